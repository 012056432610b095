"""Requests that are paused, or retracted by a pause, while records are pending.

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
