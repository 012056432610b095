"""Ring shapes: what is accepted, what is refused, and what a row costs."""

from __future__ import annotations

import pytest
import torch

from replayssm_kernels import Ring
from tests.kernels.machine import BOUNDED, DEVICE, GDN, KDA, VERY_BOUNDED, each_gate, make_shape


@pytest.mark.parametrize(
    "change,word",
    [
        (dict(layers=0), "layers"),
        (dict(rows=0), "rows"),
        (dict(k_heads=2, v_heads=3), "multiple"),
        (dict(key_dim=48), "key_dim"),
        (dict(value_dim=512), "value_dim"),
        (dict(capacity=0), "capacity"),
        (dict(capacity=65), "capacity"),
        (dict(key_dtype=torch.float64), "keys"),
        (dict(u_dtype=torch.float16), "u must"),
        (dict(gate="mamba2"), "gate"),
        (dict(lower_bound=-5.0), "lower_bound"),
        (dict(gate="kda", lower_bound=5.0), "lower_bound"),
        (dict(gate="kda", lower_bound=float("-inf")), "lower_bound"),
    ],
)
def test_shapes_outside_the_tested_set_are_refused_in_a_sentence(change: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Ring.allocate(make_shape(**change), DEVICE)


@each_gate
def test_bytes_per_row_is_what_is_allocated(gate: dict) -> None:
    shape = make_shape(
        layers=3, rows=5, k_heads=2, v_heads=4, key_dim=32, capacity=7, **gate,
        key_dtype=torch.float16, u_dtype=torch.bfloat16,
    )  # fmt: skip
    ring = Ring.allocate(shape, DEVICE)
    allocated = sum(t.numel() * t.element_size() for t in (ring.u, ring.k, ring.g, ring.checkpoint))
    assert shape.bytes_per_row() * shape.rows == allocated


def test_bytes_per_row_of_the_27b_shape() -> None:
    """DESIGN's figure for 48 layers, 16/48 heads, K = V = 128, L = 16: 22.2 MB with fp32 u, 12.7 MB with bf16."""
    shape = make_shape(
        layers=48, k_heads=16, v_heads=48, key_dim=128, value_dim=128, capacity=16, key_dtype=torch.bfloat16
    )
    assert round(shape.bytes_per_row() / 1e6, 1) == 22.2
    half = make_shape(**{**shape.__dict__, "u_dtype": torch.bfloat16})
    assert round(half.bytes_per_row() / 1e6, 1) == 12.7


def test_keys_are_scaled_where_the_bound_and_the_capacity_allow_it() -> None:
    """e^(-lower_bound L) must stay far inside float32's range, also for a whole ring of tokens at the bound."""
    assert make_shape(**BOUNDED, capacity=16).scaled_keys
    assert not make_shape(**BOUNDED, capacity=17).scaled_keys
    assert make_shape(**VERY_BOUNDED, capacity=2).scaled_keys
    assert not make_shape(**VERY_BOUNDED, capacity=3).scaled_keys
    assert not make_shape(**KDA).scaled_keys and not make_shape(**GDN).scaled_keys
