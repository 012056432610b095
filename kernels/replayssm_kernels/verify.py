"""Ring spec-verify: T tokens per request from one read of the checkpoint; the state is not written.

For one v-head with checkpoint S, pending records (u_j, k_j) and the step's tokens t = 0 .. T-1, with D_t the sum of
their gates 0 .. t and D_ts that of s+1 .. t (numbers for GDN, K-vectors for KDA):

    x        a probe: q_t or k_t, l2-normalised, q also scaled
    y_x    = S (e^{G + D_t} x) + sum_j ((e^{G_j} k_j) . (e^{D_t} x)) u_j      G, G_j: of the records, as for a fold
    u_t    = beta_t (v_t - y_{k_t} - sum_{s<t} ((e^{D_ts} k_s) . k_t) u_s)
    o_t    = y_{q_t} + sum_{s<=t} ((e^{D_ts} k_s) . q_t) u_s
    record pending + t := (u_t, k_t, g_t)

The triangle is solved once per head, not once per tile of V: o and u are linear in w_s = v_s - y_{k_s}, and `coef`
[source, probe] holds (o's part, u_t) = sum_s coef[s, .] w_s. Its entries are products of contractions and stay within
1; powers of the triangle do not, so it is substituted row by row. All other work is products on the tensor cores with
the 2 T probes as their narrow side (rows 0 .. TP-1: q, TP .. 2 TP-1: k; TP is 8 or 16), exact to fp32 (`dot_exact`).

What the drafts leave behind is in the form in which `decode` writes and reads it, so steps of both kinds may follow
each other on a row. Acceptance needs no launch (see cursors.py).

Bytes per step and v-head: those of `decode`, with T records written.

    mixed_qkv, a, b, out   as in decode.py, one row per token
    starts  [B + 1]        entry i owns the tokens starts[i] .. starts[i+1] - 1, at most max_width of them
    widths  [B]            how many of those are drafts; the rest is padding and gives zeros
    state, ring, slots, rows, pending: as in decode.py

A token's output hangs on no later token, except that a later token of the same request which is not finite makes it
NaN (0 times NaN in a product), as it does in attention under a mask.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .cursors import PAD
from .decode import check_entries, check_inputs, check_vector
from .gates import GDN, KDA, RECORDS, SCALED, dot_exact, exp_careful, exp_decay, gate_constant, log_decay
from .launch_shapes import DecodeConfig, choose_verify_config
from .replay import block_keys, block_weights
from .ring import GROUP, Ring

_PAD = tl.constexpr(PAD)
_GDN = tl.constexpr(GDN)
_KDA = tl.constexpr(KDA)
_SCALED = tl.constexpr(SCALED)
_GROUP = tl.constexpr(GROUP)


@triton.jit
def _solve(gram, beta, probe, draft, is_query, width):
    """coef [source, probe] from gram [source, probe], the decayed products of keys with probes, masked to the triangle.

    Right-looking substitution: once every push into source s has arrived, s pushes into what comes after it.
    """
    pushes = gram * tl.where(is_query, -1.0, beta)[None, :]
    coef = tl.where((probe[:, None] == probe[None, :]) & (is_query == 0)[:, None], 1.0, 0.0)
    for s in range(width):
        source = draft == s
        arrived = tl.sum(tl.where((source & (is_query == 0))[None, :], coef, 0.0), 1)
        pushed = tl.sum(tl.where((source & (is_query == 0))[:, None], pushes, 0.0), 0)
        after = (draft > s) | (is_query & source)
        coef = tl.where(after[None, :], coef - arrived[:, None] * pushed[None, :], coef)
    return coef * beta[:, None]


@triton.jit
def _verify_kernel(
    mixed_qkv, a, b, A_log, dt_bias, out, state, ring_u, ring_k, ring_g, slots, rows, pending, starts, widths,
    scale, lower_bound, s_qkv, s_a, s_b, s_state, s_u, s_k, s_g,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    GATE: tl.constexpr, BOUNDED: tl.constexpr,
    TP: tl.constexpr, MAX_WIDTH: tl.constexpr, RB: tl.constexpr, CH: tl.constexpr, BV: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    NC: tl.constexpr = K // CH
    NB: tl.constexpr = (L + RB - 1) // RB
    M: tl.constexpr = 2 * TP
    TILES: tl.constexpr = V // SPLIT // BV
    PER_KEY: tl.constexpr = HV // H
    i_split = tl.program_id(0)
    i_hv = tl.program_id(1)
    i_n = tl.program_id(2)
    i_h = i_hv // PER_KEY
    v0 = i_split * (V // SPLIT)
    oc = tl.arange(0, CH)
    ov = tl.arange(0, BV)
    probe = tl.arange(0, M)
    draft = probe % TP
    is_query = probe < TP

    slot = tl.load(slots + i_n).to(tl.int64)
    p = tl.load(pending + i_n)
    width = tl.load(widths + i_n).to(tl.int32)
    first = tl.load(starts + i_n).to(tl.int64)
    owned = (tl.load(starts + i_n + 1) - first).to(tl.int32)
    token = first + draft
    p_out = out + (token * HV + i_hv) * V + v0  # [M]
    writes_out = is_query & (draft < owned)
    if (slot < 0) | (width < 1) | (p < 0) | (p + width > L) | (width > owned) | (owned > MAX_WIDTH):
        # Padding gives zeros; anything else without a place in the ring is a fault and must be seen.
        inert = (slot < 0) | (width < 1) | (p == _PAD)
        fill = tl.zeros([BV, M], tl.float32) + tl.where(inert & (owned <= MAX_WIDTH), 0.0, float("nan"))
        for i in range(TILES):
            tl.store(p_out[None, :] + (i * BV + ov)[:, None], fill.to(out.dtype.element_ty), mask=writes_out[None, :])
        return
    row = tl.load(rows + i_n).to(tl.int64)
    i_key = i_hv if GATE == _SCALED else i_h
    p_key = ring_k + row * s_k + i_key * (L * K)
    p_g = ring_g + row * s_g + i_hv * (L if GATE == _GDN else L * K)
    live = draft < width
    is_key = (is_query == 0) & live
    place = p + draft  # of the draft's record

    # The probes as they are, in chunks [M, CH] along K, and what normalises them.
    p_x = mixed_qkv + token * s_qkv + i_h * K + tl.where(is_query, 0, H * K)
    raws = ()
    squares = tl.zeros([M], tl.float32)
    for c in tl.static_range(NC):
        raw = tl.load(p_x[:, None] + (c * CH + oc)[None, :], mask=live[:, None], other=0.0)
        raws = raws + (raw,)
        squares += tl.sum(raw.to(tl.float32) * raw.to(tl.float32), 1)
    norm = tl.rsqrt(squares + 1e-6)
    factor = norm * tl.where(is_query, scale, 1.0)
    beta = tl.sigmoid(tl.load(b + token * s_b + i_hv, mask=live, other=0.0).to(tl.float32))
    if GATE == _GDN:
        beta = beta.to(b.dtype.element_ty).to(tl.float32)  # as SGLang rounds it
    rate = tl.exp(tl.load(A_log + i_hv).to(tl.float32))

    # Gates, from the newest draft to the oldest: `since` is each probe's log-decay since draft i, at last D_t. `gram`
    # holds the decayed products of keys with probes.
    p_a = a + first * s_a + i_hv * (1 if GATE == _GDN else K)
    gram = tl.zeros([M, M], tl.float32)
    probes = ()
    if GATE == _GDN:
        bias = tl.load(dt_bias + i_hv).to(tl.float32)
        since = tl.zeros([M], tl.float32)
        decay = tl.zeros([M, M], tl.float32)
        for age in range(width):
            i = width - 1 - age
            decay = tl.where((probe == TP + i)[:, None], tl.exp(since)[None, :], decay)
            g = log_decay(tl.load(p_a + i * s_a).to(tl.float32) + bias, rate, lower_bound, BOUNDED)
            since += tl.where(draft >= i, g, 0.0)
            if i_split == 0:
                tl.store(p_g + p + i, g)
        for c in tl.static_range(NC):
            gram += dot_exact(raws[c], tl.trans(raws[c]))
        gram *= decay * norm[:, None] * factor[None, :]
        factor *= tl.exp(since)
        probes = raws
    else:
        grows = p > 0 if GATE == _SCALED else p % _GROUP != 0
        for c in tl.static_range(NC):
            columns = c * CH + oc
            x = raws[c].to(tl.float32)
            bias = tl.load(dt_bias + i_hv * K + columns).to(tl.float32)
            newest = tl.load(p_g + (p - 1) * K + columns, mask=(oc >= 0) & grows, other=0.0)
            since = tl.zeros([M, CH], tl.float32)
            sums = tl.zeros([M, CH], tl.float32)  # since the start of the record's group
            for age in range(width):
                i = width - 1 - age
                if GATE == _KDA:
                    key = tl.load(mixed_qkv + (first + i) * s_qkv + (H + i_h) * K + columns).to(tl.float32)
                    products = tl.sum(x * exp_decay(since) * key[None, :], 1)
                    gram += tl.where((probe == TP + i)[:, None], products[None, :], 0.0)
                g = log_decay(tl.load(p_a + i * s_a + columns).to(tl.float32) + bias, rate, lower_bound, BOUNDED)
                since += tl.where((draft >= i)[:, None], g[None, :], 0.0)
                if GATE == _KDA:
                    together = (draft >= i) & (place // _GROUP == (p + i) // _GROUP)
                    sums += tl.where(together[:, None], g[None, :], 0.0)
            if GATE == _KDA:
                sums += tl.where((place // _GROUP == (p - 1) // _GROUP)[:, None], newest[None, :], 0.0)
                probes = probes + (x * exp_decay(since),)
            else:
                sums = since + newest[None, :]
                key = tl.where(is_key[:, None], x * norm[:, None] * exp_careful(-sums), 0.0)
                probes = probes + (x * exp_careful(sums),)
                gram += dot_exact(key, tl.trans(probes[c]))
                if i_split == 0:
                    tl.store(p_key + place[:, None] * K + columns[None, :], key, mask=is_key[:, None])
            if i_split == 0:
                tl.store(p_g + place[:, None] * K + columns[None, :], sums, mask=is_key[:, None])
        if GATE == _KDA:
            gram *= norm[:, None]
        gram *= factor[None, :]
    if (GATE != _SCALED) & (i_split == 0) & (i_hv % PER_KEY == 0):
        for c in tl.static_range(NC):
            tl.store(p_key + place[:, None] * K + (c * CH + oc)[None, :], raws[c], mask=is_key[:, None])

    earlier = draft[:, None] < draft[None, :] + tl.where(is_query, 1, 0)[None, :]
    gram = tl.where(is_key[:, None] & earlier, gram, 0.0)
    coef = _solve(gram, beta, probe, draft, is_query, width)

    # The records' products with the probes, [RB, M] per block, newest block first.
    scores = ()
    aged = ()  # KDA: log-decay since the start of the last block, chunk by chunk
    age_of = 0.0  # GDN: the same, a number
    if GATE == _KDA:
        for _ in tl.static_range(NC):
            aged = aged + (tl.zeros([CH], tl.float32),)
    for block in tl.static_range(NB - 1, -1, -1):
        score = tl.zeros([RB, M], tl.float32)
        further = ()
        for c in tl.static_range(NC):
            columns = c * CH + oc
            if GATE == _KDA:
                keys, start = block_keys(block, aged[c], p, p_key, p_g, columns, K, RB, GATE)
                further = further + (start,)
            else:
                keys, start = block_keys(block, 0.0, p, p_key, p_g, columns, K, RB, GATE)
            score += dot_exact(keys, tl.trans(probes[c]))
        aged = further
        if GATE == _GDN:
            weights, age_of = block_weights(block, age_of, p, p_g, RB)
            score *= weights[:, None]
        scores = scores + (score * factor[None, :],)
    sides = ()  # the probes as the checkpoint sees them, [CH, M]
    for c in tl.static_range(NC):
        sides = sides + (tl.trans(probes[c] * exp_decay(aged[c])[None, :] if GATE == _KDA else probes[c]),)
    if GATE == _GDN:
        # The checkpoint is older than the oldest record by that record's own gate.
        factor *= tl.exp(age_of + tl.load(p_g, mask=p > 0, other=0.0))

    u_scale = norm if GATE != _SCALED else tl.full([M], 1.0, tl.float32)
    p_state = state + slot * s_state + i_hv * (V * K) + (v0 + ov)[:, None] * K + oc[None, :]
    p_u = ring_u + row * s_u + i_hv * (L * V) + v0
    p_v = mixed_qkv + token * s_qkv + 2 * H * K + i_hv * V + v0  # [M]
    for i in tl.range(0, TILES, num_stages=STAGES):
        y = tl.zeros([BV, M], tl.float32)
        for c in tl.static_range(NC):
            y += dot_exact(tl.load(p_state + i * (BV * K) + c * CH), sides[c])
        y *= factor[None, :]
        for n in tl.static_range(NB):
            j = (NB - 1 - n) * RB + tl.arange(0, RB)
            p_old = p_u + i * BV + j[:, None] * V + ov[None, :]
            u_old = tl.load(p_old, mask=(j < p)[:, None], other=0.0).to(tl.float32)
            y += dot_exact(tl.trans(u_old), scores[n])
        v = tl.load(p_v[None, :] + (i * BV + ov)[:, None], mask=is_key[None, :], other=0.0).to(tl.float32)
        done = dot_exact(tl.where(is_key[None, :], v - y, 0.0), coef)
        o = tl.where(live[None, :], done + y, 0.0)
        tl.store(p_out[None, :] + (i * BV + ov)[:, None], o.to(out.dtype.element_ty), mask=writes_out[None, :])
        u = done * u_scale[None, :]
        p_new = p_u + i * BV + place[None, :] * V + ov[:, None]
        tl.store(p_new, u.to(ring_u.dtype.element_ty), mask=is_key[None, :])


def verify(
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
    starts: torch.Tensor,
    widths: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    config: DecodeConfig | None = None,
) -> torch.Tensor:
    """One verify step of one layer; appends a record per draft and leaves the state untouched.

    Args: shapes as in the table at the top of this file, with N tokens in all; for KDA a [N, HV, K] and dt_bias
        [HV, K] are taken as well.
        slots, rows, widths: [B] int32 or int64, as `plan_step` had them.
        pending: [>= B] int32 from `plan_step`, after which the rows due for a fold must have been materialised.
        starts: [B + 1] int32 or int64, ascending, starts[B] <= N. Tokens that no entry owns are left alone.
        scale: usually K ** -0.5.
    Returns: out [N, HV, V]: zeros for padding, NaN for faulty entries, undefined for tokens that no entry owns.
    Raises: ValueError for shapes that do not fit the ring.
    """
    s = ring.shape
    check_vector("starts", starts, 1, (torch.int32, torch.int64))
    batch = starts.shape[0] - 1
    if s.gate != "gdn":
        a, dt_bias = a.flatten(1), dt_bias.flatten()
    if out is None:
        out = torch.empty(mixed_qkv.shape[0], s.v_heads, s.value_dim, dtype=mixed_qkv.dtype, device=mixed_qkv.device)
    check_inputs(mixed_qkv, a, b, A_log, dt_bias, state_layer, ring, out)
    check_entries(batch, pending, slots=slots, rows=rows, widths=widths)
    if mixed_qkv.shape[0] > batch * s.max_width:
        raise ValueError(f"{mixed_qkv.shape[0]} tokens are more than {s.max_width} for each of {batch} entries")
    if batch == 0:
        return out
    u, k, g = ring.layers[layer]
    gate = gate_constant(s)
    block_v, split, warps, stages, _ = config or choose_verify_config(
        batch * s.v_heads, gate, state_layer.element_size(), s.key_dim, s.value_dim, s.max_width
    )
    _verify_kernel[(split, s.v_heads, batch)](
        mixed_qkv, a, b, A_log, dt_bias, out, state_layer, u, k, g, slots, rows, pending, starts, widths,
        scale, s.lower_bound or 0.0,
        mixed_qkv.stride(0), a.stride(0), b.stride(0), state_layer.stride(0), u.stride(0), k.stride(0), g.stride(0),
        H=s.k_heads, HV=s.v_heads, K=s.key_dim, V=s.value_dim, L=s.capacity,
        GATE=gate, BOUNDED=s.lower_bound is not None, TP=8 if s.max_width <= 8 else 16, MAX_WIDTH=s.max_width,
        RB=RECORDS, CH=min(32, s.key_dim), BV=block_v, SPLIT=split, STAGES=stages, num_warps=warps, num_stages=1,
    )  # fmt: skip
    return out
