"""A prefill that leaves its state and conv window at chosen token counts. Each hook is a pass-through elsewhere.

A linear layer's extend is SGLang's own and runs once, over all tokens. On its way two kernels of ours store what a
prefill would leave that ended at a point (kernels/replayssm_kernels/extend.py):

    forward_extend                        the conv windows, from what is convolved
        dispatcher.extend                 (prefill kernels other than Triton's: w and u are made for the states alone)
            chunk_gated_delta_rule_fwd_h  the states, from the w and u of SGLang's Triton kernels

SGLang's own tracked states of such a forward (for its prefix cache) are points like the others: in the pool's dtype,
where SGLang's are rounded to the activations' dtype on the GDN path.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from replayssm_kernels.extend import CHUNK, Points, leave_states, leave_windows

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

Original = Callable[..., Any]


@dataclass(frozen=True)
class Point:
    """`at`: tokens of the extend before it; `slot`: [1] where the state at that point goes, on the device."""

    at: int
    slot: torch.Tensor


@dataclass(frozen=True)
class Leaving:
    """What one forward's extends leave.

    Attributes:
        points: of all rows.
        metadata: the backend's for this forward, without SGLang's own tracking.
        last_layer_id: of the linear layer that runs last.
        written: to be called when that layer has run.
    """

    points: Points
    metadata: Any
    last_layer_id: int
    written: Callable[[], None]


@dataclass
class _Layer:
    """The extend of a linear layer that is running.

    Attributes:
        points: see `Leaving`.
        state: [slots, HV, V, K] of this layer.
        keys: [1, tokens, H, K] of KDA, normalised.
        done: whether the states are stored.
    """

    points: Points
    state: torch.Tensor
    keys: torch.Tensor | None = None
    done: bool = False


_FEW = 256  # pairs of chunk and head up to which SGLang's KDA prefill takes fewer and larger kernels

_running: _Layer | None = None  # one forward runs at a time: two-batch overlap is refused at launch


def can_leave(batch: ForwardBatch) -> bool:
    """Whether the batch says on the host what points need: plain extends, with lengths and tracking per row."""
    lists = (
        batch.extend_seq_lens_cpu,
        batch.extend_prefix_lens_cpu,
        batch.mamba_prefill_track_mask_cpu,
        batch.mamba_track_seqlens_cpu,
    )
    plain = batch.forward_mode.is_extend() and not batch.forward_mode.is_target_verify()
    return plain and all(values is not None and len(values) == batch.batch_size for values in lists)


def tracked_point(batch: ForwardBatch, row: int, chunk: int) -> Point | None:
    """Where SGLang wants its own state of this row's extend, or None."""
    if not batch.mamba_prefill_track_mask_cpu[row]:
        return None
    tokens = batch.mamba_track_seqlens_cpu[row] - batch.extend_prefix_lens_cpu[row]
    return Point(tokens // chunk * chunk, batch.mamba_track_indices[row : row + 1])


def plan(batch: ForwardBatch, wanted: dict[int, Sequence[Point]], chunk: int) -> Points:
    """The points of a forward, SGLang's own included, as its kernels take them.

    Args:
        wanted: by row of the batch, inside its extend.
        chunk: tokens between the states that SGLang's tracking can name.
    """
    sequences, slots, first = [], [], 0
    for row, length in enumerate(int(n) for n in batch.extend_seq_lens_cpu):
        tracked = tracked_point(batch, row, chunk)
        found = sorted([*wanted.get(row, ()), *([tracked] if tracked else [])], key=lambda point: point.at)
        if found:
            sequences.append((first, row, batch.extend_prefix_lens_cpu[row] > 0, [point.at for point in found]))
            slots += [point.slot.to(torch.int64) for point in found]
        first += length
    return Points.of(sequences, torch.cat(slots), batch.req_pool_indices.device)


def without_tracking(metadata: Any) -> Any:
    """SGLang's metadata of a forward whose tracked states are points."""
    changed = copy.copy(metadata)
    changed.has_mamba_track_mask = False
    changed.state_checkpoint_cu_starts = changed.state_checkpoint_indices = None
    changed.num_state_checkpoints = changed.state_checkpoint_every_n_tokens = 0
    return changed


# -- the extend of a layer, from the outside in -----------------------------------------------------------------------


def forward(
    leaving: Leaving,
    original: Original,
    backend: Any,
    layer: Any,
    batch: ForwardBatch,
    mixed_qkv: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """{GDN,KDA}AttnBackend.forward_extend of a forward that leaves states; mixed_qkv [tokens, dim]."""
    global _running
    metadata = backend.forward_metadata
    cache = backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
    conv = cache.conv[0]
    if conv.shape[1] != mixed_qkv.shape[1]:  # KDA's lie as [window, dim]
        conv = conv.transpose(1, 2)
    leave_windows(conv, mixed_qkv, metadata.mamba_cache_indices, leaving.points)
    _running = running = _Layer(leaving.points, cache.temporal)
    backend.forward_metadata = leaving.metadata
    try:
        result = original(backend, layer, batch, mixed_qkv, *args, **kwargs)
    finally:
        backend.forward_metadata = metadata
        _running = None
    if not running.done:
        raise RuntimeError("a prefill kernel ran past the hooks of sglang-replayssm; run sglang-replayssm-check")
    if layer.layer_id == leaving.last_layer_id:
        leaving.written()
    return result


def dispatch(
    original: Original,
    dispatcher: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    **kwargs: Any,
) -> Any:
    """{GDN,KDA}KernelDispatcher.extend: kernels that hand out no w and u get them from Triton's."""
    if _running is not None and not _is_triton(dispatcher, kwargs.get("lower_bound"), q, query_start_loc):
        make = _kda_chunks if "A_log" in kwargs else _gdn_chunks
        chunks = make(q, k, v, g, beta, query_start_loc, **kwargs)
        leave_states(ssm_states, cache_indices, _running.points, *chunks)
        _running.done = True
    return original(
        dispatcher,
        q,
        k,
        v,
        g,
        beta,
        ssm_states=ssm_states,
        cache_indices=cache_indices,
        query_start_loc=query_start_loc,
        **kwargs,
    )


def kda_keys(original: Original, q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """chunk_kda_fwd_intra: the keys as they are before a chunk's end decays them."""
    if _running is not None:
        _running.keys = k
    return original(q, k, *args, **kwargs)


def chunk_states(
    original: Original,
    k: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """chunk_gated_delta_rule_fwd_h: before SGLang walks from chunk to chunk and puts the last state into the slot."""
    if _running is not None and not _running.done:
        pool = _running.state
        assert initial_state.data_ptr() == pool.data_ptr() and initial_state.shape == pool.shape, "slots of a copy"
        assert gk is None or kwargs["use_exp2"], "KDA's gates were to be of base 2"
        keys, gates, decayed = (k, g, None) if gk is None else (_running.keys, gk, k)
        leave_states(initial_state, initial_state_indices, _running.points, w, u, keys, gates, decayed)
        _running.done = True
    return original(k, w, u, g, gk, initial_state, initial_state_indices, *args, **kwargs)


# -- other prefill kernels --------------------------------------------------------------------------------------------


def _is_triton(dispatcher: Any, lower_bound: float | None, q: torch.Tensor, query_start_loc: torch.Tensor) -> bool:
    from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel
    from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel

    kernel = dispatcher.extend_kernel
    if hasattr(dispatcher, "effective_extend_kernel"):  # KDA
        kernel = dispatcher.effective_extend_kernel(lower_bound, q.shape[1], query_start_loc.numel() - 1)
    return isinstance(kernel, (TritonGDNKernel, TritonKDAKernel))


def _gdn_chunks(q: Any, k: Any, v: Any, g: Any, beta: Any, cu_seqlens: torch.Tensor, **unused: Any) -> tuple[Any, ...]:
    """w, u, keys, gates and None of what a GDN prefill kernel takes: g [1, tokens, HV] and beta after their gates."""
    from sglang.kernels.ops.attention.fla.chunk_fwd import chunk_gated_delta_rule_fwd_intra
    from sglang.kernels.ops.attention.fla.cumsum import chunk_local_cumsum
    from sglang.kernels.ops.attention.fla.index import prepare_chunk_indices
    from sglang.kernels.ops.attention.fla.l2norm import l2norm_fwd

    varlen = {"cu_seqlens": cu_seqlens, "chunk_indices": prepare_chunk_indices(cu_seqlens, CHUNK)}
    k, v, g, beta = l2norm_fwd(k.contiguous()), v.contiguous(), g.contiguous(), beta.contiguous()
    gates = chunk_local_cumsum(g, chunk_size=CHUNK, **varlen)
    w, u, _ = chunk_gated_delta_rule_fwd_intra(k=k, v=v, g=gates, beta=beta, **varlen)
    return w, u, k, gates, None


def _kda_chunks(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    cu_seqlens: torch.Tensor,
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    **unused: Any,
) -> tuple[Any, ...]:
    """w, u, keys, gates and decayed keys of what a KDA prefill kernel takes: g and beta before their gates."""
    from sglang.kernels.ops.attention.fla.index import prepare_chunk_indices
    from sglang.kernels.ops.attention.fla.kda import RCP_LN2, chunk_kda_fwd_intra, kda_gate_chunk_cumsum
    from sglang.kernels.ops.attention.fla.l2norm import l2norm_fwd

    chunks = prepare_chunk_indices(cu_seqlens, CHUNK)
    varlen = {"cu_seqlens": cu_seqlens, "chunk_indices": chunks}
    k, v = l2norm_fwd(k.contiguous()), v.contiguous()
    gates, beta = kda_gate_chunk_cumsum(
        g.contiguous(),
        A_log=A_log,
        chunk_size=CHUNK,
        scale=RCP_LN2,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        beta=beta,
        **varlen,
    )
    few = len(chunks) * k.shape[2] <= _FEW
    w, u, _, decayed, *_ = chunk_kda_fwd_intra(
        q=q.contiguous(),
        k=k,
        v=v,
        gk=gates,
        beta=beta,
        scale=1.0,
        safe_gate=lower_bound is not None,
        fuse_recompute=few,
        fuse_diagonal=few,
        **varlen,
    )
    return w, u, k, gates, decayed
