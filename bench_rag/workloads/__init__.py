"""The workloads by name."""

from __future__ import annotations

from .base import Conversation, Plan, Turn, Vocab, Workload, describe
from .burst import Burst
from .gsp import SharedPrefix
from .multi import MultiTurn
from .zipf import ZipfRag

WORKLOADS: dict[str, type] = {w.kind: w for w in (SharedPrefix, ZipfRag, MultiTurn, Burst)}

__all__ = [
    "WORKLOADS",
    "Burst",
    "Conversation",
    "MultiTurn",
    "Plan",
    "SharedPrefix",
    "Turn",
    "Vocab",
    "Workload",
    "ZipfRag",
    "describe",
]
