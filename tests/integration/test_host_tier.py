"""States in the host tier (HiCache): backed up, evicted from the device, loaded back, continued. Real servers.

The device pools of these servers hold about four documents, so that the hits below are read from the host. An answer
after a load-back must be that of a device hit, of a cold run and of transformers.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.harness import tiny
from tests.harness.configs import CONFIGS
from tests.harness.events import Events
from tests.harness.judge import ON_OFF, Exchange, ask, distance, follow_transformers, recorded, same_answers
from tests.harness.pool import ServerPool, on
from tests.harness.reference import prompt
from tests.harness.scenarios import COLD_WARM, cold_again
from tests.harness.server import Server

DOCUMENTS = 6
LENGTH = 205  # no multiple of anything; 20 decode steps after it leave 4 records in a ring of 16
OUT = 21
KIMI = 0.02
"""Kimi's slow head: a decoded state moves log-probabilities by 0.0108 from a cold run's, as without a host tier."""


def source(exchange: Exchange, tier: str) -> int:
    """Prompt tokens of an answer that came from the "device", the "host" or the "storage"."""
    return int((exchange.answer.meta.get("cached_tokens_details") or {}).get(tier, 0))


def cold_warm(server: Server) -> float:
    return KIMI if "kimi" in server.model else COLD_WARM


def first_turns(server: Server) -> list[Exchange]:
    """More documents than the device holds, one after the other."""
    return [ask(server, prompt(LENGTH, seed=500 + i), OUT) for i in range(DOCUMENTS)]


def second_turns(server: Server, turns: list[Exchange]) -> list[Exchange]:
    """Every conversation goes on, the oldest first: its state has left the device by then."""
    return [ask(server, turn.tokens + prompt(20, seed=600 + i), 9) for i, turn in enumerate(turns)]


def conversations(server: Server) -> list[Exchange]:
    turns = first_turns(server)
    return turns + second_turns(server, turns)


@pytest.mark.long
def test_the_oracle_reads_the_host_too(server_pool: ServerPool) -> None:
    answers = recorded(server_pool, "host-off", conversations)
    assert sum(source(exchange, "host") > 0 for exchange in answers) >= DOCUMENTS - 1
    follow_transformers(server_pool.get("host-off"), answers)


@pytest.mark.long
@on("host-on")
def test_on_equals_off(server_pool: ServerPool, server: Server) -> None:
    """Hit for hit, with boundaries off: what is kept, evicted and loaded back is what SGLang keeps."""
    answers = conversations(server)
    follow_transformers(server, answers)
    off = recorded(server_pool, "host-off", conversations)
    print("largest difference to the server without the plugin:", same_answers(off, answers, ON_OFF))
    assert [source(exchange, "host") for exchange in answers] == [source(exchange, "host") for exchange in off]


@on("host-on-boundaries")
def test_server_info_says_that_it_is_on(server: Server) -> None:
    (state,) = server.server_info()["internal_states"]
    assert state["replayssm"]["host_tier"] is True and state["replayssm"]["states_at_boundaries"] is True


@pytest.mark.parametrize(
    "server",
    [
        "host-on-boundaries",
        pytest.param("host-back", marks=pytest.mark.long),
        pytest.param("kimi-host", marks=pytest.mark.long),
    ],
    indirect=True,
)
def test_load_back_equals_cold(server: Server) -> None:
    """What is backed up at the end of a request is its own slot, whose last records were pending a moment before."""
    events = Events()
    turns = first_turns(server)
    later = second_turns(server, turns)
    loaded = [exchange for exchange in later if source(exchange, "host")]
    assert loaded, "no answer came from the host"
    follow_transformers(server, turns + later)
    for exchange in loaded[:2]:
        cold_again(server, exchange, cold_warm(server))
    # Row reuse (scenario 6): requests that loaded their state took rows whose last owner left records pending.
    last: dict[int, int] = {}
    taken_over = []
    for event in events:
        if event.kind == "extend":
            taken_over += [last.pop(row, 0) for row, prefix in zip(event.rows, event.prefix, strict=True) if prefix]
        else:
            last.update(zip(event.rows, event.pending, strict=True))
    assert max(taken_over) > 0
    assert "ERROR" not in server.log_text()


@pytest.mark.long
@on("host-on-boundaries", "host-back", "host-selective", "kimi-host")
def test_a_state_at_the_end_of_a_request_survives_the_host(server: Server) -> None:
    """A device hit, a host hit and a cold run of the same prompt, from a state that had 4 records pending when it left.

    A write-through copies the slot as soon as the request ends, before any forward comes: unfolded, it would be 4
    tokens behind its key.
    """
    first = ask(server, prompt(LENGTH, seed=500), OUT)
    question = first.tokens + prompt(20, seed=600)
    device = ask(server, question, 9)
    assert device.hit == len(first.tokens) - 1 and not source(device, "host")
    # the hit has proven the state, which is spared from now on: only a request that takes nearly all KV pushes it out
    ask(server, prompt(960, seed=501), 2)
    host = ask(server, question, 9)
    assert host.hit == len(first.tokens) - 1 == source(host, "host"), "a full hit in the host tier (scenario 15)"
    assert distance(device.answer, host.answer) <= COLD_WARM
    follow_transformers(server, [first, device, host])
    cold_again(server, host, cold_warm(server))


@pytest.mark.long
def test_a_restarted_server_reads_what_the_storage_has_kept(tmp_path: Path) -> None:
    """The file backend: a second server, with pools and host tier empty, starts from the first one's states."""
    config = CONFIGS["host-storage"]
    environment = {**config.env, "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path)}
    documents = [prompt(LENGTH, seed=700 + i) for i in range(2)]
    answers = []
    for _ in range(2):
        with Server(tiny.build(config.model), config.args, environment, plugin=True) as server:
            answers.append([ask(server, document, OUT) for document in documents])
            follow_transformers(server, answers[-1])
            _wait_until_quiet(tmp_path)
            assert "ERROR" not in server.log_text()
    for cold, warm in zip(*answers, strict=True):
        assert cold.hit == 0 and warm.hit == source(warm, "storage") == 192, "the last whole page of 64"
        assert distance(cold.answer, warm.answer) <= COLD_WARM


def _wait_until_quiet(folder: Path, seconds: float = 3.0) -> None:
    """Until no file has been written for so long."""
    count, since = -1, time.monotonic()
    while time.monotonic() - since < seconds:
        found = sum(1 for _ in folder.rglob("*"))
        if found != count:
            count, since = found, time.monotonic()
        time.sleep(0.2)
