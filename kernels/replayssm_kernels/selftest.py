"""A self-test of a few seconds: every kernel is compiled for this device and checked against the fp64 reference."""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import reference
from .cursors import FAULT, PAD, StepPlan, plan_step, set_checkpoint
from .decode import DecodeConfig
from .ring import Ring, RingShape
from .workload import Workload

# With fp32 states and records the bound of the design; outputs are taken in fp32, so 16-bit activations do not blur it.
EXACT = 1e-5
# A 16-bit state or record is rounded at every fold or append: about twice what an H200 showed (2.5e-3 and 1.6e-3).
ROUNDED = 6e-3


class Result(NamedTuple):
    """One line of the self-test: `ok` is error <= bound."""

    name: str
    error: float
    bound: float
    ok: bool


def _shape(device: torch.device, key_dtype: torch.dtype, u_dtype: torch.dtype, capacity: int) -> RingShape:
    small = device.type == "cpu"  # the interpreter needs milliseconds for what a GPU does in microseconds
    dim = 32 if small else 128
    return RingShape(
        layers=1 if small else 2,
        rows=4,
        k_heads=1 if small else 2,
        v_heads=2 if small else 6,
        key_dim=dim,
        value_dim=dim,
        capacity=capacity,
        key_dtype=key_dtype,
        u_dtype=u_dtype,
    )


def _run_trace(shape: RingShape, state_dtype: torch.dtype, device: torch.device, config: DecodeConfig | None) -> float:
    """Largest relative error of any output of 2 L + 2 steps, and of the states after a final fold."""
    w = Workload(shape, 3, state_dtype, device, out_dtype=torch.float32, config=config)
    exact = w.states()
    worst = 0.0
    for _ in range(2 * shape.capacity + 2):
        w.inputs.draw()
        out = w.forward()
        for layer in range(shape.layers):
            o, exact[layer], _ = reference.step(exact[layer], w.inputs.token(layer))
            worst = _worse(worst, reference.relative_error(out[layer], o))
    folded = w.fold()
    for layer in range(shape.layers):
        worst = _worse(worst, reference.relative_error(folded[layer], exact[layer]))
    return float("nan") if int(w.ring.faults) else worst


def _worse(a: float, b: float) -> float:
    """The larger error; NaN is the largest."""
    return b if b != b else max(a, b)


def _cursors(device: torch.device) -> float:
    """Number of wrong values in one plan with a fold, a snapshot, padding and a fault."""
    ring = Ring.allocate(_shape(device, torch.float16, torch.float32, capacity=4), device)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, device=device)

    set_checkpoint(ring, ints(1, 2, 3), ints(10, 20, 30))
    plan = StepPlan.allocate(4, device)
    mask = torch.tensor([True, True, True, False], device=device)
    plan_step(ring, plan, ints(2, 1, 3, 0), ints(25, 13, 99, 1), ints(5, 6, 7, -1), mask, ints(8, -1, 9, -1))
    got = [
        plan.pending.tolist(),
        plan.fold.to_host(),
        plan.snapshot.to_host(),
        ring.checkpoint[1:].tolist(),
        ring.faults.tolist(),
    ]
    want = [[0, 2, FAULT, PAD], [(2, 5, 5, 4)], [(2, 5, 8, 1), (3, 7, 9, FAULT)], [10, 24, 30], [1]]
    return float(sum(g != w for g, w in zip(got, want, strict=True)))


def run(device: torch.device | str) -> list[Result]:
    """Check every kernel on `device`: "cuda", or "cpu" with TRITON_INTERPRET=1 set before Triton was imported.

    Returns one Result per check; nothing is raised for a wrong number.
    """
    device = torch.device(device)
    gpu = device.type != "cpu"
    fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
    # Triton's interpreter computes on bf16 as raw integers: fp16 stands in for it there.
    half = bf16 if gpu else fp16
    capacity = 16 if gpu else 3
    cases: list[tuple[str, torch.dtype, torch.dtype, torch.dtype, int, DecodeConfig | None]] = [
        ("decode and fold, 16-bit keys", half, fp32, fp32, capacity, None),
        ("decode and fold, fp32 keys, odd capacity", fp32, fp32, fp32, capacity - 1, None),
        ("decode and fold, 16-bit state", half, fp32, half, capacity, None),
    ]
    if gpu:
        cases += [
            ("decode and fold, fp16 keys", fp16, fp32, fp32, 7, None),
            ("decode and fold, bf16 u", bf16, bf16, fp32, 16, None),
            ("decode and fold, capacity 64", bf16, fp32, fp32, 64, None),
        ]
        for config in _large_batch_configs():
            cases.append((f"decode, {config}", bf16, fp32, fp32, 16, config))
    error = _cursors(device)
    results = [Result("cursors and work lists", error, 0.0, error == 0.0)]
    for name, key, u, state, size, config in cases:
        error = _run_trace(_shape(device, key, u, size), state, device, config)
        bound = EXACT if state is fp32 and u is fp32 else ROUNDED
        results.append(Result(name, error, bound, error <= bound))
    return results


def _large_batch_configs() -> list[DecodeConfig]:
    """The launch shapes that a batch of three does not reach by itself."""
    from .decode import choose_config

    return sorted({choose_config(batch, 48, 128, 128) for batch in (1, 4, 16, 64, 256, 1024)})
