"""Ring spec-verify inside SGLang's speculative decoding. Each hook is a pass-through where no ring verifies.

A verify step of SGLang: the drafts of a request are its next `width` tokens; all of them run as one TARGET_VERIFY
forward; then some are accepted and the states are committed. With the ring the drafts become records behind the
committed ones, and a commit leaves the recurrent state alone: the next step's token count says what was accepted. What
remains of it is the conv window, which SGLang rolls back as always, and a snapshot where a track boundary was crossed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sglang_replayssm import arguments, memory_plan
from sglang_replayssm.request_ring import RequestRing, ring_of

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

Original = Callable[..., Any]
# On the metadata of a verify forward: rows and committed token counts of its entries. Metadata and not the ring keeps
# them because SGLang puts it back in place where it replays a graph of its own metadata stage.
_ENTRIES = "replayssm_entries"


def pool_init(original: Original, pool: Any, *, speculative_num_draft_tokens: int | None = None, **kwargs: Any) -> None:
    """MambaPool.__init__: the pool of a server with speculative decoding, without a state per draft.

    SGLang leaves those out under its own flag only, together with a ring of its own.
    """
    if speculative_num_draft_tokens is None or not arguments.spec_requested():
        original(pool, speculative_num_draft_tokens=speculative_num_draft_tokens, **kwargs)
        return
    original(pool, speculative_num_draft_tokens=None, **kwargs)
    windows, stored = _conv_windows(
        pool, speculative_num_draft_tokens, kwargs["spec_state_size"], kwargs["cache_params"]
    )
    pool._intermediate_conv_window_phys = stored
    pool.mamba_cache = pool.SpeculativeState(
        **vars(pool.mamba_cache), intermediate_ssm=None, intermediate_conv_window=windows
    )
    pool.mem_usage += sum(tensor.nbytes for tensor in stored) / memory_plan.GIB


def _conv_windows(pool: Any, drafts: int, requests: int, params: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Per conv state, [layers, requests + 1, drafts, *its shape]: the window after each draft; and what stores it."""
    layers, dtype = pool.mamba_cache.temporal.shape[0], params.dtype.conv
    windows, stored = [], []
    if memory_plan.windows_overlap(params):
        pool.conv_window_axis = pool._detect_conv_window_axis(params.shape.conv, params.shape.conv_kernel - 1)
    for shape in params.shape.conv:
        if memory_plan.windows_overlap(params):
            storage, window = pool._allocate_deduplicated_conv_window(
                conv_shape=shape,
                num_mamba_layers=layers,
                spec_state_size=requests,
                speculative_num_draft_tokens=drafts,
                conv_dtype=dtype,
            )
        else:
            storage = window = torch.zeros(layers, requests + 1, drafts, *shape, dtype=dtype, device=pool.device)
        windows.append(window)
        stored.append(storage)
    return windows, stored


def plan(ring: RequestRing, backend: Any, batch: ForwardBatch) -> None:
    """After the metadata of a verify forward is made: the ring's plan, and what its commit will need."""
    size = batch.batch_size
    rows, committed = batch.req_pool_indices[:size], batch.seq_lens[:size]
    metadata = backend.forward_metadata
    ring.plan_verify(rows, committed, metadata.mamba_cache_indices[:size], batch.spec_info.draft_token_num)
    setattr(metadata, _ENTRIES, (rows, committed))


def forward(
    ring: RequestRing,
    backend: Any,
    layer: Any,
    batch: ForwardBatch,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    **unused: Any,
) -> torch.Tensor:
    """One linear layer of a verify step: output [1, tokens, HV, V]. KDA's a and b may carry a leading 1.

    The convolution is SGLang's, and leaves a window per draft for the rollback.
    """
    from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update

    width = batch.spec_info.draft_token_num
    tokens = mixed_qkv.shape[0]
    entries = tokens // width
    slots = backend.forward_metadata.mamba_cache_indices[:entries]
    cache = backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
    conv, windows = cache.conv[0], cache.intermediate_conv_window[0]
    if ring.ring.shape.gate == "kda":  # its windows lie as [kernel - 1, dim], the kernel wants the dim first
        conv, windows = conv.transpose(-1, -2), windows.transpose(-1, -2)
    convolved = causal_conv1d_update(
        mixed_qkv.view(entries, width, -1).transpose(1, 2),
        conv,
        layer.conv_weights,
        layer.bias,
        layer.activation,
        conv_state_indices=slots,
        intermediate_conv_window=windows,
        intermediate_state_indices=backend.verify_intermediate_state_indices[:entries],
    )
    out = ring.verify_layer(
        layer.layer_id,
        convolved.transpose(1, 2).reshape(tokens, -1),
        a.reshape(tokens, -1),
        b.reshape(tokens, -1),
        A_log=layer.A_log.reshape(-1),
        dt_bias=layer.dt_bias.reshape(-1),
        scale=layer.head_k_dim**-0.5,
        slots=slots,
        rows=batch.req_pool_indices[:entries],
        width=width,
    )
    return out.unsqueeze(0)


def commit(
    original: Original,
    backend: Any,
    last_correct_step_indices: torch.Tensor,
    mamba_track_indices: torch.Tensor | None,
    mamba_steps_to_track: torch.Tensor | None,
    model: Any,
    req_pool_indices: torch.Tensor | None = None,
) -> Any:
    """HybridLinearAttnBackend.update_mamba_state_after_mtp_verify: nothing to do for the state itself.

    SGLang's scatter takes the accepted conv windows; an empty state tells it that there is no other to take.
    """
    linear = backend.linear_attn_backend
    ring = ring_of(linear.req_to_token_pool)
    if ring is None or not ring.verifies:
        return original(
            backend, last_correct_step_indices, mamba_track_indices, mamba_steps_to_track, model, req_pool_indices
        )
    from sglang.kernels.ops.mamba.mamba_state_scatter_triton import scatter_mamba_states_after_mtp_verify

    requests = last_correct_step_indices.shape[0]
    slots = linear.forward_metadata.mamba_cache_indices[:requests]
    if mamba_track_indices is not None:
        rows, committed = (entry[:requests] for entry in getattr(linear.forward_metadata, _ENTRIES))
        ring.snapshot_verified(rows, committed, slots, mamba_steps_to_track, mamba_track_indices)
    caches = linear.req_to_token_pool.get_speculative_mamba2_params_all_layers()
    scatter_mamba_states_after_mtp_verify(
        dataclasses.replace(caches, temporal=caches.temporal[:0]),
        slots,
        last_correct_step_indices,
        mamba_track_indices,
        mamba_steps_to_track,
    )
    return None
