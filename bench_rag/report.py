"""Tables for the terminal and Markdown, and the JSON everything else can be made from."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tabulate import tabulate

from . import __version__, crosscheck, measures
from .client import Reply
from .hosts import gpu_name
from .noise import Difference, compare
from .runner import Results, Run
from .settings import Settings
from .workloads import Burst, Workload, describe


class _Column(NamedTuple):
    """A column of a table: two-line title, figure, factor to show it by, decimals."""

    title: str
    figure: str
    factor: float
    decimals: int


_COMMON = (
    _Column("TTFT ms\nmean", "ttft_ms_mean", 1, 0),
    _Column("\np50", "ttft_ms_p50", 1, 0),
    _Column("\np99", "ttft_ms_p99", 1, 0),
    _Column("TPOT ms\nmean", "tpot_ms_mean", 1, 1),
    _Column("ITL ms\np50", "itl_ms_p50", 1, 1),
    _Column("\np99", "itl_ms_p99", 1, 1),
    _Column("E2E ms\nmean", "e2e_ms_mean", 1, 0),
    _Column("tok/s\nout", "output_throughput", 1, 1),
    _Column("\nin", "prompt_throughput", 1, 0),
)
_BUDGET = _Column("budget\nceiling %", "budget_hit_rate", 100, 1)
_PREFIX = (_Column("hits\n%", "hit_rate", 100, 1), *_COMMON)
_BURST = (_Column("steady\ntok/s", "steady_throughput", 1, 1), *_COMMON)
# Only shown where some arm has the figure (and, for tiers, where something came from it).
_OPTIONAL = (
    _Column("good\nreq/s", "goodput", 1, 2),
    _Column("in time\n%", "in_time", 100, 1),
    _Column("state pool\nmax %", "state_pool_max", 100, 0),
)
_TIERS = (
    _Column("hits %\ndevice", "hit_rate_device", 100, 1),
    _Column("\nhost", "hit_rate_host", 100, 1),
    _Column("\nstorage", "hit_rate_storage", 100, 1),
)
_EQUAL = _Column("same\nout %", "equal_outputs", 100, 1)


def summarise(results: Results, arm: str, workload: str) -> dict[str, Any]:
    """Figures of one arm on one workload, averaged over seeds; empty if it was not measured."""
    runs = [r.figures for r in results.runs if r.arm == arm and r.workload == workload]
    return {**measures.average(runs), "failed_total": sum(r["failed"] for r in runs)} if runs else {}


def mean_ceiling(results: Results, workload: str) -> float:
    """Hit rate of an infinite cache on the workload, averaged over seeds."""
    by_seed = results.ceilings[workload]
    return sum(by_seed.values()) / len(by_seed)


def table(settings: Settings, results: Results, workload: Workload, fmt: str = "simple") -> str:
    """One row per arm, in tabulate's format ``fmt``; several seeds show as mean ± sample standard deviation.

    ``same out`` compares greedy answers with the first arm's, whose own cell says ``ref``.
    """
    columns = _columns(settings, results, workload)
    rows = []
    for arm in settings.arms:
        summary = summarise(results, arm.name, workload.label)
        cells = [_cell(summary, column) for column in columns]
        if arm is settings.arms[0] and columns[-1] is _EQUAL and summary:
            cells[-1] = "ref"
        rows.append([arm.name, *cells, f"{summary['failed_total']:.0f}" if summary else "not measured"])
    titles = ["arm", *(column.title for column in columns), "failed"]
    if fmt != "simple":
        titles = _one_line(titles)
    alignment = ("left", *["right"] * (len(titles) - 1))
    return tabulate(rows, titles, tablefmt=fmt, colalign=alignment, disable_numparse=True)


class FigureRow(NamedTuple):
    """A figure of all arms: its title, a cell per arm, and what the difference from the first arm is (may be empty)."""

    title: str
    cells: list[str]
    notes: list[str]


def by_figure(settings: Settings, results: Results, workload: Workload) -> list[FigureRow]:
    """The table of :func:`table` turned over, with the differences in it: one row per figure."""
    columns = _columns(settings, results, workload)
    found = [summarise(results, arm.name, workload.label) for arm in settings.arms]
    listed = differences(settings, results, workload)
    notes = {
        arm.name: {d.figure.name: f"{d.text()}, {d.verdict}" for d in listed.get(arm.name, [])} for arm in settings.arms
    }
    rows = []
    for column, title in zip(columns, _one_line([c.title for c in columns]), strict=True):
        cells = [_cell(summary, column) if summary else "not measured" for summary in found]
        if column is _EQUAL and found[0]:
            cells[0] = "ref"
        rows.append(FigureRow(title, cells, [notes[arm.name].get(column.figure, "") for arm in settings.arms]))
    failed = [f"{summary['failed_total']:.0f}" if summary else "-" for summary in found]
    return [*rows, FigureRow("failed requests", failed, [""] * len(failed))]


def _columns(settings: Settings, results: Results, workload: Workload) -> list[_Column]:
    """The columns that have something to show."""
    found = [summarise(results, arm.name, workload.label) for arm in settings.arms]
    columns = list(_BURST if isinstance(workload, Burst) else _PREFIX)
    if not isinstance(workload, Burst) and any(_BUDGET.figure in summary for summary in found):
        columns.insert(1, _BUDGET)
    columns += [c for c in _OPTIONAL if any(c.figure in summary for summary in found)]
    if any(summary.get(c.figure) for summary in found for c in _TIERS[1:]):
        columns += _TIERS
    return columns + ([_EQUAL] if len(settings.arms) > 1 else [])


def differences(settings: Settings, results: Results, workload: Workload) -> dict[str, list[Difference]]:
    """By arm, its differences from the first arm, seed by seed; without the first arm and arms not measured."""
    figures = {
        arm.name: {r.seed: r.figures for r in results.runs if r.arm == arm.name and r.workload == workload.label}
        for arm in settings.arms
    }
    reference, *others = figures
    unshared = ("hit_rate",) if isinstance(workload, Burst) else ()  # a burst has nothing to hit
    found = {name: compare(figures[name], figures[reference], unshared) for name in others}
    return {name: listed for name, listed in found.items() if listed}


def difference_rows(settings: Settings, results: Results, workload: Workload) -> tuple[list[str], list[list[str]]]:
    """Titles and one row per figure: each other arm's difference from the first, and whether it is noise."""
    found = differences(settings, results, workload)
    by_figure: dict[str, dict[str, str]] = {}
    for name, listed in found.items():
        for d in listed:
            by_figure.setdefault(d.figure.title, {})[name] = f"{d.text()}, {d.verdict}"
    rows = [[title, *(cells.get(name, "-") for name in found)] for title, cells in by_figure.items()]
    return [f"against {settings.arms[0].name}", *found], rows


