"""What a machine adds to every server: flags and environment for a host with or without a GPU."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from .errors import BenchError
from .workloads import Vocab


@dataclass(frozen=True)
class HostProfile:
    """``args`` and ``env`` come before those of the person and of the arm, so both can override them."""

    name: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


# SGLang on plain CPU tensors with its Triton kernels in Triton's interpreter: behaviour and numerics, not speed.
# Idle servers must sleep: a spinning scheduler takes one of few cores from the one that works.
_CPU_ARGS = (
    *("--device", "cpu", "--dtype", "float16"),
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph"),
    *("--max-total-tokens", "4096", "--max-running-requests", "4", "--max-mamba-cache-size", "32"),
    *("--mem-fraction-static", "0.5", "--skip-server-warmup", "--watchdog-timeout", "3600", "--sleep-on-idle"),
)
_CPU_ENV = {"TRITON_INTERPRET": "1", "SGLANG_MAMBA_CONV_DTYPE": "float16", "OMP_NUM_THREADS": "1"}
_PLATFORMS = "sglang.srt.platforms"


def has_gpu() -> bool:
    """Whether an NVIDIA driver answers here with at least one GPU."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return False
    try:
        listing = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and "GPU" in listing.stdout


def host_profile(name: str) -> HostProfile:
    """``cpu``, ``gpu``, or ``auto`` for what this machine has."""
    if name == "auto":
        name = "gpu" if has_gpu() else "cpu"
    if name == "gpu":
        return HostProfile("gpu")
    return HostProfile("cpu", _CPU_ARGS, {**_CPU_ENV, "SGLANG_PLATFORM": _cpu_platform()})


def _cpu_platform() -> str:
    """The installed SGLang platform package that runs without a GPU, named by SGLANG_PLATFORM if there are several."""
    chosen = os.environ.get("SGLANG_PLATFORM")
    if chosen:
        return chosen
    names = sorted({e.name for e in entry_points(group=_PLATFORMS)})
    if len(names) == 1:
        return names[0]
    if names:
        raise BenchError(f"several SGLang platforms are installed ({', '.join(names)}): name one in SGLANG_PLATFORM")
    raise BenchError(
        "there is no GPU, and no installed package lets SGLang run without one; ./run setup installs one for tests"
    )


def gpu_memory_used() -> int | None:
    """MiB in use over all GPUs, or None where nvidia-smi does not say."""
    lines = _query_gpus("memory.used")
    return sum(int(line) for line in lines) if lines and all(line.isdigit() for line in lines) else None


@functools.cache
def gpu_name() -> str | None:
    """The GPUs of this machine, such as ``2 x NVIDIA H200``, or None."""
    names = _query_gpus("name")
    kinds = sorted(set(names))
    return ", ".join(k if names.count(k) == 1 else f"{names.count(k)} x {k}" for k in kinds) or None


def _query_gpus(field_name: str) -> list[str]:
    """One value per GPU as nvidia-smi prints it; empty where there is none to ask."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, f"--query-gpu={field_name}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()] if answer.returncode == 0 else []


def vocab_of(model: str | None) -> Vocab:
    """Token ids to draw prompts from: ordinary ones, clear of the special tokens at both ends.

    The upper end is 80% of the vocabulary in a local model's config.json, at most 30,000; 30,000 where there is no such
    file to read.
    """
    default = Vocab()
    size = _vocab_size(model)
    if size is None:
        return default
    high = min(default.high, max(2, size * 4 // 5))
    return Vocab(min(default.low, high // 2), high)


def model_needs(model: str | None, profile: HostProfile) -> HostProfile:
    """``profile`` with what a local model's config.json asks of a server beside it.

    SGLang keeps convolution states in bfloat16 unless told otherwise, whatever the model's dtype; and on a CPU host
    latent attention runs on the triton backend only.
    """
    config = _config(model)
    args, env = profile.args, dict(profile.env)
    if config.get("dtype", config.get("torch_dtype")) == "float16":
        env["SGLANG_MAMBA_CONV_DTYPE"] = "float16"
    if profile.name == "cpu" and config.get("kv_lora_rank"):
        args = (*args, "--attention-backend", "triton")
    return HostProfile(profile.name, args, env)


def _vocab_size(model: str | None) -> int | None:
    config = _config(model)
    for table in (config, config.get("text_config") or {}):
        if isinstance(table.get("vocab_size"), int):
            return int(table["vocab_size"])
    return None


def _config(model: str | None) -> dict[str, Any]:
    """A local model's config.json; empty where there is none to read."""
    try:
        found = json.loads((Path(model) / "config.json").read_text()) if model else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
