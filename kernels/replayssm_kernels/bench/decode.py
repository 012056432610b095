"""Decode and verify benchmark: microseconds per layer and step, folds and cursors included.

Time of a forward = cursors + folds due in it + every layer's decode or verify, averaged over whole turns of the ring
(the steps from a request's fold to its next), in a CUDA graph, divided by the layers. Requests stand at staggered
positions, so in every step as many rows fold as in serving. Pools exceed the L2 cache, and every layer reads another
part of them.

The byte floor is `verify_bytes` of `..traffic` (for decode, width 1, `buffered_bytes`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..launch_shapes import DecodeConfig
from ..ring import RingShape
from ..traffic import verify_bytes
from ..workload import Workload
from . import arms as baseline_arms
from . import report, verify_arms
from .arms import Arm, Ours, accuracy, available_baselines
from .timing import copy_bandwidth, interleaved, launcher

_MOST_DIRECT = 8  # batches at which direct steps are tried


def direct_configs(value_dim: int) -> tuple[DecodeConfig, ...]:
    """Launch shapes that a sweep tries for direct steps: a program per tile."""
    tiles = [(8, 1, 32), (8, 2, 32), (16, 1, 32), (16, 2, 32), (32, 4, 32)]
    tiles += [(8, 1, 64), (8, 2, 64), (16, 2, 64), (4, 1, 128), (8, 1, 128), (8, 2, 128), (16, 2, 128), (32, 4, 128)]
    return tuple(DecodeConfig(bv, value_dim // bv, warps, 1, ch) for bv, warps, ch in tiles if bv <= value_dim)


@dataclass(frozen=True)
class Options:
    """One benchmark run; see `__main__` for their meaning on the command line."""

    k_heads: int
    v_heads: int
    head_dim: int
    batches: tuple[int, ...]
    capacity: int
    act_dtype: torch.dtype
    state_dtype: torch.dtype
    u_dtype: torch.dtype
    layers: int
    rounds: int
    gate: str
    lower_bound: float | None
    graph: bool
    baselines: bool
    configs: tuple[DecodeConfig, ...]
    device: torch.device
    width: int = 1
    accepted: int = 1

    @property
    def name(self) -> str:
        return f"{self.gate}_verify" if self.width > 1 else f"{self.gate}_decode"

    def shape(self, batch: int, layers: int) -> RingShape:
        return RingShape(
            layers=layers,
            rows=batch + 1,
            k_heads=self.k_heads,
            v_heads=self.v_heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            capacity=self.capacity,
            key_dtype=self.act_dtype,
            u_dtype=self.u_dtype,
            gate=self.gate,
            lower_bound=self.lower_bound,
            max_width=self.width,
        )

    def layers_for(self, batch: int) -> int:
        """48 layers as in the 27B shape; fewer at batches whose pools dwarf the cache anyway, and fewer still where
        one of the arms keeps a state per draft."""
        many, few = (48, 12) if self.width == 1 else (24, 6)
        return self.layers or (many if batch <= 32 else few)


def arms(o: Options, batch: int, layers: int, stagger: bool, shared: bool) -> dict[str, Callable[[], Arm]]:
    """Constructors of everything that is compared at one batch size; `shared`: all of ours run over one pool."""
    shape = o.shape(batch, layers)

    def workload() -> Workload:
        kind = dict(stagger=stagger, width=o.width, accepted=o.accepted)
        return Workload(shape, batch, o.state_dtype, o.device, **kind)

    def verify_baseline(kind: verify_arms.Baseline) -> Arm:
        arm = kind(workload())
        if stagger and isinstance(arm, verify_arms.InTreeRing):
            arm.stagger()
        return arm

    ours = functools.cache(workload) if shared else workload
    made: dict[str, Callable[[], Arm]] = {"ours": lambda: Ours(ours())}
    for config in o.configs:
        name = f"ours bv{config.block_v} split{config.split} w{config.warps} st{config.stages}"
        name += f" ch{config.chunk}" if config.chunk != DecodeConfig._field_defaults["chunk"] else ""
        made[name] = lambda c=config: Ours(ours(), c)
    if o.width == 1 and batch <= _MOST_DIRECT:
        directly = functools.cache(workload) if shared else workload
        made["ours, direct"] = lambda: Ours(directly(), direct=True)
        for config in direct_configs(o.head_dim) if o.configs else ():
            name = f"ours, direct bv{config.block_v} w{config.warps} ch{config.chunk}"
            made[name] = lambda c=config: Ours(directly(), c, direct=True)
    if o.baselines and o.width > 1:
        for name, kind in verify_arms.available_baselines(shape)[0].items():
            made[name] = lambda k=kind: verify_baseline(k)
    elif o.baselines:
        for name, kind in available_baselines(shape)[0].items():
            made[name] = lambda k=kind: k(shape, batch, o.state_dtype, o.device, stagger)
    return made


def run(o: Options) -> list[dict[str, object]]:
    """Run every batch size; prints a table and returns one record per arm and batch size."""
    device = report.machine(o.device)
    copy = copy_bandwidth(o.device)
    print(f"{device}; copy {copy / 1e9:.0f} GB/s; {o.k_heads}/{o.v_heads} heads of {o.head_dim}, L = {o.capacity},")
    print(f"activations {o.act_dtype}, state {o.state_dtype}, u {o.u_dtype}; microseconds per layer and step")
    if o.width > 1:
        print(f"{o.width} tokens per request and step, {o.accepted} of them accepted")
    if o.baselines and (why := (verify_arms if o.width > 1 else baseline_arms).available_baselines(o.shape(1, 1))[1]):
        print(why)
    errors = {
        name: accuracy(make, 2 * ((o.capacity - o.width) // o.accepted + 1) + 2)
        for name, make in arms(o, batch=2, layers=1, stagger=False, shared=False).items()
    }
    records = []
    for batch in o.batches:
        records += _run_batch(o, batch, errors, copy, device)
        print(_table([r for r in records if r["batch"] == batch]), flush=True)
    return records


def _run_batch(
    o: Options, batch: int, errors: dict[str, float], copy: float, device: dict[str, str]
) -> list[dict[str, object]]:
    layers = o.layers_for(batch)
    shape = o.shape(batch, layers)
    made = {name: make() for name, make in arms(o, batch, layers, stagger=True, shared=True).items()}
    # `made` must outlive the timing: a captured graph does not keep the tensors it reads alive.
    runs = {name: launcher(arm.forward, o.device, o.graph) for name, arm in made.items()}
    turn = made["ours"].workload.turn
    turns = 1 if o.device.type == "cpu" else max(1, 64 // (turn * max(1, batch // 32)))
    times = interleaved(runs, o.rounds, turns * turn, o.device)  # whole turns of the ring
    floor = verify_bytes(shape, batch, o.state_dtype.itemsize, o.width, o.accepted)
    records = []
    for name, spread in times.items():
        us = spread.divided(layers)
        records.append(
            {
                "benchmark": o.name,
                "lower_bound": o.lower_bound,
                "arm": name,
                "batch": batch,
                "layers": layers,
                "us": round(us.median, 3),
                "us_p10": round(us.low, 3),
                "us_p90": round(us.high, 3),
                "gb_per_s": round(floor / us.median / 1e3, 1),
                "floor_us": round(floor / copy * 1e6, 3),
                "error": errors[name],
                "heads": f"{o.k_heads}/{o.v_heads}",
                "head_dim": o.head_dim,
                "capacity": o.capacity,
                "width": o.width,
                "accepted": o.accepted,
                "act": str(o.act_dtype),
                "state": str(o.state_dtype),
                "u": str(o.u_dtype),
                "graph": o.graph,
                **device,
            }
        )
    del runs, made
    if o.device.type == "cuda":
        torch.cuda.empty_cache()
    return records


def _table(records: list[dict[str, object]]) -> str:
    ours = next(r["us"] for r in records if r["arm"] == "ours")
    rows = [
        [
            f"batch {r['batch']} {r['arm']}",
            f"{r['us']:.2f}",
            f"{r['us_p10']:.2f}-{r['us_p90']:.2f}",
            f"{r['us'] / ours:.2f}x",
            f"{r['gb_per_s']:.0f}" if str(r["arm"]).startswith("ours") else "",
            f"{r['floor_us']:.2f}",
            f"{r['error']:.1e}",
        ]
        for r in records
    ]
    return report.table(["arm", "us", "p10-p90", "ours =1", "GB/s", "floor us", "error"], rows)
