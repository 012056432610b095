"""The report as one HTML page that needs no other file: tables, and charts as embedded pictures."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from . import charts, report
from .noise import Difference
from .plot import styles
from .runner import Results
from .settings import Settings
from .workloads import Burst, Workload


def page(settings: Settings, results: Results, closing: str = "") -> str:
    """The whole page; text that comes from servers and options is escaped."""
    environment = Environment(loader=PackageLoader("bench_rag"), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("report.html").render(
        about=report.about(settings),
        model="" if settings.url is not None else Path(settings.model).name,
        closing=closing,
        workloads=[_section(settings, results, w) for w in settings.workloads],
        batches=_picture(charts.throughput_by_batch(settings, results)),
        arms_table=Markup(report.arms_table(settings, results, "html")),
        failures=results.failures,
        method=[line.removeprefix("- ") for line in report.method(settings, results)],
    )


def _section(settings: Settings, results: Results, workload: Workload) -> dict[str, Any]:
    burst = isinstance(workload, Burst)
    compared = report.differences(settings, results, workload)
    pictures = [
        ("Time to first token", charts.first_tokens(settings, results, workload)),
        ("Hit rate over time", "" if burst else charts.hits_over_time(settings, results, workload)),
        ("State pool", charts.pool_over_time(settings, results, workload)),
    ]
    return {
        "label": workload.label,
        "title": report.title(settings, results, workload),
        "cards": [] if burst else _cards(settings, results, workload, compared),
        "arms": [arm.name for arm in settings.arms],
        "figures": report.by_figure(settings, results, workload),
        "reference": settings.arms[0].name,
        "crossed": report.cross_rows(results, workload),
        "pictures": [(name, _picture(svg)) for name, svg in pictures if svg],
    }


def _cards(
    settings: Settings, results: Results, workload: Workload, compared: dict[str, list[Difference]]
) -> list[dict[str, Any]]:
    """Per arm its hit rate and mean TTFT as large figures, both ceilings, and how it stands to the first arm."""
    cards = []
    for arm, style in zip(settings.arms, styles(settings), strict=True):
        summary = report.summarise(results, arm.name, workload.label)
        if "ttft_ms_mean" not in summary:
            cards.append({"arm": arm.name, "colour": style["color"], "measured": False})
            continue
        hits = summary.get("hit_rate")
        cards.append(
            {
                "arm": arm.name,
                "colour": style["color"],
                "measured": True,
                "hits": None if hits is None else f"{100 * hits:.1f}",
                "limit_text": f"{100 * report.mean_ceiling(results, workload.label):.1f}",
                "width": 100 * (hits or 0.0),
                "limit": 100 * report.mean_ceiling(results, workload.label),
                "budget": 100 * summary["budget_hit_rate"] if "budget_hit_rate" in summary else None,
                "ttft": f"{summary['ttft_ms_mean']:.0f}",
                "p99": f"{summary['ttft_ms_p99']:.0f}",
                "note": next(
                    (f"{d.text()}, {d.verdict}" for d in compared.get(arm.name, []) if d.figure.name == "hit_rate"), ""
                ),
            }
        )
    return cards


def _picture(svg: str) -> str:
    """A data URI, so that the page stays whole wherever it is copied to; empty for no picture."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}" if svg else ""
