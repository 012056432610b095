"""Buffered decode, fold and snapshot against the sequential fp64 recurrence."""

from __future__ import annotations

import pytest
import torch

from replayssm_kernels import decode, reference, set_checkpoint
from tests.kernels.machine import BOUNDED, DEVICE, GDN, KDA, PADDING, Machine, each_gate, make_shape, need_bf16

# Relative error of a state after a few dozen steps in float32, measured 6e-8 to 3e-7.
STATE_BOUND = 1e-6


@each_gate
@pytest.mark.parametrize("capacity", [1, 2, 3, 7, 16, 17, 64])
def test_every_capacity_over_two_folds(capacity: int, gate: dict) -> None:
    """Outputs stay exact before, across and after folds, for powers of two and other capacities."""
    m = Machine(make_shape(capacity=capacity, v_heads=1, **gate))
    m.start(request=5, row=2, slot=3, length=11)
    steps = 2 * capacity + 2 if capacity < 64 else 66
    for _ in range(steps):
        m.step([5])
    assert m.ring.checkpoint[2] == 11 + (steps - 1) // capacity * capacity
    m.fold([5])
    assert m.state_error(3, 5) <= STATE_BOUND
    assert m.ring.faults == 0


@pytest.mark.parametrize(
    "k_heads,v_heads,key_dim,value_dim",
    [(1, 1, 16, 32), (2, 2, 32, 16), (1, 3, 64, 32), (2, 4, 16, 64), (1, 2, 128, 128), (1, 1, 256, 256)],
)
@each_gate
def test_head_shapes(k_heads: int, v_heads: int, key_dim: int, value_dim: int, gate: dict) -> None:
    """Head dims from 16 to 256, with and without groups of v-heads that share a key head."""
    heads = dict(k_heads=k_heads, v_heads=v_heads, key_dim=key_dim, value_dim=value_dim)
    m = Machine(make_shape(**heads, capacity=3, **gate), slots=4)
    m.start(1, row=1, slot=1, length=7)
    for _ in range(5):
        m.step([1])
    m.fold([1])
    assert m.state_error(1, 1) <= STATE_BOUND


