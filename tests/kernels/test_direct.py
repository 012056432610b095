"""Direct steps: decode that writes the state itself and leaves the ring empty, alone and between buffered ones."""

from __future__ import annotations

import pytest
import torch

from replayssm_kernels import plan_step
from tests.kernels.machine import BOUNDED, DEVICE, GDN, KDA, PADDING, Machine, each_gate, make_shape, need_bf16
from tests.kernels.test_decode import STATE_BOUND


@each_gate
def test_direct_steps_between_buffered_ones(gate: dict) -> None:
    """Whatever the order, outputs and states are the recurrence's; padding is inert, other slots stay."""
    m = Machine(make_shape(layers=2, rows=9, capacity=3, **gate))
    for request, row, slot in ((1, 8, 2), (2, 1, 9), (3, 5, 4)):
        m.start(request, row, slot, length=10 * request)
    for direct, batch in (
        (True, [1]), (False, [1, 2]), (False, [2, 1]), (True, [PADDING, 2, 3]), (False, [3, 2, 1]), (True, [3]),
        (True, [3]), (False, [3]), (False, [1, 3]), (True, [1, 2, 3]), (False, [2]),
    ):  # fmt: skip
        m.direct = direct
        m.step(batch)
        if direct:
            for request in (r for r in batch if r != PADDING):
                assert m.ring.checkpoint[m.row[request]] == m.length(request)
                assert m.state_error(m.slot[request], request) <= STATE_BOUND
    m.fold([3, 1, 2])
    for request, slot in ((1, 2), (2, 9), (3, 4)):
        assert m.state_error(slot, request) <= STATE_BOUND
    assert not m.state[:, [0, 1, 3, 5, 6, 7, 8]].any()
    assert m.ring.faults == 0


@each_gate
@pytest.mark.parametrize("capacity", [1, 2, 17, 64])
def test_any_capacity(capacity: int, gate: dict) -> None:
    """A full ring is folded by the direct step that follows, and a ring of one record after it."""
    m = Machine(make_shape(capacity=capacity, v_heads=1, **gate))
    m.start(5, row=2, slot=3, length=11)
    for direct, steps in ((False, capacity), (True, 2), (False, 2), (True, 1)):
        m.direct = direct
        for _ in range(steps):
            m.step([5])
    assert m.state_error(3, 5) <= STATE_BOUND
    assert m.ring.faults == 0


@each_gate
def test_snapshots_of_direct_steps(gate: dict) -> None:
    """The state after a direct step is in the slot: a snapshot is a copy, with records pending before or not."""
    m = Machine(make_shape(capacity=4, **gate))
    m.start(1, row=1, slot=1, length=7)
    for direct in (True, False, False, True):
        m.direct = direct
        m.step([1], track={1: 6})
        assert m.state_error(6, 1) <= STATE_BOUND


@each_gate
def test_state_dtypes(gate: dict) -> None:
    """A bf16 state is rounded once per direct step, as SGLang's own decode does it: measured up to 3.3e-3."""
    need_bf16()
    m = Machine(make_shape(key_dim=32, capacity=3, **gate), state_dtype=torch.bfloat16)
    m.output_bound = lambda: 1e-2  # type: ignore[method-assign]
    m.start(1, row=1, slot=1, length=7)
    for step in range(12):
        m.direct = step % 4 < 2
        m.step([1])
    m.fold([1])
    assert m.state_error(1, 1) <= 1e-2


@each_gate
def test_a_plan_of_the_other_kind_is_loud(gate: dict) -> None:
    """Decode that was told otherwise than its plan gives NaN and writes neither state nor ring."""
    for planned in (False, True):
        m = Machine(make_shape(**gate))
        m.start(1, row=1, slot=1, length=7)
        m.direct = planned
        m.launch_plan([1], [8])
        before = [t.clone() for t in (m.state, m.ring.u, m.ring.k, m.ring.g)]
        m.direct = not planned
        assert m.launch_decode(0, [1], m.inputs(1)[0]).isnan().all()
        for was, now in zip(before, (m.state, m.ring.u, m.ring.k, m.ring.g), strict=True):
            assert torch.equal(was, now) or (was.isnan() == now.isnan()).all()


@pytest.mark.parametrize("gate", [GDN, KDA, BOUNDED], ids=["gdn", "kda", "bounded"])
def test_faults_stay_faults(gate: dict) -> None:
    """A checkpoint that does not fit is NaN and counted in a direct step, too, and the row stays poisoned."""
    m = Machine(make_shape(capacity=4, **gate))
    m.start(1, row=1, slot=1, length=7)
    m.direct = True
    m.launch_plan([1], [7])  # one token behind the checkpoint
    assert m.launch_decode(0, [1], m.inputs(1)[0]).isnan().all()
    assert m.ring.faults == 1
    m.launch_plan([1], [8])
    assert m.launch_decode(0, [1], m.inputs(1)[0]).isnan().all()


def test_a_verify_step_is_never_direct() -> None:
    m = Machine(make_shape(capacity=8, max_width=2))
    ones = torch.ones(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="never direct"):
        plan_step(m.ring, m.plan, ones, ones, ones, widths=ones, direct=True)
