"""The same requests once more, sent by SGLang's own benchmark client: do the two clients agree?"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import BenchError
from .hosts import host_profile, model_needs
from .settings import Settings
from .workloads import Plan

_CLIENT = Path(__file__).with_name("serving_client.py")


@dataclass(frozen=True)
class Compared:
    """A figure both clients give: its name here and there, a title, and how far the two may lie apart.

    ``tolerance`` is a share of the larger one, or points of a hit rate where ``points`` says so.
    """

    name: str
    theirs: str
    title: str
    tolerance: float
    points: bool = False


# Two runs of one workload on one server form different batches; these are what such runs differ by, with room.
COMPARED = (
    Compared("hit_rate", "hit_rate", "hit rate", 0.02, points=True),
    Compared("ttft_ms_mean", "mean_ttft_ms", "TTFT mean, ms", 0.15),
    Compared("ttft_ms_p50", "median_ttft_ms", "TTFT p50, ms", 0.15),
    Compared("e2e_ms_mean", "mean_e2e_latency_ms", "E2E mean, ms", 0.1),
    Compared("output_throughput", "output_throughput", "output tok/s", 0.1),
)


def check(settings: Settings, plans: Mapping[str, Plan]) -> None:
    """BenchError if this cannot be done: before the first server starts."""
    if importlib.util.find_spec("sglang") is None:
        raise BenchError(f"--cross-check runs sglang.benchmark.serving, and {sys.executable} has no sglang")
    if settings.api != "native" or settings.as_text:
        raise BenchError("--cross-check sends token ids to SGLang's own endpoint: leave out --api and --prompts")
    if settings.ramp:
        raise BenchError("--cross-check measures every request: leave out --ramp")
    if not Path(settings.model, "tokenizer.json").is_file():
        raise BenchError("--cross-check needs --model with the folder of the tokenizer: that client counts by text")
    for label, plan in plans.items():
        if any(len(c.turns) > 1 for c in plan.conversations):
            raise BenchError(f"--cross-check takes workloads of single requests, and {label} has conversations")


async def send(settings: Settings, url: str, plan: Plan) -> dict[str, float]:
    """Figures of ``plan`` by the other client, named as ours. BenchError, with its last lines, if it fails."""
    with tempfile.TemporaryDirectory(prefix="bench-rag-") as folder:
        requests, result = Path(folder, "plan.json"), Path(folder, "result.jsonl")
        planned = [[c.turns[0].new_ids, c.turns[0].output_len, c.arrival] for c in plan.conversations]
        requests.write_text(json.dumps(planned), encoding="utf-8")
        command = [
            *(sys.executable, str(_CLIENT), str(requests)),
            *("--backend", "sglang", "--base-url", url, "--model", settings.model, "--tokenizer", settings.model),
            *("--dataset-name", "custom", "--num-prompts", str(plan.requests), "--request-rate", "inf"),
            *("--max-concurrency", str(plan.concurrency), "--warmup-requests", "0", "--cache-report"),
            *("--disable-tqdm", "--output-file", str(result)),
        ]
        profile = settings.profile if settings.url is None else model_needs(settings.model, host_profile("auto"))
        await _run(command, {**os.environ, **profile.env, "NO_PROXY": "*"}, folder, settings.request_timeout)
        try:
            found = json.loads(result.read_text(encoding="utf-8").splitlines()[-1])
            report = found["cache_report"]
            found["hit_rate"] = report["total_cached_tokens"] / report["total_prompt_tokens"]
            if found["completed"] != plan.requests:
                raise BenchError(f"sglang.benchmark.serving completed {found['completed']} of {plan.requests} requests")
            return {c.name: float(found[c.theirs]) for c in COMPARED}
        except (OSError, ValueError, KeyError, IndexError, ZeroDivisionError) as e:
            raise BenchError(f"sglang.benchmark.serving left a result that cannot be read: {e!r}") from e


async def _run(command: Sequence[str], env: Mapping[str, str], folder: str, timeout: float) -> None:
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=dict(env),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), timeout)
    except asyncio.TimeoutError:
        raise BenchError(f"sglang.benchmark.serving did not end within {timeout:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if process.returncode != 0:
        last = "\n".join(output.decode(errors="replace").splitlines()[-25:])
        raise BenchError(f"sglang.benchmark.serving ended with status {process.returncode}", last)


def rows(mine: Mapping[str, Any], theirs: Mapping[str, float]) -> list[tuple[str, str, str, str, str]]:
    """Per figure: title, both values, the difference, and whether it is within its tolerance."""
    found = []
    for c in COMPARED:
        if c.name not in mine or c.name not in theirs:
            continue
        a, b = float(mine[c.name]), theirs[c.name]
        if c.points:
            gap, shown = b - a, (f"{100 * a:.1f}%", f"{100 * b:.1f}%", f"{100 * (b - a):+.1f} points")
        else:
            gap = (b - a) / max(a, b, 1e-9)
            shown = f"{a:.1f}", f"{b:.1f}", f"{100 * gap:+.1f}%"
        limit = f"{100 * c.tolerance:g} points" if c.points else f"{100 * c.tolerance:g}%"
        reading = f"agree within {limit}" if abs(gap) <= c.tolerance else f"differ by more than {limit}"
        found.append((c.title, *shown, reading))
    return found
