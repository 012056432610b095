"""What both models share: norms, convolution, SwiGLU, and the frame of embedding, residual layers and head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Norm(nn.Module):
    """RMS norm over the last dim, in float32; ``centred`` stores the weight minus one, as Qwen3-Next does."""

    def __init__(self, size: int, eps: float, centred: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if centred else torch.ones(size))
        self.eps, self.offset = eps, 1.0 if centred else 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x.float(), x.shape[-1:], eps=self.eps)
        return y * (self.weight.float() + self.offset)


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over tokens, then SiLU: [batch, tokens, channels] to the same shape."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, 1, width) * width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        width = self.weight.shape[-1]
        padded = F.pad(x.float(), (0, 0, width - 1, 0))
        # shifted products: their gradients are as fast as they are, unlike those of a convolution with many groups
        taps = [padded[:, i : i + x.shape[1]] * self.weight[:, 0, i].float() for i in range(width)]
        return F.silu(sum(taps[1:], taps[0]))


class SwiGlu(nn.Module):
    """down(silu(gate x) * up x), no biases."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = linear(hidden, inner)
        self.up_proj = linear(hidden, inner)
        self.down_proj = linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A projection without bias; weights of standard deviation 1/sqrt(inputs)."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


def unit(x: Tensor) -> Tensor:
    """``x`` in float32 over its length, as the delta-rule kernels normalise keys and queries."""
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Softmax attention, [batch, tokens, heads, n] each; fewer key heads are shared by groups of query heads."""
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    width = v.shape[-1]
    v = F.pad(v, (0, q.shape[-1] - width))  # the fast kernels take one width
    low = torch.get_autocast_dtype(q.device.type) if torch.is_autocast_enabled(q.device.type) else v.dtype
    q, k, v = (x.to(low).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)[..., :width]


class Body(nn.Module):
    """Embedding, layers, final norm. A layer has two norms and two residual branches, by their published names."""

    def __init__(self, vocabulary: int, hidden: int, layers: list[nn.Module], norm: nn.Module) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(layers)
        self.norm = norm

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids).float()
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class LanguageModel(nn.Module):
    """ids [batch, tokens] to logits [batch, tokens, vocabulary]; parameter names are those of the checkpoint."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.model = body
        self.lm_head = linear(body.embed_tokens.embedding_dim, body.embed_tokens.num_embeddings)
        branches = (2 * len(body.layers)) ** -0.5
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                    weight.mul_(branches)  # the sum of all branches starts at the size of one
            self.lm_head.weight.mul_(0.2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.model(ids)).float()


class Residual(nn.Module):
    """x + mixer(norm x), then + feed-forward(norm x); ``mixer_name`` is the mixer's name in the checkpoint."""

    def __init__(self, mixer_name: str, mixer: nn.Module, mlp: nn.Module, norms: tuple[nn.Module, nn.Module]) -> None:
        super().__init__()
        self.mixer_name = mixer_name
        self.add_module(mixer_name, mixer)
        self.mlp = mlp
        self.input_layernorm, self.post_attention_layernorm = norms

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.get_submodule(self.mixer_name)(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


def initial_gates(count: int, heads: int) -> tuple[Tensor, Tensor]:
    """A_log [heads] and dt_bias [count] such that the decay e^(-e^A_log softplus(dt_bias)) per token spreads widely.

    Time steps between 0.001 and 0.1 and rates between 1 and 16 remember from a few tokens to about a thousand.
    """
    step = torch.exp(torch.empty(count).uniform_(-6.9, -2.3))
    return torch.empty(heads).uniform_(1.0, 16.0).log(), step + torch.log(-torch.expm1(-step))
