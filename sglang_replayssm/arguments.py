"""Launch arguments: what the flags ask for, what is refused, and how the in-tree flags are put to sleep.

The user's wish stays in the raw record (`get_server_args().enable_linear_replayssm`, `.._spec`); the *resolved* in-tree
values are declared False, so that none of SGLang's own replay code allocates or runs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from sglang_replayssm.boundaries import policy_from_environment

logger = logging.getLogger(__name__)

DISABLE_ENV = "SGLANG_REPLAYSSM_DISABLE"
# Set by the launcher once it accepted the flag, inherited by the server's processes: they honour it or end.
REQUIRED_ENV = "SGLANG_REPLAYSSM_REQUIRED"
# The untested release that the launcher warned of, inherited likewise: one warning per launch, not one per process.
WARNED_ENV = "SGLANG_REPLAYSSM_WARNED"
U_DTYPE_ENV = "SGLANG_REPLAYSSM_U_DTYPE"
DIRECT_BATCH_ENV = "SGLANG_REPLAYSSM_DIRECT_BATCH"
MAX_CAPACITY = 64
MAX_WIDTH = 16
FLAG = "--enable-linear-replayssm"
SPEC_FLAG = "--enable-linear-replayssm-spec"
# Drafts of SGLang where the user names no number: of an architecture that it has no numbers for, as ours are.
_USUAL_DRAFT_STEPS = 3
# Accepted architectures by gate kind. Each shares its linear layers, their backend and pools with a
# model whose greedy output is tested against a reference; the MoE variants differ from those outside these layers only.
ARCHITECTURES = {
    "gdn": (
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    ),
    "kda": ("KimiLinearForCausalLM", "BailingMoeV3ForCausalLM"),
}

# (attribute of the resolving view, value test, what it is, what to change). One row per refusal: a
# configuration that no test proves is refused, never half-working.
_REFUSALS: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    (
        "hicache_host_memory_mode",
        lambda v: v != "cache",
        "a host tier that only buffers for storage",
        "use --hicache-host-memory-mode cache",
    ),
    (
        "hicache_storage_backend",
        lambda v: v not in ("", "file"),
        "a storage tier other than files",
        "use --hicache-storage-backend file",
    ),
    ("enable_lmcache", bool, "LMCache", "drop --enable-lmcache"),
    ("enable_flexkv", bool, "FlexKV", "drop --enable-flexkv"),
    (
        "enable_unified_cache_external_linker",
        bool,
        "an external cache linker",
        "drop --enable-unified-cache-external-linker",
    ),
    ("radix_cache_backend", bool, "another radix-cache backend", "drop --radix-cache-backend"),
    ("disaggregation_mode", lambda v: v != "null", "PD disaggregation", "drop --disaggregation-mode"),
    ("enable_pd_role_switch", bool, "PD role switching", "drop --enable-pd-role-switch"),
    ("enable_streaming_session", bool, "streaming sessions", "drop --enable-streaming-session"),
    ("enable_session_radix_cache", bool, "the session radix cache", "drop --enable-session-radix-cache"),
    ("enable_unified_memory", bool, "unified memory", "drop --enable-unified-memory"),
    ("enable_page_major_kv_layout", bool, "the page-major layout", "drop --enable-page-major-kv-layout"),
    ("enable_int8_mamba_checkpoint", bool, "int8 state checkpoints", "drop --enable-int8-mamba-checkpoint"),
    (
        "enable_mamba_cache_stochastic_rounding",
        bool,
        "stochastic rounding of the state",
        "drop --enable-mamba-cache-stochastic-rounding",
    ),
    ("pp_size", lambda v: v > 1, "pipeline parallelism", "use --pp-size 1"),
    ("dp_size", lambda v: v > 1, "data parallelism", "use --dp-size 1"),
    # --enable-dp-attention is resolved into this width
    ("attn_dp_size", lambda v: v > 1, "DP attention", "use --attn-dp-size 1"),
    ("dcp_size", lambda v: v > 1, "decode context parallelism", "use --dcp-size 1"),
    ("attn_cp_size", lambda v: v > 1, "context parallelism", "use --attn-cp-size 1"),
    ("enable_two_batch_overlap", bool, "two-batch overlap", "drop --enable-two-batch-overlap"),
    ("enable_pdmux", bool, "prefill-decode multiplexing", "drop --enable-pdmux"),
    ("enable_mis", bool, "multi-item scoring", "drop --enable-mis"),
    ("use_ray", bool, "the Ray launcher", "drop --use-ray"),
    ("dllm_algorithm", bool, "diffusion language models", "drop --dllm-algorithm"),
    ("enable_torch_compile", bool, "torch.compile", "drop --enable-torch-compile"),
    ("enable_memory_saver", bool, "the memory saver", "drop --enable-memory-saver"),
    ("enable_nvidia_megakernel", bool, "NVIDIA megakernels", "drop --enable-nvidia-megakernel"),
    (
        "enable_deterministic_inference",
        bool,
        "deterministic inference",
        "drop --enable-deterministic-inference",
    ),
    # SGLang resolves it into deterministic inference, which the user has not asked for by name.
    ("rl_on_policy_target", bool, "on-policy training targets", "drop --rl-on-policy-target"),
    # With it, --speculative-algorithm names what is captured, and SGLang resolves that one to nothing.
    (
        "enable_return_aux_hidden_states",
        bool,
        "auxiliary hidden states",
        "drop --enable-return-aux-hidden-states",
    ),
)

# The same for ring spec-verify (SPEC_FLAG).
_SPEC_REFUSALS: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    (
        "speculative_algorithm",
        lambda v: v.upper() not in ("NEXTN", "EAGLE"),
        "that speculative algorithm",
        "use --speculative-algorithm NEXTN or EAGLE",
    ),
    ("speculative_eagle_topk", lambda v: v != 1, "a tree of drafts", "use --speculative-eagle-topk 1"),
    ("speculative_adaptive", bool, "adaptive draft lengths", "drop --speculative-adaptive"),
    ("enable_multi_layer_eagle", bool, "multi-layer EAGLE", "drop --enable-multi-layer-eagle"),
    ("tp_size", lambda v: v > 1, "several ranks", "use --tp-size 1"),
    ("enable_hierarchical_cache", bool, "the hierarchical cache", "drop --enable-hierarchical-cache"),
    (
        "mamba_radix_cache_strategy",
        lambda v: v == "extra_buffer_lazy",
        "extra_buffer_lazy",
        "use --mamba-radix-cache-strategy extra_buffer",
    ),
    ("enable_mixed_chunk", bool, "mixed chunks", "drop --enable-mixed-chunk"),
    (
        "linear_attn_verify_backend",
        lambda v: v != "triton",
        "another linear-attention verify backend, in whose place its own kernel comes",
        "use --linear-attn-verify-backend triton",
    ),
)
# (variable, the values that are proven, the first of them the default; what another one does)
_OFF = ("0", "false", "no", "n")
_SPEC_ENVIRONMENT = (
    ("SGLANG_RAGGED_VERIFY_MODE", ("static",), "verify steps of unequal lengths"),
    ("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", _OFF, "metadata on a stream of its own"),
    ("SGLANG_ENABLE_PP_SPEC", _OFF, "speculation across pipeline stages"),
)
# Accepted architectures that no draft of NEXTN or EAGLE works with, and why. What the ring does for them is tested.
_WITHOUT_DRAFTS = {
    "KimiLinearForCausalLM": (
        "NEXTN and EAGLE drafts share the target's embedding and head, which SGLang's class for it does not hand out "
        "(no get_embed_and_head)"
    ),
}

# Server arguments that this package reads, here, in memory_plan.py and in explain.py.
FIELDS = (
    *("enable_linear_replayssm", "linear_replayssm_cache_len", "linear_attn_backend", "linear_attn_decode_backend"),
    *("enable_linear_replayssm_spec", "speculative_num_steps", "speculative_num_draft_tokens"),
    *(
        "device",
        "tp_size",
        "max_running_requests",
        "max_mamba_cache_size",
        "mamba_full_memory_ratio",
        "disable_radix_cache",
    ),
    *("mamba_radix_cache_strategy", "disable_overlap_schedule", "page_size", "mamba_ssm_dtype"),
    "enable_hierarchical_cache",
    *(field for field, *_ in (*_REFUSALS, *_SPEC_REFUSALS)),
)


def disabled_by_environment() -> bool:
    """Whether the kill switch is set: SGLang then behaves as if this package were not installed."""
    return os.environ.get(DISABLE_ENV, "").lower() not in ("", "0", "false")


def asked(server_args: Any) -> bool:
    """Whether server arguments ask for the ring, with either flag: both give buffered decode."""
    fields = ("enable_linear_replayssm", "enable_linear_replayssm_spec")
    return any(getattr(server_args, field, False) for field in fields)


def requested() -> bool:
    """Whether the published server arguments ask for buffered decode."""
    return _published(asked)


def spec_requested() -> bool:
    """Whether the published server arguments ask for ring spec-verify."""
    return _published(lambda server_args: bool(server_args.enable_linear_replayssm_spec))


def _published(test: Callable[[Any], bool]) -> bool:
    from sglang.srt.runtime_context import get_server_args

    try:
        return test(get_server_args())
    except ValueError:  # nothing published in this process yet
        return False


def step_width() -> int:
    """Most tokens that one step of the published server brings to a request: its drafts, or 1 in plain decode."""
    if not spec_requested():
        return 1
    from sglang.srt.runtime_context import max_speculative_num_draft_tokens

    width = max_speculative_num_draft_tokens()
    assert width is not None, "ring spec-verify was accepted without a speculative algorithm"
    return width


def ring_capacity() -> int:
    """Records that a row of the published server's ring holds."""
    from sglang.srt.runtime_context import get_server_args

    return capacity_for(get_server_args().linear_replayssm_cache_len, step_width())


