"""Replay a workload against a model of the prefix cache: hit rate by policy and number of state slots.

The model keeps what decides hits on a hybrid model: a prompt hits at the deepest stored state that its tokens pass; KV
lives as long as a state at or beyond it does; slots are shared between running requests and stored states; the stored
state that was used longest ago goes first. Time passes as in SGLang's loop: what waits is prefilled in one batch before
anything is decoded, a step decodes one token of every running request, and a prefill's states are in the cache when its
result is looked at, one batch later (or, with the policy's `early`, before the next batch is made). KV capacity is not
modelled.

`plain` is SGLang's extra_buffer: one state per extend, at its last multiple of 64 or at the branch that it learns on
the second visit, and one at the last multiple of 256 in an answer. The other rows are policies of
`sglang_replayssm.boundaries`, written as in its environment variable.

    python -m bench_rag.simulate --workload gsp,zipf,multi --slots 120,223 --policy "" --policy "most=2"
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import sys
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang_replayssm.boundaries import BoundaryPolicy, StateLedger, TextHistory, parse_policy

from .budget import MOST_REQUESTS, bound, passages
from .ceiling import ceiling
from .errors import BenchError
from .workloads import WORKLOADS, Plan, Turn, Vocab

CHUNK = 64  # SGLang's own states of a prefill stand at multiples of it, from where the extend began
INTERVAL = 256  # SGLang's default --mamba-track-interval
SLOTS_PER_REQUEST = 3  # a running request's own slot and two track slots
Prefix = tuple[int, int]  # length and hash


@dataclass(frozen=True)
class Machine:
    """Slots of the state pool, and seconds: of a prefill per token, but at least, and of a decode step.

    The defaults are those of a 27B-shaped model on an H200 (docs/measurements.md).

    Attributes:
        batch_tokens: new tokens that one prefill batch takes.
    """

    slots: int = 223
    prefill_token: float = 95e-6
    least_prefill: float = 0.09
    step: float = 0.02
    batch_tokens: int = 8192


@dataclass
class StateCache:
    """Stored states by prefix, least recently used first; `live` counts the states at or beyond each prefix."""

    slots: int
    ledger: StateLedger | None = None
    held: int = 0  # slots of running requests
    states: OrderedDict[Prefix, list[Prefix]] = field(default_factory=OrderedDict)
    locked: Counter[Prefix] = field(default_factory=Counter)
    live: Counter[Prefix] = field(default_factory=Counter)

    def free(self) -> int:
        return self.slots - self.held - len(self.states)

    def evictable(self) -> int:
        return len(self.states) - len(self.locked)

    def make_room(self, count: int = 1) -> bool:
        """Evict until `count` slots are free; False if what is left is in use."""
        while self.free() < count:
            if self.ledger is not None:
                self.ledger.spare(self._touch)
            victim = next((key for key in self.states if key not in self.locked), None)
            if victim is None:
                return False
            self.live.subtract(self.states.pop(victim))
            self.live += Counter()
            if self.ledger is not None:
                self.ledger.prune(self.states.__contains__)
        return True

    def _touch(self, key: Prefix, _: object) -> bool:
        if key not in self.states:
            return False
        self.states.move_to_end(key)
        return True

    def insert(self, prefixes: Sequence[Prefix], kind: str) -> None:
        """Store the state of the last of `prefixes`, which are all prefixes of its tokens, shortest first."""
        key = prefixes[-1]
        if key in self.states:
            self.states.move_to_end(key)
        elif self.make_room():
            self.states[key] = list(prefixes)
            self.live.update(prefixes)
        else:
            return
        if self.ledger is not None:
            self.ledger.stored(key, kind)

    def match(self, prefixes: Sequence[Prefix]) -> tuple[int, int]:
        """Deepest state and KV, in tokens, that hold a prefix of the prompt whose prefixes are given."""
        low, high = 0, len(prefixes)  # KV of a prefix implies that of all shorter ones
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.live[prefixes[middle - 1]] else (low, middle - 1)
        for at in range(low, 0, -1):
            key = prefixes[at - 1]
            if key in self.states:
                self.states.move_to_end(key)
                if self.ledger is not None:
                    self.ledger.used(key, lambda: None)
                return at, low
        return 0, low

    def lock(self, key: Prefix, by: int) -> None:
        self.locked[key] += by
        if not self.locked[key]:
            del self.locked[key]


def _prefixes(ids: Sequence[int], known: Sequence[Prefix] = ()) -> list[Prefix]:
    """(length, hash) of every prefix of `ids`; `known` are those of a shorter prefix."""
    found = list(known)
    running = found[-1][1] if found else 0
    for at in range(len(found), len(ids)):
        running = hash((running, ids[at]))
        found.append((at + 1, running))
    return found


def plain_states(start: int, end: int, branch: int) -> list[int]:
    """Where SGLang's extra_buffer leaves a state in an extend of tokens [start, end)."""
    last = start + (end - start) // CHUNK * CHUNK
    branch = branch // CHUNK * CHUNK
    if last == start:
        return []
    return [branch] if start < branch < last and (branch - start) % CHUNK == 0 else [last]


