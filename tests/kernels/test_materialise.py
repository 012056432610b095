"""Materialise against the plain replay of the same records, at every position, in place and elsewhere."""

from __future__ import annotations

import pytest
import torch

from replayssm_kernels import Ring, RingShape, WorkList, materialise, reference
from tests.kernels.machine import DEVICE, each_gate, make_shape, need_bf16

# One replay of up to 64 records in float32; measured 5e-8 to 2e-7 (fp32 states; KDA with wiped channels 1.1e-6, from
# the sums of gates within a group), 1.7e-3 (bf16), 2e-4 (fp16).
BOUND = {torch.float32: 4e-6, torch.bfloat16: 3e-3, torch.float16: 5e-4}
SLOTS = 9


def fill(shape: RingShape, state_dtype: torch.dtype, seed: int = 0) -> tuple[Ring, torch.Tensor]:
    """A ring of plausible records (gates from 0 to -inf) and random states."""
    random = torch.Generator().manual_seed(seed)
    ring = Ring.allocate(shape, DEVICE)
    ring.u.copy_(torch.randn(shape.u_shape, generator=random))
    key = torch.randn(shape.k_shape, generator=random)
    gates = -torch.rand(shape.g_shape, generator=random).pow(4) * 3
    kind = torch.rand(shape.g_shape, generator=random)
    gates[kind < 0.05] = 0.0
    gates[(kind > 0.95) & (kind < 0.97)] = -1e5
    gates[kind > 0.98] = float("-inf")
    if shape.scaled_keys:  # accumulated gates within the bound, and keys that carry them
        gates = gates.clamp_min(shape.lower_bound).cumsum(-2)
        key *= torch.exp(-gates)
    elif shape.gate == "kda":  # cut as decode cuts them, and summed up by group
        gates = gates.clamp_min(-104.0)
        for j in range(1, shape.capacity):
            if j % shape.gate_group:
                gates[..., j, :] += gates[..., j - 1, :]
    ring.k.copy_(key)
    ring.g.copy_(gates)
    size = shape.layers, SLOTS, shape.v_heads, shape.value_dim, shape.key_dim
    return ring, torch.randn(size, generator=random).to(state_dtype).to(DEVICE)


def worklist(entries: list[tuple[int, int, int, int]], room: int = 0) -> WorkList:
    """A list of the given entries; beyond them, garbage that must not be looked at."""
    work = WorkList.allocate(len(entries) + room, DEVICE)
    work.entries.fill_(1)
    work.entries[:, : len(entries)] = torch.tensor(entries, dtype=torch.int32).reshape(-1, 4).T
    work.count.fill_(len(entries))
    return work


def expected(ring: Ring, state: torch.Tensor, entry: tuple[int, int, int, int]) -> torch.Tensor:
    row, src, _, upto = entry
    layers = [
        reference.replay_row(ring.shape, state[i, src], layer.u[row], layer.k[row], layer.g[row], upto)
        for i, layer in enumerate(ring.layers)
    ]
    return torch.stack(layers)


@pytest.mark.parametrize("capacity", [1, 2, 3, 7, 16, 17])
@pytest.mark.parametrize("in_place", [True, False])
@each_gate
def test_every_position(capacity: int, in_place: bool, gate: dict) -> None:
    """upto from 0 to L: the destination is exact, everything else stays bit for bit what it was."""
    ring, state = fill(make_shape(layers=2, capacity=capacity, **gate), torch.float32, seed=capacity)
    for upto in range(capacity + 1):
        entry = (3, 4, 4 if in_place else 7, upto)
        before = state.clone()
        want = expected(ring, state, entry)
        materialise(state, ring, worklist([entry]))
        assert reference.relative_error(state[:, entry[2]], want) <= BOUND[torch.float32]
        others = [s for s in range(SLOTS) if s != entry[2]]
        assert torch.equal(state[:, others], before[:, others])


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("key_dtype", [torch.float32, torch.bfloat16, torch.float16])
@each_gate
def test_dtypes(state_dtype: torch.dtype, key_dtype: torch.dtype, gate: dict) -> None:
    if torch.bfloat16 in (state_dtype, key_dtype):
        need_bf16()
    ring, state = fill(make_shape(key_dtype=key_dtype, capacity=5, **gate), state_dtype)
    entry = (2, 1, 8, 5)
    want = expected(ring, state, entry)
    materialise(state, ring, worklist([entry]))
    assert reference.relative_error(state[:, 8], want) <= BOUND[state_dtype]