@pytest.mark.parametrize("key_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("u_dtype", [torch.float32, torch.bfloat16])
@each_gate
def test_activation_and_record_dtypes(key_dtype: torch.dtype, u_dtype: torch.dtype, gate: dict) -> None:
    """16-bit activations cost nothing but the rounding of the outputs; bf16 records are the documented opt-
    in.
    """
    if torch.bfloat16 in (key_dtype, u_dtype):
        need_bf16()
    m = Machine(make_shape(key_dtype=key_dtype, u_dtype=u_dtype, key_dim=32, **gate))
    # bf16 u: rounding of every record to 8 bits, measured 0.7e-3 to 1.7e-3 on outputs and states.
    loose = 4e-3 if u_dtype is torch.bfloat16 else 0.0
    m.output_bound = lambda: max(loose, Machine.output_bound(m))  # type: ignore[method-assign]
    m.start(1, row=1, slot=1, length=7)
    m.start(2, row=4, slot=6, length=30)
    for _ in range(10):
        m.step([2, 1])
    m.fold([1, 2])
    for request, slot in ((1, 1), (2, 6)):
        assert m.state_error(slot, request) <= max(loose, STATE_BOUND)


@each_gate
def test_permuted_rows_padding_and_changing_batches(gate: dict) -> None:
    """Rows, slots and batch places are unrelated; padded entries are inert wherever they stand."""
    m = Machine(make_shape(layers=2, rows=9, capacity=3, **gate))
    for request, row, slot in ((1, 8, 2), (2, 1, 9), (3, 5, 4)):
        m.start(request, row, slot, length=10 * request)
    for batch in ([1, 2, 3], [PADDING, 3, 1], [2], [3, PADDING, 2, 1, PADDING], [1, 3], [2, 3, 1], [1, 2, 3]):
        m.step(batch)
    m.fold([3, 1, 2])
    for request, slot in ((1, 2), (2, 9), (3, 4)):
        assert m.state_error(slot, request) <= STATE_BOUND
    untouched = [slot for slot in range(10) if slot not in (2, 9, 4)]
    assert not m.state[:, untouched].any()
    assert m.ring.u[:, [0, 2, 3, 4, 6, 7]].isnan().all(), "rows that no request owns were written"
    assert m.ring.faults == 0


def test_snapshot_at_a_track_boundary_is_the_state_after_this_step() -> None:
    """The third request of a batch gets its own state in its track slot; checkpoints stay where they are."""
    m = Machine(make_shape(layers=2, capacity=5))
    for request in (1, 2, 3):
        m.start(request, row=request, slot=request, length=4 + request)
    for _ in range(3):
        m.step([1, 2, 3])
    before = m.ring.checkpoint.clone(), m.state[:, :4].clone()
    m.step([1, 2, 3], track={3: 9, 1: 7})
    assert m.state_error(9, 3) <= STATE_BOUND
    assert m.state_error(7, 1) <= STATE_BOUND
    assert torch.equal(m.ring.checkpoint, before[0])
    assert torch.equal(m.state[:, :4], before[1])
    for _ in range(4):
        m.step([2, 3, 1])


@each_gate
def test_snapshot_on_the_step_of_a_fold_and_with_a_full_ring(gate: dict) -> None:
    """upto runs from 1 (the step after a fold) to L (the ring is full with this step's own record)."""
    m = Machine(make_shape(capacity=3, **gate))
    m.start(1, row=1, slot=1, length=8)
    for taken in range(7):
        m.step([1], track={1: 5})
        assert m.plan.snapshot.to_host() == [(1, 1, 5, taken % 3 + 1)]
        assert m.state_error(5, 1) <= STATE_BOUND


def test_a_step_too_many_needs_no_correction() -> None:
    """Overlap scheduling runs one step past the end: fold at the committed length, then the row is reused."""
    for extra_at in range(1, 6):
        m = Machine(make_shape(capacity=3), seed=extra_at)
        m.start(1, row=2, slot=2, length=20)
        for _ in range(extra_at):
            m.step([1])
        committed = {layer: o.states[1].clone() for layer, o in enumerate(m.oracle)}
        m.step([1])
        for layer, oracle in enumerate(m.oracle):  # the request ended one token earlier
            oracle.states[1], oracle.lens[1] = committed[layer], 20 + extra_at
        m.fold([1])
        assert m.state_error(2, 1) <= STATE_BOUND
        m.start(2, row=2, slot=3, length=5)
        for _ in range(4):
            m.step([2])
        assert m.ring.faults == 0


def test_capacity_one_equals_conventional_decode() -> None:
    """With L = 1 every step folds: the slot lags by one record and is bit-stable against plain decode to
    rounding.
    """
    m = Machine(make_shape(capacity=1, layers=2))
    m.start(1, row=1, slot=1, length=3)
    for step in range(6):
        m.step([1])
        assert m.plan.fold.to_host() == ([(1, 1, 1, 1)] if step else [])
    m.fold([1])
    assert m.state_error(1, 1) <= STATE_BOUND


def test_strided_inputs_and_given_output() -> None:
    """Row strides of mixed_qkv, a and b are free, and a caller's fp32 output takes the unrounded result."""
    m = Machine(make_shape(key_dtype=torch.float16))
    m.start(1, row=1, slot=1, length=3)
    m.launch_plan([1], [4])
    x = m.inputs(1)[0]

    def widen(t: torch.Tensor) -> torch.Tensor:
        wide = torch.full((t.shape[0], t.shape[1] + 5), float("nan"), dtype=t.dtype, device=DEVICE)
        wide[:, : t.shape[1]] = t
        return wide[:, : t.shape[1]]

    out = torch.full((1, 2, 16), float("nan"), device=DEVICE)
    decode(
        widen(x.mixed_qkv), widen(x.a), widen(x.b), m.A_log[0], m.dt_bias[0], m.state[0], m.ring, 0,
        m.ints([1]), m.ints([1], torch.int32), m.plan.pending, m.scale, out=out,
    )  # fmt: skip
    expected = m.oracle[0].step([1], m.token(0, x))
    assert (out.double() - expected).norm() <= 1e-6 * expected.norm()


def test_beta_is_rounded_as_sglang_rounds_it() -> None:
    """GDN rounds beta to b's dtype, KDA does not: with b in fp16 the two differ by far more than the bound."""
    for gate, rounded in ((GDN, True), (KDA, False), (BOUNDED, False)):
        m = Machine(make_shape(**gate, v_heads=1))
        m.start(1, row=1, slot=1, length=3)
        m.launch_plan([1], [4])
        x = m.inputs(1)[0]
        x.b = torch.full_like(x.b, 0.3).half()  # sigmoid 0.57444, 3.6e-4 relative from the nearest halves' midpoint
        out = m.launch_decode(0, [1], x)
        errors = {}
        for how in (True, False):
            t = m.token(0, x)._replace(beta=reference.update_rate(x.b, rounded=how))
            o, _, _ = reference.step(m.state[0, 1].double()[None], t)
            errors[how] = reference.relative_error(out, o)
        assert errors[rounded] <= 1e-6 and errors[not rounded] > 1e-5, (gate, errors)


def test_kda_takes_gates_per_head_too() -> None:
    """a as [B, HV, K] and dt_bias as [HV, K] are the same numbers as the flat forms."""
    m = Machine(make_shape(**KDA))
    m.start(1, row=1, slot=1, length=3)
    m.launch_plan([1], [4])
    x = m.inputs(1)[0]
    rows, slots = m.ints([1]), m.ints([1])
    flat = m.launch_decode(0, [1], x)
    shaped = decode(
        x.mixed_qkv, x.a.view(1, 2, 16), x.b, m.A_log[0], m.dt_bias[0].view(2, 16), m.state[0], m.ring, 0,
        slots, rows, m.plan.pending, m.scale,
    )  # fmt: skip
    assert torch.equal(flat, shaped)


def test_shapes_that_do_not_fit_are_refused() -> None:
    m = Machine(make_shape())
    m.start(1, row=1, slot=1, length=3)
    m.launch_plan([1], [4])
    x = m.inputs(1)[0]
    rows, slots = m.ints([1]), m.ints([1])

    def call(mixed_qkv=x.mixed_qkv, a=x.a, state=m.state[0], out=None, slots=slots, rows=rows, pending=m.plan.pending):
        decode(
            mixed_qkv,
            a,
            x.b,
            m.A_log[0],
            m.dt_bias[0],
            state,
            m.ring,
            0,
            slots,
            rows,
            pending,
            1.0,
            out=out,
        )

    for bad in (
        dict(mixed_qkv=x.mixed_qkv[:, 1:]),
        dict(mixed_qkv=x.mixed_qkv.half()),
        dict(a=x.a[:, :1]),
        dict(state=m.state[0].transpose(2, 3)),
        dict(state=m.state[0].double()),
        dict(out=torch.empty(1, 2, 8, device=DEVICE)),
        dict(slots=slots.float()),
        dict(rows=rows.short()),
        dict(pending=m.plan.pending.long()),
        dict(pending=m.plan.pending[:0]),
    ):
        with pytest.raises(ValueError):
            call(**bad)


@each_gate
def test_pending_counts_without_a_place_in_the_ring_are_faults(gate: dict) -> None:
    """decode itself refuses what plan_step never gives: a full ring has no room for this token's record."""
    m = Machine(make_shape(capacity=2, **gate))
    for request in (1, 2, 3):
        m.start(request, row=request, slot=request, length=3)
    m.launch_plan([1, 2, 3], [4, 4, 4])
    m.plan.pending[:3] = m.ints([2, 2**30, -7])
    before = [t.clone() for t in (m.ring.u, m.ring.k, m.ring.g)]
    assert m.launch_decode(0, [1, 2, 3], m.inputs(3)[0]).isnan().all()
    for old, new in zip(before, (m.ring.u, m.ring.k, m.ring.g), strict=True):
        assert torch.equal(old.nan_to_num(7.0), new.nan_to_num(7.0))


def test_a_row_handed_on_without_a_reset_is_detected() -> None:
    """The new owner's token count does not fit the old checkpoint: NaN and a counted fault, not somebody
    else's tokens.
    """
    m = Machine(make_shape())
    m.start(1, row=1, slot=1, length=50)
    m.step([1])
    m.launch_plan([1], [9])
    assert m.plan.pending[0] == -1
    out = m.launch_decode(0, [1], m.inputs(1)[0])
    assert out.isnan().all()
    assert m.ring.faults == 1
    set_checkpoint(m.ring, m.ints([1]), m.ints([8]))
    m.launch_plan([1], [9])
    assert not m.launch_decode(0, [1], m.inputs(1)[0]).isnan().any()
