"""Chat: sessions of several turns, each prompt the whole conversation so far."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from .base import Conversation, Plan, Turn, Vocab, need_positive, resize


@dataclass(frozen=True)
class MultiTurn:
    """``sessions`` conversations: ``first_len`` tokens, then ``turns - 1`` additions of ``question_len`` tokens."""

    kind: ClassVar[str] = "multi"

    sessions: int = 32
    turns: int = 4
    first_len: int = 512
    question_len: int = 128
    output_len: int = 96
    concurrency: int = 32

    def __post_init__(self) -> None:
        need_positive(self, ("sessions", "turns", "first_len", "question_len", "output_len", "concurrency"))

    @property
    def label(self) -> str:
        return "multi"

    def plan(self, seed: int, vocab: Vocab) -> Plan:
        rng = random.Random(seed)
        conversations = []
        for _ in range(self.sessions):
            lengths = [self.first_len] + [self.question_len] * (self.turns - 1)
            conversations.append(Conversation([Turn(vocab.draw(rng, n), self.output_len) for n in lengths]))
        return Plan(conversations, self.concurrency)

    def warmup(self) -> MultiTurn:
        return resize(self, sessions=16, turns=2, output_len=16)
