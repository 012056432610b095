"""A small Qwen3-Next: three Gated DeltaNet layers and one of gated full attention, experts that all take part.

SGLang gives every layer of a Qwen3-Next experts; two, both chosen for every token, make a feed-forward without the
discontinuity of a choice, which rounding would cross.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .delta import delta_rule
from .layers import (
    Body,
    LanguageModel,
    Norm,
    Residual,
    ShortConvolution,
    SwiGlu,
    causal_attention,
    initial_gates,
    linear,
    unit,
)

CHUNK = 64


def config(vocabulary: int) -> dict[str, Any]:
    """The config.json of the model, as published checkpoints of Qwen3-Next write it."""
    return dict(
        architectures=["Qwen3NextForCausalLM"],
        model_type="qwen3_next",
        vocab_size=vocabulary,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=384,
        hidden_act="silu",
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        partial_rotary_factor=0.5,
        tie_word_embeddings=False,
        attn_output_gate=True,
        dtype="float16",
        bos_token_id=0,
        eos_token_id=0,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        full_attention_interval=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_experts=2,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        norm_topk_prob=True,
        mlp_only_layers=[],
    )


class GatedDeltaNet(nn.Module):
    """x [batch, tokens, hidden] to the same shape. Rows of the input projections are ordered by key head."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.keys, self.values = c["linear_num_key_heads"], c["linear_num_value_heads"]
        self.key, self.value = c["linear_key_head_dim"], c["linear_value_head_dim"]
        key, value = self.keys * self.key, self.values * self.value
        self.in_proj_qkvz = linear(c["hidden_size"], 2 * key + 2 * value)
        self.in_proj_ba = linear(c["hidden_size"], 2 * self.values)
        self.conv1d = ShortConvolution(2 * key + value, c["linear_conv_kernel_dim"])
        a_log, dt_bias = initial_gates(self.values, self.values)
        self.A_log, self.dt_bias = nn.Parameter(a_log), nn.Parameter(dt_bias)
        self.norm = Norm(self.value, c["rms_norm_eps"])
        self.out_proj = linear(value, c["hidden_size"])

    def forward(self, x: Tensor) -> Tensor:
        group = self.values // self.keys
        parts = [self.key, self.key, group * self.value, group * self.value]
        q, k, v, z = self.in_proj_qkvz(x).unflatten(-1, (self.keys, -1)).split(parts, -1)
        b, a = (y.flatten(2) for y in self.in_proj_ba(x).unflatten(-1, (self.keys, -1)).chunk(2, -1))
        key, value = self.keys * self.key, self.values * self.value
        q, k, v = self.conv1d(torch.cat([y.flatten(2) for y in (q, k, v)], -1)).split([key, key, value], -1)
        q, k = (unit(y.unflatten(-1, (self.keys, -1))).repeat_interleave(group, 2) for y in (q, k))
        g = -self.A_log.exp() * F.softplus(a.float() + self.dt_bias)
        v, z = v.unflatten(-1, (self.values, -1)), z.reshape(*x.shape[:2], self.values, self.value)
        with torch.autocast(x.device.type, enabled=False):
            o = delta_rule(q * self.key**-0.5, k, v, g[..., None], b.float().sigmoid(), CHUNK)
        return self.out_proj((self.norm(o) * F.silu(z.float())).flatten(2))


class GatedAttention(nn.Module):
    """Grouped-query attention whose output is gated, with rotary embedding of the first part of a head."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.groups, self.size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        self.theta, self.rotary = c["rope_theta"], int(c["head_dim"] * c["partial_rotary_factor"])
        self.q_proj = linear(c["hidden_size"], 2 * self.heads * self.size)
        self.k_proj = linear(c["hidden_size"], self.groups * self.size)
        self.v_proj = linear(c["hidden_size"], self.groups * self.size)
        self.o_proj = linear(self.heads * self.size, c["hidden_size"])
        self.q_norm, self.k_norm = (Norm(self.size, c["rms_norm_eps"], centred=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, gate = self.q_proj(x).unflatten(-1, (self.heads, -1)).chunk(2, -1)
        k, v = (p(x).unflatten(-1, (self.groups, -1)) for p in (self.k_proj, self.v_proj))
        q, k = (self._rotate(norm(y)) for norm, y in ((self.q_norm, q), (self.k_norm, k)))
        o = causal_attention(q, k, v, self.size**-0.5)
        return self.o_proj((o * gate.sigmoid()).flatten(2))

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotary embedding of the first ``rotary`` channels; the two halves of those are one complex number each."""
        half = self.rotary // 2
        speeds = self.theta ** -(torch.arange(half, device=x.device) / half)
        angle = (torch.arange(x.shape[1], device=x.device)[:, None] * speeds)[:, None]
        a, b, rest = x.split([half, half, x.shape[-1] - self.rotary], -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest], -1)


class Experts(nn.Module):
    """All experts weighted by the router's softmax, and a shared one with a gate of its own."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        assert c["num_experts"] == c["num_experts_per_tok"], "every expert takes part"
        self.gate = linear(c["hidden_size"], c["num_experts"])
        self.experts = nn.ModuleList(SwiGlu(c["hidden_size"], c["moe_intermediate_size"]) for _ in range(2))
        self.shared_expert = SwiGlu(c["hidden_size"], c["shared_expert_intermediate_size"])
        self.shared_expert_gate = linear(c["hidden_size"], 1)

    def forward(self, x: Tensor) -> Tensor:
        share = self.gate(x).float().softmax(-1)
        y = self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        for i, expert in enumerate(self.experts):
            y = y + share[..., i : i + 1] * expert(x)
        return y


def build(c: dict[str, Any]) -> LanguageModel:
    """The model of a :func:`config`, with initial weights."""
    layers: list[nn.Module] = []
    for kind in c["layer_types"]:
        name, mixer = (
            ("self_attn", GatedAttention(c)) if kind == "full_attention" else ("linear_attn", GatedDeltaNet(c))
        )
        norms = tuple(Norm(c["hidden_size"], c["rms_norm_eps"], centred=True) for _ in range(2))
        layers.append(Residual(name, mixer, Experts(c), norms))
    last = Norm(c["hidden_size"], c["rms_norm_eps"], centred=True)
    return LanguageModel(Body(c["vocab_size"], c["hidden_size"], layers, last))
