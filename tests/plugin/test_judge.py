"""The random-trace judge: ten thousand steps by default; with --long as many as REPLAYSSM_JUDGE_STEPS says (a million).

REPLAYSSM_JUDGE_STEPS=1000000 ./run test --long tests/plugin/test_judge.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_replayssm import request_ring
from sglang_replayssm.boundaries import BoundaryPolicy
from tests.harness import host
from tests.plugin import twins
from tests.plugin.cache_machine import CacheMachine, Launched
from tests.plugin.judge import STEPS, attempt, judge, random_trace, run, shrink

pytestmark = pytest.mark.skipif(host.has_gpu(), reason="the judge's launches are twins on the host")

POLICY = BoundaryPolicy(tail=(8, 24), least=4, cold=12, most=3, share=0.0)
TIGHT = dict(slots=15, tokens=400)  # five slots a request, the fewest that SGLang plans with
HOST = dict(policy=POLICY, slots=20, tokens=700)
SETTINGS: dict[str, dict[str, Any]] = {
    "SGLang's own states": dict(core="rust"),
    "boundaries": dict(core="rust", policy=POLICY, capacity=5),
    "boundaries, tight": dict(core="python", policy=POLICY, capacity=1, **TIGHT),
    "mixed chunk": dict(core="python", policy=POLICY, mixed=True, capacity=4),
    "direct steps": dict(core="rust", policy=POLICY, mixed=True, capacity=4, direct_batch=1),
    "no_buffer": dict(core="python", no_buffer=True),
    "host, written through": dict(core="rust", host="write_through", **HOST),
    "host, written back": dict(core="rust", host="write_back", **HOST),
    "host, selective": dict(core="python", host="write_through_selective", mixed=True, policy=POLICY, **TIGHT),
    "host, a small one": dict(core="python", host="write_through", host_ratio=1.0, policy=POLICY, **TIGHT),
}
GRID = 8  # tokens between SGLang's own states
EVERY = 10_000 // len(SETTINGS)


@pytest.fixture(autouse=True)
def fast(isolated: None) -> Iterator[None]:
    with twins.in_place_of_kernels():
        yield


@pytest.mark.parametrize("name", SETTINGS)
def test_everything_stays_exact_and_nothing_leaks(name: str) -> None:
    setting = SETTINGS[name]
    seen = judge(EVERY, seed=1, chunk=GRID, **setting)
    expected = {"hit": 20, "DECODE": 100, "finish": 50, "abort": 20, "retract": 10, "flush": 2}
    expected["MIXED"] = 20 if setting.get("mixed") else 0
    expected["boundary"] = 20 if setting.get("policy") else 0
    expected["inserted early"] = 10 if setting.get("policy") and not setting.get("host") else 0
    expected["loaded"] = {None: 0, "write_through_selective": 3}.get(setting.get("host"), 10)
    assert {kind: seen[kind] for kind, least in expected.items() if seen[kind] < least} == {}, seen


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", SETTINGS)
def test_for_a_million_steps(name: str) -> None:
    """Another trace every time; what fails prints its shortest form and its seed's setting."""
    steps = int(os.environ.get("REPLAYSSM_JUDGE_STEPS", 1_000_000)) // len(SETTINGS)
    judge(steps, seed=int.from_bytes(os.urandom(4), "big"), chunk=GRID, **SETTINGS[name])


def test_every_step_is_a_method_and_is_drawn() -> None:
    assert {name for name, _ in random_trace(2000, seed=0)} == set(STEPS)


def test_a_failure_shrinks_to_a_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fold is forgotten: what is left of a thousand steps is a prefill, a few decodes and what needed the fold."""
    monkeypatch.setattr(request_ring.RequestRing, "_fold_leaving", lambda ring: ring._leaving.clear())
    setting = dict(chunk=GRID, **SETTINGS["boundaries"])
    trace = random_trace(1000, seed=3)
    found = attempt(trace, **setting)
    assert found.error is not None
    short = shrink(trace[: found.steps], seconds=20, **setting)
    assert len(short) <= 12
    with pytest.raises((AssertionError, RuntimeError)):
        run(short, **setting)


# -- named regressions: what the judge found ------------------------------------------------------------------


def test_the_next_snapshot_spares_the_last_one() -> None:
    """SGLang 0.5.23 changes a request's track slots over twice where a prefill follows the step over a boundary.

    The step over the next boundary then writes into the slot that the request, should it end meanwhile, hands over.
    """
    machine = CacheMachine("rust", chunk=GRID)
    req = machine.request(range(100, 113), out=30)
    assert machine.admit(req)
    machine.result(machine.launch_extend({req: 13}))
    flying: list[Launched] = []

    def decode_to(tokens: int) -> None:
        while req.kv.kv_committed_len < tokens:
            flying.append(machine.launch_decode([req]))
            if len(flying) > 1:
                machine.result(flying.pop(0))

    decode_to(16)
    machine.result(flying.pop(0))  # what was launched since is a prefill: no further step of this request is in flight
    decode_to(24)
    machine.check()
    assert req.kv.mamba_last_track_seqlen == 16
