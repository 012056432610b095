"""A small machine that drives the kernels the way a server does and checks every output against the fp64
oracle.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from replayssm_kernels import (
    Ring,
    RingShape,
    StepPlan,
    WorkList,
    decode,
    materialise,
    plan_forced_fold,
    plan_snapshot,
    plan_step,
    reference,
    set_checkpoint,
    verify,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

PADDING = -1
"""A request id that stands for a padded batch entry."""

# Rounding of the outputs to 16 bits is the only thing that 16-bit activations add: 2^-12 and 2^-9 relative
# for the average element, measured 1.5e-4 to 2.6e-4 (fp16) and 1.2e-3 to 1.9e-3 (bf16).
OUTPUT_BOUND = {torch.float32: 1e-5, torch.float16: 4e-4, torch.bfloat16: 3e-3}


def need_bf16() -> None:
    """Skip where bf16 would be computed on as raw integers: in an interpreter without the CPU host's fixes."""
    if DEVICE.type == "cpu":
        pytest.importorskip("replayssm_cpu_host.interpreter", reason="bf16 in the interpreter needs the CPU test host")


def make_shape(**changes: object) -> RingShape:
    """A tiny default shape; every test names what it varies."""
    base = dict(
        layers=1,
        rows=6,
        k_heads=1,
        v_heads=2,
        key_dim=16,
        value_dim=16,
        capacity=4,
        key_dtype=torch.float32,
        u_dtype=torch.float32,
    )
    return RingShape(**{**base, **changes})


# The gate kinds, as changes to a shape. With L > 16 (or L > 2 for the second bound) the bounded gate keeps raw keys.
GDN = dict(gate="gdn")
KDA = dict(gate="kda")
BOUNDED = dict(gate="kda", lower_bound=-5.0)
VERY_BOUNDED = dict(gate="kda", lower_bound=-35.0)

each_gate = pytest.mark.parametrize(
    "gate", [GDN, KDA, BOUNDED, VERY_BOUNDED], ids=["gdn", "kda", "bounded", "very-bounded"]
)


@dataclass
class Inputs:
    """One layer's inputs of one step."""

    mixed_qkv: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor


