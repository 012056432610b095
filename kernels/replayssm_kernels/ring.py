"""The ring: the records that running requests have not folded into their slot yet.

One ring serves all linear-attention layers of one model shard. It is keyed by *request row*, so cached slots
pay nothing.

Layout (row-major; L = capacity, H key heads, HV value heads, K and V the head dims):

    tensor      shape                      dtype          meaning of one record
    u           [layers, rows, HV, L, V]   fp32 or bf16   u_t times the reciprocal norm of the key
    k           [layers, rows, H,  L, K]   activations'   the raw key, exactly as the layer received it
    g           [layers, rows, HV, L]      fp32           GDN: a sum of log-decays, see below
                [layers, rows, HV, L, K]   fp32           KDA: the same per key channel
    checkpoint  [rows]                     int32          token count of the row's slot, or INERT or FRESH
    faults      [1]                        int32          inconsistent cursors seen so far (0 if all is well)

g is the sum of the tokens' log-decays since the start of the record's *group*; groups are `RingShape.gate_group`
neighbouring records. Every log-decay is <= 0, so kernels that add them never cancel, whereas the difference of two sums
loses the small gates that follow a strong one (after -1e5 a float32 sum moves in steps of 0.0078):

    GDN                1    the token's own log-decay; one number per head is cheap to add up
    KDA                4    a scan over the records of 128 channels is not; log-decays are cut at -104, where e^g is 0,
                            so that a sum stays above -416 and a difference is right to 1.5e-5 at worst, 1e-7 as a rule
    KDA, scaled keys   L    the bound keeps a whole ring above -SCALED_LIMIT

Where KDA's gate is bounded so that a whole ring decays by no more than e^SCALED_LIMIT (`RingShape.scaled_keys`), a
record is read without its gate and without an exponential, because the key carries both:

    u           [layers, rows, HV, L, V]   fp32 or bf16   u_t
    k           [layers, rows, HV, L, K]   fp32           the normalised key times e^-C_t, C_t the sum in g

Record number j (0 <= j < pending) belongs to token checkpoint + j + 1. Records at and beyond `pending` are
undefined memory and never read, so a row can be handed to another request without clearing anything but its
checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

MAX_CAPACITY = 64
MAX_WIDTH = 16
"""Most tokens of one request in one verify step."""
HEAD_DIMS = (16, 32, 64, 128, 256)
KEY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
U_DTYPES = (torch.float32, torch.bfloat16)
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GATES = ("gdn", "kda")

GROUP = 4
"""KDA: records per group of gate sums."""

SCALED_LIMIT = 80.0
"""Largest -lower_bound * L for scaled keys: e^80 and e^-80 are normal float32 numbers with room to spare."""

INERT = -2
"""checkpoint of a row that no request has held yet: treated as padding, so warm-up forwards over it touch
nothing.
"""
FRESH = -1
"""checkpoint of a row whose new owner has not run yet: its slot is exact wherever its first forward starts.
"""

POISON = -3
"""checkpoint of a row whose cursor was found wrong: it stays a fault until the row has a new owner."""

PADDING_ROW = 0
"""The request row that padded batch entries use. It never holds records."""


@dataclass(frozen=True)
class RingShape:
    """Sizes of a ring. `key_dtype` is the activation dtype, `capacity` the number L of records a row can hold,
    `max_width` the most tokens that one step brings to a row: 1 for plain decode, the draft length T for verify.
    """

    layers: int
    rows: int
    k_heads: int
    v_heads: int
    key_dim: int
    value_dim: int
    capacity: int
    key_dtype: torch.dtype
    u_dtype: torch.dtype = torch.float32
    gate: str = "gdn"
    lower_bound: float | None = None
    max_width: int = 1

    def validate(self) -> None:
        """Raise ValueError with one sentence that says what is wrong and what is allowed."""
        for name in ("layers", "rows", "k_heads", "v_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"the ring needs {name} >= 1, got {getattr(self, name)}")
        if self.v_heads % self.k_heads:
            raise ValueError(f"v_heads ({self.v_heads}) must be a multiple of k_heads ({self.k_heads})")
        for name in ("key_dim", "value_dim"):
            if getattr(self, name) not in HEAD_DIMS:
                raise ValueError(f"{name} must be one of {HEAD_DIMS}, got {getattr(self, name)}")
        if not 1 <= self.capacity <= MAX_CAPACITY:
            raise ValueError(f"the ring's capacity must be from 1 to {MAX_CAPACITY}, got {self.capacity}")
        if not 1 <= self.max_width <= MAX_WIDTH:
            raise ValueError(f"a step may bring from 1 to {MAX_WIDTH} tokens of a request, got {self.max_width}")
        if self.max_width > 1 and self.capacity < 2 * self.max_width:
            raise ValueError(
                f"a ring of {self.capacity} records folds in every step that brings {self.max_width} tokens; "
                f"with {2 * self.max_width} and more it never folds in two steps running"
            )
        if self.key_dtype not in KEY_DTYPES:
            raise ValueError(f"keys must be one of {KEY_DTYPES}, got {self.key_dtype}")
        if self.u_dtype not in U_DTYPES:
            raise ValueError(f"u must be one of {U_DTYPES}, got {self.u_dtype}")
        if self.gate not in GATES:
            raise ValueError(f"the gate must be one of {GATES}, got {self.gate!r}")
        if self.lower_bound is not None and (self.gate != "kda" or not -math.inf < self.lower_bound < 0):
            raise ValueError(f"lower_bound is a negative number and for KDA only, got {self.lower_bound} ({self.gate})")

    @property
    def scaled_keys(self) -> bool:
        """Whether records hold scaled keys and accumulated gates: decided by the model's bound and the capacity."""
        return self.lower_bound is not None and -self.lower_bound * self.capacity <= SCALED_LIMIT

    @property
    def gate_group(self) -> int:
        """Records whose gates are summed up in `g`: see the top of this file."""
        if self.gate == "gdn":
            return 1
        return self.capacity if self.scaled_keys else GROUP

    @property
    def u_shape(self) -> tuple[int, ...]:
        return self.layers, self.rows, self.v_heads, self.capacity, self.value_dim

    @property
    def k_shape(self) -> tuple[int, ...]:
        heads = self.v_heads if self.scaled_keys else self.k_heads
        return self.layers, self.rows, heads, self.capacity, self.key_dim

    @property
    def k_dtype(self) -> torch.dtype:
        """The dtype in which records keep keys."""
        return torch.float32 if self.scaled_keys else self.key_dtype

    @property
    def g_shape(self) -> tuple[int, ...]:
        shape = self.layers, self.rows, self.v_heads, self.capacity
        return shape if self.gate == "gdn" else (*shape, self.key_dim)

    @property
    def gate_width(self) -> int:
        """Numbers in one token's gate per v-head: 1 for GDN, one per key channel for KDA."""
        return 1 if self.gate == "gdn" else self.key_dim

    def bytes_per_row(self) -> int:
        """Device bytes that one request row costs, all layers together (what a memory plan charges per row)."""
        total = 4  # checkpoint
        for shape, size in (
            (self.u_shape, self.u_dtype.itemsize),
            (self.k_shape, self.k_dtype.itemsize),
            (self.g_shape, 4),
        ):
            elements = self.layers
            for extent in shape[2:]:
                elements *= extent
            total += elements * size
        return total


