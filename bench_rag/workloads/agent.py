"""Agent loops: one system prompt with tools, a task per session, and tool outputs appended step by step."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from .base import Conversation, Plan, Turn, Vocab, need, need_positive, resize


@dataclass(frozen=True)
class AgentLoop:
    """``sessions`` agents share ``prefix_len`` tokens of instructions and tools; each gets a task and runs its loop.

    A task has ``question_len`` tokens. In each of ``steps`` steps the model writes ``output_len`` tokens, a tool runs
    for an exponential time of mean ``tool_seconds``, and its output is appended: uniformly between half and one and
    a half times ``tool_len`` tokens.
    """

    kind: ClassVar[str] = "agent"

    sessions: int = 24
    steps: int = 8
    prefix_len: int = 1024
    question_len: int = 128
    tool_len: int = 256
    output_len: int = 48
    tool_seconds: float = 0.2
    concurrency: int = 24

    def __post_init__(self) -> None:
        need_positive(
            self, ("sessions", "steps", "prefix_len", "question_len", "tool_len", "output_len", "concurrency")
        )
        need(self.tool_seconds >= 0, f"agent: tool-seconds must be at least 0, got {self.tool_seconds:g}")

    @property
    def label(self) -> str:
        return "agent"

    def plan(self, seed: int, vocab: Vocab) -> Plan:
        rng = random.Random(seed)
        system = vocab.draw(rng, self.prefix_len)
        conversations = []
        for _ in range(self.sessions):
            turns = [Turn(system + vocab.draw(rng, self.question_len), self.output_len)]
            for _ in range(self.steps - 1):
                size = rng.randint((self.tool_len + 1) // 2, self.tool_len + self.tool_len // 2)
                pause = rng.expovariate(1 / self.tool_seconds) if self.tool_seconds else 0.0
                turns.append(Turn(vocab.draw(rng, size), self.output_len, pause))
            conversations.append(Conversation(turns))
        return Plan(conversations, self.concurrency)

    def warmup(self) -> AgentLoop:
        return resize(self, sessions=12, steps=2, output_len=16, tool_seconds=0.0)
