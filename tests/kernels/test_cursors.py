"""The cursor kernels against a model in plain Python, list for list."""

from __future__ import annotations

import random

import pytest
import torch

from replayssm_kernels import (
    FRESH,
    INERT,
    PAD,
    Counters,
    Ring,
    StepPlan,
    WorkList,
    mark_fresh,
    plan_forced_fold,
    plan_snapshot,
    plan_step,
    set_checkpoint,
)
from tests.kernels.cursor_model import Model
from tests.kernels.machine import DEVICE, make_shape

ROWS = 5000


def make(capacity: int, seed: int, max_width: int = 1) -> tuple[random.Random, Model, Ring]:
    """A ring whose rows stand anywhere, with FRESH and INERT ones among them, and its model."""
    rng = random.Random(seed)
    ring = Ring.allocate(make_shape(rows=ROWS, capacity=capacity, v_heads=1, max_width=max_width), DEVICE)
    values = [INERT] + [rng.choice([FRESH, INERT, rng.randrange(1000), rng.randrange(1000)]) for _ in range(ROWS - 1)]
    ring.checkpoint.copy_(torch.tensor(values, dtype=torch.int32))
    return rng, Model(capacity, values, max_width), ring


def draw_batch(rng: random.Random, model: Model, size: int) -> tuple[list[int], list[int], list[int]]:
    """Distinct rows (some padded, some out of range), lengths around the allowed window, slots."""
    rows = rng.sample(range(1, ROWS), size)
    lens, slots = [], []
    for i, row in enumerate(rows):
        lens.append(max(1, model.checkpoint[row] + 1 + rng.randint(-1, model.capacity + 1)))
        slots.append(rng.choice([-1, i, i, i, i, i]))
        kind = rng.random()
        if kind < 0.1:
            rows[i] = 0
        elif kind < 0.13:
            rows[i] = rng.choice([ROWS, ROWS + 7, -3])
    return rows, lens, slots


def tensor(values: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1024, 1025, 4096])
@pytest.mark.parametrize("capacity", [1, 3, 16])
def test_plan_step_against_the_model(size: int, capacity: int) -> None:
    """Pending counts, both lists, moved checkpoints and faults; batches beyond one block of the kernel too; the last
    step is direct."""
    rng, model, ring = make(capacity, seed=size * 100 + capacity)
    plan = StepPlan.allocate(size, DEVICE)
    for turn in range(3):
        rows, lens, slots = draw_batch(rng, model, size)
        tracks = [rng.choice([-1, -1, 5000 + i, slots[i]]) for i in range(size)] if turn else [-1] * size
        wide, narrow = (torch.int64, torch.int32) if turn % 2 else (torch.int32, torch.int64)
        mask = track_slots = None
        if turn:
            # An entry that is not masked must be ignored whatever its track slot says.
            mask = torch.tensor([t >= 0 or rng.random() < 0.5 for t in tracks], device=DEVICE)
            track_slots = tensor([t if m else 9 for t, m in zip(tracks, mask.tolist(), strict=True)], wide)
        direct = turn == 2
        entries = tensor(rows, wide), tensor(lens, narrow), tensor(slots, narrow)
        plan_step(ring, plan, *entries, mask, track_slots, direct=direct)
        model.step(rows, lens, slots, tracks, direct=direct)
        assert plan.pending.tolist() == model.pending
        assert plan.fold.to_host() == model.fold
        assert plan.snapshot.to_host() == model.snapshot
        assert ring.checkpoint.tolist() == model.checkpoint
        assert int(ring.faults) == model.faults
    assert model.faults > 0 or size < 64, "the drawn batches must contain faults"