def capacity_for(cache_len: int, width: int) -> int:
    """Records of a row where --linear-replayssm-cache-len is `cache_len` and a step brings `width` tokens.

    A fold of a verify step is due when its drafts do not fit any more. Their places come on top, so that with either
    flag a row folds once it has more than `cache_len` committed records, or as many in plain decode.
    """
    return cache_len + (width if width > 1 else 0)


def planned_width(view: Any) -> int:
    """`step_width` of a launch that is still being resolved: SGLang decides on drafts after our step."""
    if not view.enable_linear_replayssm_spec:
        return 1
    steps = view.speculative_num_steps
    return (_USUAL_DRAFT_STEPS if steps is None else steps) + 1  # what SGLang makes of it for a chain


def u_dtype_name() -> str:
    """dtype of the ring's u records, "float32" (default, DESIGN invariant 7) or "bfloat16"."""
    name = os.environ.get(U_DTYPE_ENV, "float32")
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"{U_DTYPE_ENV}={name!r}: set it to float32 (the default) or bfloat16.")
    return name


def direct_batch() -> int | None:
    """Largest batch whose decode steps write the state themselves; None for what was measured to be faster."""
    text = os.environ.get(DIRECT_BATCH_ENV, "")
    if not text:
        return None
    if not text.isdecimal():
        raise ValueError(f"{DIRECT_BATCH_ENV}={text!r}: set it to a batch size, 0 for never, or unset it.")
    return int(text)


