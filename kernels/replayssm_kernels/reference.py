"""References in float64 and plain PyTorch, one line of mathematics per line of code. Slow on purpose.

    S_t = decayed S_{t-1} + u_t k_t^T      u_t = beta_t (v_t - (decayed S_{t-1}) k_t)      o_t = S_t q_t

`Token` holds one step's inputs after the gates and norms; `step` is the recurrence that every kernel is measured
against; `replay` is the same state from a checkpoint and records; `Sequential` runs requests of a random trace through
`step`, a token or a run of drafts at a time. Shapes: q, k [B, HV, K]; v, u, o [B, HV, V]; g [B, HV, 1] (GDN) or
[B, HV, K] (KDA); beta [B, HV]; S [B, HV, V, K]; all float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .ring import RingShape


class Token(NamedTuple):
    """One decode step's inputs per v-head, in float64; see the shapes above."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor


def gdn_gate(a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """Log-decay of GDN: a [B, HV], A_log [HV], dt_bias [HV] -> g [B, HV, 1], always <= 0."""
    x = a.double() + dt_bias.double()
    return (-A_log.double().exp() * torch.nn.functional.softplus(x, threshold=20.0))[..., None]


def kda_gate(
    a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float | None = None
) -> torch.Tensor:
    """Log-decay of KDA: a [B, HV K], A_log [HV], dt_bias [HV K] -> g [B, HV, K], always <= 0.

    With a lower_bound (< 0) the gate is lower_bound sigmoid(exp(A_log) (a + dt_bias)), else GDN's formula per channel.
    """
    x = (a.double() + dt_bias.double()).view(a.shape[0], A_log.shape[0], -1)
    rate = A_log.double().exp()[:, None]
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * x)
    return -rate * torch.nn.functional.softplus(x, threshold=20.0)


def update_rate(b: torch.Tensor, rounded: bool) -> torch.Tensor:
    """beta = sigmoid(b), [B, HV]. GDN rounds it to b's dtype (as SGLang does in prefill and decode), KDA does
    not.
    """
    return torch.sigmoid(b.float()).to(b.dtype).double() if rounded else torch.sigmoid(b.double())


