"""What only a GPU shows: CUDA graphs, no hidden synchronisation, pools beyond 2^31 elements, any launch shape."""

from __future__ import annotations

import sys

import pytest
import torch

from replayssm_kernels import (
    Counters,
    DecodeConfig,
    Points,
    decode,
    leave_states,
    leave_windows,
    materialise,
    plan_forced_fold,
    plan_step,
    reference,
)
from replayssm_kernels.bench.__main__ import configs
from replayssm_kernels.bench.decode import direct_configs
from replayssm_kernels.bench.timing import launcher
from replayssm_kernels.workload import Workload
from tests.kernels.machine import BOUNDED, DEVICE, GDN, KDA, PADDING, Machine, each_gate, make_shape

pytestmark = pytest.mark.device

SERVED = dict(k_heads=2, v_heads=4, key_dim=128, value_dim=128, capacity=16, key_dtype=torch.bfloat16)


class Captured:
    """A whole forward of a Machine in one CUDA graph over static buffers, as a server captures it."""

    def __init__(self, m: Machine, size: int) -> None:
        self.m, self.size = m, size
        self.rows = torch.zeros(size, dtype=torch.int64, device=DEVICE)
        self.lens = torch.zeros(size, dtype=torch.int64, device=DEVICE)
        self.slots = torch.full((size,), -1, dtype=torch.int32, device=DEVICE)
        self.mask = torch.zeros(size, dtype=torch.bool, device=DEVICE)
        self.track = torch.full((size,), -1, dtype=torch.int64, device=DEVICE)
        self.inputs = m.inputs(size)
        self.outs = [torch.empty(size, m.shape.v_heads, m.shape.value_dim, device=DEVICE) for _ in self.inputs]
        self.forward()  # compiles; everything is padding so far
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.forward()

    def forward(self) -> None:
        m = self.m
        plan_step(m.ring, m.plan, self.rows, self.lens, self.slots, self.mask, self.track)
        materialise(m.state, m.ring, m.plan.fold)
        for i, x in enumerate(self.inputs):
            decode(
                x.mixed_qkv, x.a, x.b, m.A_log[i], m.dt_bias[i], m.state[i], m.ring, i,
                self.slots, self.rows, m.plan.pending, m.scale, self.outs[i],
            )  # fmt: skip
        materialise(m.state, m.ring, m.plan.snapshot)

    def step(self, requests: list[int], track: dict[int, int]) -> float:
        """Replay with these requests, the rest of the graph's batch padded; returns the outputs' error."""
        m, n = self.m, len(requests)
        self.rows.zero_()
        self.lens.zero_()
        self.slots.fill_(-1)
        self.rows[:n] = m.ints([m.row[r] for r in requests])
        self.slots[:n] = m.ints([m.slot[r] for r in requests], torch.int32)
        self.lens[:n] = m.ints([m.length(r) + 1 for r in requests])
        self.mask[:n] = torch.tensor([r in track for r in requests], device=DEVICE)
        self.track[:n] = m.ints([track.get(r, -1) for r in requests])
        for static, fresh in zip(self.inputs, m.inputs(self.size), strict=True):
            for name in ("mixed_qkv", "a", "b"):
                getattr(static, name).copy_(getattr(fresh, name))
        self.graph.replay()
        worst = 0.0
        for layer, x in enumerate(self.inputs):
            t = reference.Token(*(part[:n] for part in m.token(layer, x)))
            worst = max(worst, reference.relative_error(self.outs[layer][:n], m.oracle[layer].step(requests, t)))
            assert not self.outs[layer][n:].any(), "padded rows must be zeros"
        return worst


@each_gate
def test_a_captured_forward_replays_exactly(gate: dict) -> None:
    """Batches of changing size and order through one graph, with folds and snapshots; padding is inert."""
    m = Machine(make_shape(layers=2, rows=9, **{**SERVED, "capacity": 3}, **gate), slots=12)
    captured = Captured(m, size=6)
    for request in range(1, 6):
        m.start(request, row=request + 2, slot=request + 3, length=7 * request)
    for step, batch in enumerate(([1, 2, 3], [5, 4, 3, 2, 1], [2], [1, 2, 3, 4], [4, 1], [5, 3, 1], [1, 2, 3, 4, 5])):
        track = {batch[0]: 1} if step % 2 else {}
        assert captured.step(batch, track) <= 1e-5
        if track:
            assert m.state_error(1, batch[0]) <= 1e-5
    m.fold([1, 2, 3, 4, 5])
    for request in range(1, 6):
        assert m.state_error(m.slot[request], request) <= 1e-5
    assert not m.state[:, [0, 2, 3]].any()
    assert m.ring.faults == 0


