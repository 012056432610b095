"""Two ranks: answers and hits of plain SGLang on two ranks, answers of one rank, states at boundaries on both."""

from __future__ import annotations

import os

import pytest
import torch

from tests.harness import host
from tests.harness.judge import ON_OFF, Exchange, ask, follow_transformers, recorded, same_answers
from tests.harness.pool import ServerPool, on
from tests.harness.reference import prompt
from tests.harness.scenarios import cold_again, conversation
from tests.harness.server import Server

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        (torch.cuda.device_count() if host.has_gpu() else os.cpu_count() or 1) < 2,
        reason="two ranks need two GPUs, or two cores",
    ),
]


def decoded(server: Server) -> list[Exchange]:
    """A conversation, and answers long enough for several comparisons of the ranks (one in 64 forwards)."""
    return [*conversation(server), ask(server, prompt(40, seed=700), 150), ask(server, prompt(30, seed=701), 150)]


@pytest.fixture
def off(server_pool: ServerPool, oracle: str) -> list[Exchange]:
    """Answers without the plugin. Named before `server`, which it may have to end."""
    return recorded(server_pool, oracle, decoded)


@on("tp-on")
@pytest.mark.parametrize("oracle", ["tp-off"])
def test_two_ranks_answer_as_plain_sglang_does(off: list[Exchange], server: Server, oracle: str) -> None:
    answers = decoded(server)
    same_answers(off, answers, ON_OFF)
    assert [exchange.hit for exchange in answers] == [exchange.hit for exchange in off]
    follow_transformers(server, answers)


@on("tp-on-one-rank")
@pytest.mark.parametrize("oracle", ["tp-on"])
def test_one_rank_answers_as_two(off: list[Exchange], server: Server, oracle: str) -> None:
    same_answers(off, decoded(server), ON_OFF)


@on("tp-boundaries")
def test_states_at_boundaries_on_two_ranks(server: Server) -> None:
    document = prompt(173, seed=900)
    first, second, third = answers = [ask(server, document + prompt(n, seed=900 + n), 70) for n in (70, 75, 81)]
    assert [first.hit, second.hit, third.hit] == [0, 173 + 70 - 128, 173]
    turn = ask(server, third.tokens + prompt(20, seed=990), 30)
    assert turn.hit == len(third.tokens) - 1
    follow_transformers(server, [*answers, turn])
    cold_again(server, third)