def normalise(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def token(
    mixed_qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, k_heads: int, key_dim: int, scale: float
) -> Token:
    """Cut mixed_qkv [B, 2 H K + HV V], normalise q and k, and repeat the key heads for their group of
    v-heads.
    """
    batch, v_heads = beta.shape
    q, k, v = mixed_qkv.double().split(
        [k_heads * key_dim, k_heads * key_dim, mixed_qkv.shape[1] - 2 * k_heads * key_dim], 1
    )
    group = v_heads // k_heads
    q = normalise(q.view(batch, k_heads, key_dim)).repeat_interleave(group, 1) * scale
    k = normalise(k.view(batch, k_heads, key_dim)).repeat_interleave(group, 1)
    return Token(q, k, v.view(batch, v_heads, -1), g, beta)


def step(S: torch.Tensor, t: Token) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token of the plain recurrence. Returns (o, new state, u)."""
    S = S * t.g.exp()[:, :, None, :]
    u = t.beta[..., None] * (t.v - torch.einsum("bhvk,bhk->bhv", S, t.k))
    S = S + torch.einsum("bhv,bhk->bhvk", u, t.k)
    return torch.einsum("bhvk,bhk->bhv", S, t.q), S, u


def replay(S: torch.Tensor, u: torch.Tensor, k: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """The state after applying p records to checkpoint S [HV, V, K]: u [HV, p, V], k [HV, p, K], g [HV, p, 1
    or K].
    """
    S = S.double()
    for j in range(u.shape[1]):
        S = S * g[:, j].double().exp()[:, None, :] + u[:, j].double()[:, :, None] * k[:, j].double()[:, None, :]
    return S


def replay_row(
    shape: RingShape, state: torch.Tensor, ring_u: torch.Tensor, ring_k: torch.Tensor, ring_g: torch.Tensor, upto: int
) -> torch.Tensor:
    """`replay` from one layer's raw ring row: state [HV, V, K], u [HV, L, V], k [H or HV, L, K], g [HV, L(, K)].

    Sums of gates are turned back into the tokens' own gates, scaled keys into keys.
    """
    u, k, g = ring_u[:, :upto], ring_k[:, :upto].double(), ring_g[:, :upto].double()
    if shape.scaled_keys:
        k = k * g.exp()
    before = torch.zeros_like(g)
    before[:, 1:] = g[:, :-1]
    before[:, :: shape.gate_group] = 0  # a group starts anew
    g = g - before
    k = k.repeat_interleave(state.shape[0] // k.shape[0], 0)
    return replay(state, u, k, g if g.dim() == 3 else g[..., None])


def prefill_chunk(
    k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a prefill computes of one chunk before it knows the state, see extend.py.

        S_t = S_0 e^{G_t} + sum_{j <= t} x_j (e^{G_t - G_j} k_j)^T      x = u - S_0 w, of all tokens j

    Args:
        k: [T, HV, K]; v: [T, HV, V]; g: [T, HV, 1 or K]; beta: [T, HV].

    Returns:
        w [T, HV, K], u [T, HV, V], the gates' sums [T, HV, 1 or K] and k e^{G_T - G_j} [T, HV, K].
    """
    k, v, beta = k.double(), v.double(), beta.double()[..., None]
    sums = g.double().cumsum(0)
    since = (sums[:, None] - sums[None]).clamp_max(0).exp().expand(-1, -1, *k.shape[1:])  # from j to a later i
    pairs = torch.einsum("ihk,jhk,ijhk->hij", beta * k, k, since)
    solved = torch.linalg.inv(pairs.tril(-1) + torch.eye(len(k), dtype=k.dtype, device=k.device))
    w = torch.einsum("hij,jhk->ihk", solved, beta * k * sums.exp())
    u = torch.einsum("hij,jhv->ihv", solved, beta * v)
    return w, u, sums, k * (sums[-1] - sums).exp()


@dataclass
class Sequential:
    """The oracle of a random trace: for every request id the state and token count that plain decoding
    reaches.
    """

    states: dict[int, torch.Tensor] = field(default_factory=dict)
    lens: dict[int, int] = field(default_factory=dict)

    def start(self, request: int, state: torch.Tensor, length: int) -> None:
        """A request begins (after its prefill) at `length` tokens with `state` [HV, V, K]."""
        self.states[request] = state.double().clone()
        self.lens[request] = length

    def step(self, requests: list[int], t: Token) -> torch.Tensor:
        """One decode step of the batch `requests`; returns o [B, HV, V]."""
        o, S, _ = step(torch.stack([self.states[r] for r in requests]), t)
        for i, r in enumerate(requests):
            self.states[r] = S[i]
            self.lens[r] += 1
        return o

    def verify(self, request: int, t: Token) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The drafts t (their axis in B's place) one after the other, as if each were accepted, without committing any.

        Returns o [T, HV, V] and the state [HV, V, K] before the first draft and after every one.
        """
        states, outs = [self.states[request]], []
        for i in range(t.q.shape[0]):
            o, S, _ = step(states[-1][None], Token(*(part[i : i + 1] for part in t)))
            outs.append(o)
            states.append(S[0])
        return torch.cat(outs), states

    def accept(self, request: int, states: list[torch.Tensor], count: int) -> None:
        """Commit the first `count` drafts of a `verify` that returned `states`."""
        self.states[request] = states[count]
        self.lens[request] += count


def relative_error(x: torch.Tensor, reference: torch.Tensor) -> float:
    """||x - reference|| / ||reference|| in float64; NaN if anything is NaN."""
    reference = reference.double()
    return ((x.double() - reference).norm() / reference.norm().clamp_min(1e-300)).item()
