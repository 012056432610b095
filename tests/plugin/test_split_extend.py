"""A prefill that pauses, on SGLang's real backends: a boundary's state is that of a prefill which ends there.

Scenario 17: rows of unequal lengths, some split and some not, with SGLang's own tracking of each.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replayssm_kernels import reference
from sglang_replayssm import split_extend
from sglang_replayssm.prefix_states import Boundary, PrefixStates, states_of
from tests.plugin.launch import DEVICE
from tests.plugin.test_backend import BOUNDED_KDA, GDN, KDA, Model, Shard, ints

CHUNK = 64
# On a GPU, bit for bit. On the host torch computes the gates by vectors with another rounding for what is left over, so
# one may move by an ulp with its place in the batch: measured 2e-7 of a state. fp16 rounding would be 5e-4.
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
    split = prefill.run(lengths, boundaries)
    assert all(boundary.written for found in boundaries.values() for boundary in found)
    left = {
        (row, at): prefill.state(int(b.slot))
        for row, found in points.items()
        for at, b in zip(found, boundaries[row], strict=True)
    }
    own = [prefill.state(slot) for slot in prefill.slots]
    tracked_of_split = [prefill.state(slot) for slot in prefill.track]

    def alone(row: int, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        prefill.reset()
        prefill.run([at if number == row else 0 for number in range(len(lengths))])
        return prefill.state(prefill.slots[row])

    for (row, at), state in left.items():
        assert same(state, alone(row, at)), f"row {row} at {at}"
    for row, length in enumerate(lengths):
        assert same([layer[row] for layer in split], [layer[row] for layer in whole])
        assert same(own[row], final[row])
        if row not in points:
            assert torch.equal(tracked_of_split[row][1], tracked[row][1])
        elif length >= CHUNK:  # SGLang's own state of a row that is split
            assert same(tracked_of_split[row], alone(row, length // CHUNK * CHUNK))


@pytest.fixture(params=[1, 4096], ids=["many rounds", "one round"])
def cost_of_a_round(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds are so dear that requests never pause for rows this short, or so cheap that they do wherever they can."""
    monkeypatch.setattr(split_extend, "round_cost", lambda *_: request.param)


@pytest.mark.usefixtures("cost_of_a_round")
@pytest.mark.parametrize(
    ("model", "prefixes", "lengths", "points"),
    [
        pytest.param(GDN, [0, 30, 17], [140, 20, 33], {0: [64, 80, 135], 2: [20]}, id="gdn"),
        pytest.param(KDA, [0, 30], [80, 10], {0: [40, 70]}, id="kda"),
        pytest.param(BOUNDED_KDA, [0, 30], [80, 20], {0: [40, 70]}, id="bounded kda", marks=pytest.mark.long),
    ],
)
def test_a_boundary_is_what_a_prefill_that_ends_there_leaves(
    model: Model, prefixes: list[int], lengths: list[int], points: dict[int, list[int]]
) -> None:
    check_against_shorter_prefills(Prefill(model, prefixes, lengths), points)


def test_an_output_buffer_is_filled() -> None:
    prefill = Prefill(GDN, prefixes=[0], lengths=[100])
    prefill.states._by_row = {}
    expected = prefill.run([100], boundaries_of(prefill, {0: [64]}))
    seen: list[Any] = []
    original = split_extend.run

    def with_buffer(*args: Any, output: Any = None, **kwargs: Any) -> torch.Tensor:
        buffer = torch.full((1, 100, 2, 32), float("nan"), dtype=torch.float16, device=DEVICE)
        result = original(*args, output=buffer, **kwargs)
        seen.append(result is buffer)
        return result

    prefill.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_extend, "run", with_buffer)
        got = prefill.run([100], boundaries_of(prefill, {0: [64]}))
    assert seen == [True] * 3
    assert all(torch.equal(one[0], other[0]) for one, other in zip(got, expected, strict=True))


def test_a_boundary_outside_the_extend_stays_unwritten() -> None:
    prefill = Prefill(GDN, prefixes=[0, 0], lengths=[70, 70])
    boundaries = boundaries_of(prefill, {0: [70, 90], 1: [35]})
    prefill.run([70, 70], boundaries)
    assert [b.written for b in boundaries[0] + boundaries[1]] == [False, False, True]


@pytest.mark.device
def test_only_the_first_layer_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of the chunk kernels are made once per round and forward, however many rounds there are."""
    prefill, points = Prefill(GDN, prefixes=[0, 0], lengths=[400, 130]), {0: [40, 100, 170, 240, 310], 1: [64]}
    prefill.run([400, 130], boundaries_of(prefill, points))  # compiles
    waits: list[int] = []
    original = split_extend.run

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

    monkeypatch.setattr(split_extend, "run", counted)
    prefill.reset()
    prefill.run([400, 130], boundaries_of(prefill, points))
    assert len(waits) == 3 and waits[1:] == [0, 0], waits


def test_every_round_of_a_forward_keeps_its_chunk_table() -> None:
    """SGLang's kernels remember a few; with one more round every layer would wait for the device."""
    from sglang.kernels.ops.attention.fla.index import prepare_chunk_indices

    rounds = len(split_extend.cheapest([(list(range(1000, 50_000, 5000)), 50_000)], CHUNK, 1)[0])
    assert rounds == split_extend.MOST_ROUNDS
    lengths = [(ints([0, 64 + n]), chunk) for n in range(rounds) for chunk in ((CHUNK, 16) if n == 0 else (CHUNK,))]
    tables = [prepare_chunk_indices(*each) for each in lengths]
    again = [prepare_chunk_indices(*each) for each in lengths]
    assert all(one is two for one, two in zip(tables, again, strict=True))


@pytest.mark.parametrize(
    ("points", "length", "legs"),
    [
        ([], 500, [(0, 500, 0)]),
        ([90, 100], 500, [(0, 500, 2)]),  # so few tokens are repeated sooner than a round is run
        ([1600, 1856, 1984, 2048], 2112, [(0, 1600, 0), (1600, 2112, 4)]),
        ([1601, 1990], 2112, [(0, 1600, 0), (1600, 2112, 2)]),
        ([1900, 4000, 6000], 8192, [(0, 3968, 1), (3968, 5952, 1), (5952, 8192, 1)]),  # three rounds at most
        ([10, 5000], 5050, [(0, 4992, 1), (4992, 5050, 1)]),
        ([], 0, []),
    ],
)
def test_legs(points: list[int], length: int, legs: list[tuple[int, int, int]]) -> None:
    """(first token, end token, spurs) of each round that a row alone takes part in."""
    (found,) = split_extend.cheapest([(points, length)], CHUNK, split_extend.round_cost("cuda", length))
    assert [(leg.first, leg.end, len(leg.spurs)) for leg in found] == legs
    assert [which for leg in found for which in leg.spurs] == list(range(len(points)))


def test_rounds_are_weighed_for_the_whole_forward() -> None:
    """One short extend runs in one round; a dozen of them repeat more tokens than two more rounds cost."""

    def rounds(rows: int) -> list[int]:
        cost = split_extend.round_cost("cuda", 700 * rows)
        return [len(legs) for legs in split_extend.cheapest([([200, 400, 600], 700)] * rows, CHUNK, cost)]

    assert rounds(1) == [1]
    assert rounds(12) == [3] * 12
