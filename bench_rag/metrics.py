"""How full a server's pools are while a run goes on, from its Prometheus page (``--enable-metrics``)."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from .client import Client

# Gauges of SGLang by the name a report uses; shares from 0 to 1 and counts.
GAUGES = {
    "state_pool": "sglang:mamba_usage",
    "kv_pool": "sglang:full_token_usage",
    "running": "sglang:num_running_reqs",
    "queued": "sglang:num_queue_reqs",
}
_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{.*\})?\s+(\S+)")
INTERVAL = 0.5  # seconds between samples

Sample = dict[str, float]


def read_gauges(page: str) -> Sample:
    """The gauges on a Prometheus page; of several series (ranks) the largest. Empty where it has none."""
    names = {gauge: name for name, gauge in GAUGES.items()}
    found: Sample = {}
    for line in page.splitlines():
        match = _LINE.match(line)
        if match and match[1] in names:
            with contextlib.suppress(ValueError):
                name, value = names[match[1]], float(match[2])
                found[name] = max(value, found.get(name, value))
    return found


@contextlib.asynccontextmanager
async def sampled(client: Client, interval: float = INTERVAL) -> AsyncIterator[list[Sample]]:
    """A list that fills while the context is open: gauges and ``at``, the time by :func:`time.perf_counter`.

    It stays empty for a server that shows no metrics, which is asked once.
    """
    samples: list[Sample] = []

    async def sample() -> None:
        while gauges := read_gauges(await client.metrics()):
            samples.append({"at": time.perf_counter(), **gauges})
            await asyncio.sleep(interval)

    task = asyncio.create_task(sample())
    try:
        yield samples
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def occupancy(samples: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Mean and largest share of each pool over the samples of a run."""
    figures: dict[str, Any] = {}
    for name in ("state_pool", "kv_pool"):
        values = [s[name] for s in samples if name in s]
        if values:
            figures[f"{name}_mean"], figures[f"{name}_max"] = sum(values) / len(values), max(values)
    return figures
