"""Materialise benchmark: one launch over all layers for some requests, beside a plain copy of as many states."""

from __future__ import annotations

import torch

from ..cursors import WorkList
from ..materialise import materialise
from ..ring import RingShape
from ..workload import Workload
from . import report
from .timing import interleaved, launcher


def run(
    shape: RingShape,
    requests: tuple[int, ...],
    state_dtype: torch.dtype,
    device: torch.device,
    rounds: int,
    graph: bool,
    programs: tuple[int, ...],
) -> list[dict[str, object]]:
    """Fold in place, snapshot to another slot, an empty list, and torch's copy; microseconds per launch."""
    room = max(requests)
    w = Workload(shape, 2 * room, state_dtype, device, stagger=True)
    entries = torch.empty(4, room, dtype=torch.int32, device=device)
    order = torch.randperm(2 * room, device=device).to(torch.int32)
    entries[0] = w.rows[:room]
    entries[1], entries[2] = order[:room], order[room:]
    entries[3] = shape.capacity
    records: list[dict[str, object]] = []
    for count in (0, *requests):
        in_place, elsewhere = WorkList.allocate(room, device), WorkList.allocate(room, device)
        for work in (in_place, elsewhere):
            work.entries.copy_(entries)
            work.count.fill_(count)
        in_place.entries[2] = entries[1]
        steps = {
            "fold": lambda work=in_place: materialise(w.state, w.ring, work),
            "snapshot": lambda work=elsewhere: materialise(w.state, w.ring, work),
        }
        for number in programs:
            steps[f"fold, {number} programs"] = lambda n=number, work=in_place: materialise(w.state, w.ring, work, n)
        if count:
            steps["torch copy"] = lambda n=count: w.state[:, room : room + n].copy_(w.state[:, :n])
        runs = {name: launcher(step, device, graph) for name, step in steps.items()}
        moved = 2 * count * shape.layers * shape.v_heads * shape.value_dim * shape.key_dim * state_dtype.itemsize
        for name, spread in interleaved(runs, rounds, 4, device).items():
            records.append(
                {
                    "benchmark": "materialise",
                    "arm": name,
                    "requests": count,
                    "layers": shape.layers,
                    "us": round(spread.median, 2),
                    "us_p10": round(spread.low, 2),
                    "us_p90": round(spread.high, 2),
                    "gb_per_s": round(moved / spread.median / 1e3, 1),
                    "state": str(state_dtype),
                    **report.machine(device),
                }
            )
    rows = [[f"{r['requests']} requests, {r['arm']}", f"{r['us']}", f"{r['gb_per_s']:.0f}"] for r in records]
    print(report.table(["one launch, all layers", "us", "GB/s"], rows), flush=True)
    return records