@pytest.mark.parametrize("size", [1, 7, 1025])
@pytest.mark.parametrize("capacity,max_width", [(2, 1), (8, 4), (33, 16)])
def test_steps_of_any_width_against_the_model(size: int, capacity: int, max_width: int) -> None:
    """Widths differ per entry and step, none and too many among them; then snapshots at positions all around."""
    rng, model, ring = make(capacity, seed=size * 100 + capacity, max_width=max_width)
    plan = StepPlan.allocate(size, DEVICE)
    for turn in range(3):
        rows, lens, slots = draw_batch(rng, model, size)
        widths = [rng.choice([1, max_width, rng.randint(-1, max_width + 1)]) for _ in rows]
        lens = [n - 1 + w for n, w in zip(lens, widths, strict=True)]
        kind = torch.int64 if turn % 2 else torch.int32
        plan_step(ring, plan, *(tensor(x, kind) for x in (rows, lens, slots)), widths=tensor(widths, kind))
        model.step(rows, lens, slots, [-1] * size, widths)
        assert plan.pending.tolist() == model.pending
        assert plan.fold.to_host() == model.fold and plan.snapshot.to_host() == []
        positions = [rng.choice([-1, n - rng.randint(-1, capacity)]) for n in lens]
        tracks = [rng.choice([-1, 5000 + i, slot]) for i, slot in enumerate(slots)]
        plan_snapshot(ring, plan.snapshot, *(tensor(x, kind) for x in (rows, positions, slots, tracks)))
        model.snapshots(rows, positions, slots, tracks)
        assert plan.snapshot.to_host() == model.snapshot
        assert ring.checkpoint.tolist() == model.checkpoint
        assert int(ring.faults) == model.faults
    assert model.faults > 0 or size < 64, "the drawn batches must contain faults"


@pytest.mark.parametrize("size", [1, 5, 1500])
def test_forced_fold_against_the_model(size: int) -> None:
    rng, model, ring = make(capacity=7, seed=size)
    worklist = WorkList.allocate(size, DEVICE)
    for _ in range(3):
        rows, lens, slots = draw_batch(rng, model, size)
        new_lens = [n + rng.choice([0, 0, 11]) for n in lens]
        plan_forced_fold(
            ring,
            worklist,
            tensor(rows, torch.int64),
            tensor(lens, torch.int32),
            tensor(slots, torch.int64),
            tensor(new_lens, torch.int64),
        )
        model.forced(rows, lens, slots, new_lens)
        assert worklist.to_host() == model.fold
        assert ring.checkpoint.tolist() == model.checkpoint
        assert int(ring.faults) == model.faults


def test_a_smaller_batch_leaves_the_rest_of_the_buffers_alone() -> None:
    """Static buffers are larger than most batches: entries beyond the batch keep what they had."""
    _, _, ring = make(capacity=4, seed=0)
    ring.checkpoint[3] = 10
    plan = StepPlan.allocate(8, DEVICE)
    plan.pending.fill_(77)
    plan_step(ring, plan, tensor([3], torch.int64), tensor([12], torch.int64), tensor([1], torch.int64))
    assert plan.pending.tolist() == [1] + [77] * 7


def test_disarm_makes_padding() -> None:
    _, _, ring = make(capacity=1, seed=0)
    ring.checkpoint[3] = 10
    plan = StepPlan.allocate(4, DEVICE)
    mask = torch.tensor([True], device=DEVICE)
    args = tensor([3], torch.int64), tensor([12], torch.int64), tensor([1], torch.int64)
    plan_step(ring, plan, *args, mask, tensor([2], torch.int64))
    assert plan.fold.to_host() and plan.snapshot.to_host()
    plan.disarm(1)
    assert plan.pending[0] == PAD and plan.fold.to_host() == plan.snapshot.to_host() == []


