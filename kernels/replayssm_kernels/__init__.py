"""Triton kernels of buffered decode for gated linear attention, with fp64 references.

Knows tensors, not SGLang. One decode forward is `plan_step`, `materialise` of the fold list, `decode` in every
layer, then `materialise` of the snapshot list. One verify forward brings several tokens per request: `plan_step` with
widths, the folds, `verify` in every layer, and after acceptance `plan_snapshot` and `materialise` of its list.
"""

from .cursors import (
    DIRECT,
    FAULT,
    PAD,
    Counters,
    StepPlan,
    WorkList,
    mark_fresh,
    plan_forced_fold,
    plan_snapshot,
    plan_step,
    set_checkpoint,
)
from .decode import DecodeConfig, decode
from .extend import Points, leave_states, leave_windows
from .materialise import materialise
from .ring import FRESH, INERT, POISON, Ring, RingShape
from .verify import verify

__all__ = [
    "DIRECT",
    "FAULT",
    "FRESH",
    "INERT",
    "PAD",
    "POISON",
    "Points",
    "Counters",
    "DecodeConfig",
    "Ring",
    "RingShape",
    "StepPlan",
    "WorkList",
    "decode",
    "leave_states",
    "leave_windows",
    "mark_fresh",
    "materialise",
    "plan_forced_fold",
    "plan_snapshot",
    "plan_step",
    "set_checkpoint",
    "verify",
]
