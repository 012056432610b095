"""The demo: the shared-prefix workload at a size that Triton's interpreter on two CPU cores finishes in minutes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .errors import BenchError
from .hosts import HostProfile
from .report import mean_ceiling, summarise
from .runner import Results
from .settings import Settings
from .workloads import SharedPrefix

# Small prefill chunks end inside prompts, as the default ones do inside the public report's: a cache that stores no
# state inside a prompt then hits just where a chunk happened to end. 20 output tokens make a ring of 16 records fold.
WORKLOAD = SharedPrefix(
    groups=3,
    prompts_per_group=8,
    prefix_len=256,
    question_len=16,
    output_len=20,
    request_rate=4.0,
    concurrency=4,
)
_ARGS = ("--chunked-prefill-size", "512")
# On a GPU the defaults would size the pools and the graphs for a real model.
_GPU_ARGS = (
    *("--dtype", "float16", "--attention-backend", "triton", "--sampling-backend", "pytorch"),
    *("--max-total-tokens", "16384", "--max-running-requests", "4", "--max-mamba-cache-size", "64"),
    *("--mem-fraction-static", "0.3", "--skip-server-warmup"),
)
_TINY = Path(__file__).resolve().parents[1] / "tests" / "harness" / "tiny.py"


def server_args(profile: HostProfile) -> tuple[str, ...]:
    """What the demo's servers get beside the host profile."""
    return (*(_GPU_ARGS if profile.name == "gpu" else ()), *_ARGS)


def tiny_model() -> str:
    """Folder of the tiny Qwen3-Next checkpoint with random weights, built on first use (seconds)."""
    if not _TINY.is_file():
        raise BenchError(
            "the demo builds its tiny model from the repository: run it there, or name a model with --model"
        )
    built = subprocess.run([sys.executable, str(_TINY), "qwen3-next"], capture_output=True, text=True)
    folder = built.stdout.strip().splitlines()[-1:] or [""]
    if built.returncode != 0 or not Path(folder[0], "config.json").is_file():
        raise BenchError(f"building the tiny model failed: {(built.stderr.strip().splitlines() or ['no message'])[-1]}")
    return folder[0]


def sentence(settings: Settings, results: Results) -> str:
    """One sentence on what the first workload's figures show; it says only what they say."""
    workload = settings.workloads[0]
    found = {arm.name: summarise(results, arm.name, workload.label) for arm in settings.arms}
    hits = {name: 100 * summary["hit_rate"] for name, summary in found.items() if "hit_rate" in summary}
    limit = 100 * mean_ceiling(results, workload.label)
    mine = hits.get("plugin")
    if mine is None:
        listed = ", ".join(f"{name} {hit:.1f}%" for name, hit in hits.items())
        return f"Of all prompt tokens the prefix cache supplied {listed}; an infinite cache would supply {limit:.1f}%."
    parts = [
        f"With the plugin, the prefix cache supplied {mine:.1f}% of all prompt tokens (an infinite cache: {limit:.1f}%)"
    ]
    names = {"plain": "plain SGLang", "intree": "SGLang's in-tree replay"}
    compared = [f"{_compare(mine, hits[arm])} {name} ({hits[arm]:.1f}%)" for arm, name in names.items() if arm in hits]
    if compared:
        parts.append(" and ".join(compared))
    same = found["plugin"].get("equal_outputs")
    if same is not None:
        parts.append(f"{100 * same:.0f}% of its greedy answers were identical to {settings.arms[0].name}'s")
    return ", ".join(parts) + "."


def _compare(mine: float, other: float) -> str:
    """How ``mine`` stands to ``other``, both in percent; half a point is no difference."""
    if abs(mine - other) <= 0.5:
        return "as much as"
    return f"{abs(mine - other):.1f} points {'more' if mine > other else 'less'} than"
