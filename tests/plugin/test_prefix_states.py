"""Boundaries in SGLang's real prefix cache, under both of its tree cores."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from sglang_replayssm.boundaries import BoundaryPolicy
from tests.harness import host
from tests.plugin import twins
from tests.plugin.cache_machine import CacheMachine

pytestmark = pytest.mark.skipif(host.has_gpu(), reason="the ring's launches are twins on the host")

POLICY = BoundaryPolicy(tail=(32, 64), least=8, cold=40, most=3, share=0.0)
no_rust = pytest.mark.skipif(
    os.environ.get("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND") == "python", reason="this host has no working Rust core"
)
cores = pytest.mark.parametrize("core", [pytest.param("rust", marks=no_rust), "python"])


@pytest.fixture(autouse=True)
def published(isolated: None) -> Iterator[None]:
    with twins.in_place_of_kernels():
        yield


def text(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(100, 30_000), k=length)


def served(machine: CacheMachine, prompt: list[int], answer: int = 3, **request: Any) -> Any:
    """A request from its match to its end; returns it, with `hit` tokens."""
    req = machine.start(prompt, **request)
    assert req is not None
    req.hit = req.prefix_len
    machine.checkpoint(req)
    machine.decode(req, text(answer, seed=len(prompt)))
    machine.end(req)
    machine.check()
    return req


@cores
def test_the_second_of_a_group_hits(core: str) -> None:
    machine, shared = CacheMachine(core, POLICY), text(117, seed=1)
    first, second, third = (served(machine, shared + text(33 + n, seed=n)) for n in (2, 3, 4))
    assert first.hit == 0
    assert second.hit == 117 + 35 - 64, "the guess that lies in the shared part"
    assert third.hit == 117, "the branch, to the token"


@cores
@pytest.mark.parametrize(
    ("setting", "hit"),
    [
        pytest.param({}, 117 + 35 - 64, id="early"),
        pytest.param({"policy": replace(POLICY, early=False)}, 0, id="not asked for"),
        pytest.param({"host": "write_through"}, 0, id="host tier"),
    ],
)
def test_a_prompt_hits_while_the_first_of_its_kind_is_in_flight(core: str, setting: dict[str, Any], hit: int) -> None:
    """Its result has not been looked at; when it is, nothing is stored twice and nothing leaks."""
    machine, shared = CacheMachine(core, **({"policy": POLICY} | setting)), text(117, seed=1)
    first = machine.request(shared + text(35, seed=2), out=2)
    assert machine.admit(first)
    launched = machine.launch_extend({first: len(first.text)})
    machine.next_batch(launched)
    second = machine.request(shared + text(36, seed=3), out=2)
    assert machine.admit(second) and second.prefix_len == hit
    behind = machine.launch_extend({second: len(second.text)})
    machine.result(launched)
    machine.check()
    machine.next_batch(behind)
    machine.result(behind)
    for _ in range(2):
        machine.result(machine.launch_decode(list(machine.running))) if machine.running else None
    assert not machine.running
    machine.check()
    assert served(machine, shared + text(40, seed=4)).hit == 117, "the branch that the second left"


@cores
@pytest.mark.parametrize("cut", [0, 3, 60])
def test_a_request_that_went_on_after_a_retraction_may_end_with_its_prefill(core: str, cut: int) -> None:
    """Its prompt ends with its own answer, which a stop cuts: what the tree owns by then is not freed with the rest."""
    machine = CacheMachine(core, POLICY)
    req = machine.request(text(70, seed=1), out=90)
    assert machine.admit(req)
    machine.result(machine.launch_extend({req: len(req.text)}))
    for _ in range(80):
        machine.result(machine.launch_decode([req]))
    machine.retract(req)
    assert machine.admit(req)
    launched = machine.launch_extend({req: len(req.text)})
    assert any(boundary.at > 80 for boundary in req.replayssm_boundaries), "in the answer"
    machine.next_batch(launched)
    req.sampling_params.max_new_tokens, req.cut = len(req.output_ids) + 1, cut
    machine.result(launched)
    assert req.finished()
    machine.check()
    machine.evict_everything()


@cores
def test_plain_learns_from_the_second(core: str) -> None:
    machine, shared = CacheMachine(core, None), text(117, seed=1)
    assert [served(machine, shared + text(33 + n, seed=n)).hit for n in (2, 3, 4)] == [0, 0, 64]


@cores
def test_turn_two_after_an_unaligned_turn_one(core: str) -> None:
    """The next turn starts at the last one's end, off the 64-token grid, and its own branches are still learnt."""
    machine = CacheMachine(core, POLICY)
    history = text(71, seed=1)
    first = served(machine, history, answer=6)
    history += list(first.output_ids)
    assert len(history) == 71 + 7
    for seed, hit in ((2, 77), (3, 78 + 79 - 64), (4, 78 + 44)):
        turn = served(machine, history + text(44, seed=9) + text(35, seed=seed))
        assert turn.hit == hit, "the end of turn 1; a guess; the branch, to the token"


