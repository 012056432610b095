"""States inside an extend: the state and the conv window that a prefill has after chosen token counts, into slots.

A prefill kernel for gated delta rules cuts every sequence into chunks of 64 tokens, and computes for all chunks at once
what does not depend on the state: per token a vector w, which the state is read with, and u, what the token would write
if the state were zero. Then the state walks from chunk to chunk. `leave_states` walks the same way once more, up to the
last chosen token count of a sequence, and stores the state at each:

    S at a token of the chunk that starts with state S_0:    S = S_0 e^G + sum_j (u_j - S_0 w_j) (e^{G - G_j} k_j)^T
    G: the chunk's gates up to that token, summed; G_j: those up to token j; per key channel for KDA

Rows of w and u depend on earlier tokens only, so any token count inside a chunk will do, not only its end. Products and
roundings are those of SGLang's kernel: from the same w and u its state at a multiple of 64 tokens, and that of a
prefill which ends at the token count, come out with the same bits. (For KDA SGLang makes w and u by other kernels where
chunks times heads are few; across that limit two prefills of its own differ by rounding in the activations' dtype.)

    state    [slots, HV, V, K]     of one layer; slot stride free, contiguous within a slot
    w        [tokens, HV, K]       activations' dtype; tokens of all sequences, one after the other
    u        [tokens, HV, V]       same dtype
    k        [tokens, H, K]        keys, normalised
    gates    [tokens, HV] (GDN, natural logarithms) or [tokens, HV, K] (KDA, base 2), fp32: summed up within the chunk
    decayed  [tokens, HV, K]       KDA: k e^{G - G_j} with the G of the chunk's end
    conv     [slots, dim, window]  of one layer, any strides; columns oldest first
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .gates import INTERPRETED

CHUNK = 64
"""Tokens per chunk of SGLang's prefill kernels."""

COLUMNS = 6
"""Of `Points.rows`: even, so that what lies behind them in memory is always aligned as Triton tells launches apart."""

_COLUMNS = tl.constexpr(COLUMNS)


