"""Device functions of buffered decode: vectors and tiles in chunks along K, and the three ways to weigh records.

K is cut into NC register chunks of CH <= 32 channels, held in tuples: a row's sum over K then needs three shuffles for
four rows, not five for one. Records go newest first in NB blocks of RB, so that 64 of them fit the registers.

The three `replay_*` functions return (score_q, score_k, zq, zk). score_q and score_k hold one [RB] vector per block,
(e^{G_j} k_j) . q and (e^{G_j} k_j) . k; zq and zk are e^G q and e^G k, the checkpoint's projections. q and k are
normalised and scaled already; p_key and p_g point to the first record of this row and head, p counts the records.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gates import exp_careful


@triton.jit
def load_chunks(p, NC: tl.constexpr, CH: tl.constexpr):
    """Load NC neighbouring chunks of CH elements along K as a tuple."""
    chunks = ()
    for c in tl.static_range(NC):
        chunks = chunks + (tl.load(p + c * CH),)
    return chunks


@triton.jit
def load_chunks_f32(p, NC: tl.constexpr, CH: tl.constexpr):
    chunks = ()
    for c in tl.static_range(NC):
        chunks = chunks + (tl.load(p + c * CH).to(tl.float32),)
    return chunks


@triton.jit
def dot_chunks(x, y, NC: tl.constexpr):
    """x . y of two vectors in chunks."""
    acc = x[0] * y[0]
    for c in tl.static_range(1, NC):
        acc += x[c] * y[c]
    return tl.sum(acc, 0)


@triton.jit
def project(tile, x, NC: tl.constexpr):
    """tile [rows, K] times x [K], both in chunks: [rows] in fp32."""
    acc = tile[0].to(tl.float32) * x[0][None, :]
    for c in tl.static_range(1, NC):
        acc += tile[c].to(tl.float32) * x[c][None, :]
    return tl.sum(acc, 1)


@triton.jit
def times(x, factor, NC: tl.constexpr):
    """Chunked vector times a number."""
    chunks = ()
    for c in tl.static_range(NC):
        chunks = chunks + (x[c] * factor,)
    return chunks


@triton.jit
def times_exp(x, log, NC: tl.constexpr):
    """Chunked vector times e^log, channel by channel."""
    chunks = ()
    for c in tl.static_range(NC):
        chunks = chunks + (x[c] * tl.exp(log[c]),)
    return chunks


@triton.jit
def replay_gdn(
    q, k, g, p, p_key, p_g, K: tl.constexpr, NB: tl.constexpr, RB: tl.constexpr, NC: tl.constexpr, CH: tl.constexpr
):
    """GDN: g is this token's log-decay, a number, and a record's decay weighs its scores."""
    oc = tl.arange(0, CH)
    score_q = ()
    score_k = ()
    since = g  # log-decay since the newest record of the next block
    for n in tl.static_range(NB):
        r = n * RB + tl.arange(0, RB)
        record = p - 1 - r
        live = r < p
        younger = tl.load(p_g + record + 1, mask=live & (r > 0), other=0.0)
        weight = tl.where(live, tl.exp(since + tl.cumsum(younger, 0)), 0.0)
        since += tl.sum(younger, 0)
        sq = tl.zeros([RB, CH], tl.float32)
        sk = tl.zeros([RB, CH], tl.float32)
        for c in tl.static_range(NC):
            p_c = p_key + record[:, None] * K + oc[None, :] + c * CH
            key = tl.load(p_c, mask=live[:, None], other=0.0).to(tl.float32)
            sq += key * q[c][None, :]
            sk += key * k[c][None, :]
        score_q = score_q + (tl.sum(sq, 1) * weight,)
        score_k = score_k + (tl.sum(sk, 1) * weight,)
    # The checkpoint is older than the oldest record by that record's own gate.
    decay = tl.exp(since + tl.load(p_g, mask=p > 0, other=0.0))
    return score_q, score_k, times(q, decay, NC), times(k, decay, NC)


@triton.jit
def replay_kda(
    q, k, g, p, p_key, p_g, K: tl.constexpr, NB: tl.constexpr, RB: tl.constexpr, NC: tl.constexpr, CH: tl.constexpr
):
    """KDA: g holds this token's log-decays in chunks, and a record's decays weigh its key channel by channel."""
    oc = tl.arange(0, CH)
    score_q = ()
    score_k = ()
    since = g
    for n in tl.static_range(NB):
        r = n * RB + tl.arange(0, RB)
        record = p - 1 - r
        live = r < p
        sq = tl.zeros([RB, CH], tl.float32)
        sk = tl.zeros([RB, CH], tl.float32)
        further = ()
        for c in tl.static_range(NC):
            column = oc[None, :] + c * CH
            key = tl.load(p_key + record[:, None] * K + column, mask=live[:, None], other=0.0).to(tl.float32)
            p_younger = p_g + (record + 1)[:, None] * K + column
            younger = tl.load(p_younger, mask=(live & (r > 0))[:, None], other=0.0)
            key *= tl.exp(since[c][None, :] + tl.cumsum(younger, 0))
            further = further + (since[c] + tl.sum(younger, 0),)
            sq += key * q[c][None, :]
            sk += key * k[c][None, :]
        score_q = score_q + (tl.sum(sq, 1),)
        score_k = score_k + (tl.sum(sk, 1),)
        since = further
    total = ()
    for c in tl.static_range(NC):
        total = total + (since[c] + tl.load(p_g + c * CH + oc, mask=oc < p * CH, other=0.0),)
    return score_q, score_k, times_exp(q, total, NC), times_exp(k, total, NC)


@triton.jit
def replay_scaled(
    q, k, total, p, p_key, K: tl.constexpr, NB: tl.constexpr, RB: tl.constexpr, NC: tl.constexpr, CH: tl.constexpr
):
    """KDA with scaled keys: (e^{C_t - C_j} k_j) . q is the stored key times e^{C_t} q; `total` is C_t in chunks."""
    oc = tl.arange(0, CH)
    zq = ()
    zk = ()
    for c in tl.static_range(NC):
        decay = exp_careful(total[c])
        zq = zq + (q[c] * decay,)
        zk = zk + (k[c] * decay,)
    score_q = ()
    score_k = ()
    for n in tl.static_range(NB):
        r = n * RB + tl.arange(0, RB)
        p_block = p_key + (p - 1 - r)[:, None] * K + oc[None, :]
        sq = tl.zeros([RB, CH], tl.float32)
        sk = tl.zeros([RB, CH], tl.float32)
        for c in tl.static_range(NC):
            key = tl.load(p_block + c * CH, mask=(r < p)[:, None], other=0.0)
            sq += key * zq[c][None, :]
            sk += key * zk[c][None, :]
        score_q = score_q + (tl.sum(sq, 1),)
        score_k = score_k + (tl.sum(sk, 1),)
    return score_q, score_k, zq, zk