def test_nothing_synchronises() -> None:
    """A steady forward never waits for the device."""
    m = Machine(make_shape(layers=2, **SERVED))
    m.start(1, row=1, slot=1, length=5)
    rows, slots, lens = m.ints([1]), m.ints([1], torch.int32), m.ints([6])
    mask, track = torch.tensor([True], device=DEVICE), m.ints([2])
    x = m.inputs(1)

    def forward() -> None:
        plan_step(m.ring, m.plan, rows, lens, slots, mask, track)
        materialise(m.state, m.ring, m.plan.fold)
        for i in range(2):
            decode(
                x[i].mixed_qkv, x[i].a, x[i].b, m.A_log[i], m.dt_bias[i], m.state[i], m.ring, i, slots, rows,
                m.plan.pending, m.scale,
            )  # fmt: skip
        materialise(m.state, m.ring, m.plan.snapshot)
        lens.add_(1)

    forward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(40):
            forward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert m.ring.faults == 0


def test_a_pool_beyond_32_bit_offsets() -> None:
    """The last slot of a pool of 2.2e9 elements is addressed in 64 bits, in decode and in materialise."""
    shape = make_shape(layers=1, k_heads=16, v_heads=48, key_dim=128, value_dim=128, capacity=2)
    slots = (1 << 31) // (48 * 128 * 128) + 40
    m = Machine(shape, slots=1, state_dtype=torch.bfloat16)
    m.state = torch.empty(1, slots, 48, 128, 128, dtype=torch.bfloat16, device=DEVICE)
    m.output_bound = lambda: 1e-2  # type: ignore[method-assign]  # bf16 state
    m.start(1, row=1, slot=slots - 1, length=5)
    for _ in range(5):
        m.step([1], track={1: slots - 3})
    m.fold([1])
    assert m.state_error(slots - 1, 1) <= 1e-2
    assert m.state_error(slots - 3, 1) <= 1e-2


@pytest.mark.parametrize("gate", [GDN, KDA, BOUNDED], ids=["gdn", "kda", "bounded"])
def test_every_launch_shape_of_the_tuner_is_right(gate: dict) -> None:
    """The benchmark's candidates: a fast one is worth nothing if it is wrong."""
    for config in configs("all", 128):
        w = Workload(
            make_shape(rows=4, **SERVED, **gate), 3, torch.float32, DEVICE, out_dtype=torch.float32, config=config
        )
        exact = w.states()
        for _ in range(18):
            w.inputs.draw()
            out = w.forward()
            o, exact[0], _ = reference.step(exact[0], w.inputs.token(0))
            assert reference.relative_error(out[0], o) <= 1e-5, DecodeConfig(*config)


@each_gate
def test_a_captured_direct_step_replays_exactly(gate: dict) -> None:
    """One CUDA graph over many direct steps; the states are in the slots all the time. Every shape of the tuner's."""
    for config in (None, *direct_configs(128)):
        shape = make_shape(layers=2, rows=6, **SERVED, **gate)
        w = Workload(shape, 5, torch.float32, DEVICE, out_dtype=torch.float32, config=config, direct=True)
        run = launcher(w.forward, DEVICE, graph=True)
        exact = w.states()
        for _ in range(6):
            w.inputs.draw()
            run()
            for layer in range(2):
                o, exact[layer], _ = reference.step(exact[layer], w.inputs.token(layer))
                assert reference.relative_error(w.inputs.out[layer], o) <= 1e-5, config
        for state, expected in zip(w.states(), exact, strict=True):
            assert reference.relative_error(state, expected) <= 1e-5
        assert w.ring.faults == 0


def drafts_error(w: Workload, exact: list[torch.Tensor], out: torch.Tensor) -> float:
    """Largest relative error of a verify step's outputs per layer; `exact` moves on by the accepted drafts."""
    worst = 0.0
    for layer in range(w.shape.layers):
        tokens, state, outs = w.inputs.token(layer), exact[layer], []
        for t in range(w.width):
            o, state, _ = reference.step(state, reference.Token(*(part[t :: w.width] for part in tokens)))
            outs.append(o)
            if t + 1 == w.accepted:
                exact[layer] = state
        worst = max(worst, reference.relative_error(out[layer], torch.stack(outs, 1).flatten(0, 1)))
    return worst


