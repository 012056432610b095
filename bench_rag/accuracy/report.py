"""The figures of every arm side by side, by quartile of position: terminal, Markdown, JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tabulate import tabulate

from ..report import about, write_whole
from ..settings import Settings
from .score import Answers, figures

_TITLES = (
    "quartile",
    "arm",
    "perplexity\nas decoded",
    "of the same\nprefilled",
    "drift\n1e-4 nats",
    "noise\n1e-4 nats",
    "recall\n%",
    "same greedy\ncontinuation %",
    "of its\ntokens %",
)
METHOD = (
    "Every server writes the texts itself at temperature 1, so that each token passes its decode path. Perplexity as "
    "decoded is that of the tokens written; the same tokens are then scored by one prefill with an empty cache.",
    "Drift is the mean of decoded less prefilled log-probabilities, ± its standard error, and noise the mean of their "
    "sizes: decoding from a wrong state raises both with the position. Texts differ between servers, since rounding "
    "decides some samples; perplexities therefore scatter by their standard error (in the JSON), drift hardly.",
    "Recall asks for facts of the beginning behind every quartile of what the server wrote, served from the states it "
    "left in the prefix cache; an answer counts if all its tokens are right.",
    "Greedy continuations start within the first arm's texts. Two servers of one configuration differ too, where two "
    "tokens are nearly equally likely: the first arm named twice shows by how much.",
)


def table(found: Mapping[str, Answers], fmt: str = "simple") -> str:
    """One row per quartile and arm, in tabulate's format ``fmt``."""
    tables = _figures(found)
    rows = []
    for i, _ in enumerate(next(iter(tables.values()))):
        for name, quartiles in tables.items():
            f = quartiles[i]
            rows.append(
                [
                    str(i + 1),
                    name,
                    f"{f['perplexity']:.3f}",
                    f"{f['perplexity_prefilled']:.3f}",
                    f"{1e4 * f['drift']:+.2f} ± {1e4 * f['drift_se']:.2f}",
                    f"{1e4 * f['noise']:.2f}",
                    _percent(f, "recall"),
                    _percent(f, "agreement"),
                    _percent(f, "agreement_tokens"),
                ]
            )
    titles = list(_TITLES) if fmt == "simple" else [t.replace("\n", " ") for t in _TITLES]
    alignment = ("left", "left", *["right"] * (len(_TITLES) - 2))
    return tabulate(rows, titles, tablefmt=fmt, colalign=alignment, disable_numparse=True)


def _figures(found: Mapping[str, Answers]) -> dict[str, list[dict[str, Any]]]:
    first = next(iter(found))
    return {name: figures(a, None if name == first else found[first]) for name, a in found.items()}


def _percent(figures_: Mapping[str, Any], name: str) -> str:
    return f"{100 * figures_[name]:.1f}" if name in figures_ else "-"


def write(settings: Settings, sizes: Mapping[str, int], found: Mapping[str, Answers], failures: list[str]) -> None:
    """``accuracy.json`` and ``accuracy.md`` in the output folder; nothing before the first arm was asked."""
    if not found:
        return
    settings.out.mkdir(parents=True, exist_ok=True)
    made = about(settings)
    data = {
        **made,
        "model": Path(settings.model).name,
        "host_profile": settings.profile.name,
        "sizes": dict(sizes),
        "arms": [{"name": a.name, "about": a.about, "args": list(a.args)} for a in settings.arms],
        "server_args": list(settings.server_args),
        "quartiles": _figures(found),
        "recall_prompts_cached": {name: a.recall_cached for name, a in found.items() if any(a.recalled)},
        "failures": failures,
    }
    write_whole(settings.out / "accuracy.json", json.dumps(data, indent=1) + "\n")
    lines = ["# Accuracy", "", f"{made['created']}, {made['machine']}, Python {made['python']}", ""]
    lines += [f"Model `{Path(settings.model).name}`; " + ", ".join(f"{k} {v}" for k, v in sizes.items()), ""]
    lines += [table(found, "github"), "", *(f"- {line}" for line in METHOD), ""]
    lines += [f"{sentence}\n" for sentence in failures]
    write_whole(settings.out / "accuracy.md", "\n".join(lines))
