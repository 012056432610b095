"""A prefill that leaves the exact state at chosen token counts of its extend.

A linear layer's extend takes a batch of sequences, each continuing the state in its slot. To leave states at token
counts p1 < p2 < ... inside a request's extend, one layer's extend runs in rounds inside the same forward. The request
itself pauses at a multiple of SGLang's chunk length at or before the first of them; its slot (conv window and state)
is copied to those of the boundaries, and in the next round each boundary is a sequence of its own, a *spur*, beside
the rest of the request. So two rounds do for any number of boundaries that lie close together; where they lie far
apart the request pauses again, see `cheapest`. There is no second pass over the model: projections, attention and
experts run once over all tokens.

    a request     0 .................. pause ... p1 ..... p2 ....... end
    round 0       [-------------------->
    round 1                            [------------------------------>    its own slot
                                       [-------->                          the slot of p1
                                       [---------------->                  the slot of p2

SGLang's own prefill kernels compute every sequence, in the pool's dtype. They carry the state from chunk to chunk as
a slot in fp32 holds it, and pauses lie between chunks: so what a spur leaves is, bit for bit, what a prefill leaves
that ends there, and the request's own outputs do not change.

A row with boundaries has SGLang's own tracked state of this extend (for its prefix cache) taken the same way, as one
more of them; the others keep SGLang's tracking.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


MOST_ROUNDS = 3
"""SGLang's chunk kernels derive tables from a batch's sequence lengths, for which they wait for the device, and keep
four, by the tensor of lengths: with more, every layer would make every round's tables anew. (A round of fewer than 64
tokens may take two of them.)"""

FEW = 2048
"""Tokens of a forward up to which it waits for its launches rather than for the GPU, about."""


@dataclass(frozen=True)
class Point:
    """`at`: tokens of the extend before it; `slot`: [1] where the state at that point goes, on the device."""

    at: int
    slot: torch.Tensor


@dataclass(frozen=True)
class Leg:
    """Tokens `first` to `end` of a row's extend, and which of its points are spurs that start at `first`."""

    first: int
    end: int
    spurs: range


@dataclass(frozen=True)
class Copy:
    """Slots that are copied between rounds, [p] each; none is in both."""

    source: torch.Tensor
    destination: torch.Tensor


@dataclass(frozen=True)
class Round:
    """One call of a layer's extend.

    Attributes:
        batch: the sequences of this round, requests first, each as a whole extend.
        metadata: the backend's metadata for it.
        tokens: [n] which tokens of the whole batch it takes.
        kept: how many of them are the requests' own; the outputs of spurs are not used.
    """

    batch: ForwardBatch
    metadata: Any
    tokens: torch.Tensor
    kept: int


@dataclass(frozen=True)
class SplitExtend:
    """All steps of one forward's extends, in order, and what to call when its last layer has left every state."""

    steps: list[Round | Copy]
    last_layer_id: int
    written: Callable[[], None]


def round_cost(device: str, tokens: int) -> int:
    """Tokens that the linear layers compute in about the time of one more round, in a forward of so many tokens.

    On an H200, 48 GDN layers of the 27B shape: a round is 25 ms of launches, or 3.5 ms on the GPU; a token 6.6 us.
    On a CPU Triton's interpreter takes its time by the token.
    """
    if device == "cpu":
        return 16
    return 4096 if tokens <= FEW else 1024


def legs_of(points: Sequence[int], length: int, chunk: int, rounds: int) -> tuple[int, list[Leg]]:
    """How a row runs, in so many rounds at most, so that the state at each point can be left.

    Args:
        points: token counts within the row's extend, ascending, less than `length`.
        length: tokens of the extend, at least 1.
        chunk: legs start at multiples of it.

    Returns:
        The fewest tokens that spurs repeat, and the legs.
    """

    @functools.cache
    def best(first: int, number: int, rounds: int) -> tuple[int, list[Leg]]:
        """From `first` on, with the points before `number` done."""
        options, repeated = [], 0
        for stop in range(number, len(points) + 1):
            if stop > number:
                repeated += points[stop - 1] - first
            end = length if stop == len(points) else points[stop] // chunk * chunk
            if end > first and (end == length or rounds > 1):
                more, legs = best(end, stop, rounds - 1) if end < length else (0, [])
                options.append((repeated + more, [Leg(first, end, range(number, stop)), *legs]))
        return min(options, key=lambda option: (option[0], len(option[1])))

    return best(0, 0, rounds)


