"""Ring spec-verify against the sequential fp64 recurrence: every width, any acceptance, mixed with plain decode."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replayssm_kernels import FAULT, POISON, DecodeConfig, mark_fresh, reference, verify
from tests.kernels.machine import (
    BOUNDED,
    GDN,
    KDA,
    PADDING,
    VERY_BOUNDED,
    Machine,
    each_gate,
    make_shape,
    need_bf16,
)

STATE_BOUND = 2e-6  # as in test_trace.py; measured up to 6e-7


def machine(width: int, capacity: int = 0, **changes: object) -> Machine:
    return Machine(make_shape(**{**dict(max_width=width, capacity=capacity or 2 * width, v_heads=1), **changes}))


@pytest.mark.parametrize("width", range(1, 17))
@pytest.mark.parametrize("gate", [GDN, KDA, BOUNDED], ids=["gdn", "kda", "bounded"])
def test_every_width(width: int, gate: dict) -> None:
    """Outputs and folded states over steps that accept all, some and none; raw keys fill more than one block."""
    m = machine(width, capacity=2 * width if gate is BOUNDED else max(17, 2 * width), **gate)
    m.start(5, row=2, slot=3, length=11)
    for accepted in (width, width // 2, 0, width, width):
        m.verify([5], [width], [accepted])
    m.fold([5])
    assert m.state_error(3, 5) <= STATE_BOUND
    assert m.ring.faults == 0


@each_gate
def test_every_acceptance_at_every_pending_count(gate: dict) -> None:
    """Width 3 in a ring of 7, so that a step meets each pending count, each way of accepting it and each fold."""
    for accepted in range(4):
        m = machine(3, capacity=7, **gate)
        m.start(1, row=1, slot=1, length=4)
        seen = set()
        for step in range(16):
            m.verify([1], [3], [accepted if step % 3 else 1])
            seen.add(int(m.plan.pending[0]))
        assert seen >= {0, 1, 1 + accepted if accepted <= 3 else 1}
        m.fold([1])
        assert m.state_error(1, 1) <= STATE_BOUND


@each_gate
def test_verify_and_decode_take_turns(gate: dict) -> None:
    """The same rows, some steps of one kind and some of the other, whole batches and parts of them."""
    m = machine(4, capacity=9, v_heads=2, **gate)
    for request in (1, 2, 3):
        m.start(request, row=request + 1, slot=request, length=10 * request)
    for turn in range(4):
        m.verify([3, 1], [4, 2], [turn % 5, turn % 3])
        m.step([1, 2, 3])
        m.step([2, 3])
        m.verify([1, 2, 3], [1, 4, 3], [turn % 2, 2, 3 - turn % 4])
    m.fold([1, 2, 3])
    assert max(m.state_error(r, r) for r in (1, 2, 3)) <= STATE_BOUND
    assert m.ring.faults == 0


@each_gate
def test_ragged_permuted_and_padded_entries(gate: dict) -> None:
    """Widths differ, finished requests bring no token, padding stands anywhere, and tokens may be left over."""
    m = machine(5, rows=9, v_heads=2, **gate)
    for request, row, slot in ((1, 8, 2), (2, 1, 9), (3, 5, 4)):
        m.start(request, row, slot, length=10 * request)
    m.verify([2, PADDING, 1, 3], [5, 2, 1, 3], [3, 0, 1, 0], spare=2)
    before = [t[:, 5].clone() for t in (m.ring.u, m.ring.k, m.ring.g)], m.ring.checkpoint.clone()
    m.verify([PADDING, 1, 3, 2], [0, 4, 0, 2], [0, 2, 0, 2], spare=1)  # request 3 has finished: it must not write
    for old, new in zip(before[0], (m.ring.u, m.ring.k, m.ring.g), strict=True):
        assert torch.equal(old.nan_to_num(7.0), new[:, 5].nan_to_num(7.0))
    assert m.ring.checkpoint[5] == before[1][5]
    m.verify([3, 1, 2], [5, 5, 5], [5, 0, 4])
    m.fold([3, 1, 2])
    for request, slot in ((1, 2), (2, 9), (3, 4)):
        assert m.state_error(slot, request) <= STATE_BOUND
    assert not m.state[:, [slot for slot in range(10) if slot not in (2, 9, 4)]].any()
    assert m.ring.u[:, [0, 2, 3, 4, 6, 7]].isnan().all(), "rows that no request owns were written"
    assert m.ring.faults == 0


@each_gate
def test_a_boundary_inside_the_accepted_run(gate: dict) -> None:
    """The snapshot stands at exactly that token, wherever in the run it is, also on the step of a fold."""
    m = machine(4, capacity=8, layers=2, **gate)
    m.start(1, row=1, slot=1, length=6)
    m.start(2, row=2, slot=2, length=9)
    states: list[torch.Tensor] = []
    for step in range(9):
        taken = step % 4 + 1
        x = m.inputs(7)
        states = [
            o.verify(2, reference.Token(*(part[3:7] for part in m.token(i, x[i]))))[1][taken]
            for i, o in enumerate(m.oracle)
        ]
        checkpoint = m.ring.checkpoint.clone()
        m.verify([1, 2], [3, 4], [2, max(taken, 3)], track={2: (7, taken)}, inputs=x)
        moved = {int(row) for row, *_ in m.plan.fold.to_host()}
        assert all(m.ring.checkpoint[r] == checkpoint[r] for r in (1, 2) if r not in moved)
        for layer, want in enumerate(states):
            assert reference.relative_error(m.state[layer, 7], want) <= STATE_BOUND
    assert m.ring.faults == 0


def test_a_position_that_the_ring_does_not_reach_is_a_fault() -> None:
    """Before the checkpoint there is no state any more: NaN and a counted fault, not another token's state."""
    m = machine(2, capacity=4)
    m.start(1, row=1, slot=1, length=6)
    for _ in range(3):
        m.verify([1], [2], [2])
    m.verify([1], [2], [2], track={1: (5, -7)})
    assert m.plan.snapshot.to_host() == [(1, 1, 5, FAULT)]
    assert m.state[:, 5].isnan().all()
    assert m.ring.faults == 1 and m.ring.checkpoint[1] == POISON