@dataclass
class _Request:
    """A conversation on its way: history, its prefixes, turn, where the last prefill began and what it leaves."""

    ids: list[int] = field(default_factory=list)
    prefixes: list[Prefix] = field(default_factory=list)
    turn: int = 0
    start: int = 0
    branch: int = 0
    left: int = 0  # answer tokens to come
    leaves: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """``rate``: share of prompt tokens that hit (0 to 1); ``order``: (conversation, turn) as prefills began."""

    rate: float
    order: list[tuple[int, int]]


def replay(
    plan: Plan, machine: Machine, policy: BoundaryPolicy | None, hints: Sequence[Sequence[int]] | None = None
) -> Outcome:
    """What hits, and in which order requests ran.

    Args:
        policy: None is plain extra_buffer.
        hints: by conversation, token counts where documents end.
    """
    return _Replay(plan, machine, policy, hints).run()


class _Replay:
    def __init__(
        self, plan: Plan, machine: Machine, policy: BoundaryPolicy | None, hints: Sequence[Sequence[int]] | None
    ) -> None:
        self.plan, self.machine, self.policy, self.hints = plan, machine, policy, hints
        self.ledger = StateLedger(policy) if policy is not None else None
        self.history = TextHistory()
        self.cache = StateCache(machine.slots, self.ledger)
        self.most = min(plan.concurrency, machine.slots // SLOTS_PER_REQUEST)
        self.requests = [_Request() for _ in plan.conversations]
        self.arrivals = [(c.arrival, number) for number, c in enumerate(plan.conversations)]
        heapq.heapify(self.arrivals)
        self.waiting: list[int] = []
        self.running: list[int] = []
        self.sent: list[tuple[int, int]] = []
        self.hit = self.total = 0
        self.fresh = itertools.count(-1, -1)  # answers share nothing

    def run(self) -> Outcome:
        now = 0.0
        in_flight: list[int] = []  # prefilled, and nobody has looked at the result
        while self.arrivals or self.waiting or self.running:
            while self.arrivals and self.arrivals[0][0] <= now:
                self._arrive(heapq.heappop(self.arrivals)[1])
            if self.policy is not None and self.policy.early:
                self._store(in_flight, at_end=False)
            batch, tokens = self._make_batch()
            self._store(in_flight, at_end=True)
            in_flight = batch
            if batch:
                now += max(self.machine.least_prefill, tokens * self.machine.prefill_token)
                self.running += batch
            elif self.running:
                now += self.machine.step
                self._decode(now)
            elif self.arrivals:
                now = max(now, self.arrivals[0][0])
            else:
                break  # what waits does not fit, and nothing will make room
        return Outcome(self.hit / self.total if self.total else 0.0, self.sent)

    def _turn(self, who: int) -> Turn:
        return self.plan.conversations[who].turns[self.requests[who].turn]

    def _arrive(self, who: int) -> None:
        request = self.requests[who]
        request.ids += self._turn(who).new_ids
        request.prefixes = _prefixes(request.ids, request.prefixes)
        self.waiting.append(who)

    def _make_batch(self) -> tuple[list[int], int]:
        """Who is prefilled next, and how many tokens; each is matched now and takes its slots."""
        batch: list[int] = []
        tokens = 0
        while self.waiting and len(self.running) + len(batch) < self.most:
            if not self.cache.make_room(SLOTS_PER_REQUEST):
                break
            request = self.requests[who := self.waiting[0]]
            request.start, request.branch = self.cache.match(request.prefixes[:-1])
            if tokens and tokens + len(request.ids) - request.start > self.machine.batch_tokens:
                break
            self.waiting.pop(0)
            if request.start:
                self.cache.lock(request.prefixes[request.start - 1], 1)
            self.cache.held += SLOTS_PER_REQUEST
            request.left = self._turn(who).output_len
            request.leaves = self._leaves(who)
            self.sent.append((who, request.turn))
            self.hit += request.start
            self.total += len(request.ids)
            tokens += len(request.ids) - request.start
            batch.append(who)
        return batch, tokens

    def _leaves(self, who: int) -> list[tuple[int, str]]:
        """Token counts and kinds of the states that a prefill leaves."""
        request, cache = self.requests[who], self.cache
        end = len(request.ids)
        if self.policy is None or self.ledger is None:
            return [(at, "end") for at in plain_states(request.start, end, request.branch)]
        branch, joints = self.history.read(request.ids, start=request.start)
        given = self.hints[who] if self.hints is not None else ()
        allowed = self.ledger.allowance(cache.slots, cache.free(), cache.evictable())
        branch = max(branch, request.branch)
        found: list[tuple[int, str]] = []
        for at, kind in self.policy.choose(request.start, end, end, branch=branch, joints=joints, hints=given):
            if kind == "branch" or (allowed > 0 and self.ledger.worth(kind, cache.slots, cache.free())):
                found.append((at, kind))
                allowed -= kind != "branch"
        return found + [(at, "end") for at in plain_states(request.start, end, 0)]

    def _store(self, batch: Sequence[int], at_end: bool) -> None:
        """The states of a prefill come into the cache: boundaries, and with its result (`at_end`) that of its end."""
        for who in batch:
            request = self.requests[who]
            for at, kind in request.leaves:
                if kind != "end" or (at_end and self._worth("end")):
                    self.cache.insert(request.prefixes[:at], kind)
            request.leaves = [(at, kind) for at, kind in request.leaves if kind == "end" and not at_end]

    def _worth(self, kind: str) -> bool:
        return self.ledger is None or self.ledger.worth(kind, self.cache.slots, self.cache.free())

    def _decode(self, now: float) -> None:
        for who in self.running:
            self.requests[who].left -= 1
        ended = [who for who in self.running if self.requests[who].left <= 0]
        self.running = [who for who in self.running if self.requests[who].left > 0]
        for who in ended:
            self._finish(who)
            request, turns = self.requests[who], self.plan.conversations[who].turns
            request.turn += 1
            if request.turn < len(turns):
                heapq.heappush(self.arrivals, (now + turns[request.turn].pause, who))

    def _finish(self, who: int) -> None:
        request = self.requests[who]
        self.cache.held -= SLOTS_PER_REQUEST
        if request.start:
            self.cache.lock(request.prefixes[request.start - 1], -1)
        prompt_len = len(request.ids)
        request.ids += itertools.islice(self.fresh, self._turn(who).output_len)
        request.prefixes = _prefixes(request.ids, request.prefixes)
        kept = len(request.ids) - 1  # the last token was never computed
        if self.policy is None or not self.policy.finish or not self._worth("finish"):
            kept = kept // INTERVAL * INTERVAL
        if kept > prompt_len:
            self.cache.insert(request.prefixes[:kept], "finish")


def budget_ceiling(plan: Plan, order: Sequence[tuple[int, int]], slots: int) -> float | None:
    """The best hit rate that so many slots allow; see bench_rag.budget. KV is as large as it can be of use."""
    if len(order) > MOST_REQUESTS:
        return None
    found = passages(plan, order)
    return bound(found, slots, kv_tokens=sum(passage.tokens for passage in found))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code: 2 for bad arguments, with one sentence on stderr."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m bench_rag.simulate", description=about)
    parser.add_argument("--workload", default="gsp,zipf,multi", help=f"comma-separated from {', '.join(WORKLOADS)}")
    parser.add_argument("--slots", default="223", help="comma-separated numbers of state slots (default 223)")
    parser.add_argument("--seeds", default="1", help="comma-separated (default 1)")
    parser.add_argument("--policy", action="append", metavar="TEXT", help='such as "tail=64:128,most=2"; repeatable')
    parser.add_argument("--set", action="append", default=[], metavar="NAME=N", help="a size of the workload")
    options = parser.parse_args(arguments)
    try:
        policies = {text or "default": parse_policy(text) for text in options.policy or [""]}
        seeds = [int(seed) for seed in options.seeds.split(",")]
        machines = [Machine(slots=int(text)) for text in options.slots.split(",")]
        print(f"{'workload':10} {'slots':>5}  {'policy':48} {'hit rate':>8}")
        for kind in options.workload.split(","):
            workload = _workload(kind, options.set)
            plans = [workload.plan(seed, Vocab()) for seed in seeds]
            for machine in machines:
                rows = {}
                for name, policy in {"plain": None, **policies}.items():
                    outcomes = [replay(plan, machine, policy) for plan in plans]
                    rows[name] = [outcome.rate for outcome in outcomes]
                best = [
                    budget_ceiling(plan, outcome.order, machine.slots)
                    for plan, outcome in zip(plans, outcomes, strict=True)
                ]
                rows["budget ceiling"] = [rate for rate in best if rate is not None]
                for name, rates in rows.items():
                    if rates:
                        print(f"{kind:10} {machine.slots:5}  {name:48} {sum(rates) / len(rates):8.1%}", flush=True)
            print(f"{kind:10} {'all':>5}  {'infinite ceiling':48} {sum(map(ceiling, plans)) / len(plans):8.1%}")
    except (BenchError, ValueError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    return 0


def _workload(kind: str, settings: Sequence[str]):
    if kind not in WORKLOADS:
        raise BenchError(f"there is no workload {kind!r}; choose from {', '.join(WORKLOADS)}")
    known = WORKLOADS[kind].__dataclass_fields__
    sizes = dict(part.partition("=")[::2] for part in settings)
    return WORKLOADS[kind](**{name: type(known[name].default)(n) for name, n in sizes.items() if name in known})


if __name__ == "__main__":
    sys.exit(main())
