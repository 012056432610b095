"""Scenarios 2 and 7: no_buffer, where the tree keeps the finished request's own slot, pending records and all."""

from __future__ import annotations

import pytest

from tests.harness.events import Events
from tests.harness.judge import Exchange, ask, distance, distance_to_transformers, recorded
from tests.harness.pool import ServerPool, on
from tests.harness.reference import prompt
from tests.harness.server import Server

FP16 = 0.15
ON_OFF = 0.03
CAPACITY = 16
# (prompt length, tokens out). The last token out is never committed, so out - 1 records are written and a fold
# happens before each one that finds the ring full.
CASES = [(90, 20), (131, 33), (117, 34), (105, 26)]
MORE_CASES = [(200, 47), (150, 40), (163, 22), (97, 30), (128, 24), (180, 32), (64, 21), (111, 28)]


def pending_at_finish(out: int) -> int:
    """Records in the ring when a request ends after `out` tokens."""
    return (out - 2) % CAPACITY + 1


def turn_after(server: Server, length: int, out: int) -> list[Exchange]:
    """A request, then its prompt, output and five new tokens: out of the cache, and without one."""
    first = ask(server, prompt(length, seed=length), out)
    question = first.tokens + prompt(5, seed=7)
    warm = ask(server, question, 6)
    server.flush()
    return [first, warm, ask(server, question, 6)]


def short_cases(server: Server) -> list[Exchange]:
    return [exchange for case in CASES for exchange in turn_after(server, *case)]


def long_cases(server: Server) -> list[Exchange]:
    return [exchange for case in MORE_CASES for exchange in turn_after(server, *case)]


def distances_to_cold(exchanges: list[Exchange]) -> list[float]:
    """Of each case, the largest log-probability difference that the prefix cache makes."""
    return [distance(warm.answer, cold.answer) for warm, cold in zip(exchanges[1::3], exchanges[2::3], strict=True)]


@on("deep-off-no-buffer")
def test_the_oracle_follows_transformers(server_pool: ServerPool, server: Server) -> None:
    for exchange in recorded(server_pool, "deep-off-no-buffer", short_cases):
        assert distance_to_transformers(server.model, exchange, tie=FP16) <= FP16


@pytest.fixture
def off(server_pool: ServerPool, cases: object) -> list[Exchange]:
    """Answers without the plugin. Named before `server`, which it may have to end."""
    return recorded(server_pool, "deep-off-no-buffer", cases)


@on("deep-on-no-buffer")
@pytest.mark.parametrize("cases", [short_cases, pytest.param(long_cases, marks=pytest.mark.long)])
def test_reuse_of_a_finished_request_is_at_the_noise_floor(off: list[Exchange], server: Server, cases) -> None:
    events = Events()
    answers = cases(server)
    table = CASES if cases is short_cases else MORE_CASES
    assert server.server_info()["mamba_radix_cache_strategy"] == "no_buffer"
    for exchange in answers:
        assert distance_to_transformers(server.model, exchange, tie=FP16) <= FP16
    for (length, out), first, warm, cold in zip(table, answers[0::3], answers[1::3], answers[2::3], strict=True):
        committed = length + out - 1
        assert [first.hit, warm.hit, cold.hit] == [0, committed, 0]
    folded = [event.folds[0][3] if event.folds else 0 for event in events.of("hand over")]
    print("hand-overs folded", folded)
    for _, out in table:
        assert pending_at_finish(out) in folded
    plain, ours = distances_to_cold(off), distances_to_cold(answers)
    for case, without, with_plugin in zip(table, plain, ours, strict=True):
        print(case, f"plain no_buffer {without:.4f}, with the plugin {with_plugin:.4f}")
    for wanted, exchange in zip(off, answers, strict=True):
        assert exchange.answer.ids == wanted.answer.ids and exchange.hit == wanted.hit
        print("on = off", distance(wanted.answer, exchange.answer))
    assert max(ours) <= max(2 * max(plain), 0.005)
