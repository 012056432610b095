"""``python -m bench_rag compare A.json B.json``: what changed between two benchmarks, and what of it is noise."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from .errors import BenchError
from .noise import compare
from .options import Parser

# What should be the same on both sides; where it differs, the comparison says so above its figures.
_CONDITIONS = (
    *("machine", "model", "host_profile", "warmup", "cache", "ramp_s", "api", "prompts"),
    *("token_ids", "ttft_limit_ms"),
)


def load(path: Path) -> dict[str, Any]:
    """A ``results.json``; BenchError if the file is none. A folder stands for the file inside."""
    path = path / "results.json" if path.is_dir() else path
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise BenchError(f"cannot read {path}: {e.strerror}") from e
    except ValueError as e:
        raise BenchError(f"{path} is not JSON: {e}") from e
    if not isinstance(data, dict) or not all(isinstance(data.get(k), list) for k in ("runs", "workloads", "arms")):
        raise BenchError(f"{path} is not a result file of bench_rag")
    if not data["runs"]:
        raise BenchError(f"{path}: no run was measured")
    return data


def pairs(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Arms to compare: those of one name, or the only one of each side. BenchError if there are none."""
    left, right = ([arm["name"] for arm in side["arms"]] for side in (a, b))
    shared = [(name, name) for name in left if name in right]
    if shared:
        return shared
    if len(left) == len(right) == 1:
        return [(left[0], right[0])]
    raise BenchError(f"no arm is in both files: {', '.join(left)} in the first, {', '.join(right)} in the second")


def warnings(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """What makes two files hard to compare: other conditions, other sizes of a workload, workloads of one side."""
    found = [f"{k.replace('_', ' ')}: {a.get(k)} and {b.get(k)}" for k in _CONDITIONS if a.get(k) != b.get(k)]
    left, right = ({w["label"]: w for w in side["workloads"]} for side in (a, b))
    for label in left.keys() & right.keys():
        sizes = [k for k in left[label] if k not in ("ceiling", "facts") and left[label].get(k) != right[label].get(k)]
        sizes += [k for k in right[label] if k not in left[label]]
        if left[label].get("facts") != right[label].get("facts") and not sizes:
            sizes = ["facts of the plan"]
        found += [f"{label}, {k.replace('_', ' ')}: {left[label].get(k)} and {right[label].get(k)}" for k in sizes]
    for name, side, other in (("first", left, right), ("second", right, left)):
        found += [f"{label} is only in the {name} file" for label in side if label not in other]
    return found


def table(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """One row per arm, workload and figure: both means, the second's difference from the first, and its reading."""
    labels = [w["label"] for w in a["workloads"] if w["label"] in {w["label"] for w in b["workloads"]}]
    rows = []
    for label in labels:
        for left, right in pairs(a, b):
            first, second = _by_seed(a, left, label), _by_seed(b, right, label)
            name = left if left == right else f"{right} against {left}"
            burst = ("hit_rate",) if any("steady_throughput" in figures for figures in first.values()) else ()
            for d in compare(second, first, burst):
                seeds = [s for s in second if s in first and d.figure.name in first[s] and d.figure.name in second[s]]
                means = [
                    sum(side[s][d.figure.name] for s in seeds) / len(seeds) * (1 if d.figure.relative else 100)
                    for side in (first, second)
                ]
                rows.append([label, name, d.figure.title, *(f"{m:.1f}" for m in means), d.text(), d.verdict])
    if not rows:
        raise BenchError("the files share no workload, arm and seed")
    titles = ["workload", "arm", "figure", "first", "second", "difference", "reading"]
    alignment = ("left", "left", "left", "right", "right", "right", "left")
    return tabulate(rows, titles, colalign=alignment, disable_numparse=True)


def _by_seed(data: Mapping[str, Any], arm: str, label: str) -> dict[int, dict[str, Any]]:
    return {r["seed"]: r["figures"] for r in data["runs"] if r["arm"] == arm and r["workload"] == label}


def main(argv: Sequence[str]) -> int:
    """Print the comparison; exit status 2 for files that cannot be compared."""
    p = Parser(
        prog="python -m bench_rag compare",
        description="Compare two result files of bench_rag arm by arm, seed by seed; the first is the reference.",
    )
    p.add_argument("first", type=Path, metavar="A.json", help="result file, or the folder that holds results.json")
    p.add_argument("second", type=Path, metavar="B.json")
    options = p.parse_args(argv)
    try:
        a, b = load(options.first), load(options.second)
        text = table(a, b)
    except BenchError as e:
        print(f"bench_rag: {e}", file=sys.stderr)
        return 2
    for name, data in (("first", a), ("second", b)):
        print(
            f"{name}: {data.get('created')}, {data.get('machine')}, seeds {', '.join(map(str, data.get('seeds', [])))}"
        )
    for line in warnings(a, b):
        print(f"differs: {line}")
    print(f"\n{text}\n\nIntervals: Student's 95% over the seeds both files have.")
    return 0
