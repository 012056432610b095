"""Is buffered decode worth turning on at a batch size? From what was measured (measured.json), not from bytes alone."""

from __future__ import annotations

import functools
import importlib.resources
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replayssm_kernels.ring import RingShape

# Less than this share of the linear layers' decode, or of a step's time, is lost in what one server shows twice.
LEAST_SHARE = 0.05
LEAST_STEP_US = 250.0


@functools.cache
def measured() -> dict[str, Any]:
    """The kernels' measurements: per kind (see `kind_of`) the shape, the batch sizes, and microseconds per layer and
    step."""
    return json.loads(importlib.resources.files("sglang_replayssm").joinpath("measured.json").read_text())


def kind_of(shape: RingShape) -> str:
    """Which of the measurements a ring is judged by: the gate kind, and of KDA how its records keep keys.

    A bounded gate whose ring is too long for scaled keys runs the kernel of an unbounded one.
    """
    return "kda_bounded" if shape.scaled_keys else shape.gate


@dataclass(frozen=True)
class Verdict:
    """What turning buffered decode on does to one step.

    Attributes:
        worth: whether to turn it on.
        ours, conventional: microseconds per layer and step on the measured shape.
        saved_us: microseconds that a step of the model's `layers` saves; negative where it costs.
        reason: a sentence.
    """

    worth: bool
    ours: float
    conventional: float
    saved_us: float
    reason: str


def at_batch(batch: int, kind: str, layers: int, scale: float, against_measured: float = 1.0) -> Verdict:
    """Judge one batch size.

    Args:
        batch: requests that decode together, from 1.
        kind: see `kind_of`.
        layers: linear layers of the model.
        scale: bytes of this model's state per layer over those of the measured shape. Beyond 1 it scales the times; a
            smaller state is not faster in proportion where launches bound it, so below 1 it scales as well, which
            makes the saving small rather than large.
        against_measured: bytes that a buffered step moves with this launch's L over those with the measured one's.
    """
    table = measured()[kind]
    ours, conventional = (_interpolate(batch, table["batch"], table[name]) for name in ("ours", "conventional"))
    ours *= against_measured
    saved = (conventional - ours) * layers * scale
    share = 1 - ours / conventional
    if saved < 0:
        return Verdict(False, ours, conventional, saved, "no: slower than SGLang's decode kernel")
    if share < LEAST_SHARE or saved < LEAST_STEP_US:
        return Verdict(False, ours, conventional, saved, f"no: saves {saved / 1e3:.2f} ms of a step, lost in the noise")
    return Verdict(True, ours, conventional, saved, f"yes: saves {saved / 1e3:.2f} ms of a step")


def _interpolate(batch: int, batches: list[int], times: list[float]) -> float:
    """Time at a batch size: between two measured ones linearly in the batch, beyond them in proportion to it.

    Below the smallest measured one the time is that of the smallest: there launches bound it, not bytes.
    """
    if batch <= batches[0]:
        return times[0]
    if batch >= batches[-1]:
        return times[-1] * batch / batches[-1]
    right = next(i for i, at in enumerate(batches) if at >= batch)
    left = right - 1
    part = (batch - batches[left]) / (batches[right] - batches[left])
    return math.fsum((times[left] * (1 - part), times[right] * part))