@pytest.mark.parametrize(
    "k_heads,v_heads,key_dim,value_dim",
    [(1, 1, 16, 32), (2, 2, 32, 16), (1, 3, 64, 32), (2, 4, 16, 64), (1, 2, 128, 128), (1, 1, 256, 256)],
)
@each_gate
def test_head_shapes(k_heads: int, v_heads: int, key_dim: int, value_dim: int, gate: dict) -> None:
    heads = dict(k_heads=k_heads, v_heads=v_heads, key_dim=key_dim, value_dim=value_dim)
    m = Machine(make_shape(**heads, capacity=6, max_width=3, **gate), slots=4)
    m.start(1, row=1, slot=1, length=7)
    for accepted in (3, 1, 2):
        m.verify([1], [3], [accepted])
    m.fold([1])
    assert m.state_error(1, 1) <= STATE_BOUND


@pytest.mark.parametrize("key_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "u_dtype,state_dtype", [("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")]
)
@each_gate
def test_dtypes(key_dtype: torch.dtype, u_dtype: str, state_dtype: str, gate: dict) -> None:
    """16-bit activations cost the rounding of the outputs only; bf16 records and states what they cost in decode."""
    u, state = getattr(torch, u_dtype), getattr(torch, state_dtype)
    if torch.bfloat16 in (key_dtype, u, state):
        need_bf16()
    shape = make_shape(key_dtype=key_dtype, u_dtype=u, key_dim=32, max_width=4, capacity=8, **gate)
    m = Machine(shape, state_dtype=state)
    loose = 6e-3 if torch.bfloat16 in (u, state) else 0.0
    m.output_bound = lambda: max(loose, Machine.output_bound(m))  # type: ignore[method-assign]
    m.start(1, row=1, slot=1, length=7)
    m.start(2, row=4, slot=6, length=30)
    for accepted in (4, 2, 3, 1):
        m.verify([2, 1], [4, 3], [accepted, min(accepted, 3)])
    m.fold([1, 2])
    for request, slot in ((1, 1), (2, 6)):
        assert m.state_error(slot, request) <= max(loose, STATE_BOUND)


@each_gate
def test_repeated_keys_and_wide_open_gates(gate: dict) -> None:
    """One key over and over, beta near 1, no decay: powers of the triangle would reach 10^3, its inverse stays at 1."""
    m = machine(16, capacity=32, v_heads=1, **gate)
    m.A_log.fill_(-20.0)
    m.start(1, row=1, slot=1, length=7)
    for accepted in (16, 9, 16):
        x = m.inputs(16)[0]
        x.mixed_qkv[:, :32] = x.mixed_qkv[0, :32]
        x.b.fill_(9.0)
        m.verify([1], [16], [accepted], inputs=[x])
    m.fold([1])
    assert m.state_error(1, 1) <= 1e-5


