"""Buffered decode: one token per request from checkpoint and pending records; the state is not written.

A direct step is the same without records: nothing is pending, and the program that read rows of the state writes them,
S e^G + u k^T, in place. It moves twice the state's bytes, and is faster where a step is all latency (small batches).

For one v-head with checkpoint S (V x K), p pending records (u_j, k_j, g_j) and this token's q, k, v, g, beta:

    G   = g + sum_j g_j                  log-decay since the checkpoint    (g: a number for GDN, a K-vector for KDA,
    G_j = g + sum of g_i, i younger      log-decay since record j           e^G then multiplies channel by channel)
    s_j = (e^{G_j} k_j) . q      r_j = (e^{G_j} k_j) . k
    u   = beta (v - S (e^G k) - sum_j r_j u_j)
    o   = S (e^G q) + sum_j s_j u_j + (k . q) u
    record p := (u, k, g)

q and k are l2-normalised, q also scaled. The ring keeps the raw key, which is exact in the activation dtype, and u
times the key's reciprocal norm, so that u_j k_j is the product of what is stored. (Scaled keys: see ring.py.) S and
u_j are projected; a V x K sum is never formed.

Bytes per step and v-head: V K s_state read; p V s_u + p K s_k / (HV / H) + 4 p (KDA: 4 p K; scaled keys: 4 K) of
records read; one record written.

    mixed_qkv  [B, 2 H K + HV V]      q heads, k heads, v heads, after the convolution; row stride free
    a          [B, HV]                GDN; row stride free
               [B, HV K]              KDA
    b          [B, HV]                row stride free
    A_log      [HV] fp32
    dt_bias    [HV] (KDA: [HV K])     any float
    state      [slots, HV, V, K]      one layer of the pool; slot stride free, the rest contiguous
    out        [B, HV, V]             contiguous, in mixed_qkv's dtype unless the caller brings another
    ring       see ring.py

One program owns (request, v-head, V / SPLIT rows) and walks its rows in tiles of BV, so keys and weights are computed
once. K is cut into register chunks of at most 32: a row's sum over K then needs three shuffles for four rows, not
five for one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .cursors import DIRECT, PAD
from .gates import GDN, KDA, RECORDS, SCALED, exp_careful, exp_decay, gate_constant, log_decay
from .launch_shapes import DecodeConfig, choose_config, choose_direct_config
from .replay import (
    dot_chunks,
    load_block,
    load_chunks,
    load_chunks_f32,
    plus,
    project,
    replay_gdn,
    replay_kda,
    replay_scaled,
    times,
    times_exp,
)
from .ring import GROUP, STATE_DTYPES, Ring

_PAD = tl.constexpr(PAD)
_DIRECT = tl.constexpr(DIRECT)
_GDN = tl.constexpr(GDN)
_KDA = tl.constexpr(KDA)
_SCALED = tl.constexpr(SCALED)
_GROUP = tl.constexpr(GROUP)


@triton.jit
def _decode_kernel(
    mixed_qkv, a, b, A_log, dt_bias, out, state, ring_u, ring_k, ring_g, slots, rows, pending, scale, lower_bound,
    s_qkv, s_a, s_b, s_state, s_u, s_k, s_g,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    GATE: tl.constexpr, BOUNDED: tl.constexpr, IS_DIRECT: tl.constexpr,
    RB: tl.constexpr, CH: tl.constexpr, BV: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    NC: tl.constexpr = K // CH
    NB: tl.constexpr = 0 if IS_DIRECT else (L + RB - 1) // RB
    TILES: tl.constexpr = V // SPLIT // BV
    PER_KEY: tl.constexpr = HV // H
    i_split = tl.program_id(0)
    i_hv = tl.program_id(1)
    i_n = tl.program_id(2)
    i_h = i_hv // PER_KEY
    v0 = i_split * (V // SPLIT)
    oc = tl.arange(0, CH)
    ov = tl.arange(0, BV)

    slot = tl.load(slots + i_n).to(tl.int64)
    p = tl.load(pending + i_n)
    p_out = out + (i_n * HV + i_hv) * V + v0 + ov
    misplaced = p != _DIRECT if IS_DIRECT else (p < 0) | (p >= L)
    if (slot < 0) | misplaced:
        # Padding gives zeros; anything else without a place in the ring is a fault and must be seen.
        fill = tl.where((slot < 0) | (p == _PAD), 0.0, float("nan"))
        for i in range(TILES):
            tl.store(p_out + i * BV, (tl.zeros([BV], tl.float32) + fill).to(out.dtype.element_ty))
        return
    row = tl.load(rows + i_n).to(tl.int64)
    p_state = state + slot * s_state + i_hv * (V * K) + (v0 + ov)[:, None] * K + oc[None, :]
    i_key = i_hv if GATE == _SCALED else i_h
    p_key = ring_k + row * s_k + i_key * (L * K)
    p_g = ring_g + row * s_g + i_hv * (L if GATE == _GDN else L * K)

    # What hangs on nothing but the row goes first, and is in flight while this token is worked out.
    if TILES == 1:
        tile = load_chunks(p_state, NC, CH)
    loaded = ()
    if NB == 1:
        loaded = load_block(0, p, p_key, p_g, K, RB, NC, CH, GATE)
    newest = ()  # gate sums of the newest record: where this token's own sum starts
    if GATE != _GDN and not IS_DIRECT:
        grows = p > 0 if GATE == _SCALED else p % _GROUP != 0
        for c in tl.static_range(NC):
            newest = newest + (tl.load(p_g + (p - 1) * K + c * CH + oc, mask=(oc >= 0) & grows, other=0.0),)

    # This token.
    p_q = mixed_qkv + i_n * s_qkv + i_h * K + oc
    q = load_chunks_f32(p_q, NC, CH)
    k = load_chunks_f32(p_q + H * K, NC, CH)
    q = times(q, tl.rsqrt(dot_chunks(q, q, NC) + 1e-6) * scale, NC)
    k_norm = tl.rsqrt(dot_chunks(k, k, NC) + 1e-6)
    k = times(k, k_norm, NC)
    qk = dot_chunks(q, k, NC)
    beta = tl.sigmoid(tl.load(b + i_n * s_b + i_hv).to(tl.float32))
    rate = tl.exp(tl.load(A_log + i_hv).to(tl.float32))
    if GATE == _GDN:
        # SGLang rounds GDN's beta to b's dtype, in prefill too; without that outputs drift from plain decode.
        beta = beta.to(b.dtype.element_ty).to(tl.float32)
        x = tl.load(a + i_n * s_a + i_hv).to(tl.float32) + tl.load(dt_bias + i_hv).to(tl.float32)
        g = log_decay(x, rate, lower_bound, BOUNDED)
    else:
        g = ()
        for c in tl.static_range(NC):
            channel = i_hv * K + c * CH + oc
            x = tl.load(a + i_n * s_a + channel).to(tl.float32) + tl.load(dt_bias + channel).to(tl.float32)
            g = g + (log_decay(x, rate, lower_bound, BOUNDED),)

    if IS_DIRECT:
        if GATE == _GDN:
            zq = times(q, tl.exp(g), NC)
            zk = times(k, tl.exp(g), NC)
        else:
            zq = times_exp(q, g, NC)
            zk = times_exp(k, g, NC)
    elif GATE == _GDN:
        score_q, score_k, zq, zk = replay_gdn(loaded, q, k, g, p, p_key, p_g, K, NB, RB, NC, CH)
        u_scale = k_norm
    elif GATE == _KDA:
        score_q, score_k, zq, zk = replay_kda(loaded, q, k, g, p, p_key, p_g, K, NB, RB, NC, CH)
        u_scale = k_norm
    else:
        total = plus(newest, g, NC)
        score_q, score_k, zq, zk = replay_scaled(loaded, q, k, total, p, p_key, p_g, K, NB, RB, NC, CH)
        u_scale = 1.0

    p_u = ring_u + row * s_u + i_hv * (L * V) + v0
    p_v = mixed_qkv + i_n * s_qkv + 2 * H * K + i_hv * V + v0 + ov
    for i in tl.range(0, TILES, num_stages=STAGES):
        if TILES > 1:
            tile = load_chunks(p_state + i * (BV * K), NC, CH)
        hk = project(tile, zk, NC)
        o = project(tile, zq, NC)
        for n in tl.static_range(NB):
            j = (NB - 1 - n) * RB + tl.arange(0, RB)
            p_old = p_u + i * BV + j[:, None] * V + ov[None, :]
            u_old = tl.load(p_old, mask=(j < p)[:, None], other=0.0).to(tl.float32)
            hk += tl.sum(u_old * score_k[n][:, None], 0)
            o += tl.sum(u_old * score_q[n][:, None], 0)
        u = beta * (tl.load(p_v + i * BV).to(tl.float32) - hk)
        tl.store(p_out + i * BV, (o + u * qk).to(out.dtype.element_ty))
        if IS_DIRECT:
            for c in tl.static_range(NC):
                fade = tl.exp(g) if GATE == _GDN else exp_decay(g[c])[None, :]
                new = tile[c].to(tl.float32) * fade + u[:, None] * k[c][None, :]
                tl.store(p_state + i * (BV * K) + c * CH, new.to(state.dtype.element_ty))
        else:
            tl.store(p_u + p * V + i * BV + ov, (u * u_scale).to(ring_u.dtype.element_ty))

    if i_split == 0 and not IS_DIRECT:
        if GATE == _GDN:
            tl.store(p_g + p, g)
        else:
            sums = plus(newest, g, NC)
            for c in tl.static_range(NC):
                tl.store(p_g + p * K + c * CH + oc, sums[c])
        if GATE == _SCALED:
            for c in tl.static_range(NC):
                tl.store(p_key + p * K + c * CH + oc, k[c] * exp_careful(-total[c]))
        elif i_hv % PER_KEY == 0:
            for c in tl.static_range(NC):
                tl.store(p_key + p * K + c * CH + oc, tl.load(p_q + H * K + c * CH))


def check_inputs(
    mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor,
    state: torch.Tensor, ring: Ring, out: torch.Tensor,
) -> None:  # fmt: skip
    """Raise ValueError unless one layer's tensors fit the ring and each other: a row of mixed_qkv, a, b and out per
    token."""
    s = ring.shape
    tokens = mixed_qkv.shape[0]
    gates = s.v_heads * s.gate_width
    width = 2 * s.k_heads * s.key_dim + s.v_heads * s.value_dim
    for name, t, columns in (("mixed_qkv", mixed_qkv, width), ("a", a, gates), ("b", b, s.v_heads)):
        if t.shape != (tokens, columns) or t.stride(1) != 1:
            raise ValueError(f"{name} must be [{tokens}, {columns}] with contiguous rows, got {tuple(t.shape)}")
    if mixed_qkv.dtype is not s.key_dtype:
        raise ValueError(f"mixed_qkv is {mixed_qkv.dtype} but the ring keeps keys in {s.key_dtype}")
    for name, t, size in (("A_log", A_log, s.v_heads), ("dt_bias", dt_bias, gates)):
        if t.shape != (size,) or not t.is_contiguous():
            raise ValueError(f"{name} must be a contiguous [{size}], got {tuple(t.shape)}")
    check_state(state, ring)
    wanted = tokens, s.v_heads, s.value_dim
    if out.shape != wanted or not out.is_contiguous():
        raise ValueError(f"out must be a contiguous {wanted}, got {tuple(out.shape)}")


def check_entries(batch: int, pending: torch.Tensor, **vectors: torch.Tensor) -> None:
    """Raise ValueError unless `pending` (int32) and the vectors (int32 or int64) are contiguous with `batch` entries
    or more."""
    check_vector("pending", pending, batch, (torch.int32,))
    for name, t in vectors.items():
        check_vector(name, t, batch, (torch.int32, torch.int64))


def check_vector(name: str, t: torch.Tensor, entries: int, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise ValueError unless `t` is a contiguous vector of one of the dtypes with so many entries or more."""
    if t.dtype not in dtypes or t.dim() != 1 or t.shape[0] < entries or (entries > 1 and t.stride(0) != 1):
        raise ValueError(f"{name} must be a contiguous {dtypes} vector of {entries} entries, got {t.dtype} {t.shape}")


