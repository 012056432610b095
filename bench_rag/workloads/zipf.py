"""Retrieval-augmented prompts: a system prompt, k documents drawn by popularity, a question."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import ClassVar

from .base import Plan, Vocab, need, need_positive, need_rate, resize, single_turn_plan


@dataclass(frozen=True)
class ZipfRag:
    """``requests`` prompts over ``documents`` documents; document i (from 1) has weight ``1 / i**zipf_alpha``.

    The chosen documents stand in corpus order, so prompts that share their first documents share a prefix.
    """

    kind: ClassVar[str] = "zipf"

    requests: int = 256
    documents: int = 64
    document_len: int = 512
    documents_per_prompt: int = 3
    prefix_len: int = 128
    question_len: int = 64
    output_len: int = 48
    request_rate: float = 8.0
    concurrency: int = 48
    zipf_alpha: float = 1.0

    def __post_init__(self) -> None:
        need_positive(
            self,
            (
                "requests",
                "documents",
                "document_len",
                "documents_per_prompt",
                "prefix_len",
                "question_len",
                "output_len",
                "concurrency",
            ),
        )
        need_rate(self, self.request_rate)
        need(
            self.documents_per_prompt <= self.documents,
            f"zipf: {self.documents_per_prompt} documents per prompt need a corpus of at least as many, "
            f"got {self.documents}",
        )
        need(self.zipf_alpha >= 0, f"zipf: zipf-alpha must be at least 0, got {self.zipf_alpha}")

    @property
    def label(self) -> str:
        return "zipf"

    def plan(self, seed: int, vocab: Vocab) -> Plan:
        rng = random.Random(seed)
        system = vocab.draw(rng, self.prefix_len)
        corpus = [vocab.draw(rng, self.document_len) for _ in range(self.documents)]
        prompts = []
        for _ in range(self.requests):
            documents = [token for d in self._retrieve(rng) for token in corpus[d]]
            prompts.append(system + documents + vocab.draw(rng, self.question_len))
        return single_turn_plan(prompts, self.output_len, self.request_rate, self.concurrency, rng)

    def _retrieve(self, rng: random.Random) -> list[int]:
        """Distinct document numbers in corpus order, drawn by weight without replacement."""
        left = list(range(self.documents))
        weights = [1 / (d + 1) ** self.zipf_alpha for d in left]
        chosen = []
        for _ in range(self.documents_per_prompt):
            at = rng.choices(range(len(left)), weights)[0]
            chosen.append(left.pop(at))
            weights.pop(at)
        return sorted(chosen)

    def warmup(self) -> ZipfRag:
        return replace(resize(self, requests=48, output_len=16), request_rate=float("inf"))