def cheapest(rows: Sequence[tuple[Sequence[int], int]], chunk: int, cost: int) -> list[list[Leg]]:
    """The legs of all rows of a forward: rounds, which all share, weighed against the tokens that spurs repeat.

    Args:
        rows: points and length of each, see `legs_of`; a row without tokens has no legs.
        cost: of a round, in tokens.
    """
    options = []
    for rounds in range(1, MOST_ROUNDS + 1):
        found = [legs_of(points, length, chunk, rounds) if length else (0, []) for points, length in rows]
        needed = max((len(legs) for _, legs in found), default=0)
        options.append((needed * cost + sum(repeated for repeated, _ in found), [legs for _, legs in found]))
    return min(options, key=lambda option: option[0])[1]


def tracked_point(batch: ForwardBatch, row: int, chunk: int) -> Point | None:
    """Where SGLang wants its own state of this row's extend, or None."""
    if not batch.mamba_prefill_track_mask_cpu[row]:
        return None
    tokens = batch.mamba_track_seqlens_cpu[row] - batch.extend_prefix_lens_cpu[row]
    return Point(tokens // chunk * chunk, batch.mamba_track_indices[row : row + 1])


def can_split(batch: ForwardBatch) -> bool:
    """Whether the batch says on the host what a split needs: plain extends, with lengths and tracking per row."""
    lists = (
        batch.extend_seq_lens_cpu,
        batch.extend_prefix_lens_cpu,
        batch.mamba_prefill_track_mask_cpu,
        batch.mamba_track_seqlens_cpu,
    )
    plain = batch.forward_mode.is_extend() and not batch.forward_mode.is_target_verify()
    return plain and all(values is not None and len(values) == batch.batch_size for values in lists)


def plan(
    backend: Any,
    batch: ForwardBatch,
    wanted: dict[int, list[Point]],
    chunk: int,
    init_metadata: Callable[[ForwardBatch], None],
) -> list[Round | Copy]:
    """The steps of a batch.

    Args:
        wanted: by row of the batch, ascending, inside its extend.
        chunk: tokens between the states that SGLang's tracking can name, a multiple of the kernels' chunks.
        init_metadata: sets `backend.forward_metadata` for a batch. What it is set to now stays.
    """
    lengths = [int(n) for n in batch.extend_seq_lens_cpu]
    whole = backend.forward_metadata
    own = whole.mamba_cache_indices
    points: dict[int, list[Point]] = {}
    closing: list[tuple[int, Point]] = []  # at a row's end, behind its last round
    for row, length in enumerate(lengths):
        points[row] = list(wanted.get(row, ()))
        if points[row] and (tracked := tracked_point(batch, row, chunk)) is not None:
            if tracked.at == length:
                closing.append((row, tracked))
            else:
                points[row] = sorted([*points[row], tracked], key=lambda point: point.at)
    rows = [([point.at for point in points[row]], length) for row, length in enumerate(lengths)]
    legs = cheapest(rows, chunk, round_cost(own.device.type, sum(lengths)))
    starts = [sum(lengths[:row]) for row in range(len(lengths))]
    split = {row for row, found in points.items() if found}
    steps: list[Round | Copy] = []
    try:
        for number in range(max(map(len, legs), default=0)):
            running = [(row, found[number]) for row, found in enumerate(legs) if number < len(found)]
            spurs = [(row, leg.first, points[row][which]) for row, leg in running for which in leg.spurs]
            if spurs:
                steps.append(_copy(batch, own, [(row, point) for row, _, point in spurs]))
            spurs = [(row, first, point) for row, first, point in spurs if point.at > first]
            sequences = [(row, leg.first, leg.end) for row, leg in running]
            kept = sum(end - first for _, first, end in sequences)
            sequences += [(row, first, point.at) for row, first, point in spurs]
            part = _part_of(batch, sequences, split)
            init_metadata(part)
            metadata = backend.forward_metadata
            if spurs:
                slots = torch.cat([point.slot for *_, point in spurs]).to(own.dtype)
                metadata.mamba_cache_indices = torch.cat([metadata.mamba_cache_indices[: len(running)], slots])
            tokens = torch.cat([torch.arange(starts[row] + first, starts[row] + end) for row, first, end in sequences])
            steps.append(Round(part, metadata, _to(batch, tokens), kept))
        if closing:
            steps.append(_copy(batch, own, closing))
    finally:
        backend.forward_metadata = whole
    return steps


def _copy(batch: ForwardBatch, own: torch.Tensor, destinations: Sequence[tuple[int, Point]]) -> Copy:
    """From the slots of rows to those of points."""
    source = own[_to(batch, [row for row, _ in destinations])].to(torch.int64)
    return Copy(source, torch.cat([point.slot for _, point in destinations]).to(torch.int64))


def _to(batch: ForwardBatch, values: Sequence[Any] | torch.Tensor, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """`values` on the batch's device, without waiting for it."""
    device = batch.req_pool_indices.device
    host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def _part_of(batch: ForwardBatch, parts: Sequence[tuple[int, int, int]], split: set[int]) -> ForwardBatch:
    """A batch of the given (row, first token, end token) as its extends; rows in `split` are not tracked by SGLang."""
    rows = [row for row, _, _ in parts]
    index = _to(batch, rows)
    prefixes = [int(batch.extend_prefix_lens_cpu[row]) + first for row, first, _ in parts]
    lengths = [end - first for _, first, end in parts]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    part = copy.copy(batch)
    part.batch_size = len(parts)
    part.req_pool_indices = batch.req_pool_indices[index]
    if batch.req_pool_indices_cpu is not None:
        part.req_pool_indices_cpu = batch.req_pool_indices_cpu[rows]
    part.seq_lens = _to(batch, [p + n for p, n in zip(prefixes, lengths, strict=True)], batch.seq_lens.dtype)
    part.seq_lens_cpu = torch.tensor([p + n for p, n in zip(prefixes, lengths, strict=True)])
    part.extend_num_tokens = sum(lengths)
    part.extend_prefix_lens = _to(batch, prefixes, batch.extend_prefix_lens.dtype)
    part.extend_seq_lens = _to(batch, lengths, batch.extend_seq_lens.dtype)
    part.extend_start_loc = _to(batch, starts, batch.extend_start_loc.dtype)
    part.extend_prefix_lens_cpu = prefixes
    part.extend_seq_lens_cpu = lengths
    track = [bool(batch.mamba_prefill_track_mask_cpu[row]) and row not in split for row in rows]
    part.mamba_prefill_track_mask_cpu = track
    part.mamba_track_seqlens_cpu = [batch.mamba_track_seqlens_cpu[row] for row in rows]
    part.mamba_track_mask = _to(batch, track, torch.bool)
    part.mamba_track_indices = batch.mamba_track_indices[index]
    part.mamba_track_seqlens = batch.mamba_track_seqlens[index]
    return part


def run(
    split: SplitExtend,
    original: Callable[..., torch.Tensor],
    backend: Any,
    layer: Any,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    output: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """One layer's extend in rounds; arguments and result of the backend's `forward_extend`.

    Args:
        original: that function.
        output: [1, tokens, heads, dim] to write to, or None for a new tensor.
    """
    cache = backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
    whole = backend.forward_metadata
    a_dim, b_dim = (0 if gate.ndim == 2 else 1 for gate in (a, b))
    try:
        for part in split.steps:
            if isinstance(part, Copy):
                for states in (cache.conv[0], cache.temporal):
                    states.index_copy_(0, part.destination, states.index_select(0, part.source))
                continue
            backend.forward_metadata = part.metadata
            result = original(
                backend,
                layer,
                part.batch,
                mixed_qkv.index_select(0, part.tokens),
                a.index_select(a_dim, part.tokens),
                b.index_select(b_dim, part.tokens),
                **kwargs,
            )
            result = result[:, : part.kept]
            if part.kept == mixed_qkv.shape[0]:  # the only round: all requests, in order
                output = result if output is None else output.copy_(result)
                continue
            if output is None:
                output = result.new_zeros(1, mixed_qkv.shape[0], *result.shape[2:])
            output.index_copy_(1, part.tokens[: part.kept], result)
    finally:
        backend.forward_metadata = whole
    if layer.layer_id == split.last_layer_id:
        split.written()
    assert output is not None
    return output
