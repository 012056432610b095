"""Tiny Kimi Delta Attention checkpoints and a plain PyTorch reference: transformers has no class for these models.

A layer, in the order of the published models (RMS norms N, every projection without bias):

    x += attention(N x);  x += feed_forward(N x)

Kimi Delta Attention, per head (`_delta_attention`): q, k, v pass a causal depthwise convolution and SiLU; q and k are
l2-normalised, q scaled by K^-1/2; then, token by token,

    S <- S Diag(e^g);  S <- S + beta (v - S k) k^T;  o = S q        beta = sigmoid(b)
    g = -exp(A_log) softplus(f + dt_bias)                           unbounded gate
    g = lower_bound sigmoid(exp(A_log) (f + dt_bias))               bounded gate

and o is normalised, multiplied by sigmoid(z), and projected. Full attention (`_latent_attention`) is multi-head latent
attention without rotary embedding: keys and values come from one latent vector per token, and one part of the key is
shared by the heads. Some models route the feed-forward over experts (`_experts`).

Everything is computed in float64 from the float16 weights, over the whole sequence at once, without any cache.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

STAMP = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()  # of the code that runs, see tiny.py
SEED = 2


# -- checkpoints ------------------------------------------------------------------------------------------------------


def config(name: str, vocabulary: int) -> dict[str, Any]:
    """The config.json of a tiny model (tiny.KIMI): three layers with KDA, one with full attention.

    kimi-linear has unbounded gates, kimi-linear-bf16 is the same for a server in bfloat16, kimi-linear-moe has experts;
    ling-v3 is Bailing's Ling V3, which has Kimi's layers with a bounded gate; with `mtp` it has a layer that drafts.
    """
    body = dict(
        vocab_size=vocabulary,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=128,
        hidden_act="silu",
        max_position_embeddings=8192,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        dtype="bfloat16" if name.endswith("-bf16") else "float16",  # SGLang's Kimi looks here, not only at --dtype
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
        q_lora_rank=None,
        kv_lora_rank=256,
        qk_nope_head_dim=16,
        v_head_dim=32,
        moe_intermediate_size=32,
        first_k_dense_replace=4,
        num_nextn_predict_layers=0,
    )
    if name.startswith("ling-v3"):
        bounded = not name.endswith("-unbounded")
        body["num_nextn_predict_layers"] = int("-mtp" in name)
        return body | dict(
            architectures=["BailingMoeV3ForCausalLM"],
            model_type="bailing_hybrid",
            head_dim=32,
            rms_norm_eps=1e-6,
            qk_rope_head_dim=0,
            use_mla_nope=True,
            layer_group_size=4,
            short_conv_kernel_size=4,
            no_kda_lora=True,
            kda_safe_gate=bounded,
            kda_lower_bound=-5.0 if bounded else None,
            num_experts=1,
            num_shared_experts=0,
        )
    layers = dict(kda_layers=[1, 2, 3], full_attn_layers=[4], head_dim=32, num_heads=2, short_conv_kernel_size=4)
    kimi = body | dict(
        architectures=["KimiLinearForCausalLM"],
        model_type="kimi_linear",
        head_dim=16,
        rms_norm_eps=1e-5,  # SGLang's output norm of KDA has this one whatever the config says
        qk_rope_head_dim=32,  # the width that the triton backend has for a latent of 256; nothing is rotated
        mla_use_nope=True,
        model_max_length=8192,
        linear_attn_config=layers,
        num_experts=None,
    )
    if name == "kimi-linear-moe":
        # every expert for every token, as in tiny.py's other models: a top-k choice is a step that rounding crosses
        kimi |= dict(
            num_experts=2,
            num_experts_per_token=2,
            num_shared_experts=1,
            first_k_dense_replace=1,
            moe_layer_freq=1,
            moe_router_activation_func="sigmoid",
            moe_renormalize=True,
            num_expert_group=1,
            topk_group=1,
        )
    return kimi


def weights(config: dict[str, Any]) -> dict[str, Tensor]:
    """Deterministic weights by their published names, scaled so that activations stay near 1."""
    random = torch.Generator().manual_seed(SEED)
    sizes = Sizes.of(config)
    drawn = {name: _draw(name, shape, random, sizes.lower_bound is not None) for name, shape in _parameters(sizes)}
    if config["num_nextn_predict_layers"]:
        _add_drafts(drawn, sizes)
    return drawn


FOLLOWS, EMBEDDING = 6.0, 2.0
"""As in tiny.py: how strongly the head prefers one successor of a token, and how clearly it sees that token."""


def _add_drafts(drawn: dict[str, Tensor], sizes: Sizes) -> None:
    """Adds the layer for multi-token prediction, whose guesses are right now and then: as the one of tiny.py."""
    random = torch.Generator().manual_seed(SEED + 1)
    layers = len(sizes.delta_layers)
    full, drafts = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    for name in [name for name in drawn if name.startswith(full)]:
        value = drawn[name]
        noise = torch.randn(value.shape, generator=random) * 0.1
        drawn[name.replace(full, drafts)] = noise.half() if value.dim() > 1 else value.clone()
    table = f"model.{sizes.embedding}.weight"
    embedding = drawn[table].float()
    drawn[table] = (EMBEDDING * embedding).half()
    successor = embedding[torch.randperm(sizes.vocabulary, generator=random)]
    head = FOLLOWS * successor + torch.randn(successor.shape, generator=random)
    drawn["lm_head.weight"] = (head * 1.6 / math.sqrt(sizes.hidden)).half()
    drawn[drafts + "final_layernorm.weight"] = drawn["model.norm.weight"].clone()
    for part in ("enorm", "hnorm"):
        drawn[f"{drafts}{part}.weight"] = torch.ones(sizes.hidden).half()
    both = [2 * torch.eye(sizes.hidden), 0.1 * torch.randn(sizes.hidden, sizes.hidden, generator=random)]
    drawn[drafts + "eh_proj.weight"] = torch.cat(both, 1).half()


def _draw(name: str, shape: tuple[int, ...], random: torch.Generator, bounded: bool) -> Tensor:
    if "norm" in name:
        return (1 + 0.1 * torch.randn(shape, generator=random)).half()
    # A head that remembers the whole prompt and one that forgets within a few tokens: about e^-0.03 and e^-0.3 each.
    if name.endswith("A_log"):
        first, last = (1.0, 0.5) if bounded else (0.02, 0.3)
        return torch.linspace(math.log(first), math.log(last), math.prod(shape)).view(shape)
    if name.endswith("dt_bias"):
        return torch.randn(shape, generator=random) * 0.5 - (6.0 if bounded else 0.0)
    if name.endswith("correction_bias"):
        return torch.randn(shape, generator=random) * 0.1
    std = 1.0 if "embed" in name else 0.5 if "conv1d" in name else 1.6 / math.sqrt(shape[-1])
    return (torch.randn(shape, generator=random) * std).half()


@dataclass(frozen=True)
class Sizes:
    """What the two configurations call differently, under one name each."""

    vocabulary: int
    hidden: int
    heads: int  # of either attention
    intermediate: int
    eps: float
    delta_layers: tuple[bool, ...]
    key: int  # channels of a KDA head; its values have as many
    width: int  # of the convolution
    lower_bound: float | None
    low_rank: bool  # forget gate and output gate through a vector of `key` channels
    latent: int
    nope: int
    rope: int
    value: int  # of a latent-attention head
    first_sparse: int
    experts: int
    expert_size: int
    embedding: str
    attention: str

    @classmethod
    def of(cls, config: dict[str, Any]) -> Sizes:
        """Sizes of a config.json of either model."""
        layers = config["num_hidden_layers"]
        common: dict[str, Any] = dict(
            vocabulary=config["vocab_size"],
            hidden=config["hidden_size"],
            heads=config["num_attention_heads"],
            intermediate=config["intermediate_size"],
            eps=config["rms_norm_eps"],
            latent=config["kv_lora_rank"],
            nope=config["qk_nope_head_dim"],
            rope=config["qk_rope_head_dim"],
            value=config["v_head_dim"],
            expert_size=config["moe_intermediate_size"],
        )
        if config["model_type"] == "bailing_hybrid":
            period = config["layer_group_size"]
            return cls(
                **common,
                delta_layers=tuple((layer + 1) % period != 0 for layer in range(layers)),
                key=config["head_dim"],
                width=config["short_conv_kernel_size"],
                lower_bound=config["kda_lower_bound"],
                low_rank=not config["no_kda_lora"],
                first_sparse=layers,
                experts=0,
                embedding="word_embeddings",
                attention="attention",
            )
        linear = config["linear_attn_config"]
        assert linear["num_heads"] == config["num_attention_heads"]
        experts = config["num_experts"] or 0
        assert not experts or config["num_experts_per_token"] == experts, "the reference takes no choice"
        return cls(
            **common,
            delta_layers=tuple(layer + 1 in linear["kda_layers"] for layer in range(layers)),
            key=linear["head_dim"],
            width=linear["short_conv_kernel_size"],
            lower_bound=None,
            low_rank=True,
            first_sparse=config["first_k_dense_replace"],
            experts=experts,
            embedding="embed_tokens",
            attention="self_attn",
        )


def _parameters(s: Sizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Published name and shape of every parameter."""
    delta = s.heads * s.key
    yield f"model.{s.embedding}.weight", (s.vocabulary, s.hidden)
    for layer, is_delta in enumerate(s.delta_layers):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", (s.hidden,)
        yield at + "post_attention_layernorm.weight", (s.hidden,)
        attention = at + s.attention + "."
        if is_delta:
            for part in "qkv":
                yield f"{attention}{part}_proj.weight", (delta, s.hidden)
                yield f"{attention}{part}_conv1d.weight", (delta, 1, s.width)
            yield attention + "A_log", (1, 1, s.heads, 1) if s.low_rank else (s.heads,)
            yield attention + "dt_bias", (delta,)
            yield attention + "b_proj.weight", (s.heads, s.hidden)
            for gate in "fg":
                if s.low_rank:
                    yield f"{attention}{gate}_a_proj.weight", (s.key, s.hidden)
                    yield f"{attention}{gate}_b_proj.weight", (delta, s.key)
                else:
                    yield f"{attention}{gate}_proj.weight", (delta, s.hidden)
            yield attention + "o_norm.weight", (s.key,)
            yield attention + "o_proj.weight", (s.hidden, delta)
        else:
            yield attention + "q_proj.weight", (s.heads * (s.nope + s.rope), s.hidden)
            yield attention + "kv_a_proj_with_mqa.weight", (s.latent + s.rope, s.hidden)
            yield attention + "kv_a_layernorm.weight", (s.latent,)
            yield attention + "kv_b_proj.weight", (s.heads * (s.nope + s.value), s.latent)
            yield attention + "o_proj.weight", (s.hidden, s.heads * s.value)
        if layer < s.first_sparse:
            yield from _swiglu_parameters(at + "mlp.", s.hidden, s.intermediate)
            continue
        at += "block_sparse_moe."
        yield at + "gate.weight", (s.experts, s.hidden)
        yield at + "gate.e_score_correction_bias", (s.experts,)
        for expert in range(s.experts):
            for name, shape in zip("123", _swiglu_shapes(s.hidden, s.expert_size), strict=True):
                yield f"{at}experts.{expert}.w{name}.weight", shape
        yield from _swiglu_parameters(at + "shared_experts.", s.hidden, s.expert_size)
    yield "model.norm.weight", (s.hidden,)
    yield "lm_head.weight", (s.vocabulary, s.hidden)


