"""The workloads by name."""

from __future__ import annotations

from .agent import AgentLoop
from .base import Conversation, Plan, Turn, Vocab, Workload, describe
from .burst import Burst
from .docqa import DocumentQa
from .gsp import SharedPrefix
from .multi import MultiTurn
from .rag import RetrievedRag
from .trace import TraceReplay
from .zipf import ZipfRag

WORKLOADS: dict[str, type] = {
    w.kind: w for w in (SharedPrefix, ZipfRag, RetrievedRag, MultiTurn, AgentLoop, DocumentQa, TraceReplay, Burst)
}

__all__ = [
    "WORKLOADS",
    "AgentLoop",
    "Burst",
    "Conversation",
    "DocumentQa",
    "MultiTurn",
    "Plan",
    "RetrievedRag",
    "SharedPrefix",
    "TraceReplay",
    "Turn",
    "Vocab",
    "Workload",
    "ZipfRag",
    "describe",
]
