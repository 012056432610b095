"""Run an unmodified SGLang on CPU tensors, with its Triton kernels in Triton's interpreter.

Test-only. It shows behaviour and numerics: no speed, no CUDA graphs, no tensor parallelism.

Both entry points do nothing unless `TRITON_INTERPRET=1` is set, so an installed copy is inert on a GPU host.

| module | holds |
|---|---|
| `interpreter` | fixes to Triton's interpreter; `install()` there works without SGLang, for kernel tests |
| `bf16` | the largest of them: bfloat16 |
| `torch_gaps` | names that SGLang expects of torch and that a CPU has no use for |
| `platform` | the SGLang platform class |
| `sglang_hooks` | SGLang functions that need a device: replaced with plain torch |
| `elementwise` | three hot elementwise kernels in torch, for speed |
| `hicache` | the copies between the device pools and the host tier |
"""

from __future__ import annotations

import os


def enabled() -> bool:
    """Whether this process runs Triton kernels in the interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def activate() -> str | None:
    """Entry point `sglang.srt.platforms`: the platform class by name, or None where it does not apply."""
    if not enabled():
        return None
    from replayssm_cpu_host import torch_gaps

    torch_gaps.ensure_torchvision()
    return "replayssm_cpu_host.platform.CpuInterpreterPlatform"


def register() -> None:
    """Entry point `sglang.srt.plugins`: apply the fixes and register the hooks of this process."""
    if not enabled():
        return
    from replayssm_cpu_host import interpreter, sglang_hooks, torch_gaps

    torch_gaps.install()
    interpreter.install()
    sglang_hooks.register()
