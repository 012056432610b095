"""The workloads by name."""

from __future__ import annotations

from .base import Conversation, Plan, Turn, Vocab, Workload, describe
from .burst import Burst
from .gsp import SharedPrefix
from .multi import MultiTurn
from .rag import RetrievedRag
from .zipf import ZipfRag

WORKLOADS: dict[str, type] = {w.kind: w for w in (SharedPrefix, ZipfRag, RetrievedRag, MultiTurn, Burst)}

__all__ = [
    "WORKLOADS",
    "Burst",
    "Conversation",
    "MultiTurn",
    "Plan",
    "RetrievedRag",
    "SharedPrefix",
    "Turn",
    "Vocab",
    "Workload",
    "ZipfRag",
    "describe",
]