def extra_buffer() -> bool:
    """Whether the published configuration keeps prefixes in the default way, with track slots beside requests."""
    from sglang.srt.runtime_context import get_exec, get_memory

    return bool(get_exec().mamba.enable_mamba_extra_buffer) and not get_memory().disable_radix_cache


def supported_architectures() -> str:
    """The supported architectures as a list for people."""
    return ", ".join(name for names in ARCHITECTURES.values() for name in names)


def refusals(view: Any, architectures: list[str], gate: str | None) -> list[str]:
    """Reasons not to launch with the flag, as full sentences; empty when the configuration is supported.

    Args:
        view: an object with SGLang's server-argument fields, already resolved as far as they are.
        architectures: `architectures` of the model's config.
        gate: gate kind of the model's linear layers as SGLang sees it ("gdn", "kda"), None for any other model.
    """
    found = []
    flag = SPEC_FLAG if view.enable_linear_replayssm_spec else FLAG
    if gate is None or architectures[0] not in ARCHITECTURES[gate]:
        found.append(f"{flag} supports {supported_architectures()}; this model is {architectures[0]}. Drop the flag.")
    capacity = view.linear_replayssm_cache_len
    if not 1 <= capacity <= MAX_CAPACITY:
        found.append(f"--linear-replayssm-cache-len must be 1 to {MAX_CAPACITY}, got {capacity}.")
    decode = view.linear_attn_decode_backend or view.linear_attn_backend
    if decode != "triton":
        found.append(
            f"{flag} brings its own decode kernel in the place of the triton one; the linear-attention decode "
            f"backend is {decode!r}. Use --linear-attn-decode-backend triton."
        )
    if gate == "kda" and view.tp_size > 1:
        found.append(
            f"{flag} is not proven with Kimi Delta Attention on several ranks yet: use --tp-size 1, or drop {flag}."
        )
    for field, test, what, change in _REFUSALS:
        value = getattr(view, field)
        if value is not None and test(value):
            found.append(f"{flag} is not proven with {what} yet: {change}, or drop {flag}.")
    if view.enable_hierarchical_cache:
        for applies, what in (
            (view.tp_size > 1, "several ranks"),
            (view.mamba_radix_cache_strategy in ("no_buffer", "extra_buffer_lazy"), view.mamba_radix_cache_strategy),
        ):
            if applies:
                found.append(
                    f"{flag} is not proven with the hierarchical cache and {what} yet: drop "
                    f"--enable-hierarchical-cache, or drop {flag}."
                )
    found.extend(_spec_refusals(view, architectures))
    found.extend(_device_refusals(view.device))
    for setting in (u_dtype_name, direct_batch, policy_from_environment):
        try:
            setting()
        except ValueError as error:
            found.append(str(error))
    return found


