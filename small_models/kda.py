"""A small Kimi-Linear: three layers of Kimi Delta Attention and one of latent attention without positions."""

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

CHUNK = 16


def config(vocabulary: int) -> dict[str, Any]:
    """The config.json of the model, as published checkpoints of Kimi-Linear write it."""
    layers = dict(kda_layers=[1, 2, 3], full_attn_layers=[4], head_dim=32, num_heads=8, short_conv_kernel_size=4)
    return dict(
        architectures=["KimiLinearForCausalLM"],
        model_type="kimi_linear",
        vocab_size=vocabulary,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=32,
        intermediate_size=344,
        hidden_act="silu",
        max_position_embeddings=32768,
        model_max_length=32768,
        rms_norm_eps=1e-5,  # SGLang's output norm of KDA has this one whatever the config says
        rope_theta=10000.0,
        tie_word_embeddings=False,
        dtype="float16",
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
        q_lora_rank=None,
        kv_lora_rank=256,
        qk_nope_head_dim=16,
        qk_rope_head_dim=32,  # the width that SGLang's triton attention has for a latent of 256; nothing is rotated
        v_head_dim=32,
        mla_use_nope=True,
        moe_intermediate_size=32,
        first_k_dense_replace=4,
        num_experts=None,
        num_nextn_predict_layers=0,
        linear_attn_config=layers,
    )


class DeltaAttention(nn.Module):
    """x [batch, tokens, hidden] to the same shape; the decay of the state differs between key channels."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        linear_config, hidden = c["linear_attn_config"], c["hidden_size"]
        self.heads, self.size = linear_config["num_heads"], linear_config["head_dim"]
        inner, width = self.heads * self.size, linear_config["short_conv_kernel_size"]
        for part in "qkv":
            self.add_module(f"{part}_proj", linear(hidden, inner))
            self.add_module(f"{part}_conv1d", ShortConvolution(inner, width))
        a_log, dt_bias = initial_gates(inner, self.heads)
        self.A_log, self.dt_bias = nn.Parameter(a_log.view(1, 1, -1, 1)), nn.Parameter(dt_bias)
        self.b_proj = linear(hidden, self.heads)
        for gate in "fg":
            self.add_module(f"{gate}_a_proj", linear(hidden, self.size))
            self.add_module(f"{gate}_b_proj", linear(self.size, inner))
        self.o_norm = Norm(self.size, c["rms_norm_eps"])
        self.o_proj = linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._part(part, x) for part in "qkv")
        f, z = (self._gate(gate, x).float() for gate in "fg")
        f = f + self.dt_bias.view(self.heads, self.size)
        # a channel that keeps less than e^-10 of its state over one token keeps nothing that float16 would show
        g = (-self.A_log[0].exp() * F.softplus(f)).clamp(min=-10.0)
        beta = self.b_proj(x).float().sigmoid()
        with torch.autocast(x.device.type, enabled=False):
            o = delta_rule(unit(q) * self.size**-0.5, unit(k), v, g, beta, CHUNK)
        return self.o_proj((self.o_norm(o) * z.sigmoid()).flatten(2))

    def _part(self, part: str, x: Tensor) -> Tensor:
        y = self.get_submodule(f"{part}_conv1d")(self.get_submodule(f"{part}_proj")(x))
        return y.unflatten(-1, (self.heads, self.size))

    def _gate(self, gate: str, x: Tensor) -> Tensor:
        y = self.get_submodule(f"{gate}_b_proj")(self.get_submodule(f"{gate}_a_proj")(x))
        return y.unflatten(-1, (self.heads, self.size))


class LatentAttention(nn.Module):
    """Keys and values from one latent vector per token; one part of the key is shared by the heads."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        hidden, self.heads = c["hidden_size"], c["num_attention_heads"]
        self.nope, self.shared = c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        self.value, self.latent = c["v_head_dim"], c["kv_lora_rank"]
        self.q_proj = linear(hidden, self.heads * (self.nope + self.shared))
        self.kv_a_proj_with_mqa = linear(hidden, self.latent + self.shared)
        self.kv_a_layernorm = Norm(self.latent, c["rms_norm_eps"])
        self.kv_b_proj = linear(self.latent, self.heads * (self.nope + self.value))
        self.o_proj = linear(self.heads * self.value, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, -1))
        latent, shared = self.kv_a_proj_with_mqa(x).split([self.latent, self.shared], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1))
        own, v = kv.split([self.nope, self.value], -1)
        k = torch.cat([own, shared[:, :, None].expand(-1, -1, self.heads, -1).to(own.dtype)], -1)
        return self.o_proj(causal_attention(q, k, v, (self.nope + self.shared) ** -0.5).flatten(2))


def build(c: dict[str, Any]) -> LanguageModel:
    """The model of a :func:`config`, with initial weights."""
    layers: list[nn.Module] = []
    for number in range(1, c["num_hidden_layers"] + 1):
        delta = number in c["linear_attn_config"]["kda_layers"]
        mixer = DeltaAttention(c) if delta else LatentAttention(c)
        norms = tuple(Norm(c["hidden_size"], c["rms_norm_eps"]) for _ in range(2))
        layers.append(Residual("self_attn", mixer, SwiGlu(c["hidden_size"], c["intermediate_size"]), norms))
    return LanguageModel(Body(c["vocab_size"], c["hidden_size"], layers, Norm(c["hidden_size"], c["rms_norm_eps"])))