@pytest.mark.parametrize("a", [-1e4, 30.0, 1e4])
@each_gate
def test_extreme_gates(a: float, gate: dict) -> None:
    """Gates that keep everything and gates that forget everything, in turns within one run of drafts."""
    m = machine(6, capacity=13, **gate)
    m.start(1, row=1, slot=1, length=7)
    for accepted in (6, 5, 3, 6):
        x = m.inputs(6)[0]
        x.a[1::2] = a
        m.verify([1], [6], [accepted], inputs=[x])
    m.fold([1])
    assert m.state_error(1, 1) <= 1e-5


@each_gate
@pytest.mark.parametrize("where", ["mixed_qkv", "a", "state"])
def test_poison_stays_in_its_request(where: str, gate: dict) -> None:
    """The neighbours' outputs and states are bit for bit those of a run without it."""
    results = []
    for value in (1.0, float("nan")):
        m = machine(3, **gate)
        for request in (1, 2, 3):
            m.start(request, row=request, slot=request, length=request)
        m.output_bound = lambda: float("inf")  # type: ignore[method-assign]  # the poisoned request's own error is NaN
        if where == "state":
            m.state[0, 2, 0, 3, 5] = value
        outs = []
        for _ in range(3):
            x = m.inputs(9)[0]
            if where != "state":
                getattr(x, where)[4, 17 if where == "mixed_qkv" else 0] = value  # a key, a gate
            m.launch_plan([1, 2, 3], [m.length(r) + 3 for r in (1, 2, 3)], widths=[3, 3, 3])
            outs.append(m.launch_verify(0, [1, 2, 3], [3, 3, 3], [0, 3, 6, 9], x))
            for request in (1, 2, 3):
                m.oracle[0].lens[request] += 2
        m.fold([1, 2, 3])
        results.append((torch.stack(outs)[:, [0, 1, 2, 6, 7, 8]], m.state[:, [1, 3]]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not results[1][0].isnan().any()


@each_gate
def test_faulty_entries_are_loud_and_alone(gate: dict) -> None:
    """A width beyond the ring's, a count that doesn't fit, more drafts than tokens: NaN, and nothing is written."""
    m = machine(3, **gate)
    for request in (1, 2, 3, 4):
        m.start(request, row=request, slot=request, length=9)
    m.launch_plan([1, 2, 3, 4], [13, 12, 40, 12], widths=[4, 3, 3, 3])
    assert m.plan.pending[:4].tolist() == [FAULT, 0, FAULT, 0]
    assert m.ring.faults == 2
    before = [t.clone() for t in (m.ring.u, m.ring.k, m.ring.g)]
    out = m.launch_verify(0, [1, 2, 3, 4], [3, 3, 3, 3], [0, 3, 6, 9, 11], m.inputs(12)[0])
    assert out[:3].isnan().all() and out[6:11].isnan().all() and not out[3:6].isnan().any()
    for old, new in zip(before, (m.ring.u, m.ring.k, m.ring.g), strict=True):
        rows = [0, 1, 3, 4, 5]
        assert torch.equal(old[:, rows].nan_to_num(7.0), new[:, rows].nan_to_num(7.0))


def test_shapes_that_fold_in_every_step_are_refused_with_the_value_that_works() -> None:
    with pytest.raises(ValueError, match="ring of 7 records folds in every step that brings 4 tokens; with 8 and more"):
        make_shape(capacity=7, max_width=4).validate()
    make_shape(capacity=8, max_width=4).validate()
    make_shape(capacity=1, max_width=1).validate()
    for width in (0, 17):
        with pytest.raises(ValueError, match="from 1 to 16"):
            make_shape(capacity=64, max_width=width).validate()


def test_wrong_arguments_are_refused() -> None:
    m = machine(3)
    m.start(1, row=1, slot=1, length=3)
    m.launch_plan([1], [6], widths=[3])
    x = m.inputs(3)[0]
    right = dict(
        mixed_qkv=x.mixed_qkv, a=x.a, b=x.b, slots=m.ints([1]), rows=m.ints([1]), pending=m.plan.pending,
        starts=m.ints([0, 3]), widths=m.ints([3]),
    )  # fmt: skip

    def call(**changes: torch.Tensor) -> torch.Tensor:
        return verify(
            A_log=m.A_log[0], dt_bias=m.dt_bias[0], state_layer=m.state[0], ring=m.ring, layer=0, scale=m.scale,
            **{**right, **changes},
        )  # fmt: skip

    assert not call().isnan().any()
    four = m.inputs(4)[0]
    for bad in (
        dict(mixed_qkv=x.mixed_qkv[:2]),
        dict(starts=m.ints([0, 3]).float()),
        dict(starts=m.ints([])),
        dict(widths=m.ints([])),
        dict(widths=m.ints([3]).float()),
        dict(mixed_qkv=four.mixed_qkv, a=four.a, b=four.b),
    ):
        with pytest.raises(ValueError):
            call(**bad)
    with pytest.raises(ValueError, match="plan_snapshot"):
        m.launch_plan([1], [6], track={1: 4}, widths=[3])


@pytest.mark.parametrize("config", [(16, 1), (8, 2)])
def test_tiles_and_programs_per_head(config: tuple[int, int]) -> None:
    """However V is cut, each value row and each record is written once."""
    block_v, split = config
    for gate in (GDN, KDA, BOUNDED):
        m = Machine(make_shape(max_width=3, capacity=6, value_dim=32, **gate))
        m.start(1, row=1, slot=1, length=3)
        for _ in range(3):
            x = m.inputs(3)[0]
            m.launch_plan([1], [m.length(1) + 3], widths=[3])
            out = verify(
                x.mixed_qkv, x.a, x.b, m.A_log[0], m.dt_bias[0], m.state[0], m.ring, 0, m.ints([1]), m.ints([1]),
                m.plan.pending, m.ints([0, 3]), m.ints([3]), m.scale, config=DecodeConfig(block_v, split, 4, 1),
            )  # fmt: skip
            expected, states = m.oracle[0].verify(1, m.token(0, x))
            assert reference.relative_error(out, expected) <= 1e-5
            m.oracle[0].accept(1, states, 2)
        m.fold([1])
        assert m.state_error(1, 1) <= STATE_BOUND


steps = st.lists(
    st.tuples(st.sampled_from(["verify", "verify", "verify", "step", "fold", "new"]), st.integers(0, 2**20)),
    min_size=4,
    max_size=9,
)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    width=st.integers(2, 6),
    room=st.integers(0, 5),
    gate=st.sampled_from([GDN, KDA, BOUNDED, VERY_BOUNDED]),
    trace=steps,
    seed=st.integers(0, 999),
)
def test_random_histories(width: int, room: int, gate: dict, trace: list[tuple[str, int]], seed: int) -> None:
    play(width, room, gate, trace, seed)


@pytest.mark.long
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    width=st.integers(2, 16),
    room=st.integers(0, 20),
    gate=st.sampled_from([GDN, KDA, BOUNDED, VERY_BOUNDED]),
    trace=steps,
    seed=st.integers(0, 999),
)
def test_random_histories_at_length(width: int, room: int, gate: dict, trace: list, seed: int) -> None:
    play(width, room, gate, trace, seed)


