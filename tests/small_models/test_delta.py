"""The chunked delta rule against its definition, token by token, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from small_models.delta import delta_rule


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    state = torch.zeros(*k.shape[::2], k.shape[3], v.shape[3], dtype=torch.float64)
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None]
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("tokens", [1, 16, 61, 200])
@pytest.mark.parametrize(("channels", "chunk"), [(1, 64), (1, 16), (12, 16)], ids=["gdn 64", "gdn 16", "kda 16"])
def test_chunks_equal_the_recurrence_with_gradients(tokens, channels, chunk):
    torch.manual_seed(tokens)
    q, k = (normalize(torch.randn(2, tokens, 3, 12), dim=-1) for _ in range(2))
    v, beta = torch.randn(2, tokens, 3, 5), torch.rand(2, tokens, 3)
    # heads that keep nearly everything, something, and nearly nothing over a token
    g = -torch.rand(2, tokens, 3, channels) * torch.tensor([1e-3, 1.0, 9.9])[:, None]
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]
    weights = torch.randn(2, tokens, 3, 5)
    ours, right = delta_rule(*inputs, chunk), recurrence(*inputs)
    assert torch.allclose(ours.double(), right, atol=2e-5, rtol=0)
    gradients = torch.autograd.grad((ours * weights).sum(), inputs)
    expected = torch.autograd.grad((right * weights).sum(), inputs)
    for mine, theirs in zip(gradients, expected, strict=True):
        assert mine.isfinite().all() and torch.allclose(mine, theirs, atol=5e-4, rtol=1e-3)