@dataclass(frozen=True)
class Points:
    """Where the extends of one forward leave their states.

    Attributes:
        rows: [sequences, 6] int64: first token, source slot's place in the batch, first point, end of its points,
            whether the source's conv window counts (a request without a prefix starts with zeros instead), nothing.
        points: [points, 2] int64: tokens before the point, and its sequence in `rows`. Ascending within a sequence.
        slots: [points] int64: destinations, distinct, and no sequence's own slot.
    """

    rows: torch.Tensor
    points: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def of(
        cls, sequences: Sequence[tuple[int, int, bool, Sequence[int]]], slots: torch.Tensor, device: torch.device
    ) -> Points:
        """From (first token, place in the batch, has a prefix, token counts) of each sequence, without waiting."""
        rows, points = [], []
        for first, place, prefix, counts in sequences:
            rows += [first, place, len(points), len(points) + len(counts), int(prefix), 0]
            points += [(count, len(rows) // COLUMNS - 1) for count in counts]
        if len(points) != len(slots):
            raise ValueError(f"{len(points)} points, but {len(slots)} slots")
        host = torch.tensor(rows + [value for point in points for value in point], dtype=torch.int64)
        if device.type == "cuda":
            host = host.pin_memory()
        table = host.to(device, non_blocking=True)
        return cls(table[: len(rows)].view(-1, COLUMNS), table[len(rows) :].view(-1, 2), slots.to(torch.int64))


@triton.jit
def _after(
    state, token, first, stop, w, u, keys, gates, o_k, o_v,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, CHANNELS: tl.constexpr, DECAYED: tl.constexpr,
):  # fmt: skip
    """The state after tokens first .. stop - 1 of the sequence that starts at `token`, from that before: [BV, K]."""
    begin = token + first  # 64 bits
    w += begin * (HV * K)
    u += begin * (HV * V)
    keys += begin * ((HV if CHANNELS else H) * K)
    gates += begin * (HV * K if CHANNELS else HV)
    t = tl.arange(0, BT)
    stop = stop - first
    live = (t < stop)[:, None]
    read = tl.load(w + t[:, None] * (HV * K) + o_k[None, :], mask=live, other=0.0)
    written = tl.load(u + t[:, None] * (HV * V) + o_v[None, :], mask=live, other=0.0)
    written = written - tl.dot(read, tl.trans(state).to(read.dtype))
    if CHANNELS:
        last = tl.load(gates + (stop - 1) * (HV * K) + o_k)
        key = tl.load(keys + t[:, None] * (HV * K) + o_k[None, :], mask=live, other=0.0)
        if not DECAYED:
            since = tl.load(gates + t[:, None] * (HV * K) + o_k[None, :], mask=live, other=0.0)
            key = tl.where(live, key * tl.exp2(last[None, :] - since), 0.0).to(key.dtype)
        state = state * tl.exp2(last)[None, :]
    else:
        last = tl.load(gates + (stop - 1) * HV)
        since = last - tl.load(gates + t * HV, mask=t < stop, other=0.0)
        written *= tl.exp(tl.where(since <= 0, since, float("-inf")))[:, None]
        key = tl.load(keys + t[:, None] * (H * K) + o_k[None, :], mask=live, other=0.0)
        state = state * tl.exp(last)
    return state + tl.trans(tl.dot(tl.trans(key), written.to(key.dtype)))


@triton.jit
def _leave_states_kernel(
    state, sources, rows, points, slots, w, u, k, decayed, gates, s_state,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BV: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    i_v = tl.program_id(0)
    i_hv = tl.program_id(1) % HV
    row = rows + tl.program_id(1) // HV * _COLUMNS
    o_k = tl.arange(0, K)
    o_v = i_v * BV + tl.arange(0, BV)
    token = tl.load(row)
    source = tl.load(sources + tl.load(row + 1)).to(tl.int64)
    i_key = i_hv if CHANNELS else i_hv // (HV // H)
    w += i_hv * K
    u += i_hv * V
    k += i_key * K
    decayed += i_hv * K
    gates += i_hv * K if CHANNELS else i_hv
    tile = i_hv * (V * K) + o_v[:, None] * K + o_k[None, :]
    if source >= 0:
        walked = tl.load(state + source * s_state + tile).to(tl.float32)
        done = 0
        for i in range(tl.load(row + 2), tl.load(row + 3)):
            at = tl.load(points + 2 * i).to(tl.int32)
            for chunk in range(done, at // BT):
                walked = _after(
                    walked, token, chunk * BT, chunk * BT + BT, w, u, decayed if CHANNELS else k, gates, o_k, o_v,
                    H, HV, K, V, BT, CHANNELS, True,
                )  # fmt: skip
            done = at // BT
            left = walked
            if done * BT < at:
                left = _after(walked, token, done * BT, at, w, u, k, gates, o_k, o_v, H, HV, K, V, BT, CHANNELS, False)
            slot = tl.load(slots + i)
            tl.store(state + slot * s_state + tile, left.to(state.dtype.element_ty))


@triton.jit
def _leave_windows_kernel(
    conv, inputs, sources, rows, points, slots, s_slot, s_dim, s_column, s_token, dim,
    WINDOW: tl.constexpr, BW: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)[:, None]
    o_w = tl.arange(0, BW)[None, :]
    at = tl.load(points + 2 * i)
    row = rows + tl.load(points + 2 * i + 1) * _COLUMNS
    source = tl.load(sources + tl.load(row + 1)).to(tl.int64)
    if source >= 0:
        inside = (o_d < dim) & (o_w < WINDOW)
        token = at - WINDOW + o_w
        new = tl.load(inputs + (tl.load(row) + token) * s_token + o_d, mask=inside & (token >= 0), other=0.0)
        p_old = conv + source * s_slot + o_d * s_dim + (WINDOW + token) * s_column
        old = tl.load(p_old, mask=inside & (token < 0) & (tl.load(row + 4) > 0), other=0.0)
        p_left = conv + tl.load(slots + i) * s_slot + o_d * s_dim + o_w * s_column
        tl.store(p_left, tl.where(token >= 0, new, old), mask=inside)


def leave_states(
    state: torch.Tensor,
    sources: torch.Tensor,
    points: Points,
    w: torch.Tensor,
    u: torch.Tensor,
    k: torch.Tensor,
    gates: torch.Tensor,
    decayed: torch.Tensor | None = None,
) -> None:
    """Store the state at every point. To be launched before the extend itself writes the sources' new states.

    Args:
        state: fp32, bf16 or fp16, see the module; read at the sources, written at the points' slots.
        sources: [batch] slot of every sequence of the forward; a negative one is skipped.
        w, u, k, gates, decayed: see the module; a leading 1 is allowed. `decayed` for KDA only, and always there.

    Raises ValueError where the shapes do not fit each other.
    """
    w, u, k, gates = (each.squeeze(0) if each.shape[0] == 1 and each.dim() > 3 else each for each in (w, u, k, gates))
    slots, v_heads, value_dim, key_dim = state.shape
    channels = decayed is not None
    tokens, k_heads = k.shape[:2]
    gates = gates.view(tokens, v_heads, *([key_dim] if channels else []))
    if decayed is not None:
        decayed = decayed.view(k.shape)
    if w.shape != (tokens, v_heads, key_dim) or u.shape != (tokens, v_heads, value_dim) or k.shape[2] != key_dim:
        raise ValueError(f"w {tuple(w.shape)}, u {tuple(u.shape)}, k {tuple(k.shape)} of state {tuple(state.shape)}")
    if channels and k_heads != v_heads:
        raise ValueError(f"KDA has a key head per v-head, got {k_heads} and {v_heads}")
    inputs = (w, u, k, gates) if decayed is None else (w, u, k, gates, decayed)
    if not all(each.is_contiguous() for each in (*inputs, state[0])):
        raise ValueError("w, u, k, gates and each slot must be contiguous")
    block_v = value_dim if INTERPRETED else min(32, value_dim)
    if value_dim % block_v or key_dim & (key_dim - 1):
        raise ValueError(f"head dims must be powers of two, got {key_dim} and {value_dim}")
    _leave_states_kernel[(value_dim // block_v, v_heads * points.rows.shape[0])](
        state, sources, points.rows, points.points, points.slots, w, u, k, k if decayed is None else decayed, gates,
        state.stride(0),
        H=k_heads, HV=v_heads, K=key_dim, V=value_dim, BT=CHUNK, BV=block_v, CHANNELS=channels,
        num_warps=4, num_stages=2,
    )  # fmt: skip


def leave_windows(conv: torch.Tensor, inputs: torch.Tensor, sources: torch.Tensor, points: Points) -> None:
    """Store the conv window at every point. To be launched before the convolution, which may work in place.

    Args:
        conv: see the module; read at the sources, written at the points' slots.
        inputs: [tokens, dim] what is convolved, contiguous within a token.
        sources: see `leave_states`.
    """
    _, dim, window = conv.shape
    if inputs.shape[1] != dim or inputs.stride(1) != 1:
        raise ValueError(f"inputs {tuple(inputs.shape)} do not fit windows {tuple(conv.shape)}")
    block = 4096 if INTERPRETED else 256
    _leave_windows_kernel[(len(points.slots), triton.cdiv(dim, block))](
        conv, inputs, sources, points.rows, points.points, points.slots,
        conv.stride(0), conv.stride(1), conv.stride(2), inputs.stride(0), dim,
        WINDOW=window, BW=triton.next_power_of_2(window), BD=block,
        num_warps=4,
    )  # fmt: skip
