"""What is asked: texts to continue that state facts, questions behind every quartile of what was written, cut texts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ..workloads.base import need
from .recall import Fact, RecallFormat

QUARTILES = 4


@dataclass(frozen=True)
class Opening:
    """The prompt of one text, token ids, and the facts it states."""

    ids: list[int]
    facts: list[Fact]


@dataclass(frozen=True)
class Question:
    """A prompt that ends with a question, the right answer, and the quartile (0 to 3) of the text it stands behind."""

    ids: list[int]
    answer: tuple[int, ...]
    quartile: int


def openings(
    text: Sequence[int], form: RecallFormat | None, texts: int, length: int, facts: int, seed: int
) -> list[Opening]:
    """``texts`` prompts of ``length`` tokens of ``text``, ``facts`` facts spread over each; no ``form``: none stated.

    BenchError if the facts leave no room for text, or the text is too short.
    """
    rng = random.Random(seed)
    found = []
    for _ in range(texts):
        drawn = form.draw(rng, facts) if form else []
        parts = [form.stated(fact) for fact in drawn] if form else []
        filler = length - sum(map(len, parts))
        need(filler > len(parts), f"accuracy: {facts} facts do not fit into an opening of {length} tokens")
        need(len(text) > filler, f"accuracy: the text has {len(text)} tokens, an opening takes {filler}")
        at = rng.randrange(len(text) - filler)
        pieces = _cut(text[at : at + filler], len(parts) + 1)
        ids = list(pieces[0])
        for part, piece in zip(parts, pieces[1:], strict=True):
            ids += [*part, *piece]
        found.append(Opening(ids, drawn))
    return found


def _cut(ids: Sequence[int], count: int) -> list[Sequence[int]]:
    """``ids`` in ``count`` consecutive pieces of about one length."""
    ends = [len(ids) * i // count for i in range(count + 1)]
    return [ids[a:b] for a, b in zip(ends, ends[1:], strict=False)]


def questions(
    opening: Opening, written: Sequence[int], form: RecallFormat, each: int, rng: random.Random
) -> list[Question]:
    """``each`` questions per quartile about the opening's facts, in order of position.

    A question stands somewhere within its quartile of ``written``, what a server wrote after the opening: all before it
    is the prompt.
    """
    found = []
    for quartile in range(QUARTILES):
        low, high = (len(written) * (quartile + i) // QUARTILES for i in range(2))
        for at in sorted(rng.randint(low + 1, high) for _ in range(each)):
            fact = rng.choice(opening.facts)
            found.append(Question([*opening.ids, *written[:at], *form.question(fact)], fact.value, quartile))
    return found


def cuts(opening: Opening, written: Sequence[int], each: int, rng: random.Random) -> list[tuple[list[int], int]]:
    """Prompts that end ``each`` times within every quartile of ``written``, with the quartile, in order of position."""
    found = []
    for quartile in range(QUARTILES):
        low, high = (len(written) * (quartile + i) // QUARTILES for i in range(2))
        found += [
            ([*opening.ids, *written[:at]], quartile) for at in sorted(rng.randint(low + 1, high) for _ in range(each))
        ]
    return found
