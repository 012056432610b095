"""Device functions shared by the kernels: gates, record weights, and exact products on the tensor cores.

    softplus(x) = log(1 + e^x), x itself above 20 (as SGLang's kernels cut it)
    GDN gate    g = -exp(A_log) softplus(a + dt_bias)

Record weights. Tiles hold records *newest first*: tile row r is record p - 1 - r of p records. Its decay is
the sum of the gates of the r younger records (and of the step's own token, if there is one), so one forward
prefix sum over the tile gives every weight, all terms have one sign, and g = -inf (a decay of exactly 0)
yields exp(-inf) = 0 without any inf - inf.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED: bool = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""True when Triton's interpreter runs the kernels on the CPU (decided at import, as Triton itself does)."""

_INTERPRETED = tl.constexpr(INTERPRETED)


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
def dot_exact(x, y, KEY_SPLIT: tl.constexpr):
    """x [M, R] fp32 times y [R, N] to float32 accuracy on the tensor cores.

    KEY_SPLIT: y is bf16 and thus exact, so three bf16 slices of x give all its 24 bits. Otherwise three tf32
        products
    (22 bits); plain float32 products spill hundreds of registers at these tile sizes.
    """
    if _INTERPRETED:
        return tl.dot(x, y.to(tl.float32), input_precision="ieee")
    elif not KEY_SPLIT:
        return tl.dot(x, y.to(tl.float32), input_precision="tf32x3")
    else:
        hi = x.to(tl.bfloat16)
        rest = x - hi.to(tl.float32)
        mid = rest.to(tl.bfloat16)
        lo = (rest - mid.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(hi, y, tl.dot(mid, y, tl.dot(lo, y)))