def _swiglu_shapes(hidden: int, inner: int) -> tuple[tuple[int, int], ...]:
    """gate, down, up: the order of w1, w2, w3."""
    return (inner, hidden), (hidden, inner), (inner, hidden)


def _swiglu_parameters(at: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, int]]]:
    for name, shape in zip(("gate", "down", "up"), _swiglu_shapes(hidden, inner), strict=True):
        yield f"{at}{name}_proj.weight", shape


# -- reference --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Output:
    """logits [1, tokens, vocabulary], as transformers' models return them."""

    logits: Tensor


class Reference:
    """The model of a checkpoint folder, called like a transformers model: one sequence, whole, every time."""

    def __init__(self, folder: Path) -> None:
        from safetensors.torch import load_file

        self.sizes = Sizes.of(json.loads((folder / "config.json").read_text()))
        self.weights = {name: w.double() for name, w in load_file(folder / "model.safetensors").items()}

    def __call__(self, input_ids: Tensor, use_cache: bool = False) -> Output:
        assert not use_cache and input_ids.shape[0] == 1
        s, w = self.sizes, self.weights
        x = w[f"model.{s.embedding}.weight"][input_ids[0]]
        for layer, is_delta in enumerate(s.delta_layers):
            at = f"model.layers.{layer}."
            attention = self._delta_attention if is_delta else self._latent_attention
            x = x + attention(at + s.attention + ".", self._norm(at + "input_layernorm", x))
            y = self._norm(at + "post_attention_layernorm", x)
            x = x + (self._swiglu(at + "mlp.", y) if layer < s.first_sparse else self._experts(at, y))
        return Output((self._norm("model.norm", x) @ w["lm_head.weight"].T)[None])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        """RMS norm over the last dim."""
        return x * (x.square().mean(-1, keepdim=True) + self.sizes.eps).rsqrt() * self.weights[name + ".weight"]

    def _project(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[name + "_proj.weight"].T

    def _delta_attention(self, at: str, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> the same shape."""
        s, w = self.sizes, self.weights
        q, k, v = (self._short_convolution(f"{at}{part}", self._project(at + part, x)) for part in "qkv")
        q = _normalise(q) * s.key**-0.5
        k = _normalise(k)
        beta = torch.sigmoid(self._project(at + "b", x))
        f, z = (self._gate_projection(at + gate, x) for gate in "fg")
        rate = w[at + "A_log"].reshape(-1, 1).exp()
        f = f + w[at + "dt_bias"].view(s.heads, s.key)
        g = -rate * F.softplus(f) if s.lower_bound is None else s.lower_bound * torch.sigmoid(rate * f)
        o = self._norm(at + "o_norm", _delta_rule(q, k, v, g, beta)) * torch.sigmoid(z)
        return self._project(at + "o", o.flatten(1))

    def _short_convolution(self, at: str, x: Tensor) -> Tensor:
        """Causal, depthwise, then SiLU: x [tokens, heads * key] -> [tokens, heads, key]."""
        s, kernel = self.sizes, self.weights[at + "_conv1d.weight"]
        padded = F.pad(x.T, (s.width - 1, 0))[None]
        return F.silu(F.conv1d(padded, kernel, groups=x.shape[1])[0].T).view(-1, s.heads, s.key)

    def _gate_projection(self, at: str, x: Tensor) -> Tensor:
        """[tokens, heads, key] of the forget gate or the output gate."""
        s = self.sizes
        y = self._project(at + "_b", self._project(at + "_a", x)) if s.low_rank else self._project(at, x)
        return y.view(-1, s.heads, s.key)

    def _latent_attention(self, at: str, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> the same shape."""
        s, tokens = self.sizes, x.shape[0]
        q = self._project(at + "q", x).view(tokens, s.heads, s.nope + s.rope)
        latent, shared = (x @ self.weights[at + "kv_a_proj_with_mqa.weight"].T).split([s.latent, s.rope], -1)
        kv = self._project(at + "kv_b", self._norm(at + "kv_a_layernorm", latent)).view(tokens, s.heads, -1)
        own, v = kv.split([s.nope, s.value], -1)
        k = torch.cat([own, shared[:, None].expand(-1, s.heads, -1)], -1)
        scores = torch.einsum("thd,uhd->htu", q, k) * (s.nope + s.rope) ** -0.5
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        probabilities = scores.masked_fill(later, -math.inf).softmax(-1)
        return self._project(at + "o", torch.einsum("htu,uhd->thd", probabilities, v).flatten(1))

    def _swiglu(
        self, at: str, x: Tensor, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    ) -> Tensor:
        gate, up, down = (self.weights[f"{at}{name}.weight"] for name in names)
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def _experts(self, at: str, x: Tensor) -> Tensor:
        """Every expert, weighted by its sigmoid score; the correction bias only moves the choice, and there is none."""
        at += "block_sparse_moe."
        scores = torch.sigmoid(x @ self.weights[at + "gate.weight"].T)
        share = scores / scores.sum(-1, keepdim=True)
        routed = (
            share[:, expert, None] * self._swiglu(f"{at}experts.{expert}.", x, ("w1", "w3", "w2"))
            for expert in range(self.sizes.experts)
        )
        return sum(routed, self._swiglu(at + "shared_experts.", x))


def _normalise(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The recurrence, token by token: q, k, v, g [tokens, heads, key] and beta [tokens, heads] -> o like v."""
    state = torch.zeros(k.shape[1], v.shape[2], k.shape[2], dtype=k.dtype)
    outputs = []
    for q_t, k_t, v_t, decay, rate in zip(q, k, v, g.exp(), beta, strict=True):
        state = state * decay[:, None, :]
        error = v_t - torch.einsum("hvk,hk->hv", state, k_t)
        state = state + torch.einsum("h,hv,hk->hvk", rate, error, k_t)
        outputs.append(torch.einsum("hvk,hk->hv", state, q_t))
    return torch.stack(outputs)
