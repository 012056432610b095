"""Timing: CUDA graphs and events where there is a GPU, a wall clock for smoke runs on the CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch


class Spread(NamedTuple):
    """Median and 10th and 90th percentile of samples, in microseconds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: list[float]) -> Spread:
        if len(samples) < 3:
            return cls(statistics.median(samples), min(samples), max(samples))
        tenths = statistics.quantiles(samples, n=10, method="inclusive")
        return cls(statistics.median(samples), tenths[0], tenths[-1])

    def divided(self, by: float) -> Spread:
        return Spread(*(value / by for value in self))


def launcher(step: Callable[[], object], device: torch.device, graph: bool) -> Callable[[], object]:
    """`step` compiled and warm; captured into a CUDA graph where asked for and possible."""
    for _ in range(3):
        step()
    if device.type == "cpu" or not graph:
        return step
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        step()
    return captured.replay


def sample(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Microseconds per call of `run`, over `repeats` calls in a row."""
    if device.type == "cpu":
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - begin) / repeats * 1e6
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats * 1e3


def interleaved(
    runs: dict[str, Callable[[], object]], rounds: int, repeats: int, device: torch.device
) -> dict[str, Spread]:
    """Sample every arm in turn, round after round, so that drift of the card hits all of them alike."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            samples[name].append(sample(run, repeats, device))
    return {name: Spread.of(values) for name, values in samples.items()}


def copy_bandwidth(device: torch.device, size: int = 1 << 31) -> float:
    """Bytes per second of a large device-to-device copy, counting bytes read and written."""
    if device.type == "cpu":
        size = 1 << 24
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    best = min(sample(lambda: target.copy_(source), 3, device) for _ in range(5))
    return 2 * size / best * 1e6
