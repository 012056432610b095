"""Which states a prefill leaves for the prefix cache, and which of them go first: the policy, without tensors.

A prefill of a prompt can leave the exact state at any token count it passes. Each costs a slot, so the policy picks
few, by what is known of the prompt, best first:

    branch   where the prompt stops to repeat an earlier one from its first token on; two prompts share all of it
    hint     where the request says that a document ends (`custom_params`, see `parse_hints`)
    joint    where text that earlier prompts held, at any place, begins or ends: the edges of a repeated document
    tail     a geometric series back from the prompt's end, for prompts of which nothing is known yet: a first guess at
             where a shared prefix stops and a question begins
    stride   every so many tokens of such a prompt; off by default

SGLang leaves one state where a prefill ends ("end"); the plugin adds one where a request ends ("finish").

`TextHistory` finds branches and joints, `BoundaryPolicy.choose` picks, `StateLedger` decides whether a kind of state
is worth a slot on this traffic and which stored states an eviction must spare. The plugin and
`python -m bench_rag.simulate`, which replays a trace against a model of the cache, use the same three.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

ENV = "SGLANG_REPLAYSSM_BOUNDARIES"
"""Settings of the policy: "off", or such as "tail=64:128,most=2" (see BoundaryPolicy for the names)."""

HINTS = "replayssm_boundaries"
"""Key in a request's `sampling_params.custom_params`: token counts where its documents end."""

MOST_HINTS = 64
MOST_STATES = 8
"""States of one extend, hinted ones or others; each takes a slot, which a running request may need."""
TRIED = 32
"""States of a kind that are stored before it can be found to be of no use."""
KINDS = ("branch", "hint", "joint", "tail", "stride", "end", "finish")
EVENTS = ("taken", "hit", "evicted")
"""What becomes of states at boundaries, as `StateLedger` counts it: stored, started from (every time), gone."""