def test_set_checkpoint_and_mark_fresh() -> None:
    ring = Ring.allocate(make_shape(rows=6), DEVICE)
    assert ring.checkpoint.tolist() == [INERT] * 6
    set_checkpoint(ring, tensor([4, 0, 2], torch.int64), tensor([7, 9, 0], torch.int32))
    assert ring.checkpoint.tolist() == [INERT, INERT, 0, INERT, 7, INERT]
    mark_fresh(ring, tensor([4, 5, 0], torch.int64))
    assert ring.checkpoint.tolist() == [INERT, INERT, 0, INERT, FRESH, FRESH]
    assert ring.faults == 0
    set_checkpoint(ring, tensor([6, -1, 2], torch.int64), tensor([7, 9, -1], torch.int64))
    assert ring.checkpoint.tolist() == [INERT, INERT, 0, INERT, FRESH, FRESH]
    assert ring.faults == 3


def test_wrong_arguments_are_refused() -> None:
    ring = Ring.allocate(make_shape(), DEVICE)
    plan = StepPlan.allocate(2, DEVICE)
    two, three = tensor([1, 2], torch.int64), tensor([1, 2, 3], torch.int64)
    mask = torch.tensor([True, False], device=DEVICE)
    for call in (
        lambda: plan_step(ring, plan, three, three, three),
        lambda: plan_step(ring, plan, two, three, two),
        lambda: plan_step(ring, plan, two.float(), two, two),
        lambda: plan_step(ring, plan, two, two, two, mask),
        lambda: plan_step(ring, plan, two, two, two, two, two),
        lambda: plan_forced_fold(ring, plan.fold, three, three, three, three),
        lambda: set_checkpoint(ring, two, three),
    ):
        with pytest.raises(ValueError):
            call()


@pytest.mark.parametrize("capacity", [1, 5, 64])
def test_counters_are_the_sums_over_the_lists(capacity: int) -> None:
    """Against the lists that are planned, over blocks of several sizes; nothing else changes through counting."""
    shape = make_shape(capacity=capacity, rows=ROWS)
    chance = random.Random(capacity)
    counters = Counters.allocate(capacity, DEVICE)
    expected = [0] * (Counters.HISTOGRAM + capacity)
    counted, plain = (Ring.allocate(shape, DEVICE) for _ in range(2))
    plan, other = (StepPlan.allocate(1500, DEVICE) for _ in range(2))
    lens = torch.full((1500,), 20)
    rows = torch.arange(1, 1501)
    for ring in (counted, plain):
        set_checkpoint(ring, rows.to(DEVICE), lens.to(DEVICE))
    for step in range(2 * capacity + 3):
        batch = (1, 17, 1500)[step % 3]
        taken = torch.tensor(chance.sample(range(1500), batch))
        lens[taken] += 1
        mask = torch.tensor([chance.random() < 0.3 for _ in range(batch)])
        slots = torch.where(torch.rand(batch) < 0.1, -1, taken)
        given = [x.to(DEVICE) for x in (rows[taken], lens[taken], slots, mask, torch.full((batch,), 4000))]
        plan_step(counted, plan, *given, counters=counters)
        plan_step(plain, other, *given)
        lens[taken[slots < 0]] -= 1  # padding did not run
        pending = plan.pending[:batch].tolist()
        assert pending == other.pending[:batch].tolist()
        assert torch.equal(counted.checkpoint, plain.checkpoint)
        for count in pending:
            if count >= 0:
                expected[Counters.HISTOGRAM + count] += 1
        expected[Counters.FOLDS] += len(plan.fold.to_host())
        expected[Counters.SNAPSHOTS] += len(plan.snapshot.to_host())
        if step % 4 == 3:
            reason = chance.choice((Counters.EXTENDS, Counters.HAND_OVERS))
            ends = [x.to(DEVICE) for x in (rows[taken], lens[taken], taken, lens[taken])]
            plan_forced_fold(counted, plan.fold, *ends, counters, reason)
            plan_forced_fold(plain, other.fold, *ends)
            expected[reason] += len(plan.fold.to_host())
    assert counters.totals.tolist() == expected
    assert int(counted.faults) == 0 and sum(expected) > 1000
