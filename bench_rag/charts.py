"""Charts of the HTML page: what the requests of a run did, one line per arm. Each is an SVG document as text."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from . import measures
from .plot import styles
from .report import summarise
from .runner import Results, Run
from .settings import Settings
from .workloads import Burst, Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS = 400  # a line on a page shows no more


@contextmanager
def _chart(label_x: str, label_y: str) -> Iterator[tuple[Axes, Callable[[], str]]]:
    """An axis to draw on, and what gives its SVG once drawn. Needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.hashsalt": "bench_rag"}):  # the same figures give the same file
        figure, axis = pyplot.subplots(figsize=(4.7, 3.1), layout="constrained")
        axis.set_xlabel(label_x, fontsize=9)
        axis.set_ylabel(label_y, fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25, linewidth=0.6)

        def svg() -> str:
            if axis.get_legend_handles_labels()[0]:
                axis.legend(fontsize=8, frameon=False)
            text = io.StringIO()
            figure.savefig(text, format="svg", metadata={"Date": None})
            return text.getvalue()

        try:
            yield axis, svg
        finally:
            pyplot.close(figure)


def _lines(settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and line style of each arm: the colour of its bars, dashed where those are hatched.

    Each line is thinner than the one below it, so that equal arms both show.
    """
    for number, (arm, style) in enumerate(zip(settings.arms, styles(settings), strict=True)):
        dashes = "--" if "hatch" in style else "-"
        width = max(1.4, 3.8 - 1.2 * number)
        yield arm.name, {"color": style["color"], "linestyle": dashes, "linewidth": width, "label": arm.name}


def _runs(results: Results, arm: str, workload: Workload) -> list[Run]:
    return [r for r in results.runs if r.arm == arm and r.workload == workload.label and any(x.ok for x in r.replies)]


def _thin(count: int) -> np.ndarray:
    """Indices of at most so many points as a chart can show, both ends included."""
    return np.unique(np.linspace(0, count - 1, min(count, _POINTS)).astype(int))


def first_tokens(settings: Settings, results: Results, workload: Workload) -> str:
    """Share of requests whose first token had come by then, over all seeds; empty if nothing was measured.

    The axis of times is logarithmic where they spread widely.
    """
    from matplotlib.ticker import LogLocator

    longest, shortest = 0.0, float("inf")
    with _chart("time to first token, ms", "share of requests, %") as (axis, svg):
        for name, style in _lines(settings):
            times = sorted(1e3 * measures.ttft(x) for r in _runs(results, name, workload) for x in r.replies if x.ok)
            if not times:
                continue
            at = _thin(len(times))
            axis.step(np.asarray(times)[at], 100 * (at + 1) / len(times), where="post", **style)
            longest, shortest = max(longest, times[-1]), min(shortest, times[0])
        if longest > 5 * shortest:
            axis.set_xscale("log")
            axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.xaxis.set_major_formatter("{x:g}")
            axis.minorticks_off()
        axis.set_ylim(0, 101)
        if settings.ttft_limit is not None:
            axis.axvline(1e3 * settings.ttft_limit, color="0.35", linestyle=":", linewidth=1)
        return svg() if longest else ""


def hits_over_time(settings: Settings, results: Results, workload: Workload) -> str:
    """Hit rate of all requests sent so far, over the first seed measured, and an infinite cache's on the same requests.

    Empty if nothing was measured, or no endpoint reports its hits.
    """
    limit_drawn = False
    with _chart("seconds since the first request", "hit rate so far, %") as (axis, svg):
        for name, style in _lines(settings):
            runs = [r for r in _runs(results, name, workload) if "hit_rate" in r.figures]
            if not runs:
                continue
            run = runs[0]
            replies = sorted((x for x in run.replies if x.ok), key=lambda x: x.sent)
            seconds = np.array([x.sent - replies[0].sent for x in replies])
            prompts = np.cumsum([x.prompt_tokens for x in replies])
            at = _thin(len(replies))
            limits = results.request_ceilings.get((workload.label, run.seed))
            if limits and not limit_drawn:
                best = np.cumsum([limits[x.conversation, x.turn][0] for x in replies])
                grey = {"color": "0.45", "linestyle": "--", "linewidth": 1.1, "label": "infinite cache"}
                axis.plot(seconds[at], 100 * (best / prompts)[at], **grey)
                limit_drawn = True
            hits = np.cumsum([x.cached_tokens for x in replies])
            axis.plot(seconds[at], 100 * (hits / prompts)[at], **style)
        axis.set_ylim(0, 101)
        return svg() if axis.lines else ""


def pool_over_time(settings: Settings, results: Results, workload: Workload) -> str:
    """Share of the state pool in use over the first seed measured; empty where no server showed its metrics.

    A run too short for three samples has no course to draw.
    """
    with _chart("seconds since the first request", "state pool in use, %") as (axis, svg):
        for name, style in _lines(settings):
            runs = [r for r in _runs(results, name, workload) if sum("state_pool" in s for s in r.samples) > 2]
            if runs:
                began = min(x.sent for x in runs[0].replies)
                points = [(s["at"] - began, 100 * s["state_pool"]) for s in runs[0].samples if "state_pool" in s]
                axis.plot(*zip(*points, strict=True), **style)
        axis.set_ylim(0, 101)
        return svg() if axis.lines else ""


def throughput_by_batch(settings: Settings, results: Results) -> str:
    """Steady decode throughput against the batch, with 95% intervals over seeds; empty for fewer than two batches."""
    bursts = sorted((w for w in settings.workloads if isinstance(w, Burst)), key=lambda w: w.batch)
    if len(bursts) < 2:
        return ""
    with _chart("batch (requests at once)", "steady decode, tok/s") as (axis, svg):
        for name, style in _lines(settings):
            found = [(w.batch, summarise(results, name, w.label)) for w in bursts]
            found = [(batch, summary) for batch, summary in found if "steady_throughput" in summary]
            if not found:
                continue
            spread = [summary.get("steady_throughput_ci95", 0.0) for _, summary in found]
            rates = [summary["steady_throughput"] for _, summary in found]
            axis.errorbar([b for b, _ in found], rates, yerr=spread, marker="o", markersize=4, capsize=3, **style)
        axis.set_xscale("log", base=2)
        axis.set_xticks([w.batch for w in bursts], [str(w.batch) for w in bursts])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        return svg() if axis.containers else ""
