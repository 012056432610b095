"""Random traces of a scheduler over the real pools; every row and every cached slot is compared after every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sglang_replayssm.cache_hooks import start_loading, start_writing
from tests.plugin import launch
from tests.plugin.machine import Machine, Request, Sizes, Snapshot

ROWS, SLOTS = 3, 7
# name of a method, and how often it is taken. One rule draws from this table: Hypothesis switches rules off at
# random in every example, and a trace without extends or decodes tests nothing.
STEPS = {
    "decode": 6,
    "decode_over_a_track_boundary": 4,
    "extend": 4,
    "extend_with_decode_rows": 4,
    "admit": 3,
    "admit_a_prefix_hit": 3,
    "finish_and_donate": 2,
    "finish_and_leave": 3,
    "finish_with_a_step_too_many": 2,
    "back_up": 3,
    "load_back": 3,
    "abort_or_retract": 1,
    "reuse_at_once": 3,
    "evict": 1,
    "flush": 1,
}


class Traces(RuleBasedStateMachine):
    """What a scheduler may do to requests, in any order: a step is one launch, or a change of hands without one."""

    @initialize(capacity=st.integers(1, 4), seed=st.integers(0, 99))
    def start(self, capacity: int, seed: int) -> None:
        launch.publish_flag()
        self.begin(Sizes(rows=ROWS, slots=SLOTS, capacity=capacity), seed)

    def begin(self, sizes: Sizes, seed: int) -> None:
        self.machine = Machine(sizes, seed)
        self.cached: list[Snapshot] = []
        self.leaving: list[Snapshot] = []  # the cache's, but folded before the next forward or copy only
        self.host: list[tuple[torch.Tensor, Snapshot]] = []
        self.sources: dict[Request, Snapshot] = {}  # prefixes of requests that have not run yet: not to be evicted
        for prompt in (2, 5):
            self.machine.begin(prompt)

    STEPS = STEPS

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.data = data
        name = data.draw(st.sampled_from([name for name, often in self.STEPS.items() for _ in range(often)]))
        if not self.started:
            self.admit()
            if not self.machine.running:  # the cache holds every slot
                self.evict()
                return
            self.extend()
        note(f"{name}: {len(self.machine.running)} running, {len(self.cached)} cached")
        getattr(self, name)()

    @invariant()
    def everything_is_exact(self) -> None:
        if hasattr(self, "machine"):
            self.settle()
            self.machine.check(self.cached)

    # -- drawing ------------------------------------------------------------------------------------------------------

    @property
    def started(self) -> list[Request]:
        return [request for request in self.machine.running if request.started]

    def number(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))

    def one_of(self, choices: Sequence[Any]) -> Any:
        return choices[self.number(0, len(choices) - 1)]  # drawn by its index, which prints better than tensors

    def some_of(self, requests: Sequence[Request]) -> list[Request]:
        """At least one, in random order, as batches come."""
        order = self.data.draw(st.permutations(range(len(requests))))
        return [requests[i] for i in order[: self.number(1, len(requests))]]

    def settle(self) -> None:
        """What left is exact once its fold was launched."""
        if not self.machine.ring._leaving:
            self.cached += self.leaving
            self.leaving = []

    # -- steps --------------------------------------------------------------------------------------------------------

    def admit(self, prefix: Snapshot | None = None) -> None:
        request = self.machine.admit(prefix)
        if request is not None and prefix is not None:
            self.sources[request] = prefix

    def admit_a_prefix_hit(self) -> None:
        states = self.cached + self.leaving
        self.admit(self.one_of(states) if states else None)

    def extend(self, with_decode_rows: bool = False) -> None:
        """First chunks, further chunks, and rows that decoded before, as a session that goes on makes them."""
        chunks = {request: self.number(1, 4) for request in self.some_of(self.machine.running)[:2]}
        riders = [request for request in self.started if request not in chunks] if with_decode_rows else []
        self.machine.extend(chunks, riders)
        for request in chunks:
            self.sources.pop(request, None)

    def extend_with_decode_rows(self) -> None:
        self.extend(with_decode_rows=True)

    def decode(self) -> None:
        batch = self.some_of(self.started)
        for _ in range(self.number(1, 4)):
            self.machine.decode(batch, padding=self.number(0, 2))

    def decode_over_a_track_boundary(self) -> None:
        batch = self.some_of(self.started)
        track = {}
        for request in self.some_of(batch):
            slot = self.machine.pool.mamba_allocator.alloc(1)
            track[request] = -1 if slot is None else slot
        self.cached += self.machine.decode(batch, track=track, padding=self.number(0, 1))

    def finish_and_donate(self) -> None:
        snapshot = self.machine.release(self.one_of(self.started), donate=True)
        assert snapshot is not None
        self.cached.append(snapshot)

    def finish_and_leave(self) -> None:
        self.leaving.append(self.machine.leave(self.one_of(self.started)))

    def back_up(self) -> None:
        """A write-through may start at once, a write-back when the slot is evicted: a copy, then, or a move."""
        states = self.cached + self.leaving
        if not states:
            return
        snapshot, ring = self.one_of(states), self.machine.ring
        slot = int(snapshot.slot)
        copies: list[torch.Tensor] = []
        start_writing(lambda _: copies.append(ring.state[:, slot].clone()), self.machine.controller(write_queue=[slot]))
        self.settle()
        ring.state[:, slot] = copies[0]  # the copy is what `everything_is_exact` sees
        self.host = [*self.host[-3:], (copies[0], snapshot)]
        if self.number(0, 1) and snapshot not in self.sources.values():
            self.cached.remove(snapshot)
            self.machine.drop(snapshot)

    def load_back(self) -> None:
        """Into any free slot: the last owner's step, or its fold, may still be due when the load is queued."""
        slot = self.machine.pool.mamba_allocator.alloc(1) if self.host else None
        if slot is None:
            return
        (copy, of), ring = self.one_of(self.host), self.machine.ring

        def load(_: object) -> None:
            ring.state[:, int(slot)] = copy

        start_loading(load, self.machine.controller(load_queue=[int(slot)]))
        self.cached.append(Snapshot(slot, of.states, of.length))

    def finish_with_a_step_too_many(self) -> None:
        request = self.one_of(self.started)
        self.machine.decode([other for other in self.started if other is not request], dead=[request])
        self.machine.release(request)

    def abort_or_retract(self) -> None:
        request = self.one_of(self.machine.running)
        self.machine.release(request)
        self.sources.pop(request, None)

    def reuse_at_once(self) -> None:
        """The freed row and slot go to the next request without a launch in between."""
        self.abort_or_retract()
        self.machine.begin(self.number(1, 6))

    def evict(self) -> None:
        states = self.cached + self.leaving
        free = [snapshot for snapshot in states if snapshot not in self.sources.values()]
        if free:
            snapshot = self.one_of(free)
            (self.cached if snapshot in self.cached else self.leaving).remove(snapshot)
            self.machine.drop(snapshot)

    def flush(self) -> None:
        self.machine.pool.clear()
        self.machine.running.clear()
        self.cached.clear()
        self.leaving.clear()
        self.sources.clear()


