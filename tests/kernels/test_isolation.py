"""NaN in one request stays in that request, and a reused row remembers nothing of its last owner."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.machine import PADDING, Inputs, Machine, each_gate, make_shape


@pytest.mark.parametrize("where", ["q", "k", "v", "a", "b", "state"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@each_gate
def test_poison_stays_in_its_request(where: str, poison: float, gate: dict) -> None:
    """The neighbours' outputs and states are bit for bit those of a run without the poisoned request's trouble."""
    _poison(where, poison, gate, direct=False)


@pytest.mark.parametrize("where", ["q", "k", "v", "a", "b", "state"])
@each_gate
def test_poison_of_a_direct_step_stays_in_its_request(where: str, gate: dict) -> None:
    _poison(where, float("nan"), gate, direct=True)


def _poison(where: str, poison: float, gate: dict, direct: bool) -> None:
    results = []
    for value in (1.0, poison):
        m = Machine(make_shape(k_heads=1, v_heads=2, capacity=3, **gate))
        m.direct = direct
        for request in (1, 2, 3):
            m.start(request, row=request, slot=request, length=request)
        if where == "state":
            m.state[0, 2, 1, 3, 5] = value
        outs = []
        for step in range(5):
            x = m.inputs(3)[0]
            if step == 1:
                k = m.shape.key_dim
                column = {"q": 3, "k": k + 3, "v": 2 * k + 3}.get(where)
                if column is not None:
                    x.mixed_qkv[1, column] = value
                elif where != "state":
                    getattr(x, where)[1, 0] = value
            requests = [1, 2, 3]
            m.launch_plan(requests, [m.length(r) + 1 for r in requests])
            outs.append(m.launch_decode(0, requests, x))
            m.oracle[0].step(requests, m.token(0, x))
        m.fold([1, 2, 3])
        results.append((torch.stack(outs)[:, [0, 2]], m.state[:, [1, 3]]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not results[1][0].isnan().any()


@each_gate
def test_a_reused_row_is_clean_after_a_poisoned_owner(gate: dict) -> None:
    """The old owner's ring is full of NaN; its row and even its slot go to a new request, which never sees them."""
    m = Machine(make_shape(layers=2, capacity=4, **gate))
    m.start(1, row=2, slot=3, length=10)
    for _ in range(3):
        x = [Inputs(torch.full_like(i.mixed_qkv, float("nan")), i.a, i.b) for i in m.inputs(1)]
        m.launch_plan([1], [m.length(1) + 1])
        for layer in range(2):
            assert m.launch_decode(layer, [1], x[layer]).isnan().all()
            m.oracle[layer].step([1], m.token(layer, x[layer]))
    m.start(2, row=2, slot=3, length=4)
    for _ in range(6):
        m.step([2])
    m.fold([2])
    assert m.state_error(3, 2) <= 1e-6


def test_padding_touches_nothing() -> None:
    """A batch of padding only, of every kind: outputs are zeros; ring, states and checkpoints keep their bits."""
    m = Machine(make_shape(layers=1, capacity=3))
    m.start(1, row=1, slot=1, length=10)
    m.step([1])
    before = [t.clone() for t in (m.state, m.ring.u, m.ring.k, m.ring.g, m.ring.checkpoint)]
    m.row |= {7: 0, 8: 4}  # row 0 with a real slot (an idle rank), and a row that nobody ever held
    m.slot |= {7: 0, 8: 5}
    x = m.inputs(3)[0]
    m.launch_plan([PADDING, 7, 8], [1, 1, 1], track={7: 6, 8: 6})
    assert not m.launch_decode(0, [PADDING, 7, 8], x).any()
    assert m.plan.snapshot.to_host() == []
    for old, new in zip(before, (m.state, m.ring.u, m.ring.k, m.ring.g, m.ring.checkpoint), strict=True):
        assert torch.equal(old.nan_to_num(7.0), new.nan_to_num(7.0))
    assert m.ring.faults == 0


def test_a_faulty_entry_is_loud_and_alone() -> None:
    """Its output and its snapshot are NaN, it appends nothing, and its neighbour goes on exactly."""
    m = Machine(make_shape(capacity=3))
    m.start(1, row=1, slot=1, length=10)
    m.start(2, row=2, slot=2, length=10)
    m.step([1, 2])
    ring = m.ring.u.clone()
    x = m.inputs(2)[0]
    m.launch_plan([1, 2], [99, 12], track={1: 5, 2: 6})
    out = m.launch_decode(0, [1, 2], x)
    assert out[0].isnan().all()
    expected = m.oracle[0].step([2], type(m.token(0, x))(*(part[1:] for part in m.token(0, x))))
    assert (out[1].double() - expected[0]).norm() <= 1e-6 * expected.norm()
    assert torch.equal(m.ring.u[:, 1].nan_to_num(7.0), ring[:, 1].nan_to_num(7.0))
    assert m.plan.snapshot.to_host() == [(1, 1, 5, -1), (2, 2, 6, 2)]
    assert m.ring.faults == 1
