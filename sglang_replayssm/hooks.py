"""What SGLang's hook registry puts around SGLang's functions. Each hook is a pass-through where no ring exists.

`HOOKS` maps every overridden target of `seams.SEAMS` to its function, those of the prefix cache (cache_hooks.py)
included; all are AROUND hooks, called with the original function first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sglang_replayssm import arguments, cache_hooks, extend_hooks, memory_plan, operator_hooks, verify_hooks
from sglang_replayssm.boundaries import policy_from_environment
from sglang_replayssm.metrics import Tally
from sglang_replayssm.prefix_states import ATTRIBUTE as STATES_ATTRIBUTE
from sglang_replayssm.prefix_states import PrefixStates, states_of
from sglang_replayssm.request_ring import ATTRIBUTE, RequestRing, ring_of
from sglang_replayssm.seams import SEAMS

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

Original = Callable[..., Any]
_LEAVING = "replayssm_leaving"  # on a backend: what the extends of the forward in progress leave, or None
_FUSED_DECODE = "_k3_fused_decode_args"  # on a layer: static weights of SGLang's fused KDA decode, see forward_decode


# -- launch -----------------------------------------------------------------------------------------------------------


def publish(original: Original, server_args: Any, *args: Any, **kwargs: Any) -> Any:
    """runtime_context.publish: every process of a server with the flag on proves that its hooks are live."""
    result = original(server_args, *args, **kwargs)
    if arguments.asked(server_args):
        from sglang_replayssm.plugin import require_live_hooks

        require_live_hooks()
    return result


def handle_max_mamba_cache(original: Original, configurator: Any, total_rest_memory: float) -> float:
    """KVCacheConfigurator._handle_max_mamba_cache: the ring leaves the budget (GiB) before slots and KV share it."""
    if not arguments.requested():
        return original(configurator, total_rest_memory)
    charge = memory_plan.reserve(configurator, total_rest_memory)
    with memory_plan.without_snapshots(configurator):
        left = original(configurator, total_rest_memory - charge)
    memory_plan.require_room(configurator, total_rest_memory, charge, left)
    return left


def build_hybrid_req_pool(original: Original, configurator: Any, **kwargs: Any) -> Any:
    """KVCacheConfigurator._build_hybrid_req_pool: the request pool gets its ring."""
    pool = original(configurator, **kwargs)
    if arguments.requested():
        shape = memory_plan.ring_shape(configurator, rows=pool.req_to_token.shape[0])
        memory_plan.require_reserved(configurator, shape)
        ring = RequestRing(
            shape,
            pool,
            configurator.device,
            count=operator_hooks.metrics_enabled(),
            direct_batch=arguments.direct_batch(),
        )
        setattr(pool, ATTRIBUTE, ring)
        policy = policy_from_environment()
        if policy is not None and arguments.extra_buffer():
            states = PrefixStates(policy, ring.last_layer_id, ring.decided)
            setattr(pool, STATES_ATTRIBUTE, states)
            ring.tally = Tally(states.ledger.events)
    return pool


# -- forward ----------------------------------------------------------------------------------------------------------


def model_forward(original: Original, runner: Any, forward_batch: ForwardBatch, *args: Any, **kwargs: Any) -> Any:
    """ModelRunner.forward: the one place that every real forward passes, on the forward stream."""
    ring = ring_of(runner.req_to_token_pool)
    if ring is None or runner.is_draft_worker:
        return original(runner, forward_batch, *args, **kwargs)
    ring.before_forward(forward_batch)
    try:
        return original(runner, forward_batch, *args, **kwargs)
    finally:
        states = states_of(runner.req_to_token_pool)
        if states is not None:
            states.end_forward(forward_batch)


class BufferedDecode:
    """Takes the place of the dispatcher's decode kernel; the backend tells it which layer and rows come next."""

    supports_packed_decode = True

    def __init__(self, ring: RequestRing) -> None:
        self._ring = ring
        self.layer_id = -1
        self.rows: torch.Tensor | None = None

    def packed_decode(
        self,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        scale: float,
        ssm_states: torch.Tensor,
        cache_indices: torch.Tensor,
        num_v_heads: int,
        head_v_dim: int,
        lower_bound: float | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        """Output [1, B, HV, V], as SGLang's packed decode returns it. KDA's a and b may carry a leading 1."""
        if self.rows is None:
            raise RuntimeError("buffered decode ran outside of the backend's forward_decode")
        assert lower_bound == self._ring.ring.shape.lower_bound, "a layer with another gate than the ring was made for"
        batch = mixed_qkv.shape[0]
        out = self._ring.decode_layer(
            self.layer_id,
            mixed_qkv,
            a.reshape(batch, -1),
            b.reshape(batch, -1),
            A_log=A_log.reshape(-1),
            dt_bias=dt_bias.reshape(-1),
            scale=scale,
            slots=cache_indices,
            rows=self.rows,
        )
        return out.unsqueeze(0)


def backend_init(original: Original, backend: Any, model_runner: Any) -> None:
    """{GDN,KDA}AttnBackend.__init__: buffered decode becomes this backend's decode kernel."""
    original(backend, model_runner)
    if model_runner.is_draft_worker or not arguments.requested():
        return
    ring = ring_of(backend.req_to_token_pool)
    if ring is None:
        raise RuntimeError(
            f"{arguments.FLAG} is on, but this server's request pool has no ring: a hook of sglang-replayssm was "
            "not reached. Run sglang-replayssm-check, or drop the flag."
        )
    backend.kernel_dispatcher.decode_kernel = BufferedDecode(ring)
    backend.kernel_dispatcher.supports_packed_decode = True
    backend.kernel_dispatcher.supports_packed_decode_safe_gate = True  # KDA: the bounded gate, too


def _buffered(backend: Any) -> RequestRing | None:
    """The ring of a backend whose decode kernel is ours."""
    if isinstance(backend.kernel_dispatcher.decode_kernel, BufferedDecode):
        return ring_of(backend.req_to_token_pool)
    return None


def init_metadata(original: Original, backend: Any, forward_batch: ForwardBatch) -> None:
    """{GDN,KDA}AttnBackend.init_forward_metadata: eager forwards."""
    original(backend, forward_batch)
    ring = _buffered(backend)
    if ring is None:
        return
    if forward_batch.logical_forward_mode.is_decode():
        _plan(ring, backend, forward_batch, forward_batch.mamba_track_mask)
        return
    if forward_batch.logical_forward_mode.is_target_verify():
        verify_hooks.plan(ring, backend, forward_batch)
        return
    states = states_of(backend.req_to_token_pool)
    if states is not None:
        setattr(backend, _LEAVING, states.leaving_of(backend.forward_metadata, forward_batch))


def init_metadata_out_graph(
    original: Original, backend: Any, forward_batch: ForwardBatch, in_capture: bool = False
) -> None:
    """{GDN,KDA}AttnBackend.init_forward_metadata_out_graph: before a graph replay, and while one is captured."""
    original(backend, forward_batch, in_capture=in_capture)
    ring = _buffered(backend)
    if ring is None:
        return
    size = forward_batch.batch_size
    if in_capture and forward_batch.forward_mode.is_decode():
        ring.disarm(size)
        # What SGLang passes before a replay has no track mask; the captured batch shows the static buffer of it.
        ring.graph_track_masks[size] = forward_batch.mamba_track_mask
    elif forward_batch.forward_mode.is_decode():
        _plan(ring, backend, forward_batch, ring.graph_track_masks.get(size))
    elif in_capture and forward_batch.forward_mode.is_target_verify():
        ring.disarm(size)
        ring.layout(forward_batch.spec_info.draft_token_num)
    elif forward_batch.forward_mode.is_target_verify():
        verify_hooks.plan(ring, backend, forward_batch)


def _plan(ring: RequestRing, backend: Any, batch: ForwardBatch, mask: torch.Tensor | None) -> None:
    size = batch.batch_size
    metadata = backend.forward_metadata
    track = metadata.mamba_track_indices
    tracks = mask is not None and track is not None
    ring.plan_decode(
        batch.req_pool_indices[:size],
        batch.seq_lens[:size],
        metadata.mamba_cache_indices[:size],
        mask[:size] if tracks else None,
        track[:size] if tracks else None,
    )


def forward_decode(
    original: Original, backend: Any, layer: Any, forward_batch: ForwardBatch, *args: Any, **kwargs: Any
) -> Any:
    """{GDN,KDA}AttnBackend.forward_decode: names the layer and the rows for the kernel call inside.

    KDA layers of some models carry weights for fused kernels that go past the dispatcher and write the state in
    place; without them SGLang takes the dispatcher.
    """
    kernel = backend.kernel_dispatcher.decode_kernel
    if not isinstance(kernel, BufferedDecode):
        return original(backend, layer, forward_batch, *args, **kwargs)
    kernel.layer_id = layer.layer_id
    kernel.rows = forward_batch.req_pool_indices
    fused = getattr(layer, _FUSED_DECODE, None)
    if fused is None:
        return original(backend, layer, forward_batch, *args, **kwargs)
    setattr(layer, _FUSED_DECODE, None)
    try:
        return original(backend, layer, forward_batch, *args, **kwargs)
    finally:
        setattr(layer, _FUSED_DECODE, fused)


def forward_extend(
    original: Original, backend: Any, layer: Any, forward_batch: ForwardBatch, *args: Any, **kwargs: Any
) -> Any:
    """{GDN,KDA}AttnBackend.forward_extend: a verify step, or an extend that leaves states at boundaries.

    A prefill that runs from a CUDA graph comes with tables of its own and leaves none; its boundaries stay unwritten.
    """
    ring = _buffered(backend)
    if ring is not None and forward_batch.forward_mode.is_target_verify():
        return verify_hooks.forward(ring, backend, layer, forward_batch, *args, **kwargs)
    leaving = getattr(backend, _LEAVING, None)
    if leaving is None or getattr(backend, "prefill_graph_metadata", None) is not None:
        return original(backend, layer, forward_batch, *args, **kwargs)
    return extend_hooks.forward(leaving, original, backend, layer, forward_batch, *args, **kwargs)


def track_decode(
    original: Original,
    backend: Any,
    forward_batch: ForwardBatch,
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    layer_id: int | None = None,
) -> None:
    """{GDN,KDA}AttnBackend._track_mamba_state_decode: the slot lags; its state is materialised, not copied.

    SGLang's own kernel still copies the conv window, which stands at this step's token; it wants two pools, and
    copying the same window twice costs less than a copy of the state that would be overwritten.
    """
    ring = _buffered(backend)
    if ring is None:
        original(backend, forward_batch, conv_states, ssm_states, cache_indices, layer_id)
        return
    if forward_batch.mamba_track_mask is None or layer_id != ring.last_layer_id:
        return
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import track_mamba_states_all_layers

    track_mamba_states_all_layers(
        ring.conv,
        ring.conv,
        cache_indices,
        forward_batch.mamba_track_mask,
        backend.forward_metadata.mamba_track_indices,
        forward_batch.batch_size,
    )
    ring.snapshot()


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "publish": publish,
    "_handle_max_mamba_cache": handle_max_mamba_cache,
    "_build_hybrid_req_pool": build_hybrid_req_pool,
    "MambaPool.__init__": verify_hooks.pool_init,
    "update_mamba_state_after_mtp_verify": verify_hooks.commit,
    "forward": model_forward,
    "__init__": backend_init,
    "init_forward_metadata": init_metadata,
    "init_forward_metadata_out_graph": init_metadata_out_graph,
    "forward_decode": forward_decode,
    "forward_extend": forward_extend,
    "extend": extend_hooks.dispatch,
    "chunk_kda_fwd_intra": extend_hooks.kda_keys,
    "chunk_gated_delta_rule_fwd_h": extend_hooks.chunk_states,
    "_track_mamba_state_decode": track_decode,
    "_mamba_radix_cache_v2_req_prepare_for_extend": cache_hooks.prepare_track_extend,
    "get_next_batch_to_run": cache_hooks.next_batch,
    "checkpoint_into_tree": cache_hooks.checkpoint_into_tree,
    "match_prefix": cache_hooks.match_prefix,
    "reset": cache_hooks.reset,
    "_evict": cache_hooks.evict,
    "prepare_for_caching_req": cache_hooks.prepare_for_caching_req,
    "cleanup_after_caching_req": cache_hooks.cleanup_after_caching_req,
    "_handle_finish_state_updated_req": cache_hooks.decode_result,
    "attach_hybrid_pool_to_unified_cache": cache_hooks.attach_host_pools,
    "start_writing": cache_hooks.start_writing,
    "start_loading": cache_hooks.start_loading,
    "SchedulerMetricsCollector.__init__": operator_hooks.collector_init,
    "on_idle": operator_hooks.on_idle,
    "get_internal_state": operator_hooks.get_internal_state,
}


def _function(target: str) -> Callable[..., Any]:
    """Of a target: by class and name where that is told apart, else by its name."""
    owner, name = target.rsplit(".", 2)[1:]
    return _FUNCTIONS.get(f"{owner}.{name}") or _FUNCTIONS[name]


HOOKS: dict[str, Callable[..., Any]] = {seam.target: _function(seam.target) for seam in SEAMS if seam.use == "override"}
