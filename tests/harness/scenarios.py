"""Requests whose order matters, run alike on servers with and without the plugin (see tests/harness/judge.py)."""

from __future__ import annotations

from tests.harness.judge import Exchange, ask, distance
from tests.harness.reference import prompt
from tests.harness.server import Server

COLD_WARM = 0.01
"""Measured: a hit on a state of the prefill grid moves log-probabilities by 0.0, on a decoded one by up to 0.0037."""


def cold_again(server: Server, exchange: Exchange, bound: float = COLD_WARM) -> Exchange:
    """The same request on an empty prefix cache, which must give the same answer."""
    server.flush()
    cold = ask(server, exchange.prompt, len(exchange.answer.ids))
    assert cold.hit == 0
    difference = distance(exchange.answer, cold.answer)
    print(f"{len(exchange.prompt)} tokens, {exchange.hit} cached: log-probabilities {difference:.5f} from cold")
    assert difference <= bound
    return cold


def later_turn(server: Server) -> list[Exchange]:
    """Scenario 1: P and 8 tokens out, then P with another suffix; then the same without a cache."""
    document = prompt(150, seed=1)
    first = ask(server, document, 8)
    warm = ask(server, document + prompt(40, seed=2), 8)
    assert [first.hit, warm.hit] == [0, 128]
    return [first, warm, cold_again(server, warm)]


def decoded_boundary(server: Server) -> list[Exchange]:
    """Scenario 3: decoding crosses the track boundary at 256; what follows starts from the state saved there."""
    first = ask(server, prompt(250, seed=3), 12)
    warm = ask(server, first.tokens[:-1] + prompt(5, seed=4), 6)
    assert [first.hit, warm.hit] == [0, 256]
    return [first, warm, cold_again(server, warm)]


def conversation(server: Server) -> list[Exchange]:
    """Turns that keep what was said; few lengths are a multiple of anything."""
    turns = [ask(server, prompt(70, seed=5), 21)]
    for seed, length, out in ((6, 23, 19), (7, 40, 9), (8, 5, 18)):
        turns.append(ask(server, turns[-1].tokens + prompt(length, seed=seed), out))
    return turns


def two_boundaries(server: Server) -> list[Exchange]:
    """Track interval 64: decoding crosses 64 and 128; each snapshot is reused, the second also by a branch."""
    first = ask(server, prompt(50, seed=70), 40)
    second = ask(server, first.tokens[:-1] + prompt(5, seed=71), 45)
    third = ask(server, second.tokens[:-1] + prompt(9, seed=72), 6)
    branch = ask(server, second.tokens[:130] + prompt(7, seed=73), 6)
    assert [first.hit, second.hit, third.hit, branch.hit] == [0, 64, 128, 128]
    return [first, second, third, branch, cold_again(server, third)]