def check_state(state: torch.Tensor, ring: Ring) -> None:
    """Raise ValueError unless `state` [..., HV, V, K] matches the ring and is contiguous within a slot."""
    s = ring.shape
    if state.shape[-3:] != (s.v_heads, s.value_dim, s.key_dim):
        raise ValueError(
            f"the state's last dims must be {(s.v_heads, s.value_dim, s.key_dim)}, got {tuple(state.shape)}"
        )
    if state.stride()[-3:] != (s.value_dim * s.key_dim, s.key_dim, 1):
        raise ValueError(f"the state must be contiguous within a slot, got strides {state.stride()}")
    if state.dtype not in STATE_DTYPES:
        raise ValueError(f"the state must be one of {STATE_DTYPES}, got {state.dtype}")


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
    out: torch.Tensor | None = None,
    config: DecodeConfig | None = None,
    direct: bool = False,
) -> torch.Tensor:
    """One decode step of one layer. Buffered: appends one record per live entry and leaves the state untouched.
    Direct: writes the state of every live entry and leaves the ring untouched.

    Args: shapes as in the table at the top of this file; for KDA a [B, HV, K] and dt_bias [HV, K] are taken as well.
        slots, rows: [B] int32 or int64.
        pending: [>= B] int32 from `plan_step`, after which the rows due for a fold must have been materialised.
        scale: usually K ** -0.5.
        direct: as the `plan_step` of this step was told.
    Returns: out [B, HV, V]: zeros for padding, NaN for faulty entries.
    Raises: ValueError for shapes that do not fit the ring.
    """
    s = ring.shape
    batch = mixed_qkv.shape[0]
    if s.gate != "gdn":
        a, dt_bias = a.flatten(1), dt_bias.flatten()
    if out is None:
        out = torch.empty(batch, s.v_heads, s.value_dim, dtype=mixed_qkv.dtype, device=mixed_qkv.device)
    check_inputs(mixed_qkv, a, b, A_log, dt_bias, state_layer, ring, out)
    check_entries(batch, pending, slots=slots, rows=rows)
    if batch == 0:
        return out
    u, k, g = ring.layers[layer]
    gate = gate_constant(s)
    if config is None:
        shape_of = choose_direct_config if direct else choose_config
        config = shape_of(batch * s.v_heads, gate, state_layer.element_size(), s.key_dim, s.value_dim, s.capacity)
    block_v, split, warps, stages, chunk = config
    _decode_kernel[(split, s.v_heads, batch)](
        mixed_qkv, a, b, A_log, dt_bias, out, state_layer, u, k, g, slots, rows, pending, scale, s.lower_bound or 0.0,
        mixed_qkv.stride(0), a.stride(0), b.stride(0), state_layer.stride(0), u.stride(0), k.stride(0), g.stride(0),
        H=s.k_heads, HV=s.v_heads, K=s.key_dim, V=s.value_dim, L=s.capacity,
        GATE=gate, BOUNDED=s.lower_bound is not None, IS_DIRECT=direct,
        RB=min(RECORDS, max(4, triton.next_power_of_2(s.capacity))), CH=min(chunk, s.key_dim),
        BV=block_v, SPLIT=split, STAGES=stages, num_warps=warps, num_stages=1,
    )  # fmt: skip
    return out
