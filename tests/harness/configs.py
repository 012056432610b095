"""Server configurations that tests share, by name. Their order here is the order in which servers start."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.harness import events


@dataclass(frozen=True)
class Config:
    """One server: a tiny model (tests/harness/tiny.py), flags beside the host's, and the plugin on or off.

    `draft` is a tiny model that drafts for it.
    """

    model: str = "qwen3-next"
    args: tuple[str, ...] = ()
    env: Mapping[str, str | None] = field(default_factory=dict)
    plugin: bool = False
    draft: str | None = None


REPLAY = ("--enable-linear-replayssm",)
NO_BUFFER = ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule")
NO_CACHE = ("--disable-radix-cache",)
PLAIN_CACHE = {"SGLANG_REPLAYSSM_BOUNDARIES": "off"}
"""Without boundaries the prefix cache holds what it holds without the plugin; answers can be compared hit for hit."""
TRACK_64 = ("--mamba-track-interval", "64")
"""A track boundary every 64 tokens: with the default of 256 a short test would never cross one."""

CONFIGS: dict[str, Config] = {
    # SGLang as it is (the plugin's kill switch set)
    "plain": Config(args=TRACK_64),
    "plain-deep": Config(model="qwen3-next-deep", args=TRACK_64),
    "plain-qwen3.5": Config(model="qwen3.5", args=TRACK_64),
    # the plugin
    "plugin": Config(args=REPLAY + TRACK_64, env=PLAIN_CACHE, plugin=True),
    "plugin-deep": Config(model="qwen3-next-deep", args=REPLAY + TRACK_64, env=PLAIN_CACHE, plugin=True),
    "plugin-qwen3.5": Config(model="qwen3.5", args=REPLAY + TRACK_64, env=PLAIN_CACHE, plugin=True),
}

# Scenario tests: the deep model (3 linear layers of 4), the plugin's servers write their events down.
MIXED = ("--enable-mixed-chunk", "--chunked-prefill-size", "128", "--page-size", "64", *TRACK_64)
RETRACT = ("--max-total-tokens", "640", "--schedule-conservativeness", "0.1", *TRACK_64)
LAZY = ("--mamba-radix-cache-strategy", "extra_buffer_lazy", *TRACK_64)
BF16 = ("--dtype", "bfloat16", "--mamba-ssm-dtype", "bfloat16")
BF16_ENV = {"SGLANG_MAMBA_CONV_DTYPE": "bfloat16"}


def _watched() -> dict[str, str]:
    return {**events.environment(), **PLAIN_CACHE}


def _deep(*args: str, plugin: bool = True, **env: str) -> Config:
    flags = REPLAY if plugin else ()
    return Config("qwen3-next-deep", flags + args, {**(_watched() if plugin else {}), **env}, plugin)


CONFIGS |= {
    "deep-off": _deep(plugin=False),
    "deep-on": _deep(),
    "deep-on-direct": _deep(*TRACK_64, SGLANG_REPLAYSSM_DIRECT_BATCH="1"),
    "deep-on-128": _deep("--mamba-track-interval", "128", "--chunked-prefill-size", "128"),
    "deep-off-no-buffer": _deep(*NO_BUFFER, plugin=False),
    "deep-on-no-buffer": _deep(*NO_BUFFER),
    "deep-on-len-1": _deep(*TRACK_64, "--linear-replayssm-cache-len", "1"),
    "deep-on-len-5": _deep(*TRACK_64, "--linear-replayssm-cache-len", "5"),
    "deep-on-len-64": _deep(*TRACK_64, "--linear-replayssm-cache-len", "64"),
    "deep-on-metrics": _deep(*TRACK_64, "--enable-metrics"),
    "deep-on-no-overlap": _deep(*TRACK_64, "--disable-overlap-schedule"),
    "deep-on-mixed": _deep(*MIXED),
    "deep-on-retract": _deep(*RETRACT, SGLANG_TEST_RETRACT="1", SGLANG_TEST_RETRACT_INTERVAL="8"),
    "deep-on-no-cache": _deep(*NO_CACHE),
    "deep-off-lazy": _deep(*LAZY, plugin=False),
    "deep-on-lazy": _deep(*LAZY),
    "deep-off-bf16": _deep(*BF16, *TRACK_64, plugin=False, **BF16_ENV),
    "deep-on-bf16": _deep(*BF16, *TRACK_64, **BF16_ENV),
}

# States at boundaries, in the prefix cache and at the end of requests.
BOUNDARIES = {
    "SGLANG_REPLAYSSM_BOUNDARIES": "tail=64:128,cold=128,worth=0",
    # SGLang counts its pools after every step
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}

CONFIGS |= {
    "boundaries": _deep("--enable-metrics", **BOUNDARIES),
    "boundaries-python-core": _deep(**BOUNDARIES, SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND="python"),
    "boundaries-pages": _deep("--page-size", "64", "--chunked-prefill-size", "256", **BOUNDARIES),
    "boundaries-pages-128": _deep("--page-size", "128", "--chunked-prefill-size", "256", **BOUNDARIES),
    "boundaries-mixed": _deep(*MIXED, **BOUNDARIES),
    "boundaries-retract": _deep(*RETRACT, **BOUNDARIES, SGLANG_TEST_RETRACT="1", SGLANG_TEST_RETRACT_INTERVAL="8"),
    "boundaries-lazy": _deep(*LAZY, **BOUNDARIES),
}

# Speculative decoding: the model drafts 3 tokens for itself, and takes them or not. Its attention runs on the triton
# backend; one split of the KV keeps the interpreter's time down.
DRAFTS = (
    *("--attention-backend", "triton", "--triton-attention-num-kv-splits", "1", "--speculative-algorithm", "NEXTN"),
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
)
SPEC = ("--enable-linear-replayssm-spec",)
EXTRA_BUFFER = ("--mamba-radix-cache-strategy", "extra_buffer", *TRACK_64)  # without overlap it is not the default
PRECISE_STATE = ("--mamba-ssm-dtype", "float32")  # what the flag makes it


def _drafts(*args: str, plugin: bool = True, **env: str) -> Config:
    flags = (*DRAFTS, *(SPEC if plugin else PRECISE_STATE))
    return Config("qwen3-next-mtp", (*flags, *args), {**(_watched() if plugin else {}), **env}, plugin)


CONFIGS |= {
    "drafts-off": Config("qwen3-next-mtp", (*DRAFTS[:4], *EXTRA_BUFFER, *PRECISE_STATE)),
    "drafts-plain": _drafts(*EXTRA_BUFFER, plugin=False),
    "drafts-in-tree": _drafts(*EXTRA_BUFFER, *SPEC, plugin=False),
    "drafts-on": _drafts(*EXTRA_BUFFER),
    "drafts-on-len-4": _drafts(*EXTRA_BUFFER, "--linear-replayssm-cache-len", "4"),
    "drafts-on-no-buffer": _drafts(*NO_BUFFER, *REPLAY),
    "drafts-on-no-cache": _drafts(*NO_CACHE),
    "drafts-on-boundaries": _drafts(*EXTRA_BUFFER, *REPLAY, **BOUNDARIES),
    "drafts-on-pages": _drafts(*EXTRA_BUFFER, "--page-size", "64", "--chunked-prefill-size", "128"),
    "drafts-on-retract": _drafts(*EXTRA_BUFFER, *RETRACT, SGLANG_TEST_RETRACT="1", SGLANG_TEST_RETRACT_INTERVAL="8"),
    "drafts-on-eagle": dataclasses.replace(
        _drafts(*EXTRA_BUFFER, "--speculative-algorithm", "EAGLE"), draft="eagle-draft"
    ),
    "drafts-on-bf16": _drafts(*EXTRA_BUFFER, *BF16, **BF16_ENV),
}

# The host tier (HiCache): device pools so small that five documents push the first one out, to the host.
HOST = (
    *("--enable-hierarchical-cache", "--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct"),
    *("--hicache-ratio", "3", "--enable-cache-report", *TRACK_64),
    *("--max-total-tokens", "1024", "--max-mamba-cache-size", "12", "--max-running-requests", "2"),
)
THROUGH = (*HOST, "--hicache-write-policy", "write_through")

CONFIGS |= {
    "host-off": _deep(*THROUGH, plugin=False),
    "host-on": _deep(*THROUGH),
    "host-on-boundaries": _deep(*THROUGH, **BOUNDARIES),
    "host-back": _deep(*HOST, "--hicache-write-policy", "write_back", **BOUNDARIES),
    "host-storage": _deep(
        *THROUGH,
        *("--page-size", "64", "--hicache-storage-backend", "file"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", '{"prefetch_threshold": 64}'),
        **BOUNDARIES,
    ),
    "host-selective": _deep(*HOST, "--hicache-write-policy", "write_through_selective", **BOUNDARIES),
}

# Kimi Delta Attention, likewise. Latent attention runs on the triton backend only; chunks of 128 make a prompt of 150
# tokens a chunked prefill.
LATENT = ("--attention-backend", "triton")
CHUNKS = ("--chunked-prefill-size", "128", *TRACK_64)
PRECISE = ("--enable-fp32-lm-head",)  # Ling V3 computes its logits in bfloat16, whose steps would hide what is compared


def _kda(model: str, *args: str, plugin: bool = True, **env: str) -> Config:
    flags = (*LATENT, *REPLAY) if plugin else LATENT
    return Config(model, flags + args, {**(_watched() if plugin else {}), **env}, plugin)


CONFIGS |= {
    "kimi-off": _kda("kimi-linear", *CHUNKS, plugin=False),
    "kimi-on": _kda("kimi-linear", *CHUNKS),
    "kimi-off-no-buffer": _kda("kimi-linear", *NO_BUFFER, plugin=False),
    "kimi-on-no-buffer": _kda("kimi-linear", *NO_BUFFER),
    # a mixed step leaves chunks that start within a page; Kimi's slow head shows a state under another's key
    "kimi-on-mixed": _kda("kimi-linear", *MIXED),
    "kimi-on-retract": _kda("kimi-linear", *RETRACT, SGLANG_TEST_RETRACT="1", SGLANG_TEST_RETRACT_INTERVAL="8"),
    "kimi-off-bf16": _kda("kimi-linear-bf16", *CHUNKS, *BF16, plugin=False, **BF16_ENV),
    "kimi-on-bf16": _kda("kimi-linear-bf16", *CHUNKS, *BF16, **BF16_ENV),
    "kimi-on-len-5": _kda("kimi-linear", *CHUNKS, "--linear-replayssm-cache-len", "5"),
    "kimi-moe-off": _kda("kimi-linear-moe", *CHUNKS, plugin=False),
    "kimi-moe-on": _kda("kimi-linear-moe", *CHUNKS),
    "ling-off": _kda("ling-v3", *CHUNKS, *PRECISE, plugin=False),
    "ling-on": _kda("ling-v3", *CHUNKS, *PRECISE),
    "kimi-boundaries": _kda("kimi-linear", *CHUNKS, **BOUNDARIES),
    "kimi-host": _kda("kimi-linear", *THROUGH, **BOUNDARIES),
    "ling-on-len-64": _kda("ling-v3", *CHUNKS, *PRECISE, "--linear-replayssm-cache-len", "64"),
}


def _ling_drafts(*args: str, model: str = "ling-v3-mtp", plugin: bool = True, **env: str) -> Config:
    return dataclasses.replace(_drafts(*PRECISE, *args, plugin=plugin, **env), model=model)


CONFIGS |= {
    "ling-drafts-off": Config("ling-v3-mtp", (*LATENT, *DRAFTS[2:4], *EXTRA_BUFFER, *PRECISE, *PRECISE_STATE)),
    "ling-drafts-plain": _ling_drafts(*EXTRA_BUFFER, plugin=False),
    "ling-drafts-on": _ling_drafts(*EXTRA_BUFFER),
    "ling-drafts-on-len-4": _ling_drafts(*EXTRA_BUFFER, "--linear-replayssm-cache-len", "4"),
    "ling-drafts-on-no-buffer": _ling_drafts(*NO_BUFFER, *REPLAY),
    "ling-drafts-on-boundaries": _ling_drafts(*EXTRA_BUFFER, *REPLAY, **BOUNDARIES),
    "ling-drafts-on-retract": _ling_drafts(
        *EXTRA_BUFFER, *RETRACT, SGLANG_TEST_RETRACT="1", SGLANG_TEST_RETRACT_INTERVAL="8"
    ),
    "ling-drafts-on-eagle": dataclasses.replace(
        _ling_drafts(*EXTRA_BUFFER, "--speculative-algorithm", "EAGLE"), draft="eagle-draft"
    ),
    "ling-drafts-on-unbounded": _ling_drafts(*EXTRA_BUFFER, model="ling-v3-mtp-unbounded"),
}

# Two ranks. On a CPU each gets a core of its own.
TWO_RANKS = ("--tp-size", "2")
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}

CONFIGS |= {
    "tp-off": Config("qwen3-next-tp", (*TWO_RANKS, *TRACK_64), CORES),
    "tp-on": Config("qwen3-next-tp", (*REPLAY, *TWO_RANKS, *TRACK_64), {**CORES, **PLAIN_CACHE}, plugin=True),
    "tp-on-one-rank": Config("qwen3-next-tp", (*REPLAY, *TRACK_64), PLAIN_CACHE, plugin=True),
    "tp-boundaries": Config("qwen3-next-tp", (*REPLAY, *TWO_RANKS), {**CORES, **BOUNDARIES}, plugin=True),
}
