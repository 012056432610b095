"""A self-test of a few seconds: every kernel is compiled for this device and checked against the fp64 reference."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from . import reference
from .cursors import FAULT, PAD, StepPlan, plan_step, set_checkpoint
from .extend import Points, leave_states, leave_windows
from .gates import GDN, KDA, SCALED
from .launch_shapes import DecodeConfig, swept
from .ring import POISON, Ring, RingShape
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


class Case(NamedTuple):
    """One trace of the self-test."""

    name: str
    key_dtype: torch.dtype
    capacity: int
    u_dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    config: DecodeConfig | None = None
    gate: str = "gdn"
    lower_bound: float | None = None
    width: int = 1  # tokens a step: more than one is a verify step, all of them accepted


def _shape(device: torch.device, case: Case) -> RingShape:
    small = device.type == "cpu"  # the interpreter needs milliseconds for what a GPU does in microseconds
    dim = 32 if small else 128
    return RingShape(
        layers=1 if small else 2,
        rows=4,
        k_heads=1 if small else 2,
        v_heads=2 if small else 6,
        key_dim=dim,
        value_dim=dim,
        capacity=case.capacity,
        max_width=case.width,
        key_dtype=case.key_dtype,
        u_dtype=case.u_dtype,
        gate=case.gate,
        lower_bound=case.lower_bound,
    )


def _run_trace(device: torch.device, case: Case) -> float:
    """Largest relative error of any output of 2 L + 2 steps, and of the states after a final fold."""
    shape = _shape(device, case)
    step = dict(width=case.width, accepted=case.width)
    w = Workload(shape, 3, case.state_dtype, device, out_dtype=torch.float32, config=case.config, **step)
    exact = w.states()
    worst = 0.0
    for _ in range(2 * shape.capacity + 2):
        w.inputs.draw()
        out = w.forward()
        for layer in range(shape.layers):
            tokens = w.inputs.token(layer)
            for i in range(case.width):
                token = reference.Token(*(part[i :: case.width] for part in tokens))
                o, exact[layer], _ = reference.step(exact[layer], token)
                worst = _worse(worst, reference.relative_error(out[layer, i :: case.width], o))
    folded = w.fold()
    for layer in range(shape.layers):
        worst = _worse(worst, reference.relative_error(folded[layer], exact[layer]))
    return float("nan") if int(w.ring.faults) else worst


def _worse(a: float, b: float) -> float:
    """The larger error; NaN is the largest."""
    return b if b != b else max(a, b)


def _cursors(device: torch.device) -> float:
    """Number of wrong values in one plan with a fold, a snapshot, padding and a fault."""
    ring = Ring.allocate(_shape(device, Case("", torch.float16, 4)), device)

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
    want = [[0, 2, FAULT, PAD], [(2, 5, 5, 4)], [(2, 5, 8, 1), (3, 7, 9, FAULT)], [10, 24, POISON], [1]]
    return float(sum(g != w for g, w in zip(got, want, strict=True)))


def _extend(device: torch.device, gate: str, dtype: torch.dtype) -> float:
    """Largest relative error of the states that a prefill of two sequences leaves, and of their conv windows."""
    heads, dim, lengths = 2, 32, (40, 100)
    random = torch.Generator(device).manual_seed(1)

    def draw(*size: int) -> torch.Tensor:
        return torch.rand(*size, generator=random, device=device)

    tokens, gates = sum(lengths), heads if gate == "gdn" else heads * dim
    k = reference.normalise(draw(tokens, heads, dim) - 0.5).to(dtype)
    v, g, beta = (draw(tokens, heads, dim) - 0.5).to(dtype), -draw(tokens, heads, gates // heads), draw(tokens, heads)
    chunks = [slice(0, 40), slice(40, 104), slice(104, 140)]
    w, u, sums, decayed = (
        torch.cat(parts)
        for parts in zip(*(reference.prefill_chunk(k[c], v[c], g[c], beta[c]) for c in chunks), strict=True)
    )  # fmt: skip
    state, conv, inputs = draw(9, heads, dim, dim), draw(9, 3, dim).transpose(1, 2), draw(tokens, dim)
    start, windows = state.double(), conv.clone()
    sources, slots = torch.tensor([1, 2], device=device), torch.arange(4, 8, device=device)
    counts = ((0, 2, 40), (1, 90))
    points = Points.of([(0, 0, True, counts[0]), (40, 1, False, counts[1][1:])], slots, device)
    sums = sums[..., 0] if gate == "gdn" else sums * math.log2(math.e)
    given = w.to(dtype), u.to(dtype), k, sums.float().contiguous()
    leave_states(state, sources, points, *given, None if gate == "gdn" else decayed.to(dtype))
    leave_windows(conv, inputs, sources, points)
    worst = 0.0
    for slot, (first, source, at) in zip(range(4, 8), ((0, 1, 0), (0, 1, 2), (0, 1, 40), (40, 2, 90)), strict=True):
        exact = start[source][None]
        for t in range(first, first + at):
            token = (part.double()[None] for part in (k[t], k[t], v[t], g[t], beta[t]))
            exact = reference.step(exact, reference.Token(*token))[1]
        worst = _worse(worst, reference.relative_error(state[slot], exact[0]))
        old = windows[source] if first == 0 else torch.zeros_like(windows[source])
        window = torch.cat([old, inputs[first : first + at].T], 1)[:, at : at + 3]
        worst = _worse(worst, reference.relative_error(conv[slot], window))
    return worst


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
    cases = [
        Case("GDN, 16-bit keys", half, capacity),
        Case("GDN, fp32 keys, odd capacity", fp32, capacity - 1),
        Case("GDN, 16-bit state", half, capacity, state_dtype=half),
        Case("KDA, any gate", half, capacity, gate="kda"),
        Case("KDA, bounded gate", half, capacity, gate="kda", lower_bound=-5.0),
        Case("GDN, verify", half, capacity + 2, width=2),
        Case("KDA, verify", half, capacity + 2, gate="kda", width=2),
    ]
    if gpu:
        cases += [
            Case("GDN, fp16 keys", fp16, 7),
            Case("GDN, bf16 u", bf16, 16, u_dtype=bf16),
            Case("GDN, capacity 64", bf16, 64),
            Case("KDA, capacity 64", bf16, 64, gate="kda"),
            Case("KDA, bounded gate, bf16 state", bf16, 16, state_dtype=bf16, gate="kda", lower_bound=-5.0),
        ]
        # The launch shapes that a batch of three does not reach by itself.
        for gate, constant in (({}, GDN), (dict(gate="kda"), KDA), (dict(gate="kda", lower_bound=-5.0), SCALED)):
            for config in sorted({*swept(constant, 4), *swept(constant, 2)}):
                name = f"{gate.get('gate', 'gdn').upper()}{', bounded gate' if constant == SCALED else ''}, {config}"
                cases.append(Case(name, bf16, 16, config=config, **gate))
    error = _cursors(device)
    results = [Result("cursors and work lists", error, 0.0, error == 0.0)]
    for case in cases:
        error = _run_trace(device, case)
        bound = EXACT if case.state_dtype is fp32 and case.u_dtype is fp32 else ROUNDED
        results.append(Result(case.name, error, bound, error <= bound))
    for gate in ("gdn", "kda"):
        error = _extend(device, gate, half)
        results.append(Result(f"{gate.upper()}, states inside a prefill", error, ROUNDED, error <= ROUNDED))
    return results
