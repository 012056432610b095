"""Scenarios 2 and 7: no_buffer, where the tree keeps the finished request's own slot, pending records and all."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.harness.events import Events
from tests.harness.judge import ON_OFF, Exchange, Scenario, ask, distance, follow_transformers, recorded, same_answers
from tests.harness.pool import ServerPool, on
from tests.harness.reference import prompt
from tests.harness.server import Server

CAPACITY = 16


@dataclass(frozen=True)
class Case:
    """A request of `length` prompt tokens and `out` tokens of output.

    Seeds are chosen so that a relative change of 3e-4 in every attention output moves the log-probabilities by less
    than 0.008 in the reference: no expert is close to being another, which would hide a small error of the state.
    """

    length: int
    out: int
    seed: int

    @property
    def committed(self) -> int:
        """Tokens whose state exists at the end: all but the last one out."""
        return self.length + self.out - 1

    @property
    def pending(self) -> int:
        """Records in the ring at the end: one per committed token of output, folded whenever one finds it full."""
        return (self.out - 2) % CAPACITY + 1


CASES = {
    "short": [Case(90, 20, seed=1), Case(131, 33, seed=102), Case(117, 34, seed=5)],
    "long": [
        *(Case(105, 26, seed=6), Case(200, 47, seed=146), Case(150, 40, seed=68), Case(163, 22, seed=0)),
        *(Case(97, 30, seed=34), Case(128, 24, seed=27), Case(180, 32, seed=1), Case(64, 21, seed=23)),
    ],
}


def short(server: Server) -> list[Exchange]:
    return [exchange for case in CASES["short"] for exchange in next_turn(server, case)]


def long(server: Server) -> list[Exchange]:
    return [exchange for case in CASES["long"] for exchange in next_turn(server, case)]


def next_turn(server: Server, case: Case) -> list[Exchange]:
    """A request, then its prompt, output and five new tokens: out of the cache, and without one."""
    first = ask(server, prompt(case.length, seed=case.seed), case.out)
    question = first.tokens + prompt(5, seed=7)
    warm = ask(server, question, 6)
    assert [first.hit, warm.hit] == [0, case.committed]
    server.flush()
    return [first, warm, ask(server, question, 6)]


def distances_to_cold(exchanges: list[Exchange]) -> list[float]:
    """Of each case, the largest log-probability difference that the prefix cache makes."""
    return [distance(warm.answer, cold.answer) for warm, cold in zip(exchanges[1::3], exchanges[2::3], strict=True)]


scenarios = pytest.mark.parametrize(
    "scenario", [short, pytest.param(long, marks=pytest.mark.long)], ids=lambda scenario: scenario.__name__
)


@scenarios
@on("deep-off-no-buffer")
def test_the_oracle_follows_transformers(server_pool: ServerPool, server: Server, scenario: Scenario) -> None:
    follow_transformers(server, recorded(server_pool, "deep-off-no-buffer", scenario))


@pytest.fixture
def off(server_pool: ServerPool, scenario: Scenario) -> list[Exchange]:
    """Answers without the plugin. Named before `server`, which it may have to end."""
    return recorded(server_pool, "deep-off-no-buffer", scenario)


@scenarios
@on("deep-on-no-buffer")
def test_reuse_of_a_finished_request_is_at_the_noise_floor(
    off: list[Exchange], server: Server, scenario: Scenario
) -> None:
    """The key, the state and the conv window that the tree keeps stand at the same token count, whatever is pending.

    The difference to a run without a cache must be that of plain no_buffer: there the state is folded into the slot
    token by token, and rounds otherwise than a prefill of all tokens.
    """
    cases = CASES[scenario.__name__]
    events = Events()
    answers = scenario(server)
    assert server.server_info()["mamba_radix_cache_strategy"] == "no_buffer"
    follow_transformers(server, answers)
    same_answers(off, answers, ON_OFF)
    folded = [event.folds[0][3] for event in events.of("hand over") if event.folds]
    assert set(folded) >= {case.pending for case in cases}
    plain, ours = distances_to_cold(off), distances_to_cold(answers)
    for case, *both in zip(cases, plain, ours, strict=True):
        print(case, case.pending, "pending; distance to cold of plain no_buffer and ours: {:.5f} {:.5f}".format(*both))
    assert max(ours) <= max(1.5 * max(plain), 0.004)
