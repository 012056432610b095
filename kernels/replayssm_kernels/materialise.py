"""Materialise: write the exact state at a chosen position of a request to a destination slot.

Fold is the case destination = source at the end of the request.

For every entry (row, src, dst, upto) of a work list, every layer and v-head, with the row's records
j = 0 .. upto - 1:

    S[dst] = S[src] e^G + sum_j u_j (e^{G_j} k_j)^T
    G: sum of all gates; G_j: sum of the gates younger than record j; numbers for GDN, per key channel for KDA

    dst < 0              skipped
    upto == 0            S[dst] is a bit copy of S[src]; nothing to do if dst == src
    upto < 0 or > L      the position is not known (see cursors.py): S[dst] becomes NaN, never a stale state

Bytes per entry, layer and v-head: V K read, V K written, upto records read.

    state   [layers, slots, HV, V, K]   layer and slot strides free, contiguous within a slot
    ring    see ring.py

The kernel is persistent: a fixed grid walks count * layers * HV heads and reads `count` on the device, so one launch
(also inside a CUDA graph) serves any list and an empty list ends at once. A program weighs a head's records once and
walks its rows in tiles, loads ahead of the stores. A tile is read and then written by the same program and entries have
distinct destinations, so folding in place has no race; a destination must not be another's source.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .cursors import WorkList
from .decode import check_state
from .gates import GDN, INTERPRETED, KDA, RECORDS, SCALED, dot_exact, exp_careful, exp_decay, gate_constant
from .replay import block_keys, block_weights
from .ring import Ring

_PROGRAMS_PER_SM = 8
_GDN = tl.constexpr(GDN)
_KDA = tl.constexpr(KDA)
_SCALED = tl.constexpr(SCALED)


@triton.jit
def _materialise_kernel(
    state, ring_u, ring_k, ring_g, count, entries, capacity, layers,
    l_state, s_state, l_u, s_u, l_k, s_k, l_g, s_g,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    GATE: tl.constexpr, RB: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    NB: tl.constexpr = (L + RB - 1) // RB
    TILES: tl.constexpr = V // BV
    ok = tl.arange(0, K)
    ov = tl.arange(0, BV)
    total = tl.load(count) * layers * HV
    for t in range(tl.program_id(0), total, tl.num_programs(0)):
        i_hv = t % HV
        i_layer = ((t // HV) % layers).to(tl.int64)
        entry = entries + t // HV // layers
        row = tl.load(entry).to(tl.int64)
        src = tl.load(entry + capacity).to(tl.int64)
        dst = tl.load(entry + 2 * capacity).to(tl.int64)
        upto = tl.load(entry + 3 * capacity)
        p_head = state + i_layer * l_state + i_hv * (V * K) + ov[:, None] * K + ok[None, :]
        p_src = p_head + src * s_state
        p_dst = p_head + dst * s_state
        if dst >= 0:
            if (upto < 0) | (upto > L):
                for i in range(TILES):
                    unknown = tl.full([BV, K], float("nan"), tl.float32)
                    tl.store(p_dst + i * (BV * K), unknown.to(state.dtype.element_ty))
            elif upto == 0:
                if src != dst:
                    for i in tl.range(0, TILES, num_stages=STAGES):
                        tl.store(p_dst + i * (BV * K), tl.load(p_src + i * (BV * K)))
            else:
                p_u = ring_u + i_layer * l_u + row * s_u + i_hv * (L * V) + ov[None, :]
                i_key = i_hv if GATE == _SCALED else i_hv // (HV // H)
                p_k = ring_k + i_layer * l_k + row * s_k + i_key * (L * K)
                p_g = ring_g + i_layer * l_g + row * s_g + i_hv * (L if GATE == _GDN else L * K)

                # Keys, and weights on them (KDA) or for u (GDN), newest block first.
                keys = ()
                weights = ()
                since = 0.0 if GATE == _GDN else tl.zeros([K], tl.float32)
                for block in tl.static_range(NB - 1, -1, -1):
                    if GATE == _GDN:
                        weight, since = block_weights(block, since, upto, p_g, RB)
                        weights = weights + (weight,)
                    key, since = block_keys(block, since, upto, p_k, p_g, ok, K, RB, GATE)
                    keys = keys + (key,)
                if GATE == _GDN:  # the checkpoint is older than the oldest record by that record's own gate
                    fade = tl.exp(since + tl.load(p_g))
                elif GATE == _KDA:
                    fade = exp_decay(since)[None, :]
                else:
                    fade = exp_careful(tl.load(p_g + (upto - 1) * K + ok))[None, :]

                for i in tl.range(0, TILES, num_stages=STAGES):
                    old = tl.load(p_src + i * (BV * K)).to(tl.float32)
                    added = tl.zeros([BV, K], tl.float32)
                    for n in tl.static_range(NB):
                        j = (NB - 1 - n) * RB + tl.arange(0, RB)
                        p_old = p_u + i * BV + j[:, None] * V
                        u = tl.load(p_old, mask=(j < upto)[:, None], other=0.0).to(tl.float32)
                        if GATE == _GDN:
                            u *= weights[n][:, None]
                        added += dot_exact(tl.trans(u), keys[n])
                    new = (added + old) * fade if GATE == _SCALED else added + old * fade
                    tl.store(p_dst + i * (BV * K), new.to(state.dtype.element_ty))


class MaterialiseConfig(NamedTuple):
    """Launch shape: value rows per tile, warps per program, stages of the loop over V."""

    block_v: int
    warps: int
    stages: int


def choose_materialise_config(value_dim: int, key_dim: int) -> MaterialiseConfig:
    """Small tiles, loads two ahead: several programs fit a multiprocessor. Swept on an H200, docs/measurements.md."""
    if INTERPRETED:
        return MaterialiseConfig(block_v=value_dim, warps=1, stages=1)
    return MaterialiseConfig(block_v=min(32, value_dim, 4096 // key_dim), warps=4, stages=3)


@functools.cache
def default_programs(device: torch.device) -> int:
    """Size of the persistent grid: enough programs per multiprocessor to keep loads and stores in flight."""
    if INTERPRETED:
        return 1
    return _PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


def materialise(
    state: torch.Tensor,
    ring: Ring,
    worklist: WorkList,
    num_programs: int | None = None,
    config: MaterialiseConfig | None = None,
) -> None:
    """Carry out a work list in one launch for all layers, heads and entries.

    Args:
        state: [layers, slots, HV, V, K] fp32, bf16 or fp16, the whole pool of this ring's layers, updated in place.
        worklist: from `plan_step` or `plan_forced_fold`. Destinations are distinct, and no entry's source is
            another's destination.
        num_programs: size of the persistent grid; None takes `default_programs`.
        config: launch shape; None takes `choose_materialise_config`.

    Raises ValueError if the state does not fit the ring.
    """
    s = ring.shape
    if state.dim() != 5 or state.shape[0] != s.layers:
        raise ValueError(f"the state must be [{s.layers}, slots, HV, V, K], got {tuple(state.shape)}")
    check_state(state, ring)
    block_v, warps, stages = config or choose_materialise_config(s.value_dim, s.key_dim)
    _materialise_kernel[(num_programs or default_programs(state.device),)](
        state, ring.u, ring.k, ring.g, worklist.count, worklist.entries, worklist.max_entries, s.layers,
        state.stride(0), state.stride(1), ring.u.stride(0), ring.u.stride(1),
        ring.k.stride(0), ring.k.stride(1), ring.g.stride(0), ring.g.stride(1),
        H=s.k_heads, HV=s.v_heads, K=s.key_dim, V=s.value_dim, L=s.capacity,
        GATE=gate_constant(s), RB=RECORDS, BV=block_v, STAGES=stages,
        num_warps=warps, num_stages=1,
    )  # fmt: skip
