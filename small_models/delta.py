"""The gated delta rule over whole sequences, in chunks, so that a GPU can train with it.

A head keeps a state S (K x V, zero at first); token t brings q, k, v, a log decay g (one number, or one per key
channel) and beta:

    S_t = Diag(e^g_t) S_{t-1} + k_t u_t^T      u_t = beta_t (v_t - (Diag(e^g_t) S_{t-1})^T k_t)      o_t = S_t^T q_t

Within a chunk the u of all tokens solve one triangular system, whose right-hand side is linear in the state S that
enters: u = U - W S. The state that leaves is then M S + B, and such maps compose: a scan over the chunks in log2 steps
gives every chunk its state. Everything is computed in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int) -> Tensor:
    """Outputs o [batch, tokens, heads, V], float32.

    q, k: [batch, tokens, heads, K], used as they are (the caller normalises and scales). v: [batch, tokens, heads, V].
    g: [batch, tokens, heads, 1] or [batch, tokens, heads, K], at most 0. beta: [batch, tokens, heads].
    ``chunk``: tokens per chunk, a power of two. With a decay per channel, e^(-chunk/2 * g) must fit into float32: a
    chunk of 16 takes any g above -10.
    """
    tokens = q.shape[1]
    q, k, v, g, beta = (_chunks(x, chunk) for x in (q, k, v, g, beta[..., None]))
    total = g.cumsum(-2)  # log decay from the start of the chunk, this token's own included
    last = total[..., -1:, :]
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()

    if g.shape[-1] == 1:
        decay = (total - total.mT).masked_fill(~causal, -torch.inf).exp()
        kk, qk = (k @ k.mT) * decay, (q @ k.mT) * decay
    else:
        # e^(total_i - total_j) is a product of two factors, taken from the middle so that neither leaves float32
        centred = total - total[..., chunk // 2 - 1 : chunk // 2, :]
        receding = k * (-centred).exp()
        kk, qk = (k * centred.exp()) @ receding.mT, (q * centred.exp()) @ receding.mT
        qk = qk.masked_fill(~causal, 0.0)

    # masked before anything multiplies it: above the diagonal a decay per channel may have left float32
    system = beta * kk.masked_fill(~causal.tril(-1), 0.0)
    right = torch.cat([beta * v, beta * k * total.exp()], -1)
    u, w = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], -1
    )
    leaving = (k * (last - total).exp()).mT
    state = _entering(last.mT.exp() * torch.eye(k.shape[-1], device=k.device) - leaving @ w, leaving @ u)
    o = (q * total.exp()) @ state + qk @ (u - w @ state)
    return o.flatten(2, 3)[:, :, :tokens].transpose(1, 2)


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """[batch, tokens, heads, n] to float32 [batch, heads, chunks, chunk, n]; zeros at the end change nothing."""
    x = F.pad(x.float().transpose(1, 2), (0, 0, 0, -x.shape[1] % chunk))
    return x.unflatten(2, (-1, chunk))


def _entering(m: Tensor, b: Tensor) -> Tensor:
    """The state before every chunk, from the maps S -> m S + b of all chunks; [batch, heads, chunks, K, V]."""
    step, count = 1, b.shape[2]
    while step < count:
        head_m, head_b = m[:, :, :step], b[:, :, :step]
        b = torch.cat([head_b, b[:, :, step:] + m[:, :, step:] @ b[:, :, :-step]], 2)
        m = torch.cat([head_m, m[:, :, step:] @ m[:, :, :-step]], 2)
        step *= 2
    return F.pad(b[:, :, :-1], (0, 0, 0, 0, 1, 0))
