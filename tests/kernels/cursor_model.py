"""What the cursor kernels must do, in plain Python, one batch entry at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

from replayssm_kernels import DIRECT, FAULT, FRESH, INERT, PAD, POISON


@dataclass
class Model:
    """What the cursors must do, one entry at a time."""

    capacity: int
    checkpoint: list[int]
    max_width: int = 1
    faults: int = 0
    pending: list[int] = field(default_factory=list)
    fold: list[tuple[int, int, int, int]] = field(default_factory=list)
    snapshot: list[tuple[int, int, int, int]] = field(default_factory=list)

    def count(self, row: int, n: int) -> int | None:
        """Records pending at n tokens, None where that is impossible."""
        if not 0 < row < len(self.checkpoint) or self.checkpoint[row] == POISON:
            return None
        if self.checkpoint[row] == FRESH:
            self.checkpoint[row] = n
        count = n - self.checkpoint[row]
        return count if 0 <= count <= self.capacity else None

    def poison(self, row: int) -> None:
        self.faults += 1
        if 0 < row < len(self.checkpoint):
            self.checkpoint[row] = POISON

    def is_padding(self, row: int, slot: int) -> bool:
        inert = 0 < row < len(self.checkpoint) and self.checkpoint[row] == INERT
        return slot < 0 or row == 0 or inert

    def step(self, rows, lens, slots, tracks, widths=None, direct=False) -> None:
        self.pending, self.fold, self.snapshot = [], [], []
        for row, length, slot, track, width in zip(rows, lens, slots, tracks, widths or [1] * len(rows), strict=True):
            if self.is_padding(row, slot) or width < 1:
                self.pending.append(PAD)
                continue
            count = self.count(row, length - width)
            if count is None or track == slot or width > self.max_width:
                self.poison(row)
                self.pending.append(FAULT)
                if track >= 0 and track != slot:
                    self.snapshot.append((row, slot, track, FAULT))
                continue
            if count if direct else count + width > self.capacity:
                self.fold.append((row, slot, slot, count))
                self.checkpoint[row], count = length - width, 0
            if direct:
                self.checkpoint[row] = length
                self.pending.append(DIRECT)
                if track >= 0:
                    self.snapshot.append((row, slot, track, 0))
                continue
            self.pending.append(count)
            if track >= 0:
                self.snapshot.append((row, slot, track, count + 1))

    def snapshots(self, rows, positions, slots, tracks) -> None:
        self.snapshot = []
        for row, position, slot, track in zip(rows, positions, slots, tracks, strict=True):
            if self.is_padding(row, slot) or position < 0 or track < 0:
                continue
            known = 0 < row < len(self.checkpoint) and self.checkpoint[row] >= 0 and track != slot
            upto = position - self.checkpoint[row] if known else FAULT
            if not 0 <= upto <= self.capacity:
                self.poison(row)
                upto = FAULT
            if track != slot:
                self.snapshot.append((row, slot, track, upto))

    def forced(self, rows, lens, slots, new_lens) -> None:
        self.fold = []
        for row, n, slot, new in zip(rows, lens, slots, new_lens, strict=True):
            if self.is_padding(row, slot):
                continue
            count = self.count(row, n)
            if count is None:
                self.poison(row)
                self.fold.append((row, slot, slot, FAULT))
                continue
            if count:
                self.fold.append((row, slot, slot, count))
            self.checkpoint[row] = new
