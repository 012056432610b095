"""The SGLang platform of the CPU host: a CPU that says it can launch Triton kernels."""

from __future__ import annotations

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class CpuInterpreterPlatform(CpuDeviceMixin, SRTPlatform):
    """CPU tensors with `supports_triton`, so that SGLang takes the same code paths as on a GPU.

    It is an out-of-tree platform rather than SGLang's own CPU engine, which picks AMX kernels instead of the
    Triton ones under test.
    """

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities(supports_triton=True)

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def support_mamba_cache_extra_buffer(self) -> bool:
        return True

    def is_pin_memory_available(self, device: torch.device | None = None) -> bool:
        return False

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return True

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return True

    def get_speculative_worker_cls(self, algorithm: str) -> type | None:
        # The built-in worker is wanted (None), but its helpers choose between sgl_kernel's CUDA operators and
        # Triton by asking for an XPU: say yes, and they take Triton.
        from sglang.kernels.ops.speculative import cache_locs, spec_tree

        cache_locs._is_xpu = spec_tree._is_xpu = True
        return None
