"""Tensor parallelism: every rank must take the same decisions, and a rank that does not is an error on all of them.

Each rank's scheduler and cursors decide for themselves what to fold, which states to leave and what to hand over, from
the same requests in the same order. Every EVERY forwards the ranks compare where the checkpoints of all rows stand
(folds, extends and hand-overs move them) and a running digest of what was decided on the host (boundaries, donations).

Nothing waits in the steady state: the checksum is copied to the host behind EVERY forwards and gathered behind as many
more, on a group of its own, so that its order does not depend on what SGLang gathers.
"""

from __future__ import annotations

import zlib
from datetime import timedelta

import torch
import torch.distributed as dist

EVERY = 64
_PATIENCE = timedelta(seconds=120)  # for a rank that runs behind; one that is gone is an error


class Disagreement(RuntimeError):
    """Ranks have decided differently, or one does not answer."""


class Agreement:
    """Compares the decisions of all ranks. Every rank of the process group must create one, at the same point.

    Args:
        checkpoint: [rows] int32, the ring's cursors on this rank's device.
    """

    def __init__(self, checkpoint: torch.Tensor) -> None:
        self._checkpoint = checkpoint
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._ranks = dist.get_world_size(self._group)
        self._forwards = 0
        self._digest = 0
        rows = torch.arange(len(checkpoint), dtype=torch.int64, device=checkpoint.device)
        self._weights = rows * 2654435761 + 1  # rows that swap their cursors must show
        on_gpu = checkpoint.device.type == "cuda"
        self._copy = torch.zeros(1, dtype=torch.int64, pin_memory=on_gpu)
        self._event = torch.cuda.Event() if on_gpu else None
        self._taken: tuple[int, int] | None = None  # forwards and digest when the checksum was taken
        self._gathered: tuple[dist.Work, list[torch.Tensor]] | None = None

    def note(self, *decision: object) -> None:
        """Something was decided on the host: plain values, the same on every rank."""
        self._digest = zlib.crc32(repr(decision).encode(), self._digest)

    def before_forward(self) -> None:
        """Once per forward. Raises Disagreement on every rank when one decided differently."""
        self._forwards += 1
        if self._forwards % EVERY:
            return
        self._judge()
        if self._taken is not None:
            if self._event is not None:
                self._event.synchronize()  # EVERY forwards old
            mine = torch.tensor([*self._taken, int(self._copy)], dtype=torch.int64)
            theirs = [torch.zeros_like(mine) for _ in range(self._ranks)]
            self._gathered = dist.all_gather(theirs, mine, group=self._group, async_op=True), theirs
        checksum = (self._checkpoint.to(torch.int64) * self._weights).sum().reshape(1)
        self._copy.copy_(checksum, non_blocking=True)
        if self._event is not None:
            self._event.record()
        self._taken = self._forwards, self._digest

    def _judge(self) -> None:
        if self._gathered is None:
            return
        work, theirs = self._gathered
        self._gathered = None
        try:
            work.wait(_PATIENCE)
        except RuntimeError as error:
            raise Disagreement(f"ReplaySSM: a tensor-parallel rank does not answer ({error}).") from error
        values = [tuple(each.tolist()) for each in theirs]
        if len(set(values)) > 1:
            raise Disagreement(
                f"ReplaySSM: tensor-parallel ranks disagree on what was folded, kept or handed over; (forwards, "
                f"decisions, cursors) per rank: {values}. Their states no longer belong to the same tokens. This is a "
                "bug: please report it with the server's arguments and log; SGLANG_REPLAYSSM_DISABLE=1 without the "
                "flag serves without buffered decode."
            )
