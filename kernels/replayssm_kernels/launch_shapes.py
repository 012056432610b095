"""Launch shapes of the decode and verify kernels: a table of what was fastest, and a rule for everything outside it.

Swept on one H200 (2026-12-01, torch 2.11, Triton 3.6; 16/48 heads for GDN, 32 for KDA, K = V = 128, L = 16, batch 1 to
256) by the decode kernel's own time, over the shapes that `python -m replayssm_kernels.bench gdn_decode --configs all`
times with folds and cursors. The first column is the number of (request,
v-head) pairs from which a shape holds: it says how full the GPU is, whatever the model.
"""

from __future__ import annotations

from typing import NamedTuple

from .gates import GDN, INTERPRETED, KDA, RECORDS, SCALED, gate_constant
from .ring import RingShape


class DecodeConfig(NamedTuple):
    """Launch shape of decode or verify: value rows per tile, programs per v-head, warps, stages of the loop over V, and
    for decode the channels of K that one register chunk holds."""

    block_v: int
    split: int
    warps: int
    stages: int
    chunk: int = 32


_TABLE: dict[tuple[int, int], tuple[tuple[int, DecodeConfig], ...]] = {  # by gate and bytes of a state element
    (GDN, 4): (
        (4096, DecodeConfig(32, 1, 2, 3)),
        (600, DecodeConfig(64, 2, 2, 1)),
        (300, DecodeConfig(32, 2, 2, 2)),
        (150, DecodeConfig(64, 2, 4, 1)),
        (0, DecodeConfig(32, 4, 4, 1)),
    ),
    (KDA, 4): (
        (800, DecodeConfig(32, 1, 1, 2)),
        (100, DecodeConfig(32, 1, 4, 3)),
        (0, DecodeConfig(16, 8, 1, 1)),
    ),
    (SCALED, 4): (
        (800, DecodeConfig(32, 1, 1, 2)),
        (400, DecodeConfig(16, 2, 1, 2)),
        (200, DecodeConfig(16, 4, 1, 2)),
        (0, DecodeConfig(16, 8, 1, 1)),
    ),
    (GDN, 2): (
        (4096, DecodeConfig(32, 1, 1, 3)),
        (1200, DecodeConfig(32, 1, 1, 2)),
        (600, DecodeConfig(32, 2, 1, 2)),
        (300, DecodeConfig(32, 2, 2, 2)),
        (0, DecodeConfig(16, 8, 2, 1)),
    ),
    (KDA, 2): (
        (1600, DecodeConfig(32, 1, 1, 3)),
        (800, DecodeConfig(32, 1, 1, 2)),
        (400, DecodeConfig(32, 2, 1, 2)),
        (200, DecodeConfig(16, 4, 1, 2)),
        (0, DecodeConfig(16, 8, 1, 1)),
    ),
    (SCALED, 2): (
        (1600, DecodeConfig(32, 1, 1, 3)),
        (800, DecodeConfig(32, 1, 1, 2)),
        (400, DecodeConfig(32, 2, 1, 2)),
        (200, DecodeConfig(32, 4, 1, 1)),
        (0, DecodeConfig(16, 8, 1, 1)),
    ),
}

_DIRECT_PAIRS = {(GDN, 4): 96, (KDA, 4): 256, (SCALED, 4): 64, (GDN, 2): 0, (KDA, 2): 256, (SCALED, 2): 0}
"""Up to so many (request, v-head) pairs a direct step is the faster one, as far as it was measured (batch 8)."""

_DIRECT_TABLE = (  # pairs from which a shape holds: narrow tiles of whole rows, many programs
    (100, DecodeConfig(8, 16, 1, 1, 128)),
    (0, DecodeConfig(4, 32, 1, 1, 128)),
)


def swept(gate: int, state_size: int) -> list[DecodeConfig]:
    """Every launch shape of the table for a GATE constant and the bytes of a state element."""
    return [config for _, config in _TABLE[gate, 4 if state_size == 4 else 2]]


def choose_config(pairs: int, gate: int, state_size: int, key_dim: int, value_dim: int, capacity: int) -> DecodeConfig:
    """Launch shape for `pairs` = batch x v-heads.

    Args: the kernel's GATE constant; bytes of a state element; head dims; L.

    Keys wider than 128, or records of per-channel gates in more than one block, need more registers than the swept
    shapes have: four warps and more then share a tile.
    """
    if INTERPRETED:
        return DecodeConfig(block_v=value_dim, split=1, warps=1, stages=1)
    block_v, split, warps, stages, chunk = next(
        config for least, config in _TABLE[gate, 4 if state_size == 4 else 2] if pairs >= least
    )
    if key_dim > 128:
        warps = max(4, 2 * warps)
    if gate == KDA and (key_dim > 128 or capacity > RECORDS):
        warps = 8 if key_dim > 128 else 4
    block_v = min(block_v, value_dim)
    return DecodeConfig(block_v, min(split, value_dim // block_v), warps, stages, chunk)


def choose_direct_config(
    pairs: int, gate: int, state_size: int, key_dim: int, value_dim: int, capacity: int
) -> DecodeConfig:
    """Launch shape of a direct step; args as `choose_config`. Small batches: a program per tile."""
    if INTERPRETED:
        return DecodeConfig(block_v=value_dim, split=1, warps=1, stages=1)
    block_v, _, warps, stages, chunk = next(config for least, config in _DIRECT_TABLE if pairs >= least)
    block_v = min(block_v, value_dim)
    return DecodeConfig(block_v, value_dim // block_v, warps if key_dim <= 128 else 2 * warps, stages, chunk)


def direct_batch(shape: RingShape, state_size: int, on_gpu: bool | None = None) -> int:
    """The largest batch at which a direct step is faster than a buffered one; 0 for never.

    Args: the ring's shape; bytes of a state element; whether the kernels run on a GPU (None: as they do here).
    """
    if on_gpu is False or (on_gpu is None and INTERPRETED):
        return 0
    return _DIRECT_PAIRS[gate_constant(shape), 4 if state_size == 4 else 2] // shape.v_heads


def choose_verify_config(
    pairs: int, gate: int, state_size: int, key_dim: int, value_dim: int, max_width: int
) -> DecodeConfig:
    """Launch shape of verify for `pairs` = batch x v-heads; other args as `choose_config`, max_width of the ring.

    Swept on one H200 (2026-12-01) for GDN at widths 4 and 8, KDA at width 4 and batches 1 and 8. What doesn't hang on V
    (gates, triangle, products with the records' keys) is done once per program: one program per head pays off early.
    """
    if INTERPRETED:
        return DecodeConfig(block_v=value_dim, split=1, warps=1, stages=1)
    if gate == GDN:
        block_v = min(32, value_dim)
        split, warps, stages = (1, 2, 3) if pairs >= 200 else (4, 2, 1)
    else:
        block_v = min(128 if key_dim <= 128 else 32, value_dim)
        split, warps, stages = 1, 8 if pairs < 100 else 4, 1
    return DecodeConfig(block_v, min(split, value_dim // block_v), warps, stages)