@pytest.mark.parametrize(
    "k_heads,v_heads,key_dim,value_dim", [(2, 4, 16, 32), (1, 3, 64, 16), (1, 1, 128, 128), (1, 1, 256, 256)]
)
@each_gate
def test_head_shapes(k_heads: int, v_heads: int, key_dim: int, value_dim: int, gate: dict) -> None:
    heads = dict(k_heads=k_heads, v_heads=v_heads, key_dim=key_dim, value_dim=value_dim)
    shape = make_shape(**heads, capacity=6, **gate)
    ring, state = fill(shape, torch.float32)
    entry = (1, 2, 3, 6)
    want = expected(ring, state, entry)
    materialise(state, ring, worklist([entry]))
    assert reference.relative_error(state[:, 3], want) <= BOUND[torch.float32]


@pytest.mark.parametrize("programs", [1, 2, 5, 40])
def test_many_entries_on_any_grid(programs: int) -> None:
    """The persistent grid covers every tile exactly once, whatever its size; entries beyond the count are ignored."""
    ring, state = fill(make_shape(layers=2, rows=6, capacity=4), torch.float32)
    entries = [(1, 1, 1, 4), (5, 2, 7, 3), (2, 3, 3, 1), (4, 4, 8, 0), (3, 5, -1, 2)]
    wants = [expected(ring, state, e) for e in entries]
    before = state.clone()
    materialise(state, ring, worklist(entries, room=3), num_programs=programs)
    for entry, want in zip(entries, wants, strict=True):
        if entry[2] >= 0:
            assert reference.relative_error(state[:, entry[2]], want) <= BOUND[torch.float32]
    untouched = [0, 2, 4, 5, 6]
    assert torch.equal(state[:, untouched], before[:, untouched])


def test_an_empty_list_does_nothing() -> None:
    ring, state = fill(make_shape(), torch.float32)
    before = state.clone()
    materialise(state, ring, worklist([], room=4))
    assert torch.equal(state, before)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_position_zero_is_a_bit_copy(state_dtype: torch.dtype) -> None:
    """Negative zeros, infinities, denormals: nothing passes through arithmetic."""
    if state_dtype is torch.bfloat16:
        need_bf16()
    ring, state = fill(make_shape(), state_dtype)
    tiny = torch.finfo(state_dtype).smallest_normal / 2
    state[:, 4, :, 0, :5] = torch.tensor([-0.0, float("inf"), float("-inf"), tiny, -tiny], dtype=state_dtype)
    integer = torch.int32 if state_dtype is torch.float32 else torch.int16
    materialise(state, ring, worklist([(1, 4, 6, 0), (2, 3, 3, 0)]))
    assert torch.equal(state[:, 6].view(integer), state[:, 4].view(integer))


@pytest.mark.parametrize("upto", [-1, 5, 1000])
def test_an_unknown_position_gives_nan_not_an_old_state(upto: int) -> None:
    ring, state = fill(make_shape(capacity=4), torch.float32)
    before = state.clone()
    materialise(state, ring, worklist([(1, 4, 6, upto)]))
    assert state[:, 6].isnan().all()
    state[:, 6] = before[:, 6]
    assert torch.equal(state, before)


@each_gate
def test_dead_records_are_never_read(gate: dict) -> None:
    """NaN beyond `upto` and in every other row changes nothing."""
    shape = make_shape(layers=2, capacity=5, **gate)
    ring, state = fill(shape, torch.float32)
    clean = state.clone()
    materialise(clean, ring, worklist([(3, 4, 7, 2)]))
    for tensor in (ring.u, ring.k, ring.g):
        live = tensor[:, 3, :, :2].clone()
        tensor.fill_(float("nan"))
        tensor[:, 3, :, :2] = live
    materialise(state, ring, worklist([(3, 4, 7, 2)]))
    assert torch.equal(state, clean)


def test_a_pool_view_with_a_foreign_layer_stride() -> None:
    """The pool of a shard may be a slice of something larger: only the inside of a slot must be contiguous."""
    ring, state = fill(make_shape(layers=2, capacity=3), torch.float32)
    wide = torch.full((2, 2 * SLOTS, *state.shape[2:]), 5.0, device=DEVICE)
    view = wide[:, ::2]
    view.copy_(state)
    materialise(view, ring, worklist([(3, 4, 7, 2)]))
    materialise(state, ring, worklist([(3, 4, 7, 2)]))
    assert torch.equal(view, state)
    assert (wide[:, 1::2] == 5.0).all()


def test_states_that_do_not_fit_are_refused() -> None:
    ring, state = fill(make_shape(layers=2), torch.float32)
    for bad in (state[0], state[:1], state.transpose(3, 4), state[..., :8], state.double()):
        with pytest.raises(ValueError):
            materialise(bad, ring, worklist([]))
