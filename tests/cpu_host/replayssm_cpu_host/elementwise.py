"""Three elementwise kernels that SGLang launches once per token, in torch with the kernels' own rounding."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def split_qkvz_ba(
    mixed_qkvz: torch.Tensor,
    mixed_ba: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Qwen3-Next's projections, interleaved by key head, to [q | k | v], z, b and a.

    Args:
        mixed_qkvz: [tokens, H * (2 K + 2 (HV / H) V)].
        mixed_ba: [tokens, H * 2 (HV / H)].

    Returns:
        qkv [tokens, 2 H K + HV V], z [tokens, HV, V], b and a [tokens, HV].
    """
    tokens = mixed_qkvz.shape[0]
    group = num_heads_v // num_heads_qk
    widths = [head_qk, head_qk, group * head_v, group * head_v]
    q, k, v, z = mixed_qkvz.view(tokens, num_heads_qk, -1).split(widths, dim=-1)
    b, a = mixed_ba.view(tokens, num_heads_qk, -1).split([group, group], dim=-1)
    qkv = torch.cat([part.reshape(tokens, -1) for part in (q, k, v)], dim=1)
    z = z.reshape(tokens, num_heads_v, head_v)
    b, a = (part.reshape(tokens, num_heads_v).contiguous() for part in (b, a))
    return qkv, z.contiguous(), b, a


def gdn_gating(
    A_log: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-decay and beta of every token, both fp32 [1, tokens, HV]; beta is rounded to b's dtype first."""
    step = F.softplus(a.float() + dt_bias.float(), beta, threshold)
    g = -A_log.float().exp() * step
    return g[None], b.float().sigmoid().to(b.dtype).float()[None]


def gate_sigmoid_mul(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    output: torch.Tensor,
    *,
    do_add: bool,
) -> None:
    """`output (+)= sigmoid(hidden . gate) * shared`, all [tokens, hidden] but the gate, [hidden]."""
    gate = (hidden_states.float() @ gate_weight.float()).sigmoid()[:, None]
    gated = gate * shared_output.float()
    output.copy_(output.float() + gated if do_add else gated)
