"""Device functions shared by the kernels: gates, and exact products on the tensor cores.

    softplus(x) = log(1 + e^x), x itself above 20 (as SGLang's kernels cut it)
    GDN                 g = -exp(A_log) softplus(a + dt_bias)                   one number per v-head
    KDA                 the same, or                                            one per v-head and key channel
    KDA, bounded gate   g = lower_bound sigmoid(exp(A_log) (a + dt_bias))       lower_bound < 0

All are cut at -104, where e^g is 0 in fp32.

Record weights. The decay of a record is the sum of the gates of the younger records (and of the step's own token, if
there is one). Kernels add from the newest record to the oldest, so that terms of one sign never cancel, in blocks of
RECORDS, which keeps 64 of them within the registers.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from .ring import RingShape

INTERPRETED: bool = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""True when Triton's interpreter runs the kernels on the CPU (decided at import, as Triton itself does)."""

RECORDS = 16
"""Records per block: the smallest inner size of a product on the tensor cores."""

GDN, KDA, SCALED = 0, 1, 2
"""The kernels' GATE constant: what a record holds (see ring.py)."""

_INTERPRETED = tl.constexpr(INTERPRETED)


def gate_constant(shape: RingShape) -> int:
    """The GATE constant of a ring."""
    if shape.gate == "gdn":
        return GDN
    return SCALED if shape.scaled_keys else KDA


@triton.jit
def softplus(x):
    """log(1 + e^x) to float32 accuracy for every x; fp32 in, fp32 out.

    log(1 + e) alone loses all digits for small e: a decay of 0.99999 would come out wrong by half a percent
    of 1 - decay. The factor e / ((1 + e) - 1) gives back what rounding 1 + e took away.
    """
    e = tl.exp(tl.minimum(x, 20.0))
    y = 1.0 + e
    small = tl.where(y == 1.0, e, tl.log(y) * (e / tl.where(y == 1.0, 1.0, y - 1.0)))
    return tl.where(x <= 20.0, small, x)


@triton.jit
def dot_exact(x, y):
    """x [M, R] times y [R, N] on the tensor cores, to float32 accuracy whatever the two dtypes are.

    16-bit times its own kind: every product is exact. fp32 times bf16: three bf16 slices of the fp32 side give all its
    24 bits. Anything else: three tf32 products (22 bits); plain float32 products spill hundreds of registers at these
    tile sizes.
    """
    if _INTERPRETED:
        return tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision="ieee")
    elif x.dtype == y.dtype and x.dtype != tl.float32:
        return tl.dot(x, y)
    elif x.dtype == tl.float32 and y.dtype == tl.bfloat16:
        hi, mid, lo = bf16_slices(x)
        return tl.dot(hi, y, tl.dot(mid, y, tl.dot(lo, y)))
    elif x.dtype == tl.bfloat16 and y.dtype == tl.float32:
        hi, mid, lo = bf16_slices(y)
        return tl.dot(x, hi, tl.dot(x, mid, tl.dot(x, lo)))
    else:
        return tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision="tf32x3")


@triton.jit
def bf16_slices(x):
    """fp32 x as a sum of three bf16 numbers, largest first."""
    hi = x.to(tl.bfloat16)
    rest = x - hi.to(tl.float32)
    mid = rest.to(tl.bfloat16)
    return hi, mid, (rest - mid.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def log_decay(x, rate, lower_bound, BOUNDED: tl.constexpr):
    """The gate g <= 0 of inputs x = a + dt_bias and rate = exp(A_log), in fp32.

    Below -104 e^g is 0 in fp32; cutting there keeps sums of gates small (a NaN stays one).
    """
    g = lower_bound * tl.sigmoid(rate * x) if BOUNDED else -rate * softplus(x)
    return tl.where(g < -104.0, -104.0, g)


@triton.jit
def exp_decay(x):
    """e^x for a log-decay x <= 0, to two units in the last place; results below 2^-126 are 0.

    The plain exponential spends three of its five instructions on denormal results.
    """
    if _INTERPRETED:
        return tl.exp(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def exp_careful(x):
    """e^x for |x| <= 100 to one or two units in the last place.

    The GPU's own exponential multiplies x by log2(e) first, which costs |x| / 2 units. Where a weight is the product
    of a growing and a decaying factor (scaled keys), that error would not be small against the weight.
    """
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    rest = x - n * 0.693359375  # ln 2 in two parts; the first has few enough bits for n times it to be exact
    rest = rest + n * 2.12194440054690583e-4
    return tl.exp(rest) * tl.exp2(n)
