"""What repeats say: confidence intervals over seeds, and whether two arms differ by more than noise.

Arms see the same seeds, so they are compared seed by seed: what makes one seed harder than another falls out. The
intervals are Student's t at 95% over the seeds; with two seeds they are wide, as they must be.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.95


@dataclass(frozen=True)
class Figure:
    """A figure that arms are compared by. ``relative``: differences in percent of the reference, else in points."""

    name: str
    title: str
    higher_is_better: bool
    relative: bool = True


COMPARED = (
    Figure("hit_rate", "hit rate", True, relative=False),
    Figure("ttft_ms_mean", "TTFT mean", False),
    Figure("ttft_ms_p50", "TTFT p50", False),
    Figure("ttft_ms_p99", "TTFT p99", False),
    Figure("tpot_ms_mean", "TPOT mean", False),
    Figure("e2e_ms_mean", "E2E mean", False),
    Figure("output_throughput", "output tok/s", True),
    Figure("steady_throughput", "steady tok/s", True),
    Figure("goodput", "goodput", True),
)


def half_width(values: Sequence[float]) -> float | None:
    """Half of the 95% interval of the mean of ``values``; None for fewer than two."""
    if len(values) < 2:
        return None
    deviation = float(np.std(values, ddof=1))
    return float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1)) * deviation / math.sqrt(len(values))


@dataclass(frozen=True)
class Difference:
    """One figure of one arm against the reference, averaged over the ``seeds`` both have.

    ``mean`` and ``half_width`` (95%; None for a single seed) are shares of the reference's mean where the figure is
    relative, else plain differences.
    """

    figure: Figure
    mean: float
    half_width: float | None
    seeds: int

    @property
    def verdict(self) -> str:
        """``better``, ``worse``, ``equal`` or ``within noise``; ``one seed`` where nothing can be said."""
        if self.half_width is None:
            return "one seed"
        if self.mean == 0 and self.half_width == 0:
            return "equal"
        if abs(self.mean) <= self.half_width:
            return "within noise"
        return "better" if (self.mean > 0) == self.figure.higher_is_better else "worse"

    def text(self) -> str:
        """Such as ``-12.3% ± 2.1`` or ``+29.7 points ± 0.4``."""
        spread = "" if self.half_width is None else f" ± {100 * self.half_width:.1f}"
        return f"{100 * self.mean:+.1f}{'%' if self.figure.relative else ' points'}{spread}"


def compare(
    arm: Mapping[int, Mapping[str, float]],
    reference: Mapping[int, Mapping[str, float]],
    without: Collection[str] = (),
) -> list[Difference]:
    """Differences of every figure that both sides have, from figures by seed; ``without``: figures to leave out."""
    found = []
    for figure in COMPARED:
        if figure.name in without:
            continue
        pairs = [
            (arm[seed][figure.name], reference[seed][figure.name])
            for seed in arm
            if seed in reference and figure.name in arm[seed] and figure.name in reference[seed]
        ]
        if not pairs:
            continue
        scale = float(np.mean([theirs for _, theirs in pairs])) if figure.relative else 1.0
        if scale == 0:
            continue
        gaps = [(mine - theirs) / scale for mine, theirs in pairs]
        found.append(Difference(figure, float(np.mean(gaps)), half_width(gaps), len(gaps)))
    return found