def _spec_refusals(view: Any, architectures: list[str]) -> list[str]:
    """What of speculative decoding is not proven."""
    if not view.enable_linear_replayssm_spec:
        if view.speculative_algorithm:
            return [
                f"{FLAG} alone does not cover the verify steps of --speculative-algorithm: add {SPEC_FLAG}, or drop "
                "--speculative-algorithm."
            ]
        return []
    if not view.speculative_algorithm:
        return [
            f"{SPEC_FLAG} is for speculative decoding: add --speculative-algorithm NEXTN, or use {FLAG} without it."
        ]
    found = []
    for field, test, what, change in _SPEC_REFUSALS:
        value = getattr(view, field)
        if value is not None and test(value):
            found.append(f"{SPEC_FLAG} is not proven with {what} yet: {change}, or drop {SPEC_FLAG}.")
    for architecture in architectures:
        if architecture in _WITHOUT_DRAFTS:
            found.append(
                f"{SPEC_FLAG} has nothing to verify with {architecture}: {_WITHOUT_DRAFTS[architecture]}. "
                f"Drop {SPEC_FLAG}."
            )
    for variable, proven, what in _SPEC_ENVIRONMENT:
        if os.environ.get(variable, proven[0]).lower() not in proven:
            found.append(f"{SPEC_FLAG} is not proven with {what} yet: set {variable}={proven[0]}, or drop {SPEC_FLAG}.")
    width, cache_len = planned_width(view), view.linear_replayssm_cache_len
    if width > MAX_WIDTH:
        found.append(
            f"{SPEC_FLAG} verifies at most {MAX_WIDTH} tokens of a request in a step, got {width}: use "
            f"--speculative-num-steps {MAX_WIDTH - 1}."
        )
    elif not width <= cache_len <= MAX_CAPACITY - width and 1 <= cache_len <= MAX_CAPACITY:
        # Below `width` a row would fold in two steps running, which costs more than states that are always written.
        found.append(
            f"{SPEC_FLAG} with {width} tokens a step needs --linear-replayssm-cache-len {width} to "
            f"{MAX_CAPACITY - width}, got {cache_len}: use {min(max(cache_len, width), MAX_CAPACITY - width)}."
        )
    return found


def _device_refusals(device: str | None) -> list[str]:
    import torch

    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device in (None, "cuda") and torch.version.hip is None:
        return []
    if device == "cpu" and interpreted:
        return []
    name = "an AMD GPU" if device == "cuda" else f"--device {device}"
    return [f"{FLAG} needs an NVIDIA GPU (or Triton's interpreter on the CPU, for tests); this is {name}."]


def _shape_refusals(model_config: Any, tp_size: int) -> list[str]:
    """The linear layers' heads, where the kernels are not tested with them. For supported architectures only."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.runtime_context import get_parallel

    from sglang_replayssm.memory_plan import shape_for

    # Not published yet, and no other values are accepted.
    with get_parallel().override(attn_tp_size=tp_size, enable_cp_tp_group_sharing=False):
        params = mambaish_config(model_config).mamba2_cache_params
    try:
        shape_for(params, rows=2, capacity=1, key_dtype=model_config.dtype).validate()
    except ValueError as error:
        return [f"{FLAG} is not tested with the linear layers of this model: {error}. Drop the flag."]
    return []


def gate_of(model_config: Any) -> str | None:
    """Gate kind of the model's linear layers as SGLang sees it ("gdn", "kda"), None for any other model."""
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config, hybrid_kda_config

    if hybrid_gdn_config(model_config) is not None:
        return "gdn"
    return "kda" if hybrid_kda_config(model_config) is not None else None


def resolve(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Resolution hook around SGLang's `handle_linear_attn_backend`.

    Raises:
        ValueError: the configuration is refused; the message holds every reason.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolving_view

    view = resolving_view(server_args)
    os.environ.pop(REQUIRED_ENV, None)
    if not asked(view):
        previous(server_args)
        return
    model_config = model_config_of(server_args)
    reasons = refusals(view, list(model_config.hf_config.architectures), gate_of(model_config))
    reasons = reasons or _shape_refusals(model_config, view.tp_size)
    if reasons:
        raise ValueError(" ".join(reasons))
    from sglang_replayssm.plugin import require_live_hooks

    require_live_hooks()
    os.environ[REQUIRED_ENV] = "1"
    # The raw record keeps the user's True; what SGLang resolves is False, and its replay code stays asleep. Without
    # a decode backend, SGLang's own step picks FlashInfer's on Blackwell, whose place our kernel does not take.
    declare_resolution(
        server_args,
        "sglang_replayssm",
        enable_linear_replayssm=False,
        enable_linear_replayssm_spec=False,
        linear_attn_decode_backend="triton",
    )
    if view.mamba_ssm_dtype is None and server_args.enable_linear_replayssm_spec:
        # what SGLang's own step does under the flag that it no longer sees
        declare_resolution(server_args, "sglang_replayssm", mamba_ssm_dtype="float32")
    previous(server_args)