class VerifyTraces(Traces):
    """The same with speculative decoding: verify steps of any acceptance beside plain decode, on the same rows."""

    STEPS = {**STEPS, "verify": 8, "verify_over_a_track_boundary": 5, "finish_with_a_verify_too_many": 2}

    @initialize(width=st.integers(2, 5), spare=st.integers(0, 3), seed=st.integers(0, 99))
    def start(self, width: int, spare: int, seed: int) -> None:
        launch.publish_spec_flag(width)
        self.begin(Sizes(rows=ROWS, slots=SLOTS, capacity=2 * width + spare, width=width), seed)

    def accepted(self, count: int, least: int = 1) -> list[int]:
        """SGLang keeps one token of a verify step at least: the one that the target itself samples."""
        return [self.number(least, self.machine.sizes.width) for _ in range(count)]

    def verify(self) -> None:
        batch = self.some_of(self.started)
        for _ in range(self.number(1, 4)):
            self.machine.verify(batch, self.accepted(len(batch)), padding=self.number(0, 2))

    def verify_over_a_track_boundary(self) -> None:
        batch = self.some_of(self.started)
        accepted = self.accepted(len(batch))
        track = {}
        for request, count in zip(batch, accepted, strict=True):
            if self.number(0, 1):
                slot = self.machine.pool.mamba_allocator.alloc(1)
                track[request] = -1 if slot is None else slot, self.number(1, count)
        self.cached += self.machine.verify(batch, accepted, track=track, padding=self.number(0, 1))

    def finish_with_a_verify_too_many(self) -> None:
        request = self.one_of(self.started)
        batch = [other for other in self.started if other is not request]
        self.machine.verify(batch, self.accepted(len(batch)), dead=[request])
        self.machine.release(request)


class LongTraces(Traces):
    """The same, longer and different each time."""


class LongVerifyTraces(VerifyTraces):
    """The same, longer and different each time."""


TestTraces = Traces.TestCase
TestTraces.settings = settings(
    max_examples=7,  # the judge (test_judge.py) runs the same life with twins of the kernels, ten thousand steps of it
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # a failing trace is short enough to read; shrinking it takes minutes
    suppress_health_check=[HealthCheck.too_slow],
)

TestVerifyTraces = VerifyTraces.TestCase
TestVerifyTraces.settings = settings(TestTraces.settings, max_examples=7)

TestLongTraces = pytest.mark.long(LongTraces.TestCase)
TestLongTraces.settings = settings(
    TestTraces.settings,
    max_examples=60,
    stateful_step_count=60,
    derandomize=False,
    phases=list(Phase),
    print_blob=True,
)

TestLongVerifyTraces = pytest.mark.long(LongVerifyTraces.TestCase)
TestLongVerifyTraces.settings = TestLongTraces.settings
