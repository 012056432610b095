"""Random traces of a scheduler over the real cache, pools, host tier and plugin, and how to shrink one that fails.

A trace is a list of (step, number): the number seeds everything that the step draws, from what the machine then is, so
that any part of a trace is a trace. `judge` runs a long one; where it fails, `shrink` drops steps as long as it fails
on, and what is left is printed as the lines of a test.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from tests.plugin.cache_machine import CONTEXT, CacheMachine, Launched

Trace = list[tuple[str, int]]

# A step, and how often it is taken. Steps that find nothing to do do nothing.
STEPS: dict[str, int] = {
    "prefill": 10,
    "decode": 16,
    # a verify step of speculative decoding belongs here, once the plugin serves it
    "come_round": 3,
    "results": 14,
    "finish_soon": 2,
    "abort": 2,
    "retract": 2,
    "give_up": 1,
    "idle": 1,
    "evict_states": 2,
    "evict_tokens": 1,
    "copies_arrive": 4,
    "evict_host": 1,
    "flush": 1,
}
_NAMES = list(STEPS)
_WEIGHTS = list(STEPS.values())


def random_trace(steps: int, seed: int) -> Trace:
    rng = random.Random(seed)
    return [(name, rng.randrange(1 << 30)) for name in rng.choices(_NAMES, _WEIGHTS, k=steps)]


class Judge:
    """A machine and its clients: what waits, what is in flight, and which texts come again.

    Attributes:
        seen: what happened how often; a judge that never saw a hit has judged nothing.
    """

    def __init__(self, **setting: Any) -> None:
        self.machine = CacheMachine(**setting)
        self.depth = 0 if self.machine.setting.no_buffer else 1  # batches that overlap scheduling leaves in flight
        documents = random.Random(5)
        longest = 5 * self.machine.setting.chunk
        self.documents = [
            [documents.randrange(100, 400) for _ in range(documents.randrange(5, longest))] for _ in range(8)
        ]
        self.chats: list[list[int]] = []
        self.waiting: list[Any] = []
        self.in_flight: list[Launched] = []
        self.chunked: Any = None
        self.last: tuple[list[int], Any, int] | None = None
        self.seen: Counter[str] = Counter()

    def step(self, name: str, number: int) -> None:
        """One step of a trace, and everything that must hold after it."""
        self.rng = random.Random(number)
        self.machine.shuffle(self.rng)
        getattr(self, name)()
        self.machine.check()

    # -- what may run -------------------------------------------------------------------------------------------------

    def _flying(self, req: Any) -> int:
        return sum(req is other for batch in self.in_flight for _, other in batch.alive())

    def _decoding(self) -> list[Any]:
        """Requests whose next step may be launched: the results of all their batches but one have arrived."""
        ready = [req for req in self.machine.running if req.prefilled and len(req.text) < CONTEXT - 4]
        return [req for req in ready if self._flying(req) <= self.depth]

    def _launch(self, launched: Launched) -> None:
        self.in_flight.append(launched)
        self.seen[launched.mode] += 1
        while len(self.in_flight) > self.depth:
            self._arrive()

    def _arrive(self) -> None:
        batch = self.in_flight.pop(0)
        before = [req for _, req in batch.alive()]
        self.machine.result(batch)
        for req in before:
            if req.finished():
                self.seen["finish"] += 1
                self.chats = [*self.chats[-4:], [*req.origin_input_ids, *req.output_ids]]

    def _next_batch(self) -> None:
        """What SGLang's loop does first, with the batch whose result it has not looked at."""
        if self.in_flight:
            batch = self.in_flight[-1]
            self.machine.next_batch(batch)
            self.seen["inserted early"] += sum(
                req.kv.holds_kv and req.kv.cache_protected_len > req.prefix_len for req in batch.reqs
            )

    def _arrive_all(self) -> None:
        while self.in_flight:
            self._arrive()

    # -- steps --------------------------------------------------------------------------------------------------------

    def prefill(self) -> None:
        """Further chunks, requests that wait and new ones, with or without decode rows beside them."""
        rng, machine = self.rng, self.machine
        self._next_batch()
        self.copies_arrive()  # as in every turn of SGLang's loop: what is on its way to the host is locked until then
        ends: dict[Any, int] = {}
        if self.chunked is not None:
            machine.next_chunk(self.chunked)
            ends[self.chunked] = self._end_of_chunk(self.chunked)
        for _ in range(rng.choice([1, 1, 2])):
            req = self.waiting.pop(0) if self.waiting and rng.random() < 0.7 else machine.request(*self._prompt())
            if self.chunked is not None and ends and rng.random() < 0.5:
                self._wait(req)
                continue
            if not machine.admit(req, reserved=sum(len(other.text) - other.prefix_len for other in ends)):
                self.seen["no room"] += 1
                self._wait(req)
                continue
            self.seen["hit"] += req.prefix_len > 0
            self.seen["loaded"] += bool(getattr(req, "host_hit_length", 0) or req.mamba_host_hit_length)
            end = self._end_of_chunk(req) if self.chunked is None else len(req.text)
            ends[req] = end
            if end < len(req.text):
                self.chunked = req
        if not ends:
            return
        riders = []
        if machine.setting.mixed and rng.random() < 0.6:
            riders = [req for req in self._decoding() if req not in ends]
        waits = riders and self.in_flight and self.in_flight[-1].mode == "MIXED"
        machine.backend.prefill_graph_metadata = object() if rng.random() < 0.1 else None
        launched = machine.launch_extend(ends, riders, self._arrive_all if waits else lambda: None)
        self.seen["boundary"] += sum(len(getattr(req, "replayssm_boundaries", None) or []) for req in ends)
        if self.chunked not in launched.chunks:
            self.chunked = None
        self._launch(launched)

    def _end_of_chunk(self, req: Any) -> int:
        left = len(req.text) - req.prefix_len
        chunk = self.rng.choice([left, left, 2 * self.machine.setting.chunk, 2 * self.machine.setting.chunk + 3])
        return req.prefix_len + min(left, chunk)

    def _wait(self, req: Any) -> None:
        if len(self.waiting) < 4:
            self.waiting.append(req)

    def _prompt(self) -> tuple[list[int], Any, int]:
        rng = self.rng
        if self.last is not None and rng.random() < 0.15:
            return self.last  # at the same time, twice: both prefill it, and the tree has room for one
        longest = min(CONTEXT - 60, 14 * self.machine.setting.chunk)
        text = list(rng.choice(self.chats)) if self.chats and rng.random() < 0.4 else []
        for _ in range(rng.randrange(1, 3)):
            text += rng.choice(self.documents)
        text = text[:longest]
        hints = [rng.randrange(1, len(text) + 1)] if rng.random() < 0.1 else None
        text += [rng.randrange(100, 400) for _ in range(rng.choice([0, 1, 3, 9]))]
        self.last = text, hints, rng.choice([1, 2, 3, 5, 9, 30])
        return self.last

    def come_round(self) -> None:
        """SGLang's loop begins to make a batch; what it launches may come behind a retraction."""
        self._next_batch()

    def decode(self) -> None:
        self._next_batch()
        ready = self._decoding()
        if self.rng.random() < 0.3:
            ready = [req for req in ready if self.rng.random() < 0.6]
        if not ready:
            return
        if self.machine.allocator.available_size() < len(ready):
            self.machine.make_room(len(ready), 0)
            if self.machine.allocator.available_size() < len(ready):
                self.retract()
                return
        self.rng.shuffle(ready)
        self._launch(self.machine.launch_decode(ready, padding=self.rng.choice([0, 0, 1])))

    def results(self) -> None:
        if self.in_flight:
            self._arrive()

    def finish_soon(self) -> None:
        """A stop comes up, perhaps one that cuts tokens which are committed already."""
        for req in self.machine.running[:1]:
            req.sampling_params.max_new_tokens = len(req.output_ids) + 1
            req.cut = self.rng.choice([0, 0, 1, 2])

    def abort(self) -> None:
        """In any phase: at once while it waits or is chunked, with its next result otherwise."""
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        choices = [*self.waiting, *self.machine.running]
        if not choices:
            return
        req = self.rng.choice(choices)
        self.seen["abort"] += 1
        if req in self.waiting:
            self.waiting.remove(req)
        elif req is self.chunked:
            self.chunked = None
            req.finished_reason = FINISH_ABORT()
            self.machine.retract(req)
        else:
            req.to_finish = FINISH_ABORT()
        if self.rng.random() < 0.5:  # the client tries again at once
            self._wait(self.machine.request(list(req.origin_input_ids), None, 3))

    def retract(self) -> None:
        choices = [req for req in self.machine.running if req is not self.chunked and not req.to_finish]
        if choices:
            req = self.rng.choice(choices)
            self.machine.retract(req)
            self.seen["retract"] += 1
            if self.rng.random() < 0.7:
                self.waiting.insert(0, req)

    def give_up(self) -> None:
        """A request is matched, its state perhaps loaded back, and then it is not admitted."""
        self.machine.give_up(self.machine.request(*self._prompt()))
        self.seen["give up"] += 1

    def idle(self) -> None:
        self.machine.idle()

    def evict_states(self) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.machine.cache.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=self.rng.choice([1, 2, 3, 99])))

    def evict_tokens(self) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.machine.cache.evict_for_alloc(EvictParams(num_tokens=self.rng.randrange(1, 200)))

    def copies_arrive(self) -> None:
        if self.machine.host_pool is not None:
            self.machine.cache.check_hicache_events()

    def evict_host(self) -> None:
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        if self.machine.host_pool is not None:
            self.machine.cache.evict_host(self.rng.randrange(1, 3), ComponentType.MAMBA)

    def flush(self) -> None:
        """An operator flushes: the server aborts what runs, sees its last results, and is empty."""
        if self.rng.random() < 0.7:
            return
        self.drain()
        self.machine.flush()
        self.seen["flush"] += 1

    def drain(self) -> None:
        """Everything that runs ends; nothing may be left of it."""
        self._arrive_all()
        for req in list(self.machine.running):
            self.machine.retract(req)
        self.chunked = None
        self.waiting = []
        self.machine.idle()
        while self.machine.copying():
            self.machine.cache.check_hicache_events()