def difference_table(settings: Settings, results: Results, workload: Workload, fmt: str = "simple") -> str:
    """:func:`difference_rows` in tabulate's format ``fmt``; empty where there is nothing to compare."""
    titles, rows = difference_rows(settings, results, workload)
    if not rows:
        return ""
    return tabulate(rows, titles, tablefmt=fmt, colalign=["left"] * len(titles), disable_numparse=True)


def cross_rows(results: Results, workload: Workload) -> tuple[list[str], list[list[str]]]:
    """Titles and rows of the cross-check: every figure of every run by both clients; no rows where there was none."""
    rows = [
        [run.arm, str(run.seed), *row]
        for run in results.runs
        if run.workload == workload.label and run.cross
        for row in crosscheck.rows(run.figures, run.cross)
    ]
    return ["arm", "seed", "figure", "bench_rag", "sglang.benchmark.serving", "difference", "reading"], rows


def cross_table(results: Results, workload: Workload, fmt: str = "simple") -> str:
    """:func:`cross_rows` in tabulate's format ``fmt``; empty without rows."""
    titles, rows = cross_rows(results, workload)
    alignment = ("left", "right", "left", "right", "right", "right", "left")
    return tabulate(rows, titles, tablefmt=fmt, colalign=alignment, disable_numparse=True) if rows else ""


def _one_line(titles: Sequence[str]) -> list[str]:
    """Two-line titles on one line; an empty first line stands for the one to its left."""
    lines, group = [], ""
    for title in titles:
        first, _, second = title.partition("\n")
        group = first or group
        lines.append(f"{group} {second}".strip())
    return lines


