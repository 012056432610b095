"""Replay of recorded traffic, at its own arrival times where the file has them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import ClassVar

from ..tokenise import Tokeniser, tokeniser
from ..traces import HASH_BLOCK, Exchange, read_trace
from .base import Conversation, Plan, Turn, Vocab, need, need_positive, need_rate, poisson_arrivals


@dataclass(frozen=True)
class TraceReplay:
    """The first ``trace_requests`` records (0: all) of the file ``trace``; forms: :func:`bench_rag.traces.read_trace`.

    Recorded times run ``trace_speed`` times as fast; a file without times arrives at ``request_rate`` per second
    (Poisson). Answers are as long as the recorded ones, at most ``trace_output_len`` tokens (0: no limit); where none
    is recorded, ``output_len``. What the server answers, not the recorded answer, stands in later turns.
    """

    kind: ClassVar[str] = "trace"

    trace: str = ""
    trace_speed: float = 1.0
    trace_requests: int = 0
    trace_output_len: int = 0
    output_len: int = 128
    request_rate: float = float("inf")
    concurrency: int = 256
    tokenizer: str = ""

    def __post_init__(self) -> None:
        need_positive(self, ("output_len", "concurrency"))
        need_rate(self, self.request_rate)
        need(0 < self.trace_speed < float("inf"), f"trace: trace-speed must be above 0, got {self.trace_speed:g}")
        for name in ("trace_requests", "trace_output_len"):
            value = getattr(self, name)
            need(value >= 0, f"trace: {name.replace('_', '-')} must be at least 0, got {value}")

    @property
    def label(self) -> str:
        return "trace"

    def plan(self, seed: int, vocab: Vocab) -> Plan:
        need(bool(self.trace), "trace: name the file to replay with --trace")
        recorded = read_trace(self.trace, self.trace_requests)
        rng = random.Random(seed)
        words = tokeniser(self.tokenizer, vocab) if recorded.form != "mooncake" else None
        # Tokens of a block depend on seed and hash id alone, so equal ids are equal tokens wherever they stand.
        blocks: dict[int, list[int]] = {}
        times = [r.timestamp for r in recorded.records if r.timestamp is not None]
        timed = len(times) == len(recorded.records)
        arrivals = (
            [(at - times[0]) / self.trace_speed for at in times]
            if timed
            else poisson_arrivals(len(recorded.records), self.request_rate, rng)
        )
        conversations = []
        for record, at in zip(recorded.records, arrivals, strict=True):
            turns = [self._turn(e, words, seed, vocab, blocks) for e in record.exchanges]
            conversations.append(Conversation(turns, at))
        facts = {
            "form": recorded.form,
            "conversations": len(conversations),
            "requests": sum(len(c.turns) for c in conversations),
            "arrivals": f"recorded, over {arrivals[-1]:.1f} s" if timed else "Poisson",
            "new prompt tokens": sum(len(t.new_ids) for c in conversations for t in c.turns),
            "answer tokens": sum(t.output_len for c in conversations for t in c.turns),
        }
        if words is not None:
            facts["tokenizer"] = words.name
        return Plan(conversations, self.concurrency, facts)

    def _turn(
        self, exchange: Exchange, words: Tokeniser | None, seed: int, vocab: Vocab, blocks: dict[int, list[int]]
    ) -> Turn:
        if words is None:
            ids: list[int] = []
            for block in exchange.blocks:
                if block not in blocks:
                    blocks[block] = vocab.draw(random.Random(f"{seed}/{block}"), HASH_BLOCK)
                ids += blocks[block]
            ids = ids[: exchange.length]
        else:
            ids = words.encode(exchange.text)
        size = exchange.answer_len
        if exchange.answer_text and words is not None:
            size = max(1, len(words.encode(exchange.answer_text)))
        size = size or self.output_len
        return Turn(ids, min(size, self.trace_output_len) if self.trace_output_len else size, text=exchange.text)

    def warmup(self) -> TraceReplay:
        # As fast as any of it can come; recorded times would make the warm-up wait for them.
        most = min(32, self.trace_requests or 32)
        return replace(self, trace_requests=most, trace_speed=1e9, trace_output_len=16, request_rate=float("inf"))
