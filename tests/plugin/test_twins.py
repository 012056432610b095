"""Every twin of a launch against its kernel: same lists, same cursors, same states and outputs."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import replayssm_kernels as kernels
from replayssm_kernels import FRESH, INERT, POISON, Ring, RingShape, StepPlan
from tests.harness import host
from tests.plugin import twins

pytestmark = pytest.mark.skipif(host.has_gpu(), reason="twins are for the machine without a GPU")

SHAPE = RingShape(layers=2, rows=5, k_heads=1, v_heads=2, key_dim=16, value_dim=32, capacity=3, key_dtype=torch.float32)


@pytest.fixture(autouse=True)
def alone(isolated: None) -> Iterator[None]:
    yield


def pair(seed: int) -> tuple[random.Random, list[tuple[Ring, StepPlan, torch.Tensor]]]:
    """The same ring, plan and states twice."""
    generator = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)
    ring = Ring.allocate(SHAPE, "cpu")
    for tensor in (ring.u, ring.k):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    ring.g.copy_(-torch.rand(ring.g.shape, generator=generator))
    stands = [rng.choice([10, 11, 12, 13, FRESH, INERT, POISON]) for _ in range(SHAPE.rows - 1)]
    ring.checkpoint.copy_(torch.tensor([INERT, *stands]))
    state = torch.randn(SHAPE.layers, 9, SHAPE.v_heads, SHAPE.value_dim, SHAPE.key_dim, generator=generator)
    ours = (ring, StepPlan.allocate(8, "cpu"), state)
    return rng, [ours, copy.deepcopy(ours)]


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)


def same_cursors(one: tuple[Ring, StepPlan, Any], other: tuple[Ring, StepPlan, Any], batch: int) -> None:
    assert one[0].checkpoint.tolist() == other[0].checkpoint.tolist()
    assert int(one[0].faults) == int(other[0].faults)
    assert one[1].fold.to_host() == other[1].fold.to_host()
    assert one[1].snapshot.to_host() == other[1].snapshot.to_host()
    assert one[1].pending[:batch].tolist() == other[1].pending[:batch].tolist()


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_a_decode_step(seed: int, direct: bool) -> None:
    rng, sides = pair(seed)
    rows = torch.tensor(rng.sample(range(5), 4))
    lens = torch.tensor([rng.randrange(10, 17) for _ in range(4)])
    slots = torch.tensor([rng.choice([-1, i, i]) for i in range(4)], dtype=torch.int32)
    mask, tracks = torch.tensor([rng.random() < 0.5 for _ in range(4)]), torch.tensor([5, 6, -1, 8])
    generator = torch.Generator().manual_seed(seed)
    width = 2 * SHAPE.k_heads * SHAPE.key_dim + SHAPE.v_heads * SHAPE.value_dim
    inputs = [torch.randn(4, n, generator=generator) for n in (width, SHAPE.v_heads, SHAPE.v_heads)]
    gates = [torch.randn(SHAPE.v_heads, generator=generator) for _ in range(2)]
    for module, (ring, plan, state) in zip((kernels, twins), sides, strict=True):
        module.plan_step(ring, plan, rows, lens, slots, mask, tracks, direct=direct)
        module.materialise(state, ring, plan.fold)
    same_cursors(*sides, batch=4)
    for layer in range(SHAPE.layers):
        outputs = [
            module.decode(*inputs, *gates, state[layer], ring, layer, slots, rows, plan.pending, 0.25, direct=direct)
            for module, (ring, plan, state) in zip((kernels, twins), sides, strict=True)
        ]
        same(*outputs)
    for module, (ring, plan, state) in zip((kernels, twins), sides, strict=True):
        module.materialise(state, ring, plan.snapshot)
    (one, _, states), (other, _, others) = sides
    for mine, theirs in ((states, others), (one.u, other.u), (one.k, other.k), (one.g, other.g)):
        same(mine, theirs)


@pytest.mark.parametrize("seed", range(6))
def test_a_forced_fold(seed: int) -> None:
    rng, sides = pair(seed)
    rows = torch.tensor(rng.sample(range(5), 4))
    lens = torch.tensor([rng.randrange(10, 16) for _ in range(4)])
    slots = torch.tensor([rng.choice([-1, i, i]) for i in range(4)])
    for module, (ring, plan, state) in zip((kernels, twins), sides, strict=True):
        module.plan_forced_fold(ring, plan.fold, rows, lens, slots, lens + 2)
        module.materialise(state, ring, plan.fold)
    same_cursors(*sides, batch=4)
    same(sides[0][2], sides[1][2])


@pytest.mark.parametrize("seed", range(4))
def test_the_windows_of_an_extend(seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = [rng.randrange(1, 9) for _ in range(3)]
    counts = [sorted(rng.sample(range(length + 1), rng.randrange(length + 1))) for length in lengths]
    sequences = [
        (sum(lengths[:i]), i, rng.random() < 0.5, found)
        for i, found in enumerate(counts)
        if found or rng.random() < 0.5
    ]
    slots = torch.tensor(rng.sample(range(4, 40), sum(len(found) for *_, found in sequences)), dtype=torch.int64)
    points = kernels.Points.of(sequences, slots, torch.device("cpu"))
    conv, inputs = torch.randn(40, 7, 3, generator=generator), torch.randn(sum(lengths), 7, generator=generator)
    sources = torch.tensor([2, rng.choice([-1, 3]), 1])
    both = [conv.clone(), conv.clone()]
    for module, windows in zip((kernels, twins), both, strict=True):
        module.leave_windows(windows, inputs, sources, points)
    same(*both)