def play(width: int, room: int, gate: dict, trace: list[tuple[str, int]], seed: int) -> None:
    """Two rows through verify steps of any widths and acceptance, decode steps, forced folds and new owners."""
    m = Machine(make_shape(max_width=width, capacity=2 * width + room, v_heads=1, **gate), seed=seed)
    owners = [1, 2]
    for r in owners:
        m.start(r, row=r, slot=r, length=r)
    for kind, n in trace:
        batch = [owners, owners[::-1], owners[:1], [owners[1], PADDING]][n % 4]
        if kind == "verify":
            widths = [(n >> (3 * i)) % (width + 1) for i in range(len(batch))]
            accepted = [(n >> (4 * i + 7)) % (w + 1) for i, w in enumerate(widths)]
            m.verify(batch, widths, accepted, spare=n % 2)
        elif kind == "step":
            m.step(batch)
        else:
            taken = owners[n % 2]
            m.fold([taken])
            assert m.state_error(m.slot[taken], taken) <= STATE_BOUND
            if kind == "new":
                row, slot = m.row[taken], m.slot[taken]
                owners[n % 2] = new = max(owners) + 1
                m.start(new, row, slot, length=n % 50)
                mark_fresh(m.ring, m.ints([row]))
    m.fold(owners)
    assert max(m.state_error(m.slot[r], r) for r in owners) <= STATE_BOUND
    assert m.ring.faults == 0