class Machine:
    """Ring, state pool and plan of one model shard, with a sequential fp64 oracle per layer."""

    def __init__(
        self,
        shape: RingShape,
        slots: int = 10,
        max_batch: int = 8,
        state_dtype: torch.dtype = torch.float32,
        seed: int = 0,
        poison: bool = True,
    ) -> None:
        self.shape = shape
        self.random = torch.Generator().manual_seed(seed)
        self.ring = Ring.allocate(shape, DEVICE)
        if poison:  # a record that is read before it was written shows up as NaN
            for tensor in (self.ring.u, self.ring.k, self.ring.g):
                tensor.fill_(float("nan"))
        self.plan = StepPlan.allocate(max_batch, DEVICE)
        self.forced = WorkList.allocate(max_batch, DEVICE)
        self.state = torch.zeros(
            shape.layers,
            slots,
            shape.v_heads,
            shape.value_dim,
            shape.key_dim,
            dtype=state_dtype,
            device=DEVICE,
        )
        self.scale = shape.key_dim**-0.5
        self.A_log = self.randn(shape.layers, shape.v_heads) - 1.0
        self.dt_bias = self.randn(shape.layers, shape.v_heads * shape.gate_width)
        self.oracle = [reference.Sequential() for _ in range(shape.layers)]
        self.direct = False  # whether the steps that come write the state themselves
        self.row: dict[int, int] = {}
        self.slot: dict[int, int] = {}

    def randn(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.random).to(DEVICE)

    def length(self, request: int) -> int:
        return self.oracle[0].lens[request]

    def start(self, request: int, row: int, slot: int, length: int, state: torch.Tensor | None = None) -> None:
        """A request arrives from its prefill: its slot stands at `length` tokens."""
        s = self.shape
        if state is None:
            state = self.randn(s.layers, s.v_heads, s.value_dim, s.key_dim)
        self.state[:, slot] = state.to(self.state.dtype)
        for layer in range(s.layers):
            self.oracle[layer].start(request, self.state[layer, slot], length)
        self.row[request], self.slot[request] = row, slot
        set_checkpoint(self.ring, self.ints([row]), self.ints([length]))

    def ints(self, values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    def inputs(self, batch: int) -> list[Inputs]:
        s = self.shape
        width = 2 * s.k_heads * s.key_dim + s.v_heads * s.value_dim
        return [
            Inputs(
                self.randn(batch, width).to(s.key_dtype),
                self.randn(batch, s.v_heads * s.gate_width),
                self.randn(batch, s.v_heads),
            )
            for _ in range(s.layers)
        ]

    def gate(self, layer: int, x: Inputs) -> torch.Tensor:
        if self.shape.gate == "gdn":
            return reference.gdn_gate(x.a, self.A_log[layer], self.dt_bias[layer])
        return reference.kda_gate(x.a, self.A_log[layer], self.dt_bias[layer], self.shape.lower_bound)

    def token(self, layer: int, x: Inputs) -> reference.Token:
        s = self.shape
        beta = reference.update_rate(x.b, rounded=s.gate == "gdn")
        return reference.token(x.mixed_qkv, self.gate(layer, x), beta, s.k_heads, s.key_dim, self.scale)

    def step(
        self, requests: list[int], track: dict[int, int] | None = None, inputs: list[Inputs] | None = None
    ) -> list[torch.Tensor]:
        """One decode forward of the batch (PADDING entries allowed); checks every output, returns them per
        layer.
        """
        x = inputs or self.inputs(len(requests))
        live = [i for i, r in enumerate(requests) if r != PADDING]
        self.launch_plan(requests, [self.length(r) + 1 if r != PADDING else 0 for r in requests], track)
        outs = []
        for layer in range(self.shape.layers):
            out = self.launch_decode(layer, requests, x[layer])
            t = self.token(layer, x[layer])
            if live:
                expected = self.oracle[layer].step(
                    [requests[i] for i in live], reference.Token(*(part[live] for part in t))
                )
                error = reference.relative_error(out[live], expected)
                assert error <= self.output_bound(), f"layer {layer}: relative output error {error:.1e}"
            for i, r in enumerate(requests):
                assert r != PADDING or not out[i].any(), "padding must give zeros"
            outs.append(out)
        materialise(self.state, self.ring, self.plan.snapshot)
        return outs

    def verify(
        self,
        requests: list[int],
        widths: list[int],
        accepted: list[int],
        track: dict[int, tuple[int, int]] | None = None,
        spare: int = 0,
        inputs: list[Inputs] | None = None,
    ) -> list[torch.Tensor]:
        """One verify forward: widths[i] drafts of requests[i], of which accepted[i] are then committed.

        Checks every output. track: request -> (slot, how many of the accepted drafts the snapshot there includes);
        spare: padding tokens behind each entry's drafts. Returns the outputs per layer.
        """
        live = [w if r != PADDING else 0 for r, w in zip(requests, widths, strict=True)]
        starts = [0]
        for w in widths:
            starts.append(starts[-1] + min(w + spare, self.shape.max_width))
        x = inputs or self.inputs(max(1, starts[-1]))
        self.launch_plan(
            requests, [self.length(r) + w if w else 0 for r, w in zip(requests, live, strict=True)], widths=live
        )
        outs = []
        for layer in range(self.shape.layers):
            out = self.launch_verify(layer, requests, live, starts, x[layer])
            token = self.token(layer, x[layer])
            for i, request in enumerate(requests):
                mine = slice(starts[i], starts[i] + live[i])
                assert not out[mine.stop : starts[i + 1]].any(), "padding must give zeros"
                if not live[i]:
                    continue
                oracle = self.oracle[layer]
                expected, states = oracle.verify(request, reference.Token(*(part[mine] for part in token)))
                error = reference.relative_error(out[mine], expected)
                assert error <= self.output_bound(), f"layer {layer}, request {request}: output error {error:.1e}"
                oracle.accept(request, states, accepted[i])
            outs.append(out)
        if track is not None:
            position = {r: self.length(r) - accepted[requests.index(r)] + taken for r, (_, taken) in track.items()}
            plan_snapshot(
                self.ring,
                self.plan.snapshot,
                self.ints([self.row.get(r, 0) for r in requests]),
                self.ints([position.get(r, -1) for r in requests]),
                self.ints([self.slot.get(r, -1) for r in requests]),
                self.ints([track[r][0] if r in track else -1 for r in requests]),
            )
            materialise(self.state, self.ring, self.plan.snapshot)
        return outs

    def output_bound(self) -> float:
        return OUTPUT_BOUND[self.shape.key_dtype]

    def launch_plan(
        self,
        requests: list[int],
        lens: list[int],
        track: dict[int, int] | None = None,
        widths: list[int] | None = None,
    ) -> None:
        """plan_step and the folds that it lists."""
        rows = self.ints([self.row.get(r, 0) for r in requests])
        slots = self.ints([self.slot.get(r, -1) for r in requests], torch.int32)
        mask, track_slots = None, None
        if track is not None:
            mask = torch.tensor([r in track for r in requests], device=DEVICE)
            track_slots = self.ints([track.get(r, -1) for r in requests])
        wide = None if widths is None else self.ints(widths)
        direct = self.direct and wide is None
        plan_step(self.ring, self.plan, rows, self.ints(lens), slots, mask, track_slots, widths=wide, direct=direct)
        materialise(self.state, self.ring, self.plan.fold)

    def launch_decode(self, layer: int, requests: list[int], x: Inputs) -> torch.Tensor:
        rows = self.ints([self.row.get(r, 0) for r in requests])
        slots = self.ints([self.slot.get(r, -1) for r in requests], torch.int32)
        return decode(
            x.mixed_qkv, x.a, x.b, self.A_log[layer], self.dt_bias[layer], self.state[layer], self.ring,
            layer, slots, rows, self.plan.pending, self.scale, direct=self.direct,
        )  # fmt: skip

    def launch_verify(
        self, layer: int, requests: list[int], widths: list[int], starts: list[int], x: Inputs
    ) -> torch.Tensor:
        rows = self.ints([self.row.get(r, 0) for r in requests])
        slots = self.ints([self.slot.get(r, -1) for r in requests], torch.int32)
        return verify(
            x.mixed_qkv, x.a, x.b, self.A_log[layer], self.dt_bias[layer], self.state[layer], self.ring, layer,
            slots, rows, self.plan.pending, self.ints(starts, torch.int32), self.ints(widths), self.scale,
        )  # fmt: skip

    def fold(self, requests: list[int]) -> None:
        """Forced fold: afterwards the slots hold the exact state of the committed tokens."""
        lens = self.ints([self.length(r) for r in requests])
        rows = self.ints([self.row[r] for r in requests])
        slots = self.ints([self.slot[r] for r in requests])
        plan_forced_fold(self.ring, self.forced, rows, lens, slots, lens)
        materialise(self.state, self.ring, self.forced)

    def state_error(self, slot: int, request: int) -> float:
        """Largest relative error over the layers of a slot against the request's sequential state."""
        return max(
            reference.relative_error(self.state[layer, slot], self.oracle[layer].states[request])
            for layer in range(self.shape.layers)
        )
