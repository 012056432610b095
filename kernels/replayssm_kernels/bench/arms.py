"""What is compared: our buffered decode and, where SGLang is importable, its packed decode and its in-tree replay.

Every arm owns its states and caches and offers `forward`, one decode step of all layers with everything that the step
costs on the device: cursors and folds for the buffered arms, at the schedule that staggered requests have (1 / L of the
rows fold in every step). All arms read the same `Inputs`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Protocol

import torch

from .. import reference
from ..launch_shapes import DecodeConfig
from ..ring import RingShape
from ..workload import Workload


class Arm(Protocol):
    """One competitor. `forward` returns [layers, B, HV, V], or a list of as many layers."""

    workload: Workload

    def forward(self) -> torch.Tensor | list[torch.Tensor]: ...


class Ours:
    """plan_step, the due folds, decode or verify per layer. Arms that differ only in `config` may share a workload."""

    def __init__(self, workload: Workload, config: DecodeConfig | None = None, direct: bool = False) -> None:
        self.workload, self.config, self.direct = workload, config, direct

    def forward(self) -> torch.Tensor:
        self.workload.config, self.workload.direct = self.config, self.direct
        return self.workload.forward()


class Packed:
    """SGLang's packed decode: reads and writes the whole state in every step."""

    def __init__(
        self, shape: RingShape, batch: int, state_dtype: torch.dtype, device: torch.device, stagger: bool
    ) -> None:
        fla = importlib.import_module(_PACKED)
        self.workload = Workload(shape, batch, state_dtype, device)
        if shape.gate == "gdn":
            self.kernel = fla.fused_recurrent_gated_delta_rule_packed_decode
        else:
            self.kernel = functools.partial(fla.fused_recurrent_kda_packed_decode, lower_bound=shape.lower_bound)

    def forward(self) -> torch.Tensor:
        w, x = self.workload, self.workload.inputs
        for i in range(w.shape.layers):
            self.kernel(
                x.mixed_qkv[i], x.a[i], x.b[i], x.A_log[i], x.dt_bias[i], x.scale,
                initial_state=w.state[i], out=x.out[i].unsqueeze(1), ssm_state_indices=w.slots,
                use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
        return x.out


class RetunedPacked:
    """The same kernel of SGLang's with tiles of 8 value rows instead of 32, which suits small batches better."""

    block_v = 8

    def __init__(
        self, shape: RingShape, batch: int, state_dtype: torch.dtype, device: torch.device, stagger: bool
    ) -> None:
        fla = importlib.import_module(_PACKED)
        self.workload = Workload(shape, batch, state_dtype, device)
        self.gdn = shape.gate == "gdn"
        self.kernel = (
            fla.fused_recurrent_gated_delta_rule_packed_decode_kernel
            if self.gdn
            else fla.fused_recurrent_kda_packed_decode_kernel
        )

    def forward(self) -> torch.Tensor:
        w, x, s = self.workload, self.workload.inputs, self.workload.shape
        tiles, batch = s.value_dim // self.block_v, x.batch
        grid = (tiles, batch * s.v_heads) if self.gdn else (tiles, batch, s.v_heads)
        bound = {} if self.gdn else dict(lower_bound=s.lower_bound, USE_LOWER_BOUND=s.lower_bound is not None)
        for i in range(s.layers):
            self.kernel[grid](
                mixed_qkv=x.mixed_qkv[i], a=x.a[i], b=x.b[i], A_log=x.A_log[i], dt_bias=x.dt_bias[i], o=x.out[i],
                h0=w.state[i], ht=w.state[i], ssm_state_indices=w.slots, scale=x.scale,
                stride_mixed_qkv_tok=x.mixed_qkv.stride(1), stride_a_tok=x.a.stride(1), stride_b_tok=x.b.stride(1),
                stride_init_state_token=w.state.stride(1), stride_final_state_token=w.state.stride(1),
                stride_indices_seq=1, H=s.k_heads, HV=s.v_heads, K=s.key_dim, V=s.value_dim, BK=s.key_dim,
                BV=self.block_v, SOFTPLUS_THRESHOLD=20.0, USE_QK_L2NORM_IN_KERNEL=True, num_warps=1, num_stages=3,
                **bound,
            )  # fmt: skip
        return x.out


class InTree:
    """SGLang's in-tree replay: a ring per slot, the fold inside the decode kernel, a cursor per batch entry.

    It knows the softplus gate only, so there is no such arm for a bounded gate.
    """

    def __init__(
        self, shape: RingShape, batch: int, state_dtype: torch.dtype, device: torch.device, stagger: bool
    ) -> None:
        self.kernel = importlib.import_module(_IN_TREE).fused_recurrent_linear_replayssm_decode
        self.workload = Workload(shape, batch, state_dtype, device)
        self.kda = shape.gate != "gdn"
        layers, heads, capacity = shape.layers, shape.v_heads, shape.capacity
        kwargs = dict(dtype=shape.key_dtype, device=device)
        slots = batch + 1
        self.d = torch.zeros(layers, slots, heads, capacity, shape.value_dim, **kwargs)
        self.k = torch.zeros(layers, slots, shape.k_heads, capacity, shape.key_dim, **kwargs)
        gate = (shape.key_dim,) if self.kda else ()
        self.g = torch.zeros(layers, slots, heads, capacity, *gate, dtype=torch.float32, device=device)
        self.write_pos = torch.zeros(batch, dtype=torch.int32, device=device)
        if stagger:
            self.write_pos.copy_(torch.arange(batch) % capacity)
            self.d.normal_(std=0.1)
            self.k.normal_(std=shape.key_dim**-0.5)
            self.g.uniform_(-0.1, 0.0)

    def forward(self) -> torch.Tensor:
        w, x, s = self.workload, self.workload.inputs, self.workload.shape
        for i in range(s.layers):
            a, dt_bias = x.a[i], x.dt_bias[i]
            if self.kda:
                a, dt_bias = a.view(-1, s.v_heads, s.key_dim), dt_bias.view(s.v_heads, s.key_dim)
            self.kernel(
                x.mixed_qkv[i], a, x.b[i], x.A_log[i], dt_bias, x.scale, w.state[i],
                self.d[i], self.k[i], self.g[i], x.out[i].unsqueeze(1), w.slots, self.write_pos,
                use_qk_l2norm_in_kernel=True, is_kda=self.kda,
            )  # fmt: skip
        self.write_pos.add_(1).remainder_(s.capacity)
        return x.out


_PACKED = "sglang.kernels.ops.attention.fla.fused_recurrent"
_IN_TREE = "sglang.kernels.ops.attention.linear.fused_recurrent_linear_replayssm"
Baseline = type[Packed] | type[RetunedPacked] | type[InTree]


def available_baselines(shape: RingShape) -> tuple[dict[str, Baseline], str]:
    """The baselines that this Python can import and that know the gate, and a sentence where there are none."""
    try:
        importlib.import_module(_PACKED)
        importlib.import_module(_IN_TREE)
    except Exception as error:  # SGLang's imports fail in many ways on a machine that it does not support
        return {}, f"SGLang's kernels are not importable here ({type(error).__name__}: {error}); no baselines."
    baselines: dict[str, Baseline] = {"sglang packed": Packed, "sglang packed, bv 8": RetunedPacked}
    if shape.lower_bound is None:
        baselines["sglang in-tree"] = InTree
    return baselines, ""


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
            tokens = w.inputs.token(layer)
            state = exact[layer]
            for t in range(w.width):
                o, state, _ = reference.step(state, reference.Token(*(part[t :: w.width] for part in tokens)))
                wrong += (out[layer][t :: w.width].double() - o).square().sum().item()
                total += o.square().sum().item()
                if t + 1 == w.accepted:
                    exact[layer] = state
    return (wrong / total) ** 0.5
