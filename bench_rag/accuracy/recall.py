"""Associative recall: facts stand in a text, and a question repeats a fact's key.

A fact is ``<|fact|> key = value`` and a question ``<|ask|> key =``, whose answer is the value: keys of three
characters, values of twenty, drawn at random, one token per character. An answer is longer than
the ring of buffered decode, so that its end is decoded from a state that has been folded.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import BenchError

FACT, ASK = "<|fact|>", "<|ask|>"
KEY_LEN, VALUE_LEN = 3, 20
_CHARACTERS = string.ascii_lowercase + string.digits


@dataclass(frozen=True)
class Fact:
    """Token ids of a key and its value."""

    key: tuple[int, ...]
    value: tuple[int, ...]


@dataclass(frozen=True)
class RecallFormat:
    """Token ids of the markers, of ``=``, and of the characters that keys and values are made of."""

    fact: int
    ask: int
    equals: int
    characters: tuple[int, ...]

    @classmethod
    def of(cls, token_to_id: Callable[[str], int | None]) -> RecallFormat:
        """The format in a vocabulary; BenchError if it lacks one of the tokens."""
        tokens = (FACT, ASK, "=", *_CHARACTERS)
        ids = [token_to_id(token) for token in tokens]
        missing = [token for token, number in zip(tokens, ids, strict=True) if number is None]
        if missing:
            raise BenchError(
                f"recall needs a tokenizer that was trained for it: no token {missing[0]!r}; see small_models/"
            )
        fact, ask, equals, *characters = (int(number) for number in ids if number is not None)
        return cls(fact, ask, equals, tuple(characters))

    def draw(self, rng: random.Random, count: int) -> list[Fact]:
        """``count`` facts with different keys."""
        facts: dict[tuple[int, ...], Fact] = {}
        while len(facts) < count:
            key = tuple(rng.choices(self.characters, k=KEY_LEN))
            facts.setdefault(key, Fact(key, tuple(rng.choices(self.characters, k=VALUE_LEN))))
        return list(facts.values())

    def stated(self, fact: Fact) -> list[int]:
        """The fact as it stands in a text."""
        return [self.fact, *fact.key, self.equals, *fact.value]

    def question(self, fact: Fact) -> list[int]:
        """The question after which the value is the right answer."""
        return [self.ask, *fact.key, self.equals]
