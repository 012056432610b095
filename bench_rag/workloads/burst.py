"""Decode speed at a fixed batch: N requests at once, short distinct prompts, long answers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from .base import Plan, Vocab, need_positive, resize, single_turn_plan


@dataclass(frozen=True)
class Burst:
    """``batch`` requests in flight together; nothing is shared, so the prefix cache plays no part."""

    kind: ClassVar[str] = "burst"

    batch: int = 128
    prompt_len: int = 32
    output_len: int = 512

    def __post_init__(self) -> None:
        need_positive(self, ("batch", "prompt_len", "output_len"))

    @property
    def label(self) -> str:
        return f"burst-{self.batch}"

    def plan(self, seed: int, vocab: Vocab) -> Plan:
        rng = random.Random(seed)
        prompts = [vocab.draw(rng, self.prompt_len) for _ in range(self.batch)]
        return single_turn_plan(prompts, self.output_len, float("inf"), self.batch, rng)

    def warmup(self) -> Burst:
        # Long enough for the ring to fold and for the server to reach its largest decode batch.
        return resize(self, output_len=32)
