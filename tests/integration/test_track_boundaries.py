"""Scenarios 3, 8 and 17: snapshots taken while decoding, at every fill of the ring, reused by a later request."""

from __future__ import annotations

import pytest

from tests.harness.events import Events
from tests.harness.judge import ON_OFF, Exchange, ask, ask_all, follow_transformers, recorded, same_answers
from tests.harness.pool import ServerPool, on
from tests.harness.reference import prompt
from tests.harness.scenarios import cold_again, two_boundaries
from tests.harness.server import Server

CAPACITY = 16


def records_at(boundary: int, length: int, capacity: int) -> int:
    """Records, the step's own included, that a snapshot at `boundary` replays after a prompt of `length` tokens.

    The checkpoint starts at the prompt's end and moves on by `capacity` whenever the ring is full.
    """
    return (boundary - length - 1) % capacity + 1


@on("deep-on-128")
@pytest.mark.parametrize(
    "lengths",
    [
        [127, 120, 112, 111],  # 1, 8 and 16 records, and 1 after a fold in the same step
        pytest.param([126, 122, 118, 114], marks=pytest.mark.long),
        pytest.param([125, 121, 117, 113], marks=pytest.mark.long),
        pytest.param([124, 123, 119, 116], marks=pytest.mark.long),
        pytest.param([115, 110, 95, 100], marks=pytest.mark.long),
    ],
    ids=str,
)
def test_overlap_crosses_128(server: Server, lengths: list[int]) -> None:
    """A batch of unequal lengths decodes 127 -> 128 -> 129; each snapshot is reused and compared with a cold run."""
    events = Events()
    crossing = ask_all(server, [prompt(n, seed=100 + n) for n in lengths], [128 + 3 - n for n in lengths])
    follow_transformers(server, crossing)
    assert sorted(events.snapshots()) == sorted((128, records_at(128, n, CAPACITY)) for n in lengths)
    reused = [ask(server, one.tokens[:129] + prompt(5, seed=len(one.prompt)), 5) for one in crossing]
    assert [exchange.hit for exchange in reused] == [128] * len(lengths)
    follow_transformers(server, [cold_again(server, exchange) for exchange in reused])


@on("deep-on-128")
def test_state_beyond_the_key_is_not_donated(server: Server) -> None:
    """A step past a stop token takes the snapshot of 128 when only 127 tokens are committed, or one step later."""
    document = prompt(120, seed=50)
    full = ask(server, document, 12)
    for out, hit in ((8, 64), (9, 128)):  # committed: the prompt and all output but the last token
        stop = full.answer.ids[out - 1]
        assert stop not in full.answer.ids[: out - 1], "choose another seed"
        server.flush()
        events = Events()
        short = ask(server, document, 12, ignore_eos=False, stop_token_ids=[stop])
        assert short.answer.ids == full.answer.ids[:out]
        assert events.snapshots() == [(128, 8)]
        warm = ask(server, short.tokens + prompt(4, seed=51), 5)
        assert warm.hit == hit
        cold_again(server, warm)


@on("deep-on-128")
def test_chunked_prefill(server: Server) -> None:
    """Chunks of 128: a prompt of three, then its output as part of another prompt."""
    events = Events()
    first = ask(server, prompt(300, seed=60), 6)
    assert [event.prefix for event in events.of("extend")] == [[0], [128], [256]]
    second = ask(server, first.tokens + prompt(150, seed=61), 6)
    assert second.hit == 256
    follow_transformers(server, [first, second])


@pytest.mark.long
@on("plain-deep")
def test_the_oracle_follows_transformers(server_pool: ServerPool, server: Server) -> None:
    follow_transformers(server, recorded(server_pool, "plain-deep", two_boundaries))


@pytest.fixture
def off(server_pool: ServerPool) -> list[Exchange]:
    """Answers without the plugin. Named before `server`, which it may have to end."""
    return recorded(server_pool, "plain-deep", two_boundaries)


@pytest.mark.parametrize(
    "server",
    [
        pytest.param("deep-on-len-1", marks=pytest.mark.long),
        pytest.param("deep-on-len-5", marks=pytest.mark.long),
        pytest.param("deep-on-len-64", marks=pytest.mark.long),
        pytest.param("deep-on-no-overlap", marks=pytest.mark.long),
    ],
    indirect=True,
)
def test_capacities(off: list[Exchange], server: Server) -> None:
    capacity = int(server.server_info()["linear_replayssm_cache_len"])
    assert f"ring of {capacity} records" in server.log_text()
    events = Events()
    answers = two_boundaries(server)
    follow_transformers(server, answers)
    same_answers(off, answers, ON_OFF)
    assert events.snapshots() == [(64, records_at(64, 50, capacity)), (128, records_at(128, 94, capacity))]