def _cell(summary: Mapping[str, Any], column: _Column) -> str:
    if column.figure not in summary:
        return "not reported" if summary and column.figure == "hit_rate" else "-"
    text = f"{column.factor * summary[column.figure]:.{column.decimals}f}"
    spread = summary.get(f"{column.figure}_sd")
    return text if spread is None else f"{text} ± {column.factor * spread:.{column.decimals}f}"


def title(settings: Settings, results: Results, workload: Workload) -> str:
    """One line that says what the workload was and how high its hit rate could be."""
    sizes = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in describe(workload).items() if k not in ("kind", "label"))
    text = f"{workload.label}: {sizes}; seeds {', '.join(map(str, settings.seeds))}"
    if load := results.loads.get(workload.label):
        text += f". Load: {load}"
    if isinstance(workload, Burst):
        return text
    facts = ", ".join(f"{k} {v}" for k, v in results.facts.get(workload.label, {}).items())
    text += f". Of the first seed: {facts}" if facts else ""
    return f"{text}. Ceiling (infinite cache): {100 * mean_ceiling(results, workload.label):.1f}% hit rate"


def turned_table(settings: Settings, results: Results, workload: Workload) -> str:
    """:func:`by_figure` as text: a row per figure, a column per arm and one for its difference from the first."""
    rows = []
    for row in by_figure(settings, results, workload):
        cells = [row.title, row.cells[0]]
        for cell, note in zip(row.cells[1:], row.notes[1:], strict=True):
            cells += [cell, note]
        rows.append(cells)
    first, *others = [arm.name for arm in settings.arms]
    titles = ["", first, *(title for name in others for title in (name, f"against {first}"))]
    alignment = ["left", "right", *(side for _ in others for side in ("right", "left"))]
    return tabulate(rows, titles, colalign=alignment, disable_numparse=True)


def terminal(settings: Settings, results: Results, width: int | None = None) -> str:
    """All tables, ready to print; a table wider than ``width`` characters is turned over."""
    parts = []
    for workload in settings.workloads:
        shown = table(settings, results, workload)
        turned = width is not None and max(map(len, shown.splitlines())) > width
        parts += [title(settings, results, workload)]
        parts += [turned_table(settings, results, workload) if turned else shown, ""]
        if not turned and len(settings.seeds) > 1 and (compared := difference_table(settings, results, workload)):
            parts += [compared, ""]
        if crossed := cross_table(results, workload):
            parts += [crossed, ""]
    return "\n".join(parts).rstrip()


def markdown(settings: Settings, results: Results, plot: str | None = None, closing: str = "") -> str:
    """The report as one Markdown page; ``plot`` is the file name of a picture beside it."""
    made = about(settings)
    lines = ["# bench_rag", "", f"{made['created']}, {made['machine']}, Python {made['python']}", ""]
    if settings.url is None:
        lines += [f"Model: `{Path(settings.model).name}`, host profile `{settings.profile.name}`", ""]
    for workload in settings.workloads:
        lines += [f"## {workload.label}", "", title(settings, results, workload), ""]
        lines += [table(settings, results, workload, "github"), ""]
        if compared := difference_table(settings, results, workload, "github"):
            lines += [compared, ""]
        if crossed := cross_table(results, workload, "github"):
            lines += [crossed, ""]
    if closing:
        lines += [closing, ""]
    if plot:
        lines += [f"![hit rate and time to first token per arm]({plot})", ""]
    lines += ["## Arms", ""]
    lines += [arms_table(settings, results, "github"), ""]
    for failure in results.failures:
        lines += [f"`{failure.arm}` failed: {failure.sentence}", "", "```", failure.detail, "```", ""]
    lines += ["## Method", "", *method(settings, results), ""]
    return "\n".join(lines)


_ARM_HEADERS = ("arm", "what it is", "SGLang", "cache strategy", "overlap", "replay", "start s")


def arms_table(settings: Settings, results: Results, fmt: str) -> str:
    """What each arm's server said it ran, in tabulate's format ``fmt``."""
    return tabulate(_arm_rows(settings, results), _ARM_HEADERS, tablefmt=fmt, disable_numparse=True)


