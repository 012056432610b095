"""The two kinds of host a test server can run on: a CPU with Triton's interpreter, or an NVIDIA GPU."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess

# Flags that a server on CPU tensors needs, and pools small enough to start fast. Later flags win, so a test
# that wants other sizes just passes its own.
CPU_ARGS = (
    *("--device", "cpu", "--dtype", "float16"),
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--skip-server-warmup", "--watchdog-timeout", "3600"),
    *("--max-total-tokens", "4096", "--max-running-requests", "4", "--max-mamba-cache-size", "32"),
    *("--mem-fraction-static", "0.5"),
    "--sleep-on-idle",  # an idle scheduler spins otherwise, and takes one of the two cores of a CI machine
)
GPU_ARGS = (
    *("--dtype", "float16", "--attention-backend", "triton", "--sampling-backend", "pytorch"),
    *("--skip-server-warmup", "--watchdog-timeout", "600", "--sleep-on-idle"),
    *("--max-total-tokens", "4096", "--max-running-requests", "4", "--max-mamba-cache-size", "32"),
    *("--mem-fraction-static", "0.3", "--grammar-backend", "none"),
    *("--cuda-graph-bs-decode", "1", "2", "4", "--disable-prefill-cuda-graph"),
)
CPU_ENV = {
    "SGLANG_PLATFORM": "cpu_interp",
    "TRITON_INTERPRET": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}
# the conv states must have the model's dtype
COMMON_ENV = {"SGLANG_MAMBA_CONV_DTYPE": "float16", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}


@functools.cache
def has_gpu() -> bool:
    """Whether an NVIDIA GPU answers on this machine. REPLAYSSM_TEST_CPU=1 says no on one that has it."""
    if os.environ.get("REPLAYSSM_TEST_CPU") == "1" or not shutil.which("nvidia-smi"):
        return False
    try:
        probe = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return probe.returncode == 0 and "GPU" in probe.stdout


def server_args() -> list[str]:
    """The base flags of a test server on this host."""
    return list(GPU_ARGS if has_gpu() else CPU_ARGS)


def server_env() -> dict[str, str]:
    """The base environment of a test server on this host, beside the caller's own."""
    return dict(COMMON_ENV) if has_gpu() else {**COMMON_ENV, **CPU_ENV}