@pytest.mark.parametrize("width", [4, 8, 16])
@pytest.mark.parametrize("gate", [GDN, KDA, BOUNDED], ids=["gdn", "kda", "bounded"])
def test_every_verify_shape_of_the_tuner_is_right(gate: dict, width: int) -> None:
    """Over folds, with states and records in fp32, whatever the launch shape; raw and scaled keys."""
    capacity = 2 * width if gate is BOUNDED else 32 + width
    for config in configs("all", 128, verify=True):
        shape = make_shape(rows=4, **{**SERVED, "capacity": capacity}, max_width=width, **gate)
        w = Workload(
            shape, 3, torch.float32, DEVICE, out_dtype=torch.float32, config=config, width=width, accepted=width - 1
        )
        exact = w.states()
        for _ in range(w.turn + 2):
            w.inputs.draw()
            assert drafts_error(w, exact, w.forward()) <= 1e-5, config
        assert w.ring.faults == 0


@pytest.mark.parametrize("state_dtype,bound", [(torch.float32, 1e-5), (torch.bfloat16, 6e-3)])
@each_gate
def test_a_captured_verify_replays_exactly(gate: dict, state_dtype: torch.dtype, bound: float) -> None:
    """One CUDA graph: cursors, folds and verify over many steps, then the folded states."""
    shape = make_shape(layers=2, rows=6, **{**SERVED, "capacity": 12}, max_width=4, **gate)
    w = Workload(shape, 5, state_dtype, DEVICE, out_dtype=torch.float32, width=4, accepted=3)
    run = launcher(w.forward, DEVICE, graph=True)
    exact = [layer.double() for layer in w.fold()]
    for _ in range(11):
        w.inputs.draw()
        run()
        assert drafts_error(w, exact, w.inputs.out) <= bound
    for layer, state in enumerate(w.fold()):
        assert reference.relative_error(state, exact[layer]) <= bound
    assert w.ring.faults == 0


def test_a_batch_of_4096() -> None:
    """The largest batch in one launch: half of it padding, every live entry right."""
    m = Machine(make_shape(rows=2049, v_heads=1, capacity=2), slots=2048, max_batch=4096)
    requests = []
    for i in range(2048):
        m.start(i, row=i + 1, slot=i, length=i % 77)
        requests += [i, PADDING]
    for _ in range(4):
        m.step(requests)
    assert m.ring.faults == 0


def test_no_batch_size_compiles_while_serving() -> None:
    """Cursors have one variant for every batch, or the first request of each size would wait for the compiler."""
    cursors = sys.modules["replayssm_kernels.cursors"]
    kernels = (cursors._plan_step_kernel, cursors._plan_forced_fold_kernel, cursors._set_checkpoint_kernel)
    shape = make_shape(rows=70)

    def run(batch: int, reason: int = Counters.HAND_OVERS) -> None:
        w = Workload(shape, batch, torch.float32, DEVICE)  # sets checkpoints
        w.forward()
        w.fold()
        plan_forced_fold(w.ring, w.plan.fold, w.rows, w.lens, w.slots, w.lens, reason=reason)

    run(3, Counters.EXTENDS)
    before = [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels]
    for batch in (1, 2, 16, 17, 32, 64):
        run(batch)
    after = [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels]
    assert after == before


def test_no_number_of_points_compiles_while_serving() -> None:
    """Nor do the kernels that leave states inside a prefill, for any number of sequences and points."""
    extend = sys.modules["replayssm_kernels.extend"]
    kernels = (extend._leave_states_kernel, extend._leave_windows_kernel)
    state, conv = torch.zeros(64, 2, 32, 32, device=DEVICE), torch.zeros(64, 96, 3, device=DEVICE)

    def run(sequences: int, points: int) -> None:
        places = [(16 * i, i, True, list(range(1, points + 1))) for i in range(sequences)]
        found = Points.of(places, torch.arange(32, 32 + sequences * points, device=DEVICE), state.device)
        tokens, sources = 16 * sequences, torch.arange(sequences, dtype=torch.int32, device=DEVICE)
        w = torch.zeros(tokens, 2, 32, dtype=torch.bfloat16, device=DEVICE)
        leave_states(state, sources, found, w, w, w[:, :1].contiguous(), torch.zeros(tokens, 2, device=DEVICE))
        leave_windows(conv, torch.zeros(tokens, 96, device=DEVICE), sources, found)

    run(2, 2)
    before = [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels]
    for sequences, points in ((1, 1), (1, 2), (1, 3), (2, 1), (3, 3), (3, 5), (8, 4), (1, 16)):
        run(sequences, points)
    assert [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels] == before