def _arm_rows(settings: Settings, results: Results) -> list[list[str]]:
    """What each server said it ran, which is not always what it was asked for."""
    rows = []
    for arm in settings.arms:
        said = next((r.server for r in results.runs if r.arm == arm.name), {})
        overlap = said.get("disable_overlap_schedule")
        start = said.get("start_s")
        rows.append(
            [
                arm.name,
                arm.about,
                str(said.get("version", "-")),
                str(said.get("mamba_radix_cache_strategy", "-")),
                "-" if overlap is None else "off" if overlap else "on",
                str(said.get("replay", "-")),
                "-" if start is None else f"{start:.0f}",
            ]
        )
    return rows


_BUDGET_METHOD = (
    "- The ceiling of the budget is what a clairvoyant cache could supply with the server's own slots and KV tokens, "
    "requests one after another in the order in which they were sent: a proven upper bound (a linear program), not a "
    "schedule that is known to exist. States may stand at every token, and requests do not overlap.",
)


def method(settings: Settings, results: Results) -> list[str]:
    """How the figures came about, a Markdown list item each."""
    return [
        f"- Arms are run {settings.order} over the seeds; warm-up: {_WARMUPS[settings.warmup]}.",
        f"- {_CACHE[settings.cache]}",
        *_ramp_method(settings),
        f"- Prompts went out as {'text' if settings.as_text else 'token ids'} to {_ENDPOINTS[settings.api]}.",
        *(_TEXT_METHOD if settings.as_text else ()),
        "- Hits are cached over prompt tokens, as the server reports them per request. The ceiling is an infinite "
        "cache that keeps every earlier prompt and answer and is ready at once.",
        *(_BUDGET_METHOD if any(_BUDGET.figure in r.figures for r in results.runs) else ()),
        "- Times run from the moment a request is sent. A request held back by the client's own concurrency limit "
        "has not been sent yet; the JSON has that wait as `client_wait_ms_mean`.",
        "- TPOT is per request, after the first event; ITL is per token. Percentiles interpolate linearly.",
        "- Same out: share of greedy answers whose token ids all equal the first arm's. Batches form differently in "
        "every run and rounding follows them, so two runs of one arm need not reach 100% (name an arm twice to see).",
        "- ± in the table of arms is the sample standard deviation over seeds. Differences are taken seed by seed, "
        "with Student's 95% interval of their mean; one that includes 0 is within noise. Of twenty figures that do not "
        "differ, one leaves its interval by chance.",
        *_goodput_method(settings),
        "- Steady tok/s counts tokens between the last request's first token and the first request's last.",
    ]


_WARMUPS = {
    "full": "a smaller run of the workload's shape, other prompts",
    "light": "one tiny request",
    "none": "none",
}
_CACHE = {
    "flush": "The prefix cache is flushed before every measured run.",
    "keep": "The prefix cache is not flushed: whatever came before is still in it.",
    "prime": "Before every measured run the prefix cache is flushed and the run's requests are sent once, unmeasured.",
}
_ENDPOINTS = {"native": "SGLang's /generate", "openai": "/v1/completions"}
_TEXT_METHOD = (
    "- Lengths in tokens are the server's own count of the text. The ceilings count the planned tokens: those of the "
    "tokenizer named above for real text, one per made-up word otherwise.",
)


def _ramp_method(settings: Settings) -> list[str]:
    if not settings.ramp:
        return ["- No ramp: every request is measured, from the first one."]
    return [
        f"- Ramp: the limit on requests in flight rises from 1 over {settings.ramp:g} s; requests sent within them are "
        "in no figure."
    ]


def _goodput_method(settings: Settings) -> list[str]:
    if settings.ttft_limit is None:
        return []
    limit = f"{1e3 * settings.ttft_limit:g} ms"
    return [f"- Goodput counts requests whose first token came within {limit}; in time is their share of all requests."]


