"""Cursors: one tiny launch per forward says, on the device, what each entry has pending and what must fold.

    T                                 tokens that the step brings: 1, or this entry's width in a verify step
    n       = seq_len - T             tokens committed before this step (seq_len counts the step's own tokens)
    pending = n - checkpoint[row]     records to replay; a fold is due when pending + T > L
    fold      list (row, slot -> slot, upto = pending); then checkpoint[row] := n and pending := 0
    snapshot  list (row, slot -> track slot, upto = pending + 1): this step's own record included

A *direct* step leaves the ring empty: every entry with pending records is due, decode writes the state itself, and the
checkpoint moves to seq_len. On small batches that is faster than replaying, and steps of both kinds may follow each
other on a row.

A verify step writes T records behind the pending ones, and acceptance is nothing but the next step's seq_len: the
records of rejected drafts lie at and beyond the new pending count and are written over. A track boundary inside the
accepted run is known only then: `plan_snapshot` lists it.

The only cursor is the *position of the checkpoint*. It moves when a fold is listed, when an extend ends
(`plan_forced_fold`), with a direct step, or when `set_checkpoint` is called, never because a buffered step ran. So a
buffered step one too many or a rollback needs no correction, and a row that was handed on without `mark_fresh` is
detected (its pending count is out of range) instead of silently decoding from someone else's records. A FRESH row
starts wherever its first forward starts, with nothing pending.

`pending` after `plan_step`, per batch entry:

    0 .. L-T   replay that many records
    FAULT  -1  the count was not in 0..L, the row out of range, the width above the ring's, or the track slot
               equals the slot: ring.faults is raised, the checkpoint becomes POISON (a fault again until the row
               has a new owner), decode writes NaN and appends nothing, a snapshot that was asked for is NaN
    PAD    -2  padding: slot < 0, row 0, an INERT row or no token (T < 1: a request that has finished). Output
               rows are zeros, nothing else is touched
    DIRECT -3  nothing to replay; decode must write the state, and is NaN where it was not told to

Bytes per step: about 40 per batch entry, one program; lists keep the batch order. Graph-capturable: no host
synchronisation. A listed fold has already moved the checkpoint, so `materialise` must run on the list before
anything reads the ring again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .ring import FRESH, INERT, PADDING_ROW, POISON, Ring

FAULT = -1
PAD = -2
DIRECT = -3

_BLOCK = 1024
_FAULT = tl.constexpr(FAULT)
_PAD = tl.constexpr(PAD)
_DIRECT = tl.constexpr(DIRECT)
_PADDING_ROW = tl.constexpr(PADDING_ROW)
_INERT = tl.constexpr(INERT)
_FRESH = tl.constexpr(FRESH)
_POISON = tl.constexpr(POISON)


@dataclass(frozen=True, eq=False)
class WorkList:
    """A compact device list for `materialise`: entry i says (row[i], src[i] -> dst[i], upto[i]) for i <
    count[0].

    `count` is int32 [1]; the others are int32 [max_entries] views of one buffer, undefined beyond `count`.
    """

    count: torch.Tensor
    entries: torch.Tensor

    @classmethod
    def allocate(cls, max_entries: int, device: torch.device | str) -> WorkList:
        return cls(
            count=torch.zeros(1, dtype=torch.int32, device=device),
            entries=torch.zeros(4, max_entries, dtype=torch.int32, device=device),
        )

    @property
    def max_entries(self) -> int:
        return self.entries.shape[1]

    @property
    def row(self) -> torch.Tensor:
        return self.entries[0]

    @property
    def src(self) -> torch.Tensor:
        return self.entries[1]

    @property
    def dst(self) -> torch.Tensor:
        return self.entries[2]

    @property
    def upto(self) -> torch.Tensor:
        return self.entries[3]

    def to_host(self) -> list[tuple[int, int, int, int]]:
        """The valid entries as (row, src, dst, upto). Synchronises: for tests and debugging."""
        return [tuple(e) for e in self.entries[:, : int(self.count)].T.tolist()]


@dataclass(frozen=True, eq=False)
class StepPlan:
    """Static device buffers that `plan_step` fills once per forward.

    pending: int32 [max_batch], see the table at the top of this file; fold and snapshot: work lists for
        `materialise`.
    """

    pending: torch.Tensor
    fold: WorkList
    snapshot: WorkList

    def disarm(self, batch: int) -> None:
        """Make the first `batch` entries padding and both lists empty, by device operations only.

        For the capture of a CUDA graph: what is captured then runs over rows that it must not touch.
        """
        self.pending[:batch].fill_(PAD)
        self.fold.count.zero_()
        self.snapshot.count.zero_()

    @classmethod
    def allocate(cls, max_batch: int, device: torch.device | str) -> StepPlan:
        return cls(
            pending=torch.full((max_batch,), PAD, dtype=torch.int32, device=device),
            fold=WorkList.allocate(max_batch, device),
            snapshot=WorkList.allocate(max_batch, device),
        )


@dataclass(frozen=True, eq=False)
class Counters:
    """What the cursors did since the start, on the device: an option of both planning launches.

    totals: int64 [4 + capacity]. FOLDS and SNAPSHOTS count list entries of `plan_step`, EXTENDS and HAND_OVERS those of
        `plan_forced_fold` by its reason; behind them stands a histogram: how often a live entry of a step had
        0 .. capacity - 1 records to replay.
    """

    FOLDS = 0
    SNAPSHOTS = 1
    EXTENDS = 2
    HAND_OVERS = 3
    HISTOGRAM = 4

    totals: torch.Tensor

    @classmethod
    def allocate(cls, capacity: int, device: torch.device | str) -> Counters:
        return cls(torch.zeros(cls.HISTOGRAM + capacity, dtype=torch.int64, device=device))


_FOLDS = tl.constexpr(Counters.FOLDS)
_SNAPSHOTS = tl.constexpr(Counters.SNAPSHOTS)
_HISTOGRAM = tl.constexpr(Counters.HISTOGRAM)
_LEAST_BINS = 32  # of tl.histogram: a bin per thread of a warp


@triton.jit
def _append(entries, capacity, taken, at, row, src, dst, upto):
    """Write the entries whose `taken` is set behind the `at` entries already there; return the new length."""
    pos = at + tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(entries + pos, row, mask=taken)
    tl.store(entries + capacity + pos, src, mask=taken)
    tl.store(entries + 2 * capacity + pos, dst, mask=taken)
    tl.store(entries + 3 * capacity + pos, upto, mask=taken)
    return at + tl.sum(taken.to(tl.int32), 0)


@triton.jit
def _count(total, entries):
    if entries > 0:
        tl.atomic_add(total, entries.to(tl.int64))


@triton.jit(do_not_specialize=["batch", "num_rows", "fold_capacity", "snapshot_capacity"])
def _plan_step_kernel(
    checkpoint, faults, rows, seq_lens, widths, slots, track_mask, track_slots,
    pending, fold_count, fold, snapshot_count, snapshot, totals,
    batch, num_rows, fold_capacity, snapshot_capacity,
    L: tl.constexpr, MAX_WIDTH: tl.constexpr, WIDE: tl.constexpr, IS_DIRECT: tl.constexpr, TRACK: tl.constexpr,
    BLOCK: tl.constexpr, COUNT: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    folds = 0
    snapshots = 0
    bad = 0
    for start in range(0, batch, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < batch
        row = tl.load(rows + i, mask=inside, other=0).to(tl.int32)
        slot = tl.load(slots + i, mask=inside, other=-1).to(tl.int32)
        width = tl.load(widths + i, mask=inside, other=0).to(tl.int32) if WIDE else 1
        n = tl.load(seq_lens + i, mask=inside, other=1).to(tl.int32) - width
        live = inside & (slot >= 0) & (row != _PADDING_ROW)
        if WIDE:
            live = live & (width > 0)
        known = live & (row > 0) & (row < num_rows)
        stands = tl.load(checkpoint + row, mask=known, other=0)
        live = live & (stands != _INERT)
        known = known & live
        fresh = known & (stands == _FRESH)
        tl.store(checkpoint + row, n, mask=fresh)
        count = tl.where(fresh, 0, n - stands)
        good = known & (stands != _POISON) & (count >= 0) & (count <= L)
        if WIDE:
            good = good & (width <= MAX_WIDTH)
        if TRACK:
            dst = tl.load(track_slots + i, mask=inside, other=-1).to(tl.int32)
            tracked = live & (tl.load(track_mask + i, mask=inside, other=0) != 0) & (dst >= 0)
            good = good & ((dst != slot) | (tracked == 0))
        due = good & ((count > 0) if IS_DIRECT else (count + width > L))
        folds = _append(fold, fold_capacity, due, folds, row, slot, slot, count)
        moves = good if IS_DIRECT else due
        stands_now = n + 1 if IS_DIRECT else n
        tl.store(checkpoint + row, tl.where(good, stands_now, _POISON), mask=moves | (known & (good == 0)))
        replayed = tl.where(due, 0, count)
        left = tl.where(good, _DIRECT if IS_DIRECT else replayed, tl.where(live, _FAULT, _PAD))
        tl.store(pending + i, left, mask=inside)
        if COUNT:
            bins = tl.arange(0, BINS)
            seen = tl.histogram(tl.where(good, replayed, L), BINS)
            tl.atomic_add(totals + _HISTOGRAM + bins, seen.to(tl.int64), mask=(bins < L) & (seen > 0))
        if TRACK:
            # A faulty entry asks for upto = -1, which materialises NaN: the destination must not keep an
            # older state.
            upto = tl.where(good, 0 if IS_DIRECT else left + 1, _FAULT)
            taken = tracked & (dst != slot)
            snapshots = _append(snapshot, snapshot_capacity, taken, snapshots, row, slot, dst, upto)
        bad += tl.sum((live & (good == 0)).to(tl.int32), 0)
    tl.store(fold_count, folds)
    tl.store(snapshot_count, snapshots)
    if COUNT:
        _count(totals + _FOLDS, folds)
        _count(totals + _SNAPSHOTS, snapshots)
    if bad > 0:
        tl.atomic_add(faults, bad)


@triton.jit(do_not_specialize=["batch", "num_rows", "capacity"])
def _plan_snapshot_kernel(
    checkpoint, faults, rows, positions, slots, track_slots, count_out, entries, totals, batch, num_rows, capacity,
    L: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    listed = 0
    bad = 0
    for start in range(0, batch, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < batch
        row = tl.load(rows + i, mask=inside, other=0).to(tl.int32)
        slot = tl.load(slots + i, mask=inside, other=-1).to(tl.int32)
        dst = tl.load(track_slots + i, mask=inside, other=-1).to(tl.int32)
        position = tl.load(positions + i, mask=inside, other=-1).to(tl.int32)
        asked = inside & (slot >= 0) & (row != _PADDING_ROW) & (position >= 0) & (dst >= 0)
        known = asked & (row > 0) & (row < num_rows)
        stands = tl.load(checkpoint + row, mask=known, other=0)
        asked = asked & (stands != _INERT)
        known = known & asked
        upto = position - stands
        good = known & (stands >= 0) & (upto >= 0) & (upto <= L) & (dst != slot)
        listed = _append(entries, capacity, asked & (dst != slot), listed, row, slot, dst, tl.where(good, upto, _FAULT))
        tl.store(checkpoint + row, _POISON, mask=known & (good == 0))
        bad += tl.sum((asked & (good == 0)).to(tl.int32), 0)
    tl.store(count_out, listed)
    if COUNT:
        _count(totals + _SNAPSHOTS, listed)
    if bad > 0:
        tl.atomic_add(faults, bad)


@triton.jit(do_not_specialize=["batch", "num_rows", "capacity", "reason"])
def _plan_forced_fold_kernel(
    checkpoint, faults, rows, lens, slots, new_lens, count_out, entries, totals, batch, num_rows, capacity, reason,
    L: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    listed = 0
    bad = 0
    for start in range(0, batch, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < batch
        row = tl.load(rows + i, mask=inside, other=0).to(tl.int32)
        slot = tl.load(slots + i, mask=inside, other=-1).to(tl.int32)
        n = tl.load(lens + i, mask=inside, other=0).to(tl.int32)
        live = inside & (slot >= 0) & (row != _PADDING_ROW)
        known = live & (row > 0) & (row < num_rows)
        stands = tl.load(checkpoint + row, mask=known, other=0)
        live = live & (stands != _INERT)
        known = known & live
        count = tl.where(stands == _FRESH, 0, n - stands)
        good = known & (stands != _POISON) & (count >= 0) & (count <= L)
        # A faulty slot becomes NaN (upto = -1): what runs from it, or is handed it, must not look right.
        taken = live & ((good == 0) | (count > 0))
        listed = _append(entries, capacity, taken, listed, row, slot, slot, tl.where(good, count, _FAULT))
        new_len = tl.load(new_lens + i, mask=inside, other=0).to(tl.int32)
        tl.store(checkpoint + row, tl.where(good, new_len, _POISON), mask=known)
        bad += tl.sum((live & (good == 0)).to(tl.int32), 0)
    tl.store(count_out, listed)
    if COUNT:
        _count(totals + reason, listed)
    if bad > 0:
        tl.atomic_add(faults, bad)


@triton.jit(do_not_specialize=["batch", "num_rows"])
def _set_checkpoint_kernel(checkpoint, faults, rows, lens, batch, num_rows, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < batch
    row = tl.load(rows + i, mask=inside, other=0).to(tl.int32)
    n = tl.load(lens + i, mask=inside, other=0).to(tl.int32)
    live = inside & (row != _PADDING_ROW)
    good = live & (row > 0) & (row < num_rows) & (n >= 0)
    tl.store(checkpoint + row, n, mask=good)
    bad = tl.sum((live & (good == 0)).to(tl.int32), 0)
    if bad > 0:
        tl.atomic_add(faults, bad)


def _block(ring: Ring) -> int:
    """Entries per turn of a launch. It hangs on the ring and not on the batch: one compiled variant per server, so that
    no batch size compiles while requests wait."""
    return max(16, min(_BLOCK, triton.next_power_of_2(ring.shape.rows)))


def _check_vectors(batch: int, **vectors: torch.Tensor) -> None:
    for name, t in vectors.items():
        if t.dim() != 1 or t.shape[0] != batch or (batch > 1 and t.stride(0) != 1):
            raise ValueError(f"{name} must be a contiguous vector of {batch} elements, got shape {tuple(t.shape)}")
        if t.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be int32 or int64, got {t.dtype}")


def plan_step(
    ring: Ring,
    plan: StepPlan,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
    track_mask: torch.Tensor | None = None,
    track_slots: torch.Tensor | None = None,
    counters: Counters | None = None,
    widths: torch.Tensor | None = None,
    direct: bool = False,
) -> None:
    """Plan one decode or verify forward of B entries in one launch; fills `plan` and moves the checkpoint of the
    rows due for a fold.

    Args:
        rows: [B] int32 or int64 request rows, distinct among live entries.
        seq_lens: [B] int32 or int64 token counts, this step's own tokens included.
        slots: [B] int32 or int64 state slots, negative for padding.
        track_mask: [B] bool, True where a track boundary wants a snapshot of the state after this step; None
            for no snapshots.
        track_slots: [B] int32 or int64 destination slots of the snapshots; negative skips. Must differ from
            every slot in use.
        counters: where to count what is planned, or None.
        widths: [B] int32 or int64, how many tokens the step brings to each entry, up to the ring's max_width; None
            for one each. Not together with track_mask: see `plan_snapshot`.
        direct: the step's decode writes the state; not together with widths.

    Next the caller runs `materialise(state, ring, plan.fold)` before the first layer, `decode` or `verify` with
    `plan.pending` in every layer, and `materialise(state, ring, plan.snapshot)` after the last. Raises
    ValueError for wrong shapes or dtypes.
    """
    batch = rows.shape[0]
    _check_vectors(batch, rows=rows, seq_lens=seq_lens, slots=slots)
    if widths is not None:
        _check_vectors(batch, widths=widths)
        if direct:
            raise ValueError("a step with widths is never direct")
        if track_mask is not None:
            raise ValueError("a step with widths has its snapshots planned after acceptance, by plan_snapshot")
    if batch > plan.pending.shape[0]:
        raise ValueError(f"the plan holds {plan.pending.shape[0]} entries, the batch has {batch}")
    track = track_mask is not None
    if track != (track_slots is not None):
        raise ValueError("track_mask and track_slots must be given together")
    if track:
        _check_vectors(batch, track_slots=track_slots)
        if track_mask.dtype is not torch.bool or track_mask.shape != (batch,):
            raise ValueError(f"track_mask must be bool of shape ({batch},)")
    fold, snapshot = plan.fold, plan.snapshot
    _plan_step_kernel[(1,)](
        ring.checkpoint, ring.faults, rows, seq_lens, widths, slots, track_mask, track_slots,
        plan.pending, fold.count, fold.entries, snapshot.count, snapshot.entries,
        counters.totals if counters else None,
        batch, ring.shape.rows, fold.max_entries, snapshot.max_entries,
        L=ring.shape.capacity, MAX_WIDTH=ring.shape.max_width, WIDE=widths is not None, IS_DIRECT=direct, TRACK=track,
        BLOCK=_block(ring), COUNT=counters is not None,
        BINS=max(_LEAST_BINS, triton.next_power_of_2(ring.shape.capacity + 1)),
    )  # fmt: skip


def plan_snapshot(
    ring: Ring,
    worklist: WorkList,
    rows: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    track_slots: torch.Tensor,
    counters: Counters | None = None,
) -> None:
    """List the snapshots of a verify step in one launch, once its acceptance is known; moves no checkpoint.

    Args:
        rows, slots: [B] int32 or int64, as `plan_step` had them; row 0 or a negative slot is padding.
        positions: [B] int32 or int64 token counts of the states that are wanted, no further than the records that the
            row has written; negative for none.
        track_slots: [B] int32 or int64 destinations; negative skips. Must differ from every slot in use.
        counters: where to count what is listed, or None.

    Call it, and `materialise` the list, before the next `plan_step` moves a checkpoint. A position that the ring
    doesn't reach (before the checkpoint, more than L behind it) raises `ring.faults`, poisons the row and gives NaN.
    Raises ValueError for wrong shapes or dtypes.
    """
    batch = rows.shape[0]
    _check_vectors(batch, rows=rows, positions=positions, slots=slots, track_slots=track_slots)
    if batch > worklist.max_entries:
        raise ValueError(f"the work list holds {worklist.max_entries} entries, the batch has {batch}")
    _plan_snapshot_kernel[(1,)](
        ring.checkpoint, ring.faults, rows, positions, slots, track_slots, worklist.count, worklist.entries,
        counters.totals if counters else None, batch, ring.shape.rows, worklist.max_entries,
        L=ring.shape.capacity, BLOCK=_block(ring), COUNT=counters is not None,
    )  # fmt: skip


def plan_forced_fold(
    ring: Ring,
    worklist: WorkList,
    rows: torch.Tensor,
    lens: torch.Tensor,
    slots: torch.Tensor,
    new_lens: torch.Tensor,
    counters: Counters | None = None,
    reason: int = Counters.EXTENDS,
) -> None:
    """List every row with pending records for a fold, in one launch, and move its checkpoint to `new_lens`.

    Args:
        rows, slots: [B] int32 or int64, distinct live rows; row 0 or a negative slot is padding.
        lens: [B] int32 or int64 committed token counts n (unlike `plan_step`, no token of a step in
            progress).
        new_lens: [B] int32 or int64, where the slot stands after what follows: the end of the extend that is
            about to run, or `lens` where the slot is only folded.
        counters: where to count what is listed, or None; reason: under Counters.EXTENDS or Counters.HAND_OVERS.

    Rows with nothing pending are not listed. A count outside 0..L raises `ring.faults` and poisons the row, and the
    list makes its slot NaN. FRESH rows have nothing pending; INERT rows stay INERT.
    """
    batch = rows.shape[0]
    _check_vectors(batch, rows=rows, lens=lens, slots=slots, new_lens=new_lens)
    if batch > worklist.max_entries:
        raise ValueError(f"the work list holds {worklist.max_entries} entries, the batch has {batch}")
    _plan_forced_fold_kernel[(1,)](
        ring.checkpoint, ring.faults, rows, lens, slots, new_lens, worklist.count, worklist.entries,
        counters.totals if counters else None, batch, ring.shape.rows, worklist.max_entries, reason,
        L=ring.shape.capacity, BLOCK=_block(ring), COUNT=counters is not None,
    )  # fmt: skip


def set_checkpoint(ring: Ring, rows: torch.Tensor, lens: torch.Tensor) -> None:
    """Say that the slots of `rows` ([B], int32 or int64) stand at token counts `lens` ([B]) with nothing
    pending.

    Row 0 is skipped; a row out of range or a negative count raises `ring.faults` and changes nothing.
    """
    batch = rows.shape[0]
    _check_vectors(batch, rows=rows, lens=lens)
    if batch == 0:
        return
    block = _block(ring)
    _set_checkpoint_kernel[(triton.cdiv(batch, block),)](
        ring.checkpoint, ring.faults, rows, lens, batch, ring.shape.rows, BLOCK=block
    )


def mark_fresh(ring: Ring, rows: torch.Tensor) -> None:
    """Say that `rows` ([N] int32 or int64, on the ring's device) have a new owner: nothing of the old one is
    pending.
    """
    set_rows = rows.to(torch.int64)
    ring.checkpoint.index_fill_(0, set_rows, FRESH)
    ring.checkpoint[PADDING_ROW].fill_(INERT)