@dataclass(frozen=True)
class BoundaryPolicy:
    """Where a prefill leaves states, beside the one that SGLang keeps at its end, and what they may cost.

    Attributes:
        tail: distances from the prompt's end, in tokens.
        stride: tokens between guesses over all of a prompt's new text, from its end back; 0 for none.
        joints: whether the edges of repeated text are boundaries.
        most: states that one extend may leave unasked, at most MOST_STATES; hints may ask for more, up to that.
        least: tokens that lie between two states of one extend, and before the first.
        cold: tokens of new text that a prompt must have before anything is guessed about it (tail, stride).
        finish: whether the state at the end of a request is kept for the next turn.
        early: whether these states are in the cache before the next prompts are matched, not only with the prefill's
            result, which overlap scheduling looks at one batch later.
        share: the part of all slots that must be free, or hold states never used, before an unproven state takes one.
        protect: the part of the stored states that may be spared by evictions because they were used.
        worth: the part of a kind's states that must be used; below it only one in eight of that kind is kept.
    """

    tail: tuple[int, ...] = (64, 192, 512)
    stride: int = 0
    joints: bool = True
    most: int = 3
    least: int = 32
    cold: int = 256
    finish: bool = True
    early: bool = True
    share: float = 0.1
    protect: float = 0.75
    worth: float = 0.06

    def __post_init__(self) -> None:
        for name in ("stride", "most", "cold"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.most > MOST_STATES:
            raise ValueError(f"most must be at most {MOST_STATES}, got {self.most}")
        if self.least < 1:
            raise ValueError(f"least must be at least 1, got {self.least}")
        if any(distance < 1 for distance in self.tail):
            raise ValueError(f"tail holds distances of at least 1 token, got {self.tail}")
        for name in ("share", "protect", "worth"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {getattr(self, name)}")

    def choose(
        self,
        start: int,
        end: int,
        prompt_len: int,
        *,
        branch: int = 0,
        joints: Sequence[int] = (),
        hints: Sequence[int] = (),
        page_size: int = 1,
        cached: int | None = None,
    ) -> list[tuple[int, str]]:
        """(token count, kind) of the states that the extend of tokens [start, end) leaves, ascending, in (start, end).

        Args:
            start, end: the tokens of this extend (one chunk of a prompt, perhaps).
            prompt_len: tokens of the whole prompt, `end` or more.
            branch: tokens of the prompt that an earlier prompt began with; 0 for none.
            joints: token counts where repeated text begins or ends.
            hints: token counts where documents end.
            page_size: a key can name multiples of it only.
            cached: tokens of the prompt that came out of the cache; None for all before `start`.
        """
        chosen: dict[int, str] = {}

        def take(positions: Iterable[int], kind: str, most: int = self.most) -> None:
            for position in positions:
                at = position // page_size * page_size
                near = any(abs(at - other) < self.least for other in chosen)
                if len(chosen) < most and start + self.least <= at < end and not near:
                    chosen[at] = kind

        take([branch], "branch")
        take(sorted(hints), "hint", most=MOST_STATES)
        if self.joints:
            take(sorted(joints), "joint")
        known = max([start if cached is None else cached, branch, *joints])
        if not hints and prompt_len - known >= self.cold:
            first = known + self.least
            take((prompt_len - d for d in self.tail if prompt_len - d >= first), "tail")
            if self.stride:
                take(range(prompt_len // self.stride * self.stride, first - 1, -self.stride), "stride")
        return sorted(chosen.items())


class TextHistory:
    """Which runs of `window` tokens earlier prompts held, to find where a prompt joins known text and other text.

    Remembers the windows of the last `capacity` tokens or more, up to twice as many.
    """

    def __init__(self, window: int = 32, capacity: int = 1 << 20) -> None:
        self.window = window
        self.capacity = capacity
        self._young: set[int] = set()
        self._old: set[int] = set()

    def read(self, ids: Sequence[int], salt: Hashable = None, start: int = 0) -> tuple[int, list[int]]:
        """Branch and joints of a prompt (see `BoundaryPolicy.choose`), ascending; then the prompt is history.

        Args:
            ids: token ids.
            salt: prompts of different salt share nothing.
            start: tokens that came out of the cache. They are not read again, which would cost as much as long
                conversations are long; what is repeated from there on is repeated from the first token.
        """
        first = max(0, start - self.window + 1)
        known = [self._seen(window) for window in self._windows(ids[first:], salt)]
        if len(self._young) >= self.capacity:
            self._old, self._young = self._young, set()
        branch, joints = 0, []
        for number, (before, now) in enumerate(zip([False, *known], [*known, False], strict=True)):
            at = first + number
            if now and not before and number:
                joints.append(at)
            elif before and not now and at + self.window - 1 < len(ids):
                # The last known window starts at `at - 1`.
                edge = at + self.window - 1
                if not joints and not branch:
                    branch = edge
                else:
                    joints.append(edge)
        return branch, sorted(set(joints))

    def clear(self) -> None:
        """Forget every prompt."""
        self._young, self._old = set(), set()

    def _seen(self, window: int) -> bool:
        if window in self._young:
            return True
        self._young.add(window)
        return window in self._old

    def _windows(self, ids: Sequence[int], salt: Hashable) -> list[int]:
        """A 64-bit hash of each run of `window` tokens."""
        import numpy

        count = len(ids) - self.window + 1
        if count < 1:
            return []
        tokens = numpy.asarray(ids, dtype=numpy.int64).view(numpy.uint64)
        mixed = numpy.full(count, hash(salt) & (2**64 - 1), dtype=numpy.uint64)
        for offset in range(self.window):
            mixed = mixed * numpy.uint64(6364136223846793005) + tokens[offset : offset + count]
        return mixed.tolist()


@dataclass
class _State:
    kind: str  # "" once its first use is counted, or where it is not known
    proven: bool
    key: Any
    at_boundary: bool = False


@dataclass
class _Tally:
    stored: float = 0.0
    used: float = 0.0
    refused: int = 0


@dataclass
class StateLedger:
    """The states that the cache stores, as far as is known, in the order of its LRU list: oldest first.

    A state is *proven* once a request started from it, or when it is stored at a branch. Evictions take the oldest;
    `spare` has the proven ones at the old end refreshed, so that states nobody used go first.
    """

    policy: BoundaryPolicy
    tallies: dict[str, _Tally] = field(default_factory=lambda: {kind: _Tally() for kind in KINDS})
    events: Counter[str] = field(default_factory=Counter)
    """How often each of EVENTS happened, for metrics."""
    _states: OrderedDict[Hashable, _State] = field(default_factory=OrderedDict)
    _proven: int = 0

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._states

    @property
    def proven(self) -> int:
        """How many of the states are proven."""
        return self._proven

    def clear(self) -> None:
        """Nothing is stored any more; what the kinds were worth stays known."""
        self._states.clear()
        self._proven = 0

    def stored(self, name: Hashable, kind: str, key: Any = None) -> None:
        """A state was stored, or stored again; `key` is what `spare` hands to `touch`. An unknown kind is ""."""
        state = self._states.get(name)
        if state is None:
            state = self._states[name] = _State(kind, kind == "branch", key)
            self._proven += state.proven
            state.at_boundary = bool(kind)
            self.events["taken"] += state.at_boundary
            if kind:
                tally = self.tallies[kind]
                tally.stored += 1
                if tally.stored >= 128:  # forget slowly: traffic changes
                    tally.stored /= 2
                    tally.used /= 2
        self._states.move_to_end(name)

    def used(self, name: Hashable, key: Callable[[], Any]) -> None:
        """A request starts from the state; `key` makes the key of one that the ledger does not know."""
        state = self._states.get(name)
        if state is None:
            state = self._states[name] = _State("", False, key())
        self.events["hit"] += state.at_boundary
        if state.kind:
            self.tallies[state.kind].used += 1
            state.kind = ""
        self._proven += not state.proven
        state.proven = True
        self._states.move_to_end(name)

    def prune(self, alive: Callable[[Hashable], bool]) -> None:
        """After an eviction: forget the oldest states up to the first that is still stored."""
        while self._states and not alive(next(iter(self._states))):
            gone = self._states.popitem(last=False)[1]
            self._proven -= gone.proven
            self.events["evicted"] += gone.at_boundary

    def spare(self, touch: Callable[[Hashable, Any], bool], count: int = 1) -> None:
        """Before an eviction of `count` states: refresh proven ones until the `count` oldest are unproven.

        Proven states beyond the policy's `protect` are not refreshed, nor are any when nothing else is left.

        Args:
            touch: makes the state of this name and key the cache's youngest; False if it is no longer stored.
        """
        victims = 0
        for name in list(self._states):
            unproven = len(self._states) - self._proven
            if victims >= min(count, unproven) or self._proven > self.policy.protect * len(self._states):
                return
            state = self._states[name]
            if not state.proven:
                victims += 1
            elif touch(name, state.key):
                self._states.move_to_end(name)
            else:
                del self._states[name]
                self._proven -= 1
                self.events["evicted"] += state.at_boundary

    def worth(self, kind: str, slots: int, free: int) -> bool:
        """Whether another state of this kind is worth having: enough of the last ones were used.

        One in eight is kept even so; traffic changes. A request's own last states cost no time, only a slot, and are
        kept as long as many are free.

        Args: slots of the pool, and those that hold nothing.
        """
        tally = self.tallies[kind]
        if kind in ("end", "finish") and 4 * free >= slots:
            return True
        if tally.stored < TRIED or tally.used >= self.policy.worth * tally.stored:
            return True
        tally.refused += 1
        return tally.refused % 8 == 0

    def allowance(self, slots: int, free: int, evictable: int) -> int:
        """How many slots unproven states may take now, so that no proven one has to go.

        Args: slots of the pool, those that hold nothing, and those whose state no running request uses.
        """
        return max(0, free + max(0, evictable - self._proven) - int(self.policy.share * slots))


def parse_hints(custom_params: Any) -> tuple[list[int], str | None]:
    """Hinted token counts of a request, ascending, and what is wrong with them as a sentence (None if nothing is).

    Args:
        custom_params: `sampling_params.custom_params` of the request, whatever the client sent.
    """
    given = custom_params.get(HINTS) if isinstance(custom_params, dict) else None
    if given is None:
        return [], None
    if not isinstance(given, (list, tuple)) or any(type(n) is not int or n < 1 for n in given):
        return [], f"{HINTS} must be a list of token counts of at least 1; it is ignored."
    if len(given) > MOST_HINTS:
        return [], f"{HINTS} holds {len(given)} token counts, at most {MOST_HINTS} are allowed; it is ignored."
    return sorted(set(given)), None


def parse_policy(text: str) -> BoundaryPolicy | None:
    """The policy that a setting such as "tail=64:128,most=2" asks for; "" is the default, "off" is None.

    Raises:
        ValueError: a sentence that names the setting and what is allowed.
    """
    text = text.strip()
    if text.lower() in ("off", "0", "false", "no"):
        return None
    policy = BoundaryPolicy()
    known = {setting.name for setting in fields(BoundaryPolicy)}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, given, value = part.partition("=")
        if not given or name not in known:
            raise ValueError(f"{ENV}: {part!r} is none of {', '.join(f'{n}=...' for n in sorted(known))}, nor off.")
        try:
            policy = replace(policy, **{name: _value(getattr(policy, name), value)})
        except ValueError as error:
            raise ValueError(f"{ENV}: {part!r}: {error}") from None
    return policy


def _value(default: Any, text: str) -> Any:
    if isinstance(default, tuple):
        return tuple(int(number) for number in filter(None, text.split(":")))
    if isinstance(default, bool):
        if text not in ("0", "1"):
            raise ValueError("it is 0 or 1")
        return text == "1"
    return type(default)(text)


def policy_from_environment() -> BoundaryPolicy | None:
    """The policy this process runs with. Raises ValueError as `parse_policy`."""
    return parse_policy(os.environ.get(ENV, ""))