@dataclass
class Outcome:
    """How far a trace came, what failed (None: nothing), and what was seen on the way."""

    steps: int
    error: Exception | None
    seen: Counter[str]


def attempt(trace: Trace, **setting: Any) -> Outcome:
    """A whole trace, from an empty machine to an empty one."""
    judge = Judge(**setting)
    steps = 0
    try:
        for name, number in trace:
            steps += 1
            judge.step(name, number)
        judge.drain()
        judge.machine.check()
        judge.machine.evict_everything()
    except Exception as error:
        return Outcome(steps, error, judge.seen)
    return Outcome(steps, None, judge.seen)


def run(trace: Trace, **setting: Any) -> None:
    """A named regression: raises what a trace fails with."""
    outcome = attempt(trace, **setting)
    if outcome.error is not None:
        raise outcome.error


def shrink(trace: Trace, seconds: float = 60.0, **setting: Any) -> Trace:
    """A short trace that fails too: halves, quarters, ... single steps are left out as long as it does."""
    until = time.monotonic() + seconds
    size = max(1, len(trace) // 2)
    while True:
        start, shorter = 0, False
        while start < len(trace) and time.monotonic() < until:
            outcome = attempt(trace[:start] + trace[start + size :], **setting)
            if outcome.error is not None:
                trace, shorter = (trace[:start] + trace[start + size :])[: outcome.steps], True
            else:
                start += size
        if time.monotonic() >= until or (size == 1 and not shorter):
            return trace
        size = max(1, size // 2)


def judge(steps: int, seed: int, part: int = 1000, **setting: Any) -> Counter[str]:
    """Run `steps` random steps, `part` of them on each machine, and add up what was seen.

    Raises:
        AssertionError: from the failure itself, with the shortest trace found as the lines of a test.
    """
    seen: Counter[str] = Counter()
    for first in range(0, steps, part):
        trace = random_trace(min(part, steps - first), seed=seed * 1_000_003 + first)
        outcome = attempt(trace, **setting)
        if outcome.error is not None:
            short = shrink(trace[: outcome.steps], **setting)
            error = attempt(short, **setting).error or outcome.error
            lines = "".join(f"    {step!r},\n" for step in short)
            settings = ", ".join(f"{name}={value!r}" for name, value in setting.items())
            raise AssertionError(f"{error}\nrun([\n{lines}], {settings})") from error
        seen.update(outcome.seen)
    return seen
