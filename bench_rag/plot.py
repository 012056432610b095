"""One picture per benchmark: what each arm hit, and how long its users waited."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .report import mean_ceiling, summarise
from .runner import Results
from .settings import Settings
from .workloads import Burst, Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot(settings: Settings, results: Results, path: Path) -> Path:
    """Draw one row of two panels per workload to ``path`` (PNG) and return it. Needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = len(settings.workloads)
    width = max(9.0, 2.6 + 1.7 * len(settings.arms))
    figure, axes = pyplot.subplots(rows, 2, figsize=(width, 3.4 * rows), squeeze=False, layout="constrained")
    for (left, right), workload in zip(axes, settings.workloads, strict=True):
        if isinstance(workload, Burst):
            _bars(left, settings, results, workload, "steady_throughput", 1.0, "steady decode, tok/s", "{:.0f}")
            _latency(right, settings, results, workload, "tpot_ms", "time per output token, ms")
        else:
            _bars(left, settings, results, workload, "hit_rate", 100.0, "prefix-cache hit rate, %", "{:.1f}")
            limit = 100 * mean_ceiling(results, workload.label)
            left.axhline(limit, color="0.35", linestyle="--", linewidth=1)
            legend = f"dashed: infinite cache, {limit:.1f}%"
            for x, arm in enumerate(settings.arms):
                if best := summarise(results, arm.name, workload.label).get("budget_hit_rate"):
                    left.hlines(100 * best, x - 0.4, x + 0.4, color="0.1", linewidth=1.6)
                    legend = f"dashed: infinite cache, {limit:.1f}%; solid: its pools' most"
            left.set_title(legend, loc="right", fontsize=8, color="0.35")
            left.set_ylim(0, 112)
            _latency(right, settings, results, workload, "ttft_ms", "time to first token, ms")
        left.set_title(workload.label, loc="left", fontsize=10, fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


# The built-in families keep their colour whichever arms are drawn; a variant (plain-noov, plain#2) is hatched.
_FAMILIES = {"plain": "#7f8fa6", "intree": "#d98a3d", "plugin": "#2a7f62"}
_OTHERS = ("#8e6c8a", "#5b8db8", "#b05f6d", "#9a8f4f", "#4f9a94")


def styles(settings: Settings) -> list[dict[str, Any]]:
    """Bar colours and hatches, one per arm."""
    styles, others = [], iter(_OTHERS * len(settings.arms))
    for arm in settings.arms:
        family = arm.name.replace("#", "-").partition("-")[0]
        colour = _FAMILIES.get(family) or next(others)
        hatch = {"hatch": "///"} if family in _FAMILIES and arm.name != family else {}
        styles.append({"color": colour, "edgecolor": "white", **hatch})
    return styles


def _tidy(axis: Axes, settings: Settings, label: str) -> None:
    axis.set_xticks(range(len(settings.arms)), [a.name for a in settings.arms], fontsize=9)
    axis.set_ylabel(label, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(axis="y", labelsize=8)


def _bars(
    axis: Axes,
    settings: Settings,
    results: Results,
    workload: Workload,
    name: str,
    factor: float,
    label: str,
    text: str,
) -> None:
    """One bar per arm; a line shows the standard deviation over seeds."""
    top = factor * max((summarise(results, a.name, workload.label).get(name, 0.0) for a in settings.arms), default=0.0)
    for x, (arm, style) in enumerate(zip(settings.arms, styles(settings), strict=True)):
        summary = summarise(results, arm.name, workload.label)
        if name not in summary:
            axis.text(x, 0, "not measured", ha="center", va="bottom", fontsize=8, rotation=90)
            continue
        value, spread = factor * summary[name], factor * summary.get(f"{name}_sd", 0.0)
        axis.bar(x, value, 0.62, **style, yerr=spread or None, capsize=4)
        axis.annotate(
            text.format(value),
            (x, max(0.0, value - spread)),
            xytext=(0, -14 if value > 0.15 * top else 3),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
        )
    _tidy(axis, settings, label)


def _latency(axis: Axes, settings: Settings, results: Results, workload: Workload, name: str, label: str) -> None:
    """Mean as a bar, median and 99th percentile as marks."""
    for x, (arm, style) in enumerate(zip(settings.arms, styles(settings), strict=True)):
        summary = summarise(results, arm.name, workload.label)
        if f"{name}_mean" not in summary:
            continue
        mean, p50, p99 = (summary[f"{name}_{k}"] for k in ("mean", "p50", "p99"))
        axis.bar(x, mean, 0.62, **style)
        axis.vlines(x, p50, p99, color="0.2", linewidth=1)
        axis.plot(x, p50, "o", color="0.2", markersize=4)
        axis.plot(x, p99, "_", color="0.2", markersize=10)
        axis.annotate(f"{mean:.0f}", (x - 0.31, mean), xytext=(0, 2), textcoords="offset points", fontsize=9)
    axis.set_ylim(bottom=0)
    _tidy(axis, settings, label)
    axis.set_title("bar: mean, dot: p50, dash: p99", loc="right", fontsize=8, color="0.35")