class RingLayer(NamedTuple):
    """Views of one layer: u [rows, HV, L, V], k [rows, H or HV, L, K], g [rows, HV, L(, K)]."""

    u: torch.Tensor
    k: torch.Tensor
    g: torch.Tensor


@dataclass(frozen=True, eq=False)
class Ring:
    """The ring's device tensors; see the layout table at the top of this file."""

    shape: RingShape
    u: torch.Tensor
    k: torch.Tensor
    g: torch.Tensor
    checkpoint: torch.Tensor
    faults: torch.Tensor
    layers: tuple[RingLayer, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Cut once: making three views per layer and step would cost more host time than the launch itself.
        views = tuple(RingLayer(self.u[i], self.k[i], self.g[i]) for i in range(self.shape.layers))
        object.__setattr__(self, "layers", views)

    @classmethod
    def allocate(cls, shape: RingShape, device: torch.device | str) -> Ring:
        """Allocate a ring. Records are left uninitialised: nothing reads a record before it was written."""
        shape.validate()
        return cls(
            shape=shape,
            u=torch.empty(shape.u_shape, dtype=shape.u_dtype, device=device),
            k=torch.empty(shape.k_shape, dtype=shape.k_dtype, device=device),
            g=torch.empty(shape.g_shape, dtype=torch.float32, device=device),
            checkpoint=torch.full((shape.rows,), INERT, dtype=torch.int32, device=device),
            faults=torch.zeros(1, dtype=torch.int32, device=device),
        )
