"""Generated shared prefix: the workload of the public report. Groups of prompts share a long prefix."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import ClassVar

from .base import Plan, Vocab, need_positive, need_rate, resize, single_turn_plan


@dataclass(frozen=True)
class SharedPrefix:
    """``groups`` prefixes of ``prefix_len`` tokens, each asked ``prompts_per_group`` questions, shuffled together."""

    kind: ClassVar[str] = "gsp"

    groups: int = 8
    prompts_per_group: int = 32
    prefix_len: int = 2048
    question_len: int = 64
    output_len: int = 64
    request_rate: float = 8.0
    concurrency: int = 48

    def __post_init__(self) -> None:
        need_positive(
            self,
            ("groups", "prompts_per_group", "prefix_len", "question_len", "output_len", "concurrency"),
        )
        need_rate(self, self.request_rate)

    @property
    def label(self) -> str:
        return "gsp"

    def plan(self, seed: int, vocab: Vocab) -> Plan:
        rng = random.Random(seed)
        prompts = []
        for _ in range(self.groups):
            prefix = vocab.draw(rng, self.prefix_len)
            prompts += [prefix + vocab.draw(rng, self.question_len) for _ in range(self.prompts_per_group)]
        rng.shuffle(prompts)
        return single_turn_plan(prompts, self.output_len, self.request_rate, self.concurrency, rng)

    def warmup(self) -> SharedPrefix:
        # Everything at once, so that prefill and decode reach the largest batch of the measured run.
        return replace(resize(self, groups=3, prompts_per_group=16, output_len=16), request_rate=float("inf"))
