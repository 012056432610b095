"""The contract with SGLang: every name of it that this plugin overrides, calls or reads, in one table.

`differences()` compares the table with the SGLang that is installed; `plugin.register` refuses to register
anything when it is not empty, so that a SGLang of another shape runs as if this package were absent.
`missing_hooks()` says later, in a running server, which overrides did not reach their target.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import inspect
import pkgutil
import types
from collections.abc import Callable, Iterable
from typing import Any, Literal

from sglang_replayssm import arguments

TESTED_SGLANG = ("0.5.23",)

_S = "sglang.srt."
_FLA = "sglang.kernels.ops.attention.fla."
_POOL = _S + "mem_cache.memory_pool."
_CACHE = _S + "mem_cache.unified_radix_cache.UnifiedRadixCache."
_CONTROLLER = _S + "managers.cache_controller.HiCacheController."
_BASE_CACHE = _S + "mem_cache.base_prefix_cache."
_CONFIGURATOR = _S + "mem_cache.kv_cache_configurator.KVCacheConfigurator."


@dataclasses.dataclass(frozen=True)
class Seam:
    """One touched name.

    Attributes:
        target: dotted path of a function, method, class or class attribute.
        use: "override" (a hook of ours wraps it), "call" (we call it) or "read" (we read attributes).
        params: names that the signature must have, in this order, for functions ("override" and "call").
        fields: for "read": attribute names that the class must have, either declared on it or assigned
            in its `__init__`.
    """

    target: str
    use: Literal["override", "call", "read"]
    params: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()


def _backend_seams(
    module: str, kind: str, dispatcher_fields: tuple[str, ...] = (), backend_fields: tuple[str, ...] = ()
) -> tuple[Seam, ...]:
    """The linear-attention backend of one gate kind: the same names for GDN and KDA."""
    backend = f"{_S}layers.attention.linear.{module}.{kind}AttnBackend"
    dispatcher = f"{_S}layers.attention.linear.{module}.{kind}KernelDispatcher"
    return (
        Seam(
            backend,
            "read",
            fields=("req_to_token_pool", "kernel_dispatcher", "forward_metadata", "verify_intermediate_state_indices")
            + backend_fields,
        ),
        Seam(backend + ".__init__", "override", ("self", "model_runner")),
        Seam(backend + ".init_forward_metadata", "override", ("self", "forward_batch")),
        Seam(
            backend + ".init_forward_metadata_out_graph",
            "override",
            ("self", "forward_batch", "in_capture"),
        ),
        Seam(
            backend + ".forward_decode",
            "override",
            ("self", "layer", "forward_batch", "mixed_qkv", "a", "b", "kwargs"),
        ),
        Seam(
            backend + ".forward_extend",
            "override",
            ("self", "layer", "forward_batch", "mixed_qkv", "a", "b", "kwargs"),
        ),
        Seam(
            backend + "._track_mamba_state_decode",
            "override",
            ("self", "forward_batch", "conv_states", "ssm_states", "cache_indices", "layer_id"),
        ),
        Seam(
            dispatcher, "read", fields=("decode_kernel", "extend_kernel", "supports_packed_decode", *dispatcher_fields)
        ),
        Seam(
            dispatcher + ".extend",
            "override",
            ("self", "q", "k", "v", "g", "beta", "ssm_states", "cache_indices", "query_start_loc", "kwargs"),
        ),
        Seam(
            dispatcher + ".packed_decode",
            "call",
            ("self", "mixed_qkv", "a", "b", "A_log", "dt_bias", "scale", "ssm_states", "cache_indices")
            + ("num_v_heads", "head_v_dim", "kwargs"),
        ),
    )


SEAMS: tuple[Seam, ...] = (
    # Registration
    Seam(_S + "plugins.hook_registry.HookRegistry.register", "call", ("target", "hook", "hook_type", "source")),
    Seam(_S + "plugins.hook_registry.HookType", "read", fields=("AROUND",)),
    # Arguments
    Seam(_S + "server_args.ServerArgs", "read", fields=arguments.FIELDS),
    Seam(_S + "server_args.ServerArgs.add_cli_args", "call", ("parser",)),
    Seam(_S + "server_args.ServerArgs.from_cli_args", "call", ("args",)),
    Seam(_S + "arg_groups.resolution_hooks.register_resolution_hook", "call", ("name",)),
    Seam(_S + "arg_groups.overrides.resolving_view", "call", ("server_args",)),
    Seam(_S + "arg_groups.overrides.resolution_result", "call", ("server_args", "field", "default")),
    Seam(_S + "arg_groups.overrides.run_post_process_pass", "call", ("server_args", "fn")),
    Seam(_S + "arg_groups.overrides._mamba_radix_cache_resolution", "call", ("view",)),
    Seam(_S + "arg_groups.mamba_hook._platform_supports_mamba_cache_extra_buffer", "call"),
    Seam(_S + "arg_groups.model_hook.handle_mamba_radix_cache", "call", ("server_args", "hf_config")),
    Seam(_S + "arg_groups.parallel_hook.handle_deprecated_dp_attention", "call", ("server_args",)),
    Seam(_S + "arg_groups.hicache_hook.handle_hicache_ratio_default", "call", ("server_args",)),
    Seam(_S + "arg_groups.hicache_hook.handle_hicache", "call", ("server_args",)),
    Seam(_S + "arg_groups.kv_cache_hook.handle_cache_compatibility", "call", ("server_args",)),
    Seam(_S + "utils.server_args_config_parser.ConfigArgumentMerger", "call", ("parser", "boolean_actions")),
    Seam(
        _S + "utils.server_args_config_parser.ConfigArgumentMerger.merge_config_with_args", "call", ("self", "cli_args")
    ),
    Seam(_S + "arg_groups.overrides.model_config_of", "call", ("server_args",)),
    Seam(_S + "arg_groups.overrides.declare_resolution", "call", ("server_args", "source", "fields")),
    Seam(_S + "configs.hybrid_arch.hybrid_gdn_config", "call", ("model_config",)),
    Seam(_S + "configs.hybrid_arch.hybrid_kda_config", "call", ("model_config",)),
    Seam(_S + "configs.hybrid_arch.mambaish_config", "call", ("model_config",)),
    Seam(_S + "runtime_context.publish", "override", ("server_args", "role", "hf_config", "ranks")),
    Seam(_S + "runtime_context.get_server_args", "call"),
    Seam(_S + "runtime_context.get_schedule", "call"),
    Seam(_S + "runtime_context.get_memory", "call"),
    Seam(_S + "runtime_context.get_parallel", "call"),
    Seam(_S + "runtime_context.max_speculative_num_draft_tokens", "call"),
    Seam(_S + "runtime_context.ParallelContext.override", "call", ("self", "kwargs")),
    # Memory plan and pools
    Seam(_CONFIGURATOR + "_handle_max_mamba_cache", "override", ("self", "total_rest_memory")),
    Seam(
        _CONFIGURATOR + "_build_hybrid_req_pool",
        "override",
        ("self", "max_num_reqs", "extra_max_context_len"),
    ),
    Seam(_CONFIGURATOR + "_calculate_mamba_ratio", "call", ("self",)),
    Seam(_S + "mem_cache.kv_cache_configurator.MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO", "read"),
    Seam(_S + "mem_cache.allocation_sizing.get_mamba_tracking_slots", "call", ("extra_buffer", "overlap", "lazy")),
    Seam(
        _S + "mem_cache.kv_cache_configurator.KVCacheConfigurator",
        "read",
        fields=("mambaish_config", "model", "model_config", "attn_dp_size", "device", "spec_algorithm"),
    ),
    Seam(
        _S + "configs.mamba_utils.BaseLinearStateParams",
        "read",
        fields=("layers", "mamba_cache_per_req", "is_kda"),
    ),
    Seam(_S + "configs.bailing_hybrid.BailingHybridConfig", "read", fields=("kda_lower_bound",)),
    *(
        Seam(
            _S + "configs.mamba_utils." + shape,
            "read",
            fields=("temporal", "num_k_heads_per_tp", "conv", "conv_kernel", "disable_conv_window_dedup"),
        )
        for shape in ("Mamba2StateShape", "KimiLinearStateShape")
    ),
    Seam(_POOL + "ReqToTokenPool", "read", fields=("req_generation", "req_to_token", "size")),
    Seam(_POOL + "HybridReqToTokenPool.get_mamba_indices", "call", ("self", "req_indices")),
    Seam(
        _POOL + "HybridReqToTokenPool._init_mamba_pool", "read", fields=("mamba_pool", "mamba_map", "mamba_allocator")
    ),
    Seam(_POOL + "MambaPool", "read", fields=("mamba_cache", "size", "device", "mem_usage", "SpeculativeState")),
    Seam(_POOL + "MambaPool.State", "read", fields=("conv", "temporal")),
    # Speculative decoding
    Seam(_S + "speculative.spec_info.SpeculativeAlgorithm", "read", fields=("NONE",)),
    Seam(
        _POOL + "MambaPool.__init__",
        "override",
        ("self", "size", "spec_state_size", "cache_params", "mamba_layer_ids", "device", "enable_memory_saver")
        + ("speculative_num_draft_tokens", "speculative_eagle_topk", "enable_linear_replayssm")
        + ("linear_replayssm_cache_len", "envelope_layout", "enable_linear_replayssm_spec"),
    ),
    Seam(_POOL + "MambaPool.SpeculativeState", "read", fields=("intermediate_ssm", "intermediate_conv_window")),
    Seam(_POOL + "MambaPool._detect_conv_window_axis", "call", ("self", "conv_state_shape", "win_len")),
    Seam(
        _POOL + "MambaPool._allocate_deduplicated_conv_window",
        "call",
        ("self", "conv_shape", "num_mamba_layers", "spec_state_size", "speculative_num_draft_tokens", "conv_dtype"),
    ),
    Seam(_POOL + "conv_window_dedup_enabled", "call", ("is_npu", "is_cpu", "speculative_eagle_topk", "is_kda")),
    Seam(_POOL + "HybridReqToTokenPool.get_speculative_mamba2_params_all_layers", "call", ("self",)),
    Seam(
        _S + "layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend.update_mamba_state_after_mtp_verify",
        "override",
        ("self", "last_correct_step_indices", "mamba_track_indices", "mamba_steps_to_track", "model")
        + ("req_pool_indices",),
    ),
    Seam(
        _S + "layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend",
        "read",
        fields=("linear_attn_backend",),
    ),
    Seam(_S + "speculative.eagle_info.EagleVerifyInput", "read", fields=("draft_token_num",)),
    Seam(
        "sglang.kernels.ops.mamba.causal_conv1d_triton.causal_conv1d_update",
        "call",
        ("x", "conv_state", "weight", "bias", "activation", "cache_seqlens", "conv_state_indices")
        + ("num_accept_tokens", "intermediate_conv_window", "intermediate_state_indices", "retrieve_next_token")
        + ("retrieve_next_sibling", "retrieve_parent_token", "pad_slot_id", "metadata", "validate_data"),
    ),
    Seam(
        "sglang.kernels.ops.mamba.mamba_state_scatter_triton.scatter_mamba_states_after_mtp_verify",
        "call",
        ("mamba_caches", "state_indices_tensor", "last_correct_step_indices", "mamba_track_indices")
        + ("mamba_steps_to_track", "src_indices_raw"),
    ),
    # Forward
    Seam(
        _S + "model_executor.model_runner.ModelRunner",
        "read",
        fields=("req_to_token_pool", "is_draft_worker"),
    ),
    Seam(
        _S + "model_executor.model_runner.ModelRunner.forward",
        "override",
        ("self", "forward_batch", "skip_attn_backend_init", "pp_proxy_tensors", "reinit_attn_backend")
        + ("split_forward_count",),
    ),
    Seam(
        _S + "model_executor.forward_batch_info.ForwardBatch",
        "read",
        fields=(
            "forward_mode",
            "logical_forward_mode",
            "batch_size",
            "req_pool_indices",
            "seq_lens",
            "req_pool_indices_cpu",
            "extend_prefix_lens",
            "extend_prefix_lens_cpu",
            "extend_seq_lens_cpu",
            "mamba_track_mask",
            "mamba_track_indices",
            "mamba_track_seqlens_cpu",
            "mamba_prefill_track_mask_cpu",
            "spec_info",
        ),
    ),
    Seam(
        _S + "model_executor.forward_batch_info.ForwardMode",
        "read",
        fields=("is_decode", "is_decode_or_idle", "is_extend", "is_target_verify"),
    ),
    Seam(
        _S + "layers.radix_linear_attention.RadixLinearAttention",
        "read",
        fields=("layer_id", "lower_bound", "head_k_dim", "conv_weights", "bias", "activation", "A_log", "dt_bias"),
    ),
    *_backend_seams("gdn_backend", "GDN"),
    *_backend_seams("kda_backend", "KDA", ("supports_packed_decode_safe_gate",), ("prefill_graph_metadata",)),
    Seam(
        _S + "layers.attention.mamba.mamba2_metadata.ForwardMetadata",
        "read",
        fields=("mamba_cache_indices", "mamba_track_indices", "has_mamba_track_mask", "state_checkpoint_cu_starts")
        + ("num_state_checkpoints", "state_checkpoint_every_n_tokens", "state_checkpoint_indices"),
    ),
    # States inside a prefill
    *(
        Seam(
            f"{_FLA}{module}.chunk_gated_delta_rule_fwd_h",
            "override",
            ("k", "w", "u", "g", "gk", "initial_state", "initial_state_indices", "save_new_value", "cu_seqlens")
            + ("chunk_indices", "use_exp2", "inplace_update", "track_state", "track_chunk_idx", "chunk_offsets"),
        )
        for module in ("chunk", "kda")
    ),
    Seam(
        _FLA + "kda.chunk_kda_fwd_intra",
        "override",
        ("q", "k", "v", "gk", "beta", "scale", "cu_seqlens", "chunk_size", "chunk_indices", "safe_gate")
        + ("fuse_recompute", "fuse_diagonal"),
    ),
    Seam(
        _S + "layers.attention.linear.kda_backend.KDAKernelDispatcher.effective_extend_kernel",
        "call",
        ("self", "lower_bound", "num_tokens", "num_seqs"),
    ),
    Seam(_S + "layers.attention.linear.kernels.gdn_triton.TritonGDNKernel", "read"),
    Seam(_S + "layers.attention.linear.kernels.kda_triton.TritonKDAKernel", "read"),
    Seam(_FLA + "kda.RCP_LN2", "read"),
    Seam(_FLA + "l2norm.l2norm_fwd", "call", ("x", "eps", "output_dtype")),
    Seam(_FLA + "index.prepare_chunk_indices", "call", ("cu_seqlens", "chunk_size")),
    Seam(
        _FLA + "cumsum.chunk_local_cumsum",
        "call",
        ("g", "chunk_size", "reverse", "scale", "cu_seqlens", "head_first", "output_dtype", "chunk_indices", "kwargs"),
    ),
    Seam(
        _FLA + "chunk_fwd.chunk_gated_delta_rule_fwd_intra",
        "call",
        ("k", "v", "g", "beta", "cu_seqlens", "chunk_size", "chunk_indices"),
    ),
    Seam(
        _FLA + "kda.kda_gate_chunk_cumsum",
        "call",
        ("g", "A_log", "chunk_size", "scale", "dt_bias", "cu_seqlens", "output_dtype", "chunk_indices", "lower_bound")
        + ("beta",),
    ),
    Seam(
        _S + "layers.attention.hybrid_linear_attn_backend.track_mamba_states_all_layers",
        "call",
        ("conv_states_pool", "ssm_states_pool", "cache_indices", "mamba_track_mask", "mamba_track_indices")
        + ("batch_size", "check_freed_slots"),
    ),
    # Shown to operators
    Seam(
        _S + "observability.metrics_collector.SchedulerMetricsCollector.__init__",
        "override",
        ("self", "labels", "server_args", "enable_lora", "enable_hierarchical_cache", "enable_streaming_session"),
    ),
    Seam(_S + "observability.metrics_collector.SchedulerMetricsCollector", "read", fields=("labels",)),
    Seam(
        _S + "managers.scheduler.Scheduler",
        "read",
        fields=("req_to_token_pool", "tree_cache", "enable_overlap"),
    ),
    Seam(_S + "managers.scheduler.Scheduler.on_idle", "override", ("self",)),
    Seam(
        _S + "managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state",
        "override",
        ("self", "recv_req"),
    ),
    Seam(
        _S + "managers.scheduler_components.internal_state.SchedulerInternalStateController",
        "read",
        fields=("scheduler",),
    ),
    Seam(_S + "managers.io_struct.GetInternalStateReqOutput", "read", fields=("internal_state",)),
    Seam(_S + "runtime_context.get_observability", "call"),
    # Prefix cache
    Seam(
        _S + "mem_cache.unified_cache.components.mamba.MambaComponent.prepare_for_caching_req",
        "override",
        ("self", "req", "insert_params", "token_ids_len", "is_finished"),
    ),
    Seam(
        _S + "mem_cache.unified_cache.components.mamba.MambaComponent.cleanup_after_caching_req",
        "override",
        ("self", "req", "is_finished", "insert_result", "insert_params"),
    ),
    Seam(_S + "mem_cache.unified_cache.components.mamba.MambaComponent", "read", fields=("cache",)),
    Seam(
        _S + "managers.scheduler.Scheduler.get_next_batch_to_run", "override", ("self", "running_batch", "last_batch")
    ),
    Seam(_CACHE + "checkpoint_into_tree", "override", ("self", "req", "up_to", "kwargs")),
    Seam(_CACHE + "match_prefix", "override", ("self", "params")),
    Seam(_CACHE + "reset", "override", ("self",)),
    Seam(
        _S + "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
        "._handle_finish_state_updated_req",
        "override",
        ("self", "req", "batch", "result", "i", "logits_output"),
    ),
    Seam(_POOL + "HybridReqToTokenPool.get_mamba_ping_pong_other_idx", "call", ("self", "mamba_next_track_idx")),
    Seam(
        _CACHE + "_evict",
        "override",
        ("self", "params", "available_size_targets", "allocation_reclaim_satisfied"),
    ),
    Seam(_CACHE + "evict_for_alloc", "call", ("self", "params", "allocation_reclaim_satisfied")),
    Seam(_CACHE + "mamba_evictable_size", "call", ("self",)),
    Seam(_CACHE + "touch_prefix", "call", ("self", "key")),
    Seam(
        _S + "mem_cache.unified_radix_cache.UnifiedRadixCache",
        "read",
        fields=("req_to_token_pool", "enable_mamba_extra_buffer", "page_size", "tree_core", "cache_controller"),
    ),
    Seam(
        _S + "mem_cache.unified_cache.unified_tree_core_interface.UnifiedTreeCoreInterface.get_component_device_value",
        "call",
        ("self", "node_id", "component_type"),
    ),
    Seam(_S + "mem_cache.unified_cache.component_type.ComponentType", "read", fields=("MAMBA",)),
    # Host tier
    Seam(
        _S + "mem_cache.hybrid_cache.hybrid_pool_assembler.attach_hybrid_pool_to_unified_cache",
        "override",
        ("cache", "params", "server_args", "load_cache_event", "storage_backend", "storage_extra_config")
        + ("storage_prefetch_threshold",),
    ),
    Seam(_CONTROLLER + "start_writing", "override", ("self",)),
    Seam(_CONTROLLER + "start_loading", "override", ("self",)),
    Seam(
        _CONTROLLER.rstrip("."),
        "read",
        fields=("write_queue", "load_queue", "write_fence_stream", "load_fence_stream"),
    ),
    Seam(_BASE_CACHE + "EvictParams", "read", fields=("num_tokens", "mamba_num")),
    Seam(_BASE_CACHE + "InsertParams", "read", fields=("key", "mamba_value", "mamba_keep_idx")),
    Seam(_BASE_CACHE + "InsertResult", "read", fields=("last_device_node", "mamba_exist")),
    Seam(_BASE_CACHE + "MatchPrefixParams", "read", fields=("key", "req", "cow_mamba")),
    Seam(_BASE_CACHE + "MatchResult", "read", fields=("device_prefix_len", "host_hit_length", "best_match_node")),
    Seam(_S + "mem_cache.allocator.mamba.MambaSlotAllocator", "read", fields=("size",)),
    Seam(_S + "mem_cache.allocator.mamba.MambaSlotAllocator.available_size", "call", ("self",)),
    Seam(_S + "mem_cache.allocator.mamba.MambaSlotAllocator.alloc", "call", ("self", "need_size")),
    Seam(_S + "mem_cache.allocator.mamba.MambaSlotAllocator.free", "call", ("self", "free_index")),
    Seam(_POOL + "HybridReqToTokenPool.mamba2_layer_cache", "call", ("self", "layer_id")),
    Seam(_POOL + "_is_npu", "read"),
    Seam(_POOL + "_is_cpu", "read"),
    Seam(
        _S + "managers.schedule_batch.ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend",
        "override",
        ("self", "req"),
    ),
    Seam(
        _S + "managers.schedule_batch._MambaRadixCacheV2TrackEntry",
        "call",
        ("track_mask", "track_position", "track_seqlen"),
    ),
    Seam(
        _S + "managers.schedule_batch.ScheduleBatch",
        "read",
        fields=("reqs", "forward_mode", "req_to_token_pool", "tree_cache"),
    ),
    Seam(
        _S + "managers.schedule_batch.Req",
        "read",
        fields=("rid", "kv", "prefix_len", "extend_end", "full_untruncated_fill_ids", "mamba_branching_seqlen")
        + ("sampling_params", "extra_key", "cache_salt", "multimodal_inputs", "input_embeds")
        + ("positional_embed_overrides", "skip_radix_cache_insert", "origin_input_ids", "output_ids")
        + ("finished_reason", "grammar", "finished"),
    ),
    Seam(_S + "managers.schedule_batch.FINISH_ABORT", "call"),
    Seam(
        _S + "managers.schedule_batch.ReqKvInfo",
        "read",
        fields=("req_pool_idx", "mamba_pool_idx", "kv_committed_len", "cache_protected_len")
        + ("mamba_last_track_seqlen", "mamba_prev_track_seqlen", "mamba_ping_pong_track_buffer")
        + ("mamba_ping_pong_empty", "mamba_next_track_idx", "mamba_last_track_idx"),
    ),
    Seam(_S + "runtime_context.get_exec", "call"),
    Seam(_S + "runtime_context.mamba_cache_chunk_size", "call"),
)


def sglang_version() -> str | None:
    """Version of the installed SGLang distribution, or None when there is none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def differences(seams: Iterable[Seam] = SEAMS) -> list[str]:
    """What of the table the installed SGLang does not have; one sentence an entry, empty when it fits."""
    found = [difference for seam in seams if (difference := _difference(seam))]
    from sglang.srt.arg_groups import resolution_hooks

    if "handle_linear_attn_backend" not in getattr(resolution_hooks, "_OVERRIDABLE_HOOKS", ()):
        found.append("resolution step 'handle_linear_attn_backend' cannot be wrapped by a plugin")
    return found


