"""The ring's launches on the host: what the kernels compute, in NumPy, a hundred times faster than their interpreter.

For random traces of many thousand steps, which judge when the plugin launches what, and not the kernels: those have
tests of their own, and `test_twins.py` compares each twin with its kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from replayssm_kernels import DIRECT, FAULT, PAD, Points, Ring, StepPlan, WorkList
from sglang_replayssm import extend_hooks, request_ring
from tests.kernels.cursor_model import Model


def _model(ring: Ring) -> Model:
    return Model(ring.shape.capacity, ring.checkpoint.tolist(), ring.shape.max_width, int(ring.faults))


def _keep(ring: Ring, model: Model) -> None:
    ring.checkpoint.copy_(torch.tensor(model.checkpoint, dtype=torch.int32))
    ring.faults.fill_(model.faults)


def _list(worklist: WorkList, entries: list[tuple[int, int, int, int]]) -> None:
    worklist.count.fill_(len(entries))
    if entries:
        worklist.entries[:, : len(entries)] = torch.tensor(entries, dtype=torch.int32).T


def plan_step(
    ring: Ring,
    plan: StepPlan,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
    track_mask: torch.Tensor | None = None,
    track_slots: torch.Tensor | None = None,
    counters: Any = None,
    direct: bool = False,
) -> None:
    model = _model(ring)
    tracks = [-1] * len(rows)
    if track_mask is not None and track_slots is not None:
        tracks = [int(s) if on else -1 for s, on in zip(track_slots.tolist(), track_mask.tolist(), strict=True)]
    model.step(rows.tolist(), seq_lens.tolist(), slots.tolist(), tracks, direct=direct)
    _keep(ring, model)
    plan.pending[: len(rows)] = torch.tensor(model.pending, dtype=torch.int32)
    _list(plan.fold, model.fold)
    _list(plan.snapshot, model.snapshot)


def plan_forced_fold(
    ring: Ring,
    worklist: WorkList,
    rows: torch.Tensor,
    lens: torch.Tensor,
    slots: torch.Tensor,
    new_lens: torch.Tensor,
    counters: Any = None,
    reason: int = 0,
) -> None:
    model = _model(ring)
    model.forced(rows.tolist(), lens.tolist(), slots.tolist(), new_lens.tolist())
    _keep(ring, model)
    _list(worklist, model.fold)


def materialise(state: torch.Tensor, ring: Ring, worklist: WorkList) -> None:
    slots = state.numpy()
    for row, source, destination, upto in worklist.to_host():
        if not 0 <= upto <= ring.shape.capacity:
            slots[:, destination] = np.nan
        elif upto or source != destination:
            slots[:, destination] = replayed(slots[:, source], ring, row, upto)


def replayed(checkpoint: np.ndarray, ring: Ring, row: int, upto: int) -> np.ndarray:
    """States [layers, HV, V, K] in float64, `upto` records of a row after the checkpoint; GDN records."""
    u, k, g = (tensor.numpy()[:, row, :, :upto].astype(np.float64) for tensor in (ring.u, ring.k, ring.g))
    k = k.repeat(u.shape[1] // k.shape[1], axis=1)
    since = g[..., ::-1].cumsum(-1)[..., ::-1]  # gates of a record and of all younger ones
    weights = np.exp(since - g)[..., None]
    fade = np.exp(since[..., :1, None] if upto else 0.0)
    return checkpoint * fade + np.swapaxes(u * weights, -1, -2) @ k


def decode(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state_layer: torch.Tensor,
    ring: Ring,
    layer: int,
    slots: torch.Tensor,
    rows: torch.Tensor,
    pending: torch.Tensor,
    scale: float,
    direct: bool = False,
) -> torch.Tensor:
    s = ring.shape
    group, keys = s.v_heads // s.k_heads, s.k_heads * s.key_dim
    out = np.zeros((len(rows), s.v_heads, s.value_dim))
    u_rows, k_rows, g_rows = (tensor.numpy()[layer] for tensor in (ring.u, ring.k, ring.g))
    x = mixed_qkv.numpy().astype(np.float64)
    step = np.logaddexp(0.0, a.numpy().astype(np.float64) + dt_bias.numpy().astype(np.float64))
    gates = -np.exp(A_log.numpy().astype(np.float64)) * step
    betas = 1.0 / (1.0 + np.exp(-b.numpy().astype(np.float64)))
    for i, (row, slot, p) in enumerate(zip(rows.tolist(), slots.tolist(), pending[: len(rows)].tolist(), strict=True)):
        if p == FAULT or (p != PAD and (p == DIRECT) != direct):
            out[i] = np.nan
        if p == PAD or np.isnan(out[i]).any():
            continue
        raw = x[i, keys : 2 * keys].reshape(s.k_heads, s.key_dim)
        norm = 1.0 / np.sqrt((raw * raw).sum(-1, keepdims=True) + 1e-6)
        q = x[i, :keys].reshape(s.k_heads, s.key_dim)
        q = (q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) * scale).repeat(group, 0)
        k, norm = (raw * norm).repeat(group, 0), norm.repeat(group, 0)
        before = replayed(state_layer.numpy()[None, slot], _of_layer(ring, layer), row, max(p, 0))[0]
        before = before * np.exp(gates[i])[:, None, None]
        v = x[i, 2 * keys :].reshape(s.v_heads, s.value_dim)
        u = betas[i][:, None] * (v - (before @ k[..., None])[..., 0])
        out[i] = (before @ q[..., None])[..., 0] + u * (k * q).sum(-1, keepdims=True)
        if direct:
            state_layer.numpy()[slot] = before + u[..., None] * k[:, None]
            continue
        u_rows[row, :, p], k_rows[row, :, p], g_rows[row, :, p] = u * norm, raw, gates[i]
    return torch.from_numpy(out).to(mixed_qkv.dtype)


class _Layer:
    """A ring of one layer."""

    def __init__(self, u: torch.Tensor, k: torch.Tensor, g: torch.Tensor) -> None:
        self.u, self.k, self.g = u, k, g


def _of_layer(ring: Ring, layer: int) -> Any:
    return _Layer(*(tensor[layer : layer + 1] for tensor in (ring.u, ring.k, ring.g)))


def leave_windows(conv: torch.Tensor, inputs: torch.Tensor, sources: torch.Tensor, points: Points) -> None:
    window = conv.shape[2]
    for (at, sequence), slot in zip(points.points.tolist(), points.slots.tolist(), strict=True):
        first, place, _, _, has_prefix, _ = points.rows[sequence].tolist()
        if (source := int(sources[place])) >= 0:
            old = conv[source] if has_prefix else torch.zeros_like(conv[source])
            conv[slot] = torch.cat([old, inputs[first : first + at].T], 1)[:, -window:]


def leave_states(
    state: torch.Tensor, sources: torch.Tensor, points: Points, after: Callable[[int, int], np.ndarray], *unused: Any
) -> None:
    """In place of w comes what a prefill computes: the state [HV, V, K] of a sequence after so many of its tokens."""
    for (at, sequence), slot in zip(points.points.tolist(), points.slots.tolist(), strict=True):
        place = int(points.rows[sequence, 1])
        if int(sources[place]) >= 0:
            state[slot] = torch.from_numpy(after(place, at))


def track_windows(
    conv: torch.Tensor, twin: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor, destinations: torch.Tensor,
    batch_size: int, check_freed_slots: bool = False,
) -> None:  # fmt: skip
    """SGLang's `track_mamba_states_all_layers`, as the plugin calls it."""
    for i in mask.nonzero().flatten().tolist():
        if int(slots[i]) >= 0 and int(destinations[i]) >= 0:
            conv[:, int(destinations[i])] = conv[:, int(slots[i])]


@contextmanager
def in_place_of_kernels() -> Iterator[None]:
    """Within it the plugin launches the twins. For tensors of the host."""
    from sglang.srt.layers.attention import hybrid_linear_attn_backend

    with pytest.MonkeyPatch.context() as patch:
        for twin in (plan_step, plan_forced_fold, materialise, decode):
            patch.setattr(request_ring, twin.__name__, twin)
        for twin in (leave_windows, leave_states):
            patch.setattr(extend_hooks, twin.__name__, twin)
        patch.setattr(hybrid_linear_attn_backend, "track_mamba_states_all_layers", track_windows)
        yield
