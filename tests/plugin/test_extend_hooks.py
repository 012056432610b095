"""A prefill that leaves states, on SGLang's real backends: a boundary's state is that of a prefill which ends there.

Scenario 17: rows of unequal lengths, some with boundaries and some without, with SGLang's own tracking of each.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replayssm_kernels import reference
from sglang_replayssm import extend_hooks
from sglang_replayssm.prefix_states import Boundary, PrefixStates, states_of
from tests.plugin.launch import DEVICE
from tests.plugin.test_backend import BOUNDED_KDA, GDN, KDA, Model, Shard, ints

CHUNK = 64
# GDN on a GPU, bit for bit. On the host torch computes the gates by vectors, with another rounding for what is left,
# so one may move by an ulp with its place in the batch, and shorter products add up in another order: measured 3e-7 of
# a state. SGLang computes KDA's w and u by other kernels in batches of other sizes. fp16 rounding would be 5e-4.
EXACT = 0.0 if DEVICE == "cuda" else 1e-6


class Prefill:
    """One launch with requests whose prefixes are computed already: rows, slots, and inputs by token."""

    def __init__(self, model: Model, prefixes: Sequence[int], lengths: Sequence[int]) -> None:
        from sglang.srt.managers.schedule_batch import ReqKvInfo

        self.shard = Shard(flag=True, model=model)
        self.model, self.prefixes, self.lengths = model, list(prefixes), list(lengths)
        requests = [SimpleNamespace(kv=ReqKvInfo()) for _ in prefixes]
        self.rows = self.shard.pool.alloc(requests)
        self.slots = [int(request.kv.mamba_pool_idx) for request in requests]
        self.track = [int(request.kv.mamba_ping_pong_track_buffer[0]) for request in requests]
        self.shard.backend._mamba_chunk_size = CHUNK
        self.states: PrefixStates = states_of(self.shard.pool)
        random = torch.Generator().manual_seed(4)

        def half(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=random).to(DEVICE, torch.float16)

        self.inputs = [
            [(half(n, model.width), half(n, model.gate_width), half(n, 2)) for n in lengths] for _ in self.shard.layers
        ]
        self.reset()

    def reset(self) -> None:
        """Slots as the prefixes left them: zeros, or something."""
        self.shard.fill(self.slots)
        for slot, prefix in zip(self.slots, self.prefixes, strict=True):
            if not prefix:
                self.shard.cache.temporal[:, slot] = 0
                self.shard.cache.conv[0][:, slot] = 0

    def run(self, ends: Sequence[int], boundaries: dict[int, list[Boundary]] | None = None) -> list[list[torch.Tensor]]:
        """Extend every row to `ends` tokens of its extend; per layer and row, the outputs."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        alive = [row for row, end in enumerate(ends) if end]
        counts = [ends[row] for row in alive]
        prefixes = [self.prefixes[row] for row in alive]
        track = [count >= CHUNK for count in counts]
        # As SGLang's scheduler asks: the length where it is a multiple of the chunk, one more than the last one else.
        track_lens = [p + n for p, n in zip(prefixes, counts, strict=True)]
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(alive),
            input_ids=ints([0] * sum(counts)),
            req_pool_indices=ints([self.rows[row] for row in alive]),
            req_pool_indices_cpu=torch.tensor([self.rows[row] for row in alive]),
            seq_lens=ints(track_lens),
            seq_lens_cpu=torch.tensor(track_lens),
            out_cache_loc=ints([0] * sum(counts)),
            seq_lens_sum=sum(track_lens),
            extend_num_tokens=sum(counts),
            extend_prefix_lens=ints(prefixes),
            extend_prefix_lens_cpu=prefixes,
            extend_seq_lens=ints(counts),
            extend_seq_lens_cpu=counts,
            extend_start_loc=ints([sum(counts[:i]) for i in range(len(counts))]),
            mamba_track_mask=torch.tensor(track, device=DEVICE),
            mamba_prefill_track_mask_cpu=track,
            mamba_track_indices=ints([self.track[row] for row in alive]),
            mamba_track_seqlens=ints([n if t else -1 for n, t in zip(track_lens, track, strict=True)]),
            mamba_track_seqlens_cpu=[n if t else -1 for n, t in zip(track_lens, track, strict=True)],
        )
        self.states._by_row = {self.rows[row]: list(found) for row, found in (boundaries or {}).items()}
        self.shard.backend.init_forward_metadata(batch)
        found = []
        for layer, inputs in zip(self.shard.layers, self.inputs, strict=True):
            mixed_qkv, a, b = (
                torch.cat([inputs[row][part][: ends[row]] for row in alive]).clone() for part in range(3)
            )
            if self.model.is_kda:
                a, b = a.view(1, len(a), 2, 32).flatten(2), b[None]
            output = self.shard.backend.forward_extend(layer=layer, forward_batch=batch, mixed_qkv=mixed_qkv, a=a, b=b)
            found.append(list(output[0].split(counts)))
        self.states.end_forward(batch)
        return found

    def state(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.shard.cache.temporal[:, slot].clone(), self.shard.cache.conv[0][:, slot].clone()


def boundaries_of(prefill: Prefill, points: dict[int, list[int]]) -> dict[int, list[Boundary]]:
    allocator = prefill.shard.pool.mamba_allocator
    return {
        row: [Boundary(prefill.prefixes[row] + at, "tail", allocator.alloc(1)) for at in found]
        for row, found in points.items()
    }


def same(values: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return all(reference.relative_error(one, other) <= EXACT for one, other in zip(values, expected, strict=True))


def check_against_shorter_prefills(prefill: Prefill, points: dict[int, list[int]]) -> None:
    """A prefill with boundaries against the one without, and each boundary against a prefill that ends there: bits."""
    lengths = prefill.lengths
    whole = prefill.run(lengths)
    final = [prefill.state(slot) for slot in prefill.slots]
    tracked = [prefill.state(slot) for slot in prefill.track]

    prefill.reset()
    boundaries = boundaries_of(prefill, points)
    outputs = prefill.run(lengths, boundaries)
    assert all(boundary.written for found in boundaries.values() for boundary in found)
    left = {
        (row, at): prefill.state(int(b.slot))
        for row, found in points.items()
        for at, b in zip(found, boundaries[row], strict=True)
    }
    own = [prefill.state(slot) for slot in prefill.slots]
    tracked_too = [prefill.state(slot) for slot in prefill.track]

    def alone(row: int, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        prefill.reset()
        prefill.run([at if number == row else 0 for number in range(len(lengths))])
        return prefill.state(prefill.slots[row])

    for (row, at), state in left.items():
        assert same(state, alone(row, at)), f"row {row} at {at}"
    for row, length in enumerate(lengths):
        assert all(torch.equal(one[row], other[row]) for one, other in zip(outputs, whole, strict=True))
        assert all(torch.equal(one, other) for one, other in zip(own[row], final[row], strict=True))
        if length >= CHUNK:  # SGLang's own state, of rows without boundaries too
            assert torch.equal(tracked_too[row][1], tracked[row][1])
            assert same(tracked_too[row], alone(row, length // CHUNK * CHUNK))


class Foreign:
    """A prefill kernel that is not Triton's, as far as the dispatcher can tell, and works out w and u by itself."""

    def __init__(self, triton: Any) -> None:
        self._triton = triton
        self.calls = 0

    def extend(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        assert extend_hooks._running is None or extend_hooks._running.done
        return self._triton.extend(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._triton, name)


class Past(Foreign):
    """A kernel that does nothing at all."""

    def extend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return torch.zeros_like(v), None, None


@pytest.mark.parametrize(
    ("model", "foreign", "prefixes", "lengths", "points"),
    [
        pytest.param(GDN, False, [0, 30, 17], [100, 20, 33], {0: [64, 80], 2: [1, 20]}, id="gdn"),
        pytest.param(GDN, True, [30], [66], {0: [40, 64]}, id="gdn, another kernel"),
        pytest.param(KDA, False, [0, 30], [70, 10], {0: [40, 66]}, id="kda"),
        pytest.param(KDA, True, [0, 30], [70, 10], {0: [40]}, id="kda, another kernel", marks=pytest.mark.long),
        pytest.param(BOUNDED_KDA, False, [0, 30], [80, 20], {0: [40, 70]}, id="bounded kda", marks=pytest.mark.long),
        pytest.param(
            BOUNDED_KDA, True, [0, 30], [80, 20], {0: [40, 70]}, id="bounded, another", marks=pytest.mark.long
        ),
    ],
)
def test_a_boundary_is_what_a_prefill_that_ends_there_leaves(
    model: Model, foreign: bool, prefixes: list[int], lengths: list[int], points: dict[int, list[int]]
) -> None:
    prefill = Prefill(model, prefixes, lengths)
    dispatcher = prefill.shard.backend.kernel_dispatcher
    kernel = Foreign(dispatcher.extend_kernel)
    if foreign:
        dispatcher.extend_kernel = kernel
    check_against_shorter_prefills(prefill, points)
    assert bool(kernel.calls) == foreign


def test_a_kernel_that_runs_past_the_hooks_is_an_error() -> None:
    """Never a boundary, and never SGLang's own state, that was not written."""
    prefill = Prefill(GDN, prefixes=[0], lengths=[70])
    boundaries = boundaries_of(prefill, {0: [20]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extend_hooks, "_is_triton", lambda *args: True)
        dispatcher = prefill.shard.backend.kernel_dispatcher
        patch.setattr(dispatcher, "extend_kernel", Past(dispatcher.extend_kernel))
        with pytest.raises(RuntimeError, match="ran past the hooks"):
            prefill.run([70], boundaries)
    assert not boundaries[0][0].written and extend_hooks._running is None


def test_a_boundary_outside_the_extend_stays_unwritten() -> None:
    prefill = Prefill(GDN, prefixes=[0, 0], lengths=[70, 70])
    boundaries = boundaries_of(prefill, {0: [70, 90], 1: [35]})
    prefill.run([70, 70], boundaries)
    assert [b.written for b in boundaries[0] + boundaries[1]] == [False, False, True]


@pytest.mark.device
def test_leaving_states_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's chunk tables do, in the first layer of a forward; with boundaries it is no more than without."""
    prefill, points = Prefill(GDN, prefixes=[0, 0], lengths=[400, 130]), {0: [40, 100, 170, 240, 310], 1: [64]}
    waits: list[int] = []
    backend = type(prefill.shard.backend)
    original = backend.forward_extend

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                result = original(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchroniz" in str(warning.message) for warning in seen))
        return result

    prefill.run([400, 130], boundaries_of(prefill, points))  # compiles
    monkeypatch.setattr(backend, "forward_extend", counted)
    counts = []
    for boundaries in (None, points):
        prefill.reset()
        waits.clear()
        prefill.run([400, 130], boundaries_of(prefill, boundaries) if boundaries else None)
        counts.append(list(waits))
    assert counts[0] == counts[1] and counts[1][1:] == [0, 0], counts
