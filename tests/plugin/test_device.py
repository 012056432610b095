"""What only a GPU can show: CUDA graphs with padded rows, no host synchronisation, memory that is not there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from replayssm_kernels.cursors import Counters
from sglang_replayssm import cache_hooks, metrics
from sglang_replayssm.request_ring import RequestRing
from tests.plugin import launch
from tests.plugin.machine import Machine, Sizes, ring_shape

pytestmark = pytest.mark.device

SIZES = Sizes(rows=6, slots=16, capacity=5, k_heads=2, v_heads=4, key_dim=64, value_dim=64)
LIVE, PADDED = 3, 4  # batch entries with a request, and in all
START = (7, 20, 64)  # token counts at which the rows' prefill ended


@contextmanager
def no_host_sync() -> Iterator[None]:
    """CUDA calls that wait for the device raise inside the block."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Steps:
    """Decode steps of three requests in a batch of four, on static buffers as a captured graph reads them."""

    def __init__(self) -> None:
        launch.publish(launch.parse())
        self.machine = Machine(SIZES)
        self.ring: RequestRing = self.machine.ring
        m = self.machine
        self.ring.state.normal_()
        self.rows = m.ints([1, 2, 3, 0])
        self.slots = m.ints([4, 5, 6, -1], torch.int32)
        self.seq_lens = m.ints([*START, 1])
        self.track_mask = torch.zeros(PADDED, dtype=torch.bool, device="cuda")
        self.track_slots = m.ints([8, 9, 10, 0])
        self.inputs = m.tokens(PADDED)
        m.pool.req_generation[1:4] += 1
        self.ring._claim_rows()
        self.ring.before_forward(
            m.batch("EXTEND", [1, 2, 3], START, extend_prefix_lens=m.ints([0] * LIVE))
        )  # the checkpoints now stand at START

    def layers(self) -> list[torch.Tensor]:
        """What a graph captures: every layer's decode, then the snapshots."""
        m = self.machine
        out = [
            self.ring.decode_layer(
                layer_id,
                x.mixed_qkv,
                x.a,
                x.b,
                A_log=m.A_log[i],
                dt_bias=m.dt_bias[i],
                scale=m.scale,
                slots=self.slots,
                rows=self.rows,
            )
            for i, (layer_id, x) in enumerate(zip(SIZES.layer_ids, self.inputs, strict=True))
        ]
        self.ring.snapshot()
        return out

    def next(self, tokens: list) -> None:
        """Refresh the static buffers for the next step, as SGLang does before a replay, and plan it."""
        for x, new in zip(self.inputs, tokens, strict=True):
            for field in dataclasses.fields(x):
                getattr(x, field.name).copy_(getattr(new, field.name))
        self.seq_lens[:LIVE] += 1
        self.track_mask.copy_(self.seq_lens % 8 == 0)
        self.ring.plan_decode(self.rows, self.seq_lens, self.slots, self.track_mask, self.track_slots)

    def tensors(self) -> list[torch.Tensor]:
        r = self.ring.ring
        return [t.clone() for t in (r.u, r.k, r.g, r.checkpoint, r.faults, self.ring.state)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x.nan_to_num(nan=7.5), y.nan_to_num(nan=7.5)) for x, y in zip(a, b, strict=True))


def test_a_captured_step_equals_an_eager_one_and_leaves_padding_alone() -> None:
    """40 steps, folds and snapshots at different steps per row: bit-equal outputs, rings and slots."""
    eager, captured = Steps(), Steps()
    for target, source in zip(captured.tensors(), eager.tensors(), strict=True):
        assert target.shape == source.shape
    captured.ring.state.copy_(eager.ring.state)

    captured.ring.disarm(PADDED)
    before = captured.tensors()
    captured.layers()  # compiles; a capture must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = captured.layers()
    assert same(captured.tensors(), before), "warm-up and capture touched a row or a slot"

    untouched = [slot for slot in range(SIZES.slots + 1) if slot not in (4, 5, 6, 8, 9, 10)]
    bystanders = captured.ring.state[:, untouched].clone()
    for _ in range(40):
        tokens = eager.machine.tokens(PADDED)
        eager.next(tokens)
        expected = eager.layers()
        captured.next(tokens)
        graph.replay()
        for output, want in zip(outputs, expected, strict=True):
            assert torch.equal(output, want)
            assert not output[LIVE:].any(), "padding rows must be zeros"
            assert output[:LIVE].any()
    assert same(captured.tensors(), eager.tensors())
    assert torch.equal(captured.ring.state[:, untouched], bystanders)
    assert int(captured.ring.ring.faults) == 0


def test_steady_decode_never_waits_for_the_device() -> None:
    """Planning, folding, replay and the generation check of 40 steps, under torch's sync debug mode."""
    steps = Steps()
    steps.layers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps.layers()
    tokens = [steps.machine.tokens(PADDED) for _ in range(40)]
    batch = steps.machine.batch("DECODE", [1, 2, 3, 0], [1, 1, 1, 1])
    with no_host_sync():
        for step in tokens:
            steps.ring.before_forward(batch)
            steps.next(step)
            graph.replay()
        for step in tokens:  # without a graph, too
            steps.ring.before_forward(batch)
            steps.next(step)
            steps.layers()
    torch.cuda.synchronize()
    assert int(steps.ring.ring.faults) == 0


