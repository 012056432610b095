"""Questions about long documents: each document is asked several times, with other documents in between."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import ClassVar

from .base import Conversation, Plan, Turn, Vocab, need, need_positive, need_rate, poisson_arrivals, resize


@dataclass(frozen=True)
class DocumentQa:
    """``documents`` of ``document_len`` tokens, opened at ``request_rate`` per second (Poisson).

    A document is asked ``questions`` questions of ``question_len`` tokens, the first when it is opened and each next
    one after an exponential time of mean ``question_gap`` seconds. A prompt is the document and one question, so the
    gap decides how much other traffic a cache must survive to serve the next question.
    """

    kind: ClassVar[str] = "docqa"

    documents: int = 24
    questions: int = 4
    document_len: int = 6144
    question_len: int = 48
    output_len: int = 96
    request_rate: float = 1.0
    question_gap: float = 8.0
    concurrency: int = 24

    def __post_init__(self) -> None:
        need_positive(self, ("documents", "questions", "document_len", "question_len", "output_len", "concurrency"))
        need_rate(self, self.request_rate)
        need(self.question_gap >= 0, f"docqa: question-gap must be at least 0, got {self.question_gap:g}")

    @property
    def label(self) -> str:
        return "docqa"

    def plan(self, seed: int, vocab: Vocab) -> Plan:
        rng = random.Random(seed)
        conversations = []
        for opened in poisson_arrivals(self.documents, self.request_rate, rng):
            document = vocab.draw(rng, self.document_len)
            at = opened
            for _ in range(self.questions):
                prompt = document + vocab.draw(rng, self.question_len)
                conversations.append(Conversation([Turn(prompt, self.output_len)], at))
                at += rng.expovariate(1 / self.question_gap) if self.question_gap else 0.0
        return Plan(sorted(conversations, key=lambda c: c.arrival), self.concurrency)

    def warmup(self) -> DocumentQa:
        return replace(
            resize(self, documents=6, questions=2, output_len=16, question_gap=0.0), request_rate=float("inf")
        )