def _difference(seam: Seam) -> str | None:
    try:
        obj = pkgutil.resolve_name(seam.target)
    except (ImportError, AttributeError, ValueError) as error:
        return f"{seam.target} is not there ({error})"
    if seam.use == "read":
        absent = [name for name in seam.fields if not _has_attribute(obj, name)]
        return f"{seam.target} has no {', '.join(absent)}" if absent else None
    if not callable(obj):
        return f"{seam.target} is not callable"
    if seam.params:
        have = tuple(inspect.signature(inspect.unwrap(obj)).parameters)
        if have != seam.params:
            return f"{seam.target} takes ({', '.join(have)}), expected ({', '.join(seam.params)})"
    return None


def _has_attribute(obj: Any, name: str) -> bool:
    """Whether class `obj` (or a base) declares `name` or assigns it in `__init__`; functions: in their body."""
    if not isinstance(obj, type):
        return name in inspect.unwrap(obj).__code__.co_names
    for cls in obj.__mro__:
        if name in vars(cls) or name in getattr(cls, "__annotations__", {}):
            return True
        init = inspect.unwrap(vars(cls).get("__init__", object.__init__))
        if name in getattr(getattr(init, "__code__", None), "co_names", ()):
            return True
    return False


def missing_hooks(hooks: dict[str, Callable[..., Any]]) -> list[str]:
    """Targets among `hooks` (target -> our function) whose current callable does not run our function.

    SGLang only logs a hook that it failed to apply, and another plugin may have replaced the whole class.
    """
    return [target for target, hook in hooks.items() if not _runs(_current(target), hook, set())]


def _current(target: str) -> Any:
    try:
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return None


def _runs(fn: Any, hook: Callable[..., Any], seen: set[int]) -> bool:
    """Whether a call of `fn` can reach `hook`.

    A function reaches what its closure holds. Its `__wrapped__` proves nothing: a replacement keeps one as well.
    """
    if fn is hook:
        return True
    if fn is None or id(fn) in seen:
        return False
    seen.add(id(fn))
    if isinstance(fn, types.FunctionType):
        inner = [_content(cell) for cell in fn.__closure__ or ()]
    elif isinstance(fn, functools.partial):
        inner = [fn.func]
    else:  # a bound method, or a wrapper that is an object
        inner = [getattr(fn, "__func__", None), getattr(fn, "__wrapped__", None)]
    return any(_runs(each, hook, seen) for each in inner if callable(each))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None
