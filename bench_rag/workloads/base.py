"""What every workload produces: a plan of conversations with arrival times, a pure function of a seed.

A request is a conversation of one turn. In a longer conversation each turn's prompt is everything before it (the
previous prompt and what the server answered) plus new tokens, so only the new tokens are planned here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from ..errors import BenchError


@dataclass(frozen=True)
class Turn:
    """``new_ids``: token ids appended to the history. ``output_len``: tokens to generate, exactly.

    ``pause``: seconds from the end of the previous turn's answer until this turn is sent, such as a tool's run time.
    ``text``: what ``new_ids`` stand for, empty where they were drawn; see :meth:`spoken`.
    """

    new_ids: list[int]
    output_len: int
    pause: float = 0.0
    text: str = ""

    def spoken(self) -> str:
        """The turn as text: its own, or one made-up word per drawn token id, so that texts share what ids share."""
        return self.text or "".join(map(_word, self.new_ids))


_SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnprstvwxyz" for vowel in "aeiou"]


def _word(token: int) -> str:
    """A word of its own for every token id, and a space."""
    word = ""
    while True:
        token, syllable = divmod(token, len(_SYLLABLES))
        word += _SYLLABLES[syllable]
        if not token:
            return word + " "
        token -= 1


@dataclass(frozen=True)
class Conversation:
    """Turns sent strictly one after another, starting ``arrival`` seconds after the run begins."""

    turns: list[Turn]
    arrival: float = 0.0


@dataclass(frozen=True)
class Plan:
    """Conversations in order of arrival, and how many requests may be in flight at once.

    ``facts``: what a report should say about how the plan came about, such as the size of a corpus.
    """

    conversations: list[Conversation]
    concurrency: int
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        """Number of requests (turns) in the whole plan."""
        return sum(len(c.turns) for c in self.conversations)

    @property
    def load(self) -> str:
        """What decides when a request is sent, in words."""
        most = f"at most {self.concurrency} requests in flight"
        last = max((c.arrival for c in self.conversations), default=0.0)
        if not last:
            return f"closed loop, {most}"
        arrivals = "recorded" if str(self.facts.get("arrivals", "")).startswith("recorded") else "Poisson"
        return f"open loop, {arrivals} arrivals over {last:.1f} s, {most}"


@dataclass(frozen=True)
class Vocab:
    """Half-open range of token ids ``[low, high)`` that prompts draw from."""

    low: int = 100
    high: int = 30_000

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise BenchError(f"token ids need 0 <= low < high, got low {self.low} and high {self.high}")

    def draw(self, rng: random.Random, count: int) -> list[int]:
        """``count`` independent, uniform token ids."""
        return rng.choices(range(self.low, self.high), k=count)


@runtime_checkable
class Workload(Protocol):
    """A frozen dataclass of sizes; see the sibling modules."""

    kind: ClassVar[str]

    @property
    def label(self) -> str:
        """Short name that tells two instances of one kind apart in a report."""
        ...

    def plan(self, seed: int, vocab: Vocab) -> Plan:
        """Token-exact plan; the same seed and vocabulary give the same plan."""
        ...

    def warmup(self) -> Workload:
        """A smaller instance that reaches the same server code (batch shapes, kernels), no arrivals to wait for."""
        ...


W = TypeVar("W", bound=Workload)


def resize(workload: W, **changes: Any) -> W:
    """Copy of ``workload`` where each numeric field is lowered to the given value, never raised."""
    return replace(workload, **{k: min(v, getattr(workload, k)) for k, v in changes.items()})  # type: ignore[type-var]


def describe(workload: Workload) -> dict[str, Any]:
    """Kind, label and every size, for reports.

    An infinite rate becomes the string ``inf`` (JSON has no infinity), a path only its last part, and an empty option
    is left out.
    """
    sizes = {k: "inf" if v == float("inf") else v for k, v in asdict(workload).items() if v != ""}  # type: ignore[call-overload]
    sizes |= {k: Path(sizes[k]).name for k in ("corpus", "tokenizer", "trace") if k in sizes}
    return {"kind": workload.kind, "label": workload.label, **sizes}


def need(condition: bool, sentence: str) -> None:
    """Raise :class:`BenchError` with ``sentence`` unless ``condition``."""
    if not condition:
        raise BenchError(sentence)


def need_positive(workload: Workload, names: Sequence[str]) -> None:
    """Raise :class:`BenchError` unless every named size is at least one."""
    for name in names:
        value = getattr(workload, name)
        need(value >= 1, f"{workload.kind}: {name.replace('_', '-')} must be at least 1, got {value}")


def need_rate(workload: Workload, rate: float) -> None:
    """Raise :class:`BenchError` unless ``rate`` is a number above 0, infinity included."""
    need(rate > 0, f"{workload.kind}: request-rate must be above 0 (inf sends everything at once), got {rate:g}")


def poisson_arrivals(count: int, rate: float, rng: random.Random) -> list[float]:
    """Arrival times in seconds, the first at 0; ``rate`` per second, ``inf`` sends everything at once."""
    if rate == float("inf"):
        return [0.0] * count
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate)
    return times


def single_turn_plan(
    prompts: Sequence[list[int]],
    output_len: int,
    rate: float,
    concurrency: int,
    rng: random.Random,
    texts: Sequence[str] | None = None,
) -> Plan:
    """One conversation of one turn per prompt, in the given order, with Poisson arrivals; ``texts``: one per prompt."""
    arrivals = poisson_arrivals(len(prompts), rate, rng)
    conversations = [
        Conversation([Turn(ids, output_len, text=text)], at)
        for ids, text, at in zip(prompts, texts or [""] * len(prompts), arrivals, strict=True)
    ]
    return Plan(conversations, concurrency)
