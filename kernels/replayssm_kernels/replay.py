"""Device functions of buffered decode: vectors and tiles in chunks along K, and the three ways to weigh records.

K is cut into NC register chunks of CH <= 32 channels, held in tuples: a row's sum over K then needs three shuffles for
four rows, not five for one. Records go oldest first in NB blocks of RB, blocks newest first, so that 64 of them fit the
registers. What a block needs from memory is a tuple of loads (`load_block`), so that a ring of one block can be in
flight before the token's own inputs are.

The three `replay_*` functions return (score_q, score_k, zq, zk). score_q and score_k hold one [RB] vector per block,
newest block first: (e^{G_j} k_j) . q and (e^{G_j} k_j) . k; zq and zk are e^G q and e^G k, the projections' vectors.
q and k are normalised and scaled already; p_key and p_g point to the first record of this row and head, p counts the
records, `loaded` is block 0 where there is no other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gates import GDN, KDA, SCALED, exp_careful, exp_decay
from .ring import GROUP

_GDN = tl.constexpr(GDN)
_KDA = tl.constexpr(KDA)
_SCALED = tl.constexpr(SCALED)
_GROUP = tl.constexpr(GROUP)


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
def plus(x, y, NC: tl.constexpr):
    """Sum of two chunked vectors."""
    chunks = ()
    for c in tl.static_range(NC):
        chunks = chunks + (x[c] + y[c],)
    return chunks


@triton.jit
def times_exp(x, log, NC: tl.constexpr):
    """Chunked vector times e^log, channel by channel."""
    chunks = ()
    for c in tl.static_range(NC):
        chunks = chunks + (x[c] * exp_decay(log[c]),)
    return chunks


@triton.jit
def load_group_sums(p_g, p, block: tl.constexpr, columns, K: tl.constexpr, RB: tl.constexpr):
    """KDA: for each group of a block, oldest first, the sum of its gates [columns]; zeros beyond the p records."""
    sums = ()
    for m in tl.static_range(RB // _GROUP):
        first = block * RB + m * _GROUP
        last = tl.minimum(first + _GROUP, p) - 1
        sums = sums + (tl.load(p_g + last * K + columns, mask=(columns >= 0) & (first < p), other=0.0),)
    return sums


@triton.jit
def decay_of_block(since, sums, within, RB: tl.constexpr):
    """KDA: log-decays of a block's records [RB, columns] and of its start [columns].

    since: log-decay since the block's end; sums: of its groups (`load_group_sums`); within: the stored sums, each
    since its group's start. No scan over the records: log-decay = (since its group's start) - (stored sum).
    """
    group = tl.arange(0, RB) // _GROUP
    start = tl.zeros(within.shape, tl.float32)
    for m in tl.static_range(RB // _GROUP - 1, -1, -1):
        since = since + sums[m]
        start = tl.where((group == m)[:, None], since[None, :], start)
    return start - within, since


@triton.jit
def block_weights(block: tl.constexpr, since, p, p_g, RB: tl.constexpr):
    """GDN: the weights [RB] of a block's records, 0 for dead ones, and `since` at the block's start.

    since: log-decay since the block's end, 0 for the newest block; of the oldest record its own gate is left out.
    """
    j = block * RB + tl.arange(0, RB)
    younger = tl.load(p_g + j + 1, mask=j + 1 < p, other=0.0)
    weights = tl.where(j < p, tl.exp(since + tl.cumsum(younger, 0, reverse=True)), 0.0)
    return weights, since + tl.sum(younger, 0)


@triton.jit
def block_keys(
    block: tl.constexpr, since, p, p_key, p_g, columns, K: tl.constexpr, RB: tl.constexpr, GATE: tl.constexpr
):  # fmt: skip
    """Some columns of a block's keys [RB, columns], and `since` [columns] at the block's start.

    KDA: fp32 keys that carry their decays, `since` as in `block_weights`; others: keys as stored, `since` untouched.
    """
    j = block * RB + tl.arange(0, RB)
    keys = tl.load(p_key + j[:, None] * K + columns[None, :], mask=(j < p)[:, None], other=0.0)
    if GATE == _KDA:
        sums = load_group_sums(p_g, p, block, columns, K, RB)
        within = tl.load(p_g + j[:, None] * K + columns[None, :], mask=(j < p)[:, None], other=0.0)
        decay, since = decay_of_block(since, sums, within, RB)
        keys = keys.to(tl.float32) * exp_decay(decay)
    return keys, since


@triton.jit
def load_block(
    block: tl.constexpr, p, p_key, p_g, K: tl.constexpr, RB: tl.constexpr, NC: tl.constexpr, CH: tl.constexpr,
    GATE: tl.constexpr,
):  # fmt: skip
    """Loads of one block of records: NC chunks of keys, then GDN: the gates of each record's younger neighbour; KDA:
    NC chunks of stored gate sums, then the sums of the groups, chunk by chunk."""
    j = block * RB + tl.arange(0, RB)
    oc = tl.arange(0, CH)
    loaded = ()
    for c in tl.static_range(NC):
        p_c = p_key + j[:, None] * K + oc[None, :] + c * CH
        loaded = loaded + (tl.load(p_c, mask=(j < p)[:, None], other=0.0),)
    if GATE == _GDN:
        loaded = loaded + (tl.load(p_g + j + 1, mask=j + 1 < p, other=0.0),)
    elif GATE == _KDA:
        for c in tl.static_range(NC):
            p_c = p_g + j[:, None] * K + oc[None, :] + c * CH
            loaded = loaded + (tl.load(p_c, mask=(j < p)[:, None], other=0.0),)
        for c in tl.static_range(NC):
            loaded = loaded + load_group_sums(p_g, p, block, c * CH + oc, K, RB)
    return loaded


@triton.jit
def replay_gdn(
    loaded, q, k, g, p, p_key, p_g, K: tl.constexpr, NB: tl.constexpr, RB: tl.constexpr, NC: tl.constexpr,
    CH: tl.constexpr,
):  # fmt: skip
    """GDN: g is this token's log-decay, a number, and a record's decay weighs its scores."""
    score_q = ()
    score_k = ()
    since = g  # log-decay since the end of the next block
    for block in tl.static_range(NB - 1, -1, -1):
        if NB > 1:
            loaded = load_block(block, p, p_key, p_g, K, RB, NC, CH, _GDN)
        j = block * RB + tl.arange(0, RB)
        younger = loaded[NC]
        weight = tl.where(j < p, tl.exp(since + tl.cumsum(younger, 0, reverse=True)), 0.0)
        since += tl.sum(younger, 0)
        sq = tl.zeros([RB, CH], tl.float32)
        sk = tl.zeros([RB, CH], tl.float32)
        for c in tl.static_range(NC):
            key = loaded[c].to(tl.float32)
            sq += key * q[c][None, :]
            sk += key * k[c][None, :]
        score_q = score_q + (tl.sum(sq, 1) * weight,)
        score_k = score_k + (tl.sum(sk, 1) * weight,)
    # The checkpoint is older than the oldest record by that record's own gate.
    decay = tl.exp(since + tl.load(p_g, mask=p > 0, other=0.0))
    return score_q, score_k, times(q, decay, NC), times(k, decay, NC)


@triton.jit
def replay_kda(
    loaded, q, k, g, p, p_key, p_g, K: tl.constexpr, NB: tl.constexpr, RB: tl.constexpr, NC: tl.constexpr,
    CH: tl.constexpr,
):  # fmt: skip
    """KDA: g holds this token's log-decays in chunks, and a record's decays weigh its key channel by channel."""
    GROUPS: tl.constexpr = RB // _GROUP
    score_q = ()
    score_k = ()
    since = g
    for block in tl.static_range(NB - 1, -1, -1):
        if NB > 1:
            loaded = load_block(block, p, p_key, p_g, K, RB, NC, CH, _KDA)
        sq = tl.zeros([RB, CH], tl.float32)
        sk = tl.zeros([RB, CH], tl.float32)
        further = ()
        for c in tl.static_range(NC):
            sums = ()
            for m in tl.static_range(GROUPS):
                sums = sums + (loaded[2 * NC + c * GROUPS + m],)
            decay, start = decay_of_block(since[c], sums, loaded[NC + c], RB)
            further = further + (start,)
            key = loaded[c].to(tl.float32) * exp_decay(decay)  # a dead record's key is zero, its log-decay finite
            sq += key * q[c][None, :]
            sk += key * k[c][None, :]
        score_q = score_q + (tl.sum(sq, 1),)
        score_k = score_k + (tl.sum(sk, 1),)
        since = further
    return score_q, score_k, times_exp(q, since, NC), times_exp(k, since, NC)


@triton.jit
def replay_scaled(
    loaded, q, k, total, p, p_key, p_g, K: tl.constexpr, NB: tl.constexpr, RB: tl.constexpr, NC: tl.constexpr,
    CH: tl.constexpr,
):  # fmt: skip
    """KDA with scaled keys: (e^{C_t - C_j} k_j) . q is the stored key times e^{C_t} q; `total` is C_t in chunks."""
    zq = ()
    zk = ()
    for c in tl.static_range(NC):
        decay = exp_careful(total[c])
        zq = zq + (q[c] * decay,)
        zk = zk + (k[c] * decay,)
    score_q = ()
    score_k = ()
    for block in tl.static_range(NB - 1, -1, -1):
        if NB > 1:
            loaded = load_block(block, p, p_key, p_g, K, RB, NC, CH, _SCALED)
        sq = tl.zeros([RB, CH], tl.float32)
        sk = tl.zeros([RB, CH], tl.float32)
        for c in tl.static_range(NC):
            sq += loaded[c] * zq[c][None, :]
            sk += loaded[c] * zk[c][None, :]
        score_q = score_q + (tl.sum(sq, 1),)
        score_k = score_k + (tl.sum(sk, 1),)
    return score_q, score_k, zq, zk
