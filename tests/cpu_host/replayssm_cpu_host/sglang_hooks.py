"""SGLang functions that need a device, replaced for CPU tensors through SGLang's hook registry."""

from __future__ import annotations

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from replayssm_cpu_host import elementwise, hicache

KERNELS = "sglang.kernels.ops."
SCATTER = KERNELS + "mamba.mamba_state_scatter_triton."


def register() -> None:
    """Register every hook; SGLang applies them when all plugins are loaded."""
    replacements = {
        # asks the CUDA driver
        KERNELS + "attention.fla.layernorm_gated._get_sm_count": lambda device: 1,
        # refuse tensors that are not on CUDA or XPU
        SCATTER + "fused_mamba_state_scatter_with_mask": scatter_verified_states,
        SCATTER + "fused_conv_window_scatter_with_mask": scatter_verified_states,
        # launched once per token: correct in the interpreter, and most of its time
        KERNELS + "attention.triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat": elementwise.split_qkvz_ba,
        KERNELS + "attention.linear.fused_gdn_gating.fused_gdn_gating": elementwise.gdn_gating,
        KERNELS + "elementwise.elementwise._launch_fused_gate_sigmoid_mul": elementwise.gate_sigmoid_mul,
    }
    for target, replacement in replacements.items():
        HookRegistry.register(target, replacement, HookType.REPLACE)
    # the host pools' modules can be imported only when a server asks for HiCache: patch them then
    HookRegistry.register(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.init_hicache",
        hicache.install,
        HookType.BEFORE,
    )


def scatter_verified_states(
    dst: torch.Tensor,
    src: torch.Tensor,
    dst_indices_raw: torch.Tensor,
    step_indices_raw: torch.Tensor,
    src_indices_raw: torch.Tensor | None = None,
) -> None:
    """Commit of speculative verify: `dst[:, slot[i]] = src[:, row[i], step[i]]` wherever `step[i] >= 0`.

    Args:
        dst: states or conv windows, [layers, slots, ...].
        src: the same per draft token, [layers, rows, draft tokens, ...].
        dst_indices_raw: slots, [requests].
        step_indices_raw: accepted steps, [requests]; negative skips.
        src_indices_raw: rows, [requests]; None means 0, 1, 2, ...
    """
    steps, slots = step_indices_raw.long(), dst_indices_raw.long()
    rows = torch.arange(len(steps)) if src_indices_raw is None else src_indices_raw.long()
    inside = (slots >= 0) & (slots < dst.shape[1]) & (rows < src.shape[1]) & (steps < src.shape[2])
    keep = inside & (steps >= 0)
    dst[:, slots[keep]] = src[:, rows[keep], steps[keep]]
