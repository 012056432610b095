"""A prefill that pauses: the extend of a request runs in segments, and leaves its exact state at each pause.

A linear layer's extend takes a batch of sequences, each continuing the state in its slot. To leave a state at token
count b, one layer's extend runs twice inside the same forward: first the tokens up to b, then, after the slot has been
copied to the boundary's own slot (conv window and state), the rest. SGLang's own prefill kernels compute both, so the
state at b is bit for bit what a prefill that ends at b leaves in its slot, in the pool's dtype, whichever kernel
computes it. There is no second pass over the model: projections, attention and experts run once over all tokens.

    requests      0 ......... b1 ..... b2 ......... end          (tokens of this extend)
    round 0       [----------->                                  rows with a boundary, up to the first one
                  [------------------------------->              rows without any, whole
    round 1                    [------->
    round 2                            [---------->

A row that is split has SGLang's own tracked state of this extend (for its prefix cache) taken the same way, as one
more pause; the others keep SGLang's tracking.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


@dataclass(frozen=True)
class Pause:
    """`at`: tokens of the extend before it; `slot`: [1] where the state at that point goes, on the device."""

    at: int
    slot: torch.Tensor


@dataclass(frozen=True)
class Round:
    """One call of a layer's extend.

    Attributes:
        batch: the rows of this round, with their segment as the whole extend.
        metadata: the backend's metadata for it.
        tokens: [n] which tokens of the whole batch it takes.
        source, destination: [p] slots that are copied after it.
    """

    batch: ForwardBatch
    metadata: Any
    tokens: torch.Tensor
    source: torch.Tensor
    destination: torch.Tensor


@dataclass(frozen=True)
class SplitExtend:
    """All rounds of one forward, and what to call when its last layer has left every state."""

    rounds: list[Round]
    num_tokens: int
    last_layer_id: int
    written: Callable[[], None]


def widen_chunk_tables(entries: int = 64) -> bool:
    """Let SGLang's chunk kernels remember the tables of every round of a forward. Returns whether that worked.

    They derive a table from each batch's sequence lengths, wait for the device to do so, and keep the last four, by
    the tensor of lengths. A forward of more rounds would make every table anew in every layer.
    """
    from sglang.kernels.ops.attention.fla.index import prepare_chunk_indices, prepare_chunk_offsets, prepare_lens

    for remembering in (prepare_chunk_indices, prepare_chunk_offsets, prepare_lens):
        names = remembering.__code__.co_freevars
        if "cache_size" not in names:
            return False
        cell = remembering.__closure__[names.index("cache_size")]
        cell.cell_contents = max(cell.cell_contents, entries)
    return True


def segments_of(pauses: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """Per round, (row, first token, end token) of each row that takes part; token counts are within the row's extend.

    Args:
        pauses: per row, where it pauses, ascending; a pause at the row's end does not split it.
        lengths: tokens of each row; rows without tokens take no part.
    """
    rounds: list[list[tuple[int, int, int]]] = []
    for row, (points, length) in enumerate(zip(pauses, lengths, strict=True)):
        edges = [0, *(at for at in points if at < length), length]
        if not length:
            continue
        for number, (first, end) in enumerate(zip(edges, edges[1:], strict=False)):
            if number == len(rounds):
                rounds.append([])
            rounds[number].append((row, first, end))
    return rounds


def tracked_pause(batch: ForwardBatch, row: int, chunk: int) -> Pause | None:
    """Where SGLang wants its own state of this row's extend, or None."""
    if not batch.mamba_prefill_track_mask_cpu[row]:
        return None
    tokens = batch.mamba_track_seqlens_cpu[row] - batch.extend_prefix_lens_cpu[row]
    return Pause(tokens // chunk * chunk, batch.mamba_track_indices[row : row + 1])


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
    pauses: dict[int, list[Pause]],
    chunk: int,
    init_metadata: Callable[[ForwardBatch], None],
) -> list[Round]:
    """The rounds of a batch.

    Args:
        pauses: by row of the batch, ascending, inside its extend.
        chunk: tokens between the states that SGLang's tracking can name.
        init_metadata: sets `backend.forward_metadata` for a batch. What it is set to now stays.
    """
    lengths = [int(n) for n in batch.extend_seq_lens_cpu]
    every: list[list[Pause]] = []
    for row in range(batch.batch_size):
        points = list(pauses.get(row, ()))
        if points and (tracked := tracked_pause(batch, row, chunk)) is not None:
            points = sorted([*points, tracked], key=lambda pause: pause.at)
        every.append(points)
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    whole = backend.forward_metadata
    rounds = []
    try:
        for parts in segments_of([[pause.at for pause in points] for points in every], lengths):
            part = _part_of(batch, parts, split={row for row, points in enumerate(every) if points})
            init_metadata(part)
            slots = backend.forward_metadata.mamba_cache_indices
            ends = [
                (position, pause.slot)
                for position, (row, _, end) in enumerate(parts)
                for pause in every[row]
                if pause.at == end
            ]
            source = slots[_to(batch, [position for position, _ in ends])].to(torch.int64)
            destination = torch.cat([slot for _, slot in ends]).to(torch.int64) if ends else source
            tokens = torch.cat([torch.arange(starts[row] + first, starts[row] + end) for row, first, end in parts])
            rounds.append(Round(part, backend.forward_metadata, _to(batch, tokens), source, destination))
    finally:
        backend.forward_metadata = whole
    return rounds


def _to(batch: ForwardBatch, values: Sequence[Any] | torch.Tensor, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """`values` on the batch's device, without waiting for it."""
    device = batch.req_pool_indices.device
    host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def _part_of(batch: ForwardBatch, parts: Sequence[tuple[int, int, int]], split: set[int]) -> ForwardBatch:
    """The batch with only the given segments as its extends."""
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
        for part in split.rounds:
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
            if output is None:
                output = result.new_zeros(1, mixed_qkv.shape[0], *result.shape[2:])
            output.index_copy_(1, part.tokens, result)
            if part.source.numel():
                for states in (cache.conv[0], cache.temporal):
                    states.index_copy_(0, part.destination, states.index_select(0, part.source))
    finally:
        backend.forward_metadata = whole
    if layer.layer_id == split.last_layer_id:
        split.written()
    assert output is not None
    return output