@cores
def test_an_answer_ends_where_its_last_token_was_computed(core: str) -> None:
    machine = CacheMachine(core, POLICY)
    req = machine.start(text(70, seed=5))
    machine.checkpoint(req)
    machine.decode(req, [1, 2, 3])
    # overlap scheduling: the step of the next token is in flight when the request ends
    machine.decode(req, [4])
    req.output_ids.append(5)
    tokens = [*req.origin_input_ids, *req.output_ids]
    machine.end(req)
    machine.check()
    again = machine.start(tokens + text(20, seed=6))
    assert again.prefix_len == 74


@cores
def test_an_abort_donates_no_end(core: str) -> None:
    machine = CacheMachine(core, POLICY)
    req = machine.start(text(70, seed=5))
    machine.checkpoint(req)
    machine.decode(req, [1, 2, 3])
    machine.end(req, abort=True)
    machine.check()
    assert machine.start([*req.origin_input_ids, 1, 2, 3, *text(20, seed=6)]).prefix_len == 64


@cores
def test_two_boundaries_of_one_prefill_are_two_states(core: str) -> None:
    machine, prompt = CacheMachine(core, POLICY), text(200, seed=7)
    req = machine.start(prompt)
    boundaries = list(req.replayssm_boundaries)
    assert [(b.at, b.kind) for b in boundaries] == [(136, "tail"), (168, "tail")]
    assert machine.read(boundaries[0].slot) != machine.read(boundaries[1].slot)
    machine.checkpoint(req)
    machine.check()
    assert machine.start(prompt[:150] + text(20, seed=8)).prefix_len == 136
    assert machine.start(prompt[:190] + text(20, seed=8)).prefix_len == 168


@cores
def test_a_node_split_above_and_below_a_state(core: str) -> None:
    machine, prompt = CacheMachine(core, POLICY), text(200, seed=7)
    served(machine, prompt)
    for cut in (100, 140, 170, 60):  # each prompt splits a node of the first one's path
        served(machine, prompt[:cut] + text(60, seed=cut))
    assert served(machine, prompt[:180] + text(9, seed=9)).hit == 168
    assert served(machine, prompt[:130] + text(9, seed=10)).hit == 100


@cores
def test_hinted_documents_hit_at_once(core: str) -> None:
    machine = CacheMachine(core, POLICY)
    first, second = text(61, seed=1), text(83, seed=2)
    served(machine, first + second + text(30, seed=3), hints=[61, 61 + 83, 4000])
    assert served(machine, first + text(70, seed=4)).hit == 61
    assert served(machine, first + second + text(30, seed=5)).hit == 61 + 83


@cores
def test_a_state_that_was_used_outlives_those_that_were_not(core: str) -> None:
    machine = CacheMachine(core, BoundaryPolicy(tail=(32, 64), least=8, cold=40, share=0.0, protect=1.0), slots=16)
    shared = text(110, seed=1)
    for seed in (2, 3, 4):
        served(machine, shared + text(40, seed=seed))
    for seed in range(10, 40):  # strangers, each with guesses of its own, more than the pool has slots
        served(machine, text(150, seed=seed))
    assert served(machine, shared + text(40, seed=5)).hit == 110


def test_boundaries_that_no_forward_writes_are_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """As where the linear layers run inside a prefill graph: nothing wrong is stored, nothing leaks."""
    machine = CacheMachine("python", POLICY)
    machine.backend.prefill_graph_metadata = object()
    for seed in range(60):
        assert served(machine, text(150, seed=seed)).hit == 0
    assert machine.states is not None and machine.states._choose(machine.start(text(150, seed=99)), machine.cache) == []
    assert caplog.text.count("--disable-prefill-cuda-graph brings them back") == 1


@cores
def test_a_full_pool_serves_without_guesses(core: str) -> None:
    machine = CacheMachine(core, POLICY, slots=12, rows=3)
    requests = [machine.start(text(150, seed=seed)) for seed in (1, 2, 3)]
    assert all(requests[:2])
    for req in filter(None, requests):
        machine.checkpoint(req)
    machine.check()


@cores
def test_after_a_flush_everything_is_learnt_anew(core: str) -> None:
    """What was seen before is not in the cache: nothing may be taken for known, or the second prompt would not hit."""
    machine, shared = CacheMachine(core, POLICY), text(117, seed=1)

    def hits() -> list[int]:
        return [served(machine, shared + text(33 + n, seed=n)).hit for n in (2, 3, 4)]

    first = hits()
    machine.flush()
    machine.check()
    assert hits() == first == [0, 117 + 35 - 64, 117]
    assert machine.states is not None and len(machine.states.ledger) == len(machine.cache.all_mamba_values_flatten())