def as_json(settings: Settings, results: Results, closing: str = "") -> dict[str, Any]:
    """Everything measured, with what is needed to repeat it."""
    return {
        **about(settings),
        "model": settings.model,
        "url": settings.url,
        "host_profile": settings.profile.name,
        "order": settings.order,
        "warmup": settings.warmup,
        "cache": settings.cache,
        "ramp_s": settings.ramp,
        "api": settings.api,
        "prompts": "text" if settings.as_text else "ids",
        "ttft_limit_ms": None if settings.ttft_limit is None else 1e3 * settings.ttft_limit,
        "seeds": list(settings.seeds),
        "token_ids": [settings.vocab.low, settings.vocab.high],
        "workloads": [
            {
                **describe(w),
                "ceiling": results.ceilings[w.label],
                "load": results.loads.get(w.label),
                "facts": results.facts.get(w.label, {}),
            }
            for w in settings.workloads
        ],
        "arms": [
            {
                "name": arm.name,
                "about": arm.about,
                "args": list(arm.args),
                "env": dict(arm.env),
                "plugin": arm.plugin,
                "command": results.commands.get(arm.name),
            }
            for arm in settings.arms
        ],
        "runs": [
            {
                "arm": r.arm,
                "workload": r.workload,
                "seed": r.seed,
                "figures": r.figures,
                "server": r.server,
                "cross_check": r.cross,
                "samples": _samples(r),
            }
            for r in results.runs
        ],
        "summary": [
            {"arm": arm.name, "workload": w.label, **summary}
            for w in settings.workloads
            for arm in settings.arms
            if (summary := summarise(results, arm.name, w.label))
        ],
        "differences": [
            {
                "arm": name,
                "against": settings.arms[0].name,
                "workload": w.label,
                "figure": d.figure.name,
                "relative": d.figure.relative,
                "mean": d.mean,
                "half_width_95": d.half_width,
                "seeds": d.seeds,
                "reading": d.verdict,
            }
            for w in settings.workloads
            for name, listed in differences(settings, results, w).items()
            for d in listed
        ],
        "failures": [{"arm": f.arm, "sentence": f.sentence, "detail": f.detail} for f in results.failures],
        "complete": results.complete,
        "closing": closing,
    }


def write(settings: Settings, results: Results, closing: str = "", plot: str | None = None) -> None:
    """``results.json``, ``report.md`` and ``requests.jsonl`` (one line per request) in the output folder."""
    settings.out.mkdir(parents=True, exist_ok=True)
    write_whole(settings.out / "results.json", json.dumps(as_json(settings, results, closing), indent=1))
    write_whole(settings.out / "report.md", markdown(settings, results, plot, closing))
    lines = [json.dumps(_request(run, reply)) for run in results.runs for reply in run.replies]
    write_whole(settings.out / "requests.jsonl", "".join(line + "\n" for line in lines))


def _samples(run: Run) -> list[dict[str, float]]:
    """Pool samples with ``at`` in seconds from the run's first request."""
    began = min((r.sent for r in run.replies), default=0.0)
    return [{**s, "at": round(s["at"] - began, 3)} for s in run.samples]


def _request(run: Run, reply: Reply) -> dict[str, Any]:
    began = min(r.sent for r in run.replies)
    line: dict[str, Any] = {
        "arm": run.arm,
        "workload": run.workload,
        "seed": run.seed,
        "conversation": reply.conversation,
        "turn": reply.turn,
        "sent_s": round(reply.sent - began, 6),
        "waited_s": round(reply.waited, 6),
        "prompt_tokens": reply.prompt_tokens,
        "cached_tokens": reply.cached_tokens,
        "in_ramp": reply.ramp,
        "error": reply.error,
    }
    if reply.ok:
        line |= {"ttft_ms": 1e3 * measures.ttft(reply), "e2e_ms": 1e3 * measures.e2e(reply)}
        line["output_tokens"] = reply.events[-1][1]
    return line


def write_whole(path: Path, text: str) -> None:
    """Write whole or not at all: a benchmark that is killed leaves the previous file."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def about(settings: Settings) -> dict[str, Any]:
    """When, where and by which version a report was made."""
    gpu = gpu_name()
    return {
        "bench_rag": __version__,
        "created": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": gpu or f"{os.cpu_count()} CPU cores ({platform.machine()})",
        "python": platform.python_version(),
    }
