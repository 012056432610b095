"""Requests that are paused, retracted by a pause, or aborted while records are pending; weights that are loaded anew.

Every answer is judged by transformers. SGLang itself looks for lost slots and tokens when it is idle, and ends if it
finds any, so that a server which answers afterwards has lost none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.harness.events import Events
from tests.harness.judge import Exchange, follow_transformers
from tests.harness.pool import on
from tests.harness.reference import prompt
from tests.harness.scenarios import cold_again
from tests.harness.server import Answer, Server

DOCUMENT = 90
OUT = 40


@contextmanager
def running(server: Server, tokens: list[int], out: int, after: int, **kwargs: object) -> Iterator[Future[Answer]]:
    """A request that has decoded `after` tokens when the block begins."""
    events = Events()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(server.generate, tokens, out, **kwargs)
        events.wait_for_decoded_tokens(after)
        yield future


@contextmanager
def paused(server: Server, mode: str) -> Iterator[None]:
    server.post("/pause_generation", {"mode": mode})
    try:
        yield
    finally:
        server.post("/continue_generation", {})


@on("boundaries")
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_paused_request_goes_on_exactly(server: Server, mode: str) -> None:
    """In place it goes on from its ring; retracted it starts again from what the cache has."""
    document = prompt(DOCUMENT, seed=1000)
    with running(server, document, OUT, after=5) as future:
        with paused(server, mode):
            time.sleep(1)
            assert not future.done(), "the pause came too late"
        exchange = Exchange(document, future.result(timeout=240))
    assert len(exchange.answer.ids) == OUT
    follow_transformers(server, [exchange])
    cold_again(server, exchange)


@on("boundaries")
@pytest.mark.parametrize(
    "phase",
    ["decode", *(pytest.param(phase, marks=pytest.mark.long) for phase in ("waiting", "prefill"))],
)
def test_an_aborted_request_comes_again_at_once(server: Server, phase: str) -> None:
    """The retry takes whatever row and slot the aborted one left, with its records or half its prefill in them."""
    document = prompt(DOCUMENT if phase == "decode" else 400, seed=1010)
    others = [prompt(40, seed=1020 + i) for i in range(4)] if phase == "waiting" else []  # all rows are taken
    events = Events()
    with ThreadPoolExecutor(len(others) + 1) as pool:
        running = [pool.submit(server.generate, other, 24) for other in others]
        if running:
            events.wait_for_decoded_tokens(4)
        aborted = pool.submit(server.generate, document, OUT, rid=f"abort-{phase}")
        if phase == "decode":
            events.wait_for_decoded_tokens(5)
        else:
            time.sleep(0.5)  # on its way: in the queue, or in its first forward
        server.abort(f"abort-{phase}")
        retry = Exchange(document, server.generate(document, 9))
        given_up = aborted.result(timeout=240)
        beside = [Exchange(o, f.result(timeout=240)) for o, f in zip(others, running, strict=True)]
    assert given_up.meta["finish_reason"]["type"] == "abort" and len(given_up.ids) < OUT
    follow_transformers(server, [retry, *beside])
    cold_again(server, retry)


@pytest.mark.long
@on("boundaries")
def test_weights_loaded_anew_leave_nothing_of_the_old_ones(server: Server) -> None:
    """SGLang flushes the cache with the weights: no hit on states of the old ones, and hits are learnt again."""
    document = prompt(DOCUMENT, seed=1030)
    before = Exchange(document, server.generate(document, 9))
    reply = server.post("/update_weights_from_disk", {"model_path": server.model, "flush_cache": True}).json()
    assert reply["success"], reply
    after, again = (Exchange(document, server.generate(document, 9)) for _ in range(2))
    assert after.hit == 0 and again.hit == Exchange(document, server.generate(document, 9)).hit > 0
    follow_transformers(server, [before, after, again])
