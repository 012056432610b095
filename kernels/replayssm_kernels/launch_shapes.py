"""Launch shapes of the decode and verify kernels: a table of what was fastest, and a rule for everything outside it.

Swept on one H200 (2026-12-01, torch 2.11, Triton 3.6; 16/48 heads for GDN, 32 for KDA, K = V = 128, L = 16, batch 1 to
256) by the decode kernel's own time, over the shapes that `python -m replayssm_kernels.bench gdn_decode --configs all`
times with folds and cursors. The first column is the number of (request,
v-head) pairs from which a shape holds: it says how full the GPU is, whatever the model.
"""

from __future__ import annotations

from typing import NamedTuple

from .gates import GDN, INTERPRETED, KDA, RECORDS, SCALED


class DecodeConfig(NamedTuple):
    """Launch shape of decode or verify: value rows per tile, programs per v-head, warps, stages of the loop over V."""

    block_v: int
    split: int
    warps: int
    stages: int


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
    block_v, split, warps, stages = next(
        config for least, config in _TABLE[gate, 4 if state_size == 4 else 2] if pairs >= least
    )
    if key_dim > 128:
        warps = max(4, 2 * warps)
    if gate == KDA and (key_dim > 128 or capacity > RECORDS):
        warps = 8 if key_dim > 128 else 4
    block_v = min(block_v, value_dim)
    return DecodeConfig(block_v, min(split, value_dim // block_v), warps, stages)


def choose_verify_config(
    pairs: int, gate: int, state_size: int, key_dim: int, value_dim: int, max_width: int
) -> DecodeConfig:
    """Launch shape of verify for `pairs` = batch x v-heads; other args as `choose_config`, max_width of the ring.

    Not swept yet. Tiles of 64 rows and four warps give products that take their narrow side from shared memory, which
    leaves registers for three programs per multiprocessor (GDN); as many programs per head as it takes to fill the GPU.
    What doesn't hang on V (gates, triangle, products with the records' keys) is done once per program.
    """
    if INTERPRETED:
        return DecodeConfig(block_v=value_dim, split=1, warps=1, stages=1)
    block_v = min(64 if key_dim <= 128 else 32, value_dim)
    split = min(value_dim // block_v, 1 if pairs >= 600 else 2)
    return DecodeConfig(block_v, split, warps=4, stages=2)
