"""What is compared: our buffered decode and, where SGLang is importable, its packed decode and its in-tree replay.

Every arm owns its states and caches and offers `forward`, one decode step of all layers with everything that the step
costs on the device: cursors and folds for the buffered arms, at the schedule that staggered requests have (1 / L of the
rows fold in every step). All arms read the same `Inputs`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Protocol

import torch

from .. import reference
from ..decode import DecodeConfig
from ..ring import RingShape
from ..workload import Workload


class Arm(Protocol):
    """One competitor. `out` is [layers, B, HV, V]."""

    workload: Workload

    def forward(self) -> torch.Tensor: ...


class Ours:
    """plan_step, the due folds, and decode per layer. Arms that differ only in `config` may share a workload."""

    def __init__(self, workload: Workload, config: DecodeConfig | None = None) -> None:
        self.workload, self.config = workload, config

    def forward(self) -> torch.Tensor:
        self.workload.config = self.config
        return self.workload.forward()


class Packed:
    """SGLang's packed decode: reads and writes the whole state in every step."""

    def __init__(
        self, shape: RingShape, batch: int, state_dtype: torch.dtype, device: torch.device, stagger: bool
    ) -> None:
        fla = importlib.import_module("sglang.kernels.ops.attention.fla.fused_recurrent")
        self.kernel = fla.fused_recurrent_gated_delta_rule_packed_decode
        self.workload = Workload(shape, batch, state_dtype, device)

    def forward(self) -> torch.Tensor:
        w, x = self.workload, self.workload.inputs
        for i in range(w.shape.layers):
            self.kernel(
                x.mixed_qkv[i], x.a[i], x.b[i], x.A_log[i], x.dt_bias[i], x.scale,
                initial_state=w.state[i], out=x.out[i].unsqueeze(1), ssm_state_indices=w.slots,
                use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
        return x.out


class InTree:
    """SGLang's in-tree replay: a ring per slot, the fold inside the decode kernel, a cursor per batch entry."""

    def __init__(
        self, shape: RingShape, batch: int, state_dtype: torch.dtype, device: torch.device, stagger: bool
    ) -> None:
        module = importlib.import_module("sglang.kernels.ops.attention.linear.fused_recurrent_linear_replayssm")
        self.kernel = module.fused_recurrent_gdn_replayssm_decode
        self.workload = Workload(shape, batch, state_dtype, device)
        layers, heads, capacity = shape.layers, shape.v_heads, shape.capacity
        kwargs = dict(dtype=shape.key_dtype, device=device)
        slots = batch + 1
        self.d = torch.zeros(layers, slots, heads, capacity, shape.value_dim, **kwargs)
        self.k = torch.zeros(layers, slots, shape.k_heads, capacity, shape.key_dim, **kwargs)
        self.g = torch.zeros(layers, slots, heads, capacity, dtype=torch.float32, device=device)
        self.write_pos = torch.zeros(batch, dtype=torch.int32, device=device)
        if stagger:
            self.write_pos.copy_(torch.arange(batch) % capacity)
            self.d.normal_(std=0.1)
            self.k.normal_(std=shape.key_dim**-0.5)
            self.g.uniform_(-0.1, 0.0)

    def forward(self) -> torch.Tensor:
        w, x = self.workload, self.workload.inputs
        for i in range(w.shape.layers):
            self.kernel(
                x.mixed_qkv[i], x.a[i], x.b[i], x.A_log[i], x.dt_bias[i], x.scale, w.state[i],
                self.d[i], self.k[i], self.g[i], x.out[i].unsqueeze(1), w.slots, self.write_pos,
                use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
        self.write_pos.add_(1).remainder_(w.shape.capacity)
        return x.out


BASELINES: dict[str, type[Packed] | type[InTree]] = {"sglang packed": Packed, "sglang in-tree": InTree}


def available_baselines() -> tuple[dict[str, type[Packed] | type[InTree]], str]:
    """The baselines that this Python can import, and a sentence on those that it can not."""
    try:
        importlib.import_module("sglang.kernels.ops.attention.fla.fused_recurrent")
        importlib.import_module("sglang.kernels.ops.attention.linear.fused_recurrent_linear_replayssm")
    except Exception as error:  # SGLang's imports fail in many ways on a machine that it does not support
        return {}, f"SGLang's kernels are not importable here ({type(error).__name__}: {error}); no baselines."
    return dict(BASELINES), ""


def accuracy(make: Callable[[], Arm], steps: int) -> float:
    """Relative error of the outputs of `steps` steps from empty rings, against the fp64 recurrence, all together."""
    arm = make()
    w = arm.workload
    exact = w.states()
    wrong, total = 0.0, 0.0
    for _ in range(steps):
        w.inputs.draw()
        out = arm.forward()
        for layer in range(w.shape.layers):
            o, exact[layer], _ = reference.step(exact[layer], w.inputs.token(layer))
            wrong += (out[layer].double() - o).square().sum().item()
            total += o.square().sum().item()
    return (wrong / total) ** 0.5
