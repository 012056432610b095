"""Scenarios 13, 5 and 18: decode rows inside prefill batches, and requests that are retracted and come back."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.harness.events import Events
from tests.harness.judge import Exchange, ask, ask_all, follow_transformers
from tests.harness.pool import on
from tests.harness.reference import prompt
from tests.harness.scenarios import cold_again
from tests.harness.server import Server

CHUNKED = 0.03
"""Measured on plain SGLang: a cold run in other chunks than the first moves log-probabilities by up to 0.0122."""


def also_with_kda(gdn: str, kda: str) -> pytest.MarkDecorator:
    """The same test on a server with Kimi Delta Attention, with `--long` only: the mechanism is the same."""
    return pytest.mark.parametrize("server", [gdn, pytest.param(kda, marks=pytest.mark.long)], indirect=True)


def reuse_each(server: Server, exchanges: list[Exchange], tracked: int) -> None:
    """A later turn of each request: right, and the same as without a cache; the first `tracked` start from a state."""
    later = [ask(server, one.tokens + prompt(5, seed=len(one.prompt)), 4) for one in exchanges]
    print("hits", [(len(exchange.prompt), exchange.hit) for exchange in later])
    assert all(exchange.hit >= 64 for exchange in later[:tracked])
    follow_transformers(server, later)
    for exchange in later:
        cold_again(server, exchange, CHUNKED)


@pytest.mark.long
@on("deep-on-mixed", "kimi-on-mixed")
def test_mixed_chunk(server: Server) -> None:
    """Two requests decode while prompts of several chunks arrive; each mixed step runs them as one-token extends."""
    events = Events()
    decoding = [prompt(50, seed=350), prompt(58, seed=341)]
    prefilling = [prompt(280, seed=380), prompt(200, seed=310)]
    with ThreadPoolExecutor(1) as pool:  # SGLang mixes only batches in which nobody asks for log-probabilities
        decoders = pool.submit(ask_all, server, decoding, [44, 40], logprobs=False)
        events.wait_for_decoded_tokens(12)
        answers = ask_all(server, prefilling, [5, 6], logprobs=False) + decoders.result()
    follow_transformers(server, answers)
    mixed = [event for event in events.of("extend") if event.mode == "MIXED"]
    folded = [upto for event in mixed for *_, upto in event.folds]
    assert len(mixed) >= 2
    assert max(folded, default=0) > 1, "a decode row was to enter a mixed step with several pending records"
    # A decode row that reaches a boundary in a mixed step gets no snapshot there: it may find nothing to start from.
    reuse_each(server, answers, tracked=len(prefilling))


@also_with_kda("deep-on-retract", "kimi-on-retract")
def test_forced_retraction(server: Server) -> None:
    """Requests lose row and slot in the middle of decoding, wait, and start again on others."""
    events = Events()
    lengths = (60, 75, 90, 52)
    answers = ask_all(server, [prompt(n, seed=400 + n) for n in lengths], [36, 30, 28, 40])
    follow_transformers(server, answers)
    retracted = sum(int(n) for n in re.findall(r"Testing retraction\. #retracted_reqs: (\d+)", server.log_text()))
    assert retracted >= 2
    resumed = [length for event in events.of("extend") for length in event.lens if length not in lengths]
    print(retracted, "retracted, resumed at", resumed)
    assert resumed, "a request was to be prefilled again, its output included"
    reuse_each(server, answers, tracked=len(answers))