def test_counting_for_the_metrics_never_waits_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 steps of three requests, a copy to the host before every one: what arrives in the end is all that happened."""
    published: list[list[int]] = []
    gauge = SimpleNamespace(set=lambda value: None)
    families = SimpleNamespace(add=published.append, ring_bytes=gauge, slots=gauge, slots_used=gauge)
    monkeypatch.setattr(metrics, "families", lambda: families)
    monkeypatch.setattr(metrics, "INTERVAL", 0.0)
    steps = Steps()
    steps.ring.counters = Counters.allocate(SIZES.capacity, "cuda")
    steps.ring.reporter = metrics.Reporter(steps.ring)
    tokens = steps.machine.tokens(PADDED)
    batch = steps.machine.batch("DECODE", [1, 2, 3, 0], [1, 1, 1, 1])
    steps.next(tokens)  # compiles
    folds = len(steps.ring.plan.fold.to_host())
    snapshots = len(steps.ring.plan.snapshot.to_host())
    for _ in range(79):
        with no_host_sync():
            steps.ring.before_forward(batch)
            steps.next(tokens)
        folds += len(steps.ring.plan.fold.to_host())
        snapshots += len(steps.ring.plan.snapshot.to_host())
    steps.ring.reporter.when_idle()
    total = [sum(column) for column in zip(*published, strict=True)]
    assert len(published) > 10, "copies arrive while the server is busy"
    assert total[Counters.FOLDS] == folds > 0 and total[Counters.SNAPSHOTS] == snapshots > 0
    assert total[Counters.EXTENDS] == total[Counters.HAND_OVERS] == 0
    assert sum(total[Counters.HISTOGRAM :]) == 80 * LIVE


def test_claiming_and_folding_rows_never_waits_either() -> None:
    """A new owner and a forced fold copy small lists to the device; they do not wait for it."""
    steps = Steps()
    m = steps.machine
    batch = m.batch("EXTEND", [4], [9], extend_prefix_lens=m.ints([0]))
    slot = steps.slots[0]
    m.pool.req_generation[5] += 1
    steps.ring.before_forward(batch)  # compiles
    m.pool.req_generation[4] += 1
    with no_host_sync():
        steps.ring.before_forward(batch)
        steps.ring.fold_row(1, slot, START[0])


def test_copies_to_and_from_the_host_are_ordered_with_the_folds() -> None:
    """DESIGN invariant 9: forwards on a stream of their own, which is busy; copies on others, behind SGLang's fence.

    Compiling a kernel and loading it wait for the device. So the first pass may find the forwards done before anything
    that it launched; in the second everything is loaded, and only a wait of the plugin's own could do that.
    """
    assert any(copies_beside_folds_while_busy() for _ in range(2)), "something waits for a busy forward stream"


def copies_beside_folds_while_busy() -> bool:
    """Checks the order; False if the forwards had ended before the copies were launched, which proves nothing."""
    steps = Steps()
    m, ring = steps.machine, steps.ring
    m.pool.req_generation[1:4] += 1
    ring.before_forward(m.batch("EXTEND", [1, 2, 3], START, extend_prefix_lens=m.ints([0] * LIVE)))
    ring.state[:, 4:7].normal_()
    steps.seq_lens.copy_(m.ints([*START, 1]))
    forward, copy = torch.cuda.Stream(), torch.cuda.Stream()
    host = torch.zeros_like(ring.state[:, 4], device="cpu").pin_memory()
    loaded = torch.full_like(ring.state[:, 5], 0.25)
    tokens = [m.tokens(PADDED) for _ in range(3)]
    four, five = m.ints([4])[0], m.ints([5])[0]
    forward.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(forward):
        torch.cuda._sleep(4_000_000_000)  # some two seconds
        for drawn in tokens:
            steps.next(drawn)
            steps.layers()
    copy.wait_stream(torch.cuda.current_stream())

    def write(controller: SimpleNamespace) -> None:
        copy.wait_stream(controller.write_fence_stream)
        with torch.cuda.stream(copy):
            host.copy_(ring.state[:, 4], non_blocking=True)

    def load(controller: SimpleNamespace) -> int:
        copy.wait_stream(controller.load_fence_stream)
        with torch.cuda.stream(copy):
            ring.state[:, 5] = loaded
        return 0

    fences = {"write_fence_stream": forward, "load_fence_stream": forward}
    controller = m.controller(write_queue=[1], load_queue=[1], **fences)
    ring.fold_before_next_forward(1, four, START[0] + 3)
    cache_hooks.start_writing(write, controller)
    ring.fold_before_next_forward(2, five, START[1] + 3)
    cache_hooks.start_loading(load, controller)
    busy = not forward.query()
    with torch.cuda.stream(forward):
        ring.before_forward(m.batch("IDLE", [], []))
    torch.cuda.synchronize()
    assert torch.equal(host, ring.state[:, 4].cpu()), "the slot went to the host before its fold"
    assert torch.equal(ring.state[:, 5], loaded), "a fold came after what was loaded"
    assert int(ring.ring.checkpoint[1]) == START[0] + 3
    assert int(ring.ring.faults) == 0
    return busy


def test_a_ring_without_memory_says_what_to_lower() -> None:
    launch.publish(launch.parse())
    machine = Machine(SIZES)
    rows = machine.pool.req_to_token.shape[0]
    free, _ = torch.cuda.mem_get_info()
    shape = ring_shape(SIZES, rows)
    many = dataclasses.replace(shape, layers=2 * free // shape.bytes_per_row() * shape.layers // rows)
    with pytest.raises(RuntimeError, match=r"no memory for .* GiB .*Lower --max-running-requests"):
        RequestRing(many, machine.pool, "cuda")
    torch.zeros(1, device="cuda")  # the device is still usable
