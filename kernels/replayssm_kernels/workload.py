"""A synthetic shard of a model, stepped as a server steps it: for the self-test and the benchmark."""

from __future__ import annotations

import torch

from . import reference
from .cursors import StepPlan, WorkList, plan_forced_fold, plan_step, set_checkpoint
from .decode import DecodeConfig, decode
from .materialise import materialise
from .ring import Ring, RingShape
from .verify import verify

_START = 1000  # token count at which every request stands


class Inputs:
    """Static input and output buffers of all layers; `draw` fills them anew.

    mixed_qkv [layers, B, 2 H K + HV V] in the activation dtype; a [layers, B, HV] (KDA: HV K) and b [layers, B, HV],
    A_log [layers, HV] and dt_bias [layers, HV] (KDA: HV K) in fp32; out [layers, B, HV, V].
    """

    def __init__(
        self,
        shape: RingShape,
        batch: int,
        device: torch.device,
        seed: int,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        self.shape, self.batch = shape, batch
        self.random = torch.Generator(device).manual_seed(seed)
        width = 2 * shape.k_heads * shape.key_dim + shape.v_heads * shape.value_dim
        layers, heads = shape.layers, shape.v_heads
        self.mixed_qkv = torch.empty(layers, batch, width, dtype=shape.key_dtype, device=device)
        gates = heads * shape.gate_width
        self.a = torch.empty(layers, batch, gates, device=device)
        self.b = torch.empty(layers, batch, heads, device=device)
        self.A_log = self.randn(layers, heads) * 0.5 - 1.0
        self.dt_bias = self.randn(layers, gates) - 2.0
        self.out = torch.empty(layers, batch, heads, shape.value_dim, dtype=out_dtype or shape.key_dtype, device=device)
        self.scale = shape.key_dim**-0.5
        self.draw()

    def randn(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.random, device=self.random.device)

    def draw(self) -> None:
        """Fresh random inputs in place (buffers keep their addresses, as CUDA graphs need)."""
        for tensor in (self.mixed_qkv, self.a, self.b):
            tensor.normal_(generator=self.random)

    def random_state(self, slots: int, dtype: torch.dtype) -> torch.Tensor:
        """States [layers, slots, HV, V, K] of the size that a running model's have."""
        s = self.shape
        state = torch.empty(
            s.layers, slots, s.v_heads, s.value_dim, s.key_dim, dtype=dtype, device=self.mixed_qkv.device
        )
        return state.normal_(std=0.3, generator=self.random)

    def token(self, layer: int) -> reference.Token:
        """This step's inputs of one layer for the fp64 reference."""
        s = self.shape
        gate_inputs = self.a[layer], self.A_log[layer], self.dt_bias[layer]
        gdn = s.gate == "gdn"
        g = reference.gdn_gate(*gate_inputs) if gdn else reference.kda_gate(*gate_inputs, s.lower_bound)
        beta = reference.update_rate(self.b[layer], rounded=gdn)
        return reference.token(self.mixed_qkv[layer], g, beta, s.k_heads, s.key_dim, self.scale)


class Workload:
    """`batch` requests decoding through a ring; `forward` is everything that one step of a server launches.

    width: tokens that a step brings to each request: 1 is plain decode, more a verify step, of which `accepted` are
    committed. The inputs are those of batch * width tokens, a request's tokens next to each other.
    direct: every step writes the state (plain decode only).
    stagger spreads the requests over the ring, so that as many rows fold in every step as in serving (one in `turn`);
    otherwise all start with an empty ring and `reference` starts from `state`.
    """

    def __init__(
        self,
        shape: RingShape,
        batch: int,
        state_dtype: torch.dtype,
        device: torch.device | str,
        *,
        seed: int = 0,
        stagger: bool = False,
        out_dtype: torch.dtype | None = None,
        config: DecodeConfig | None = None,
        width: int = 1,
        accepted: int = 1,
        direct: bool = False,
    ) -> None:
        device = torch.device(device)
        self.shape, self.batch, self.config = shape, batch, config
        self.width, self.accepted, self.direct = width, accepted, direct
        self.turn = (shape.capacity - width) // accepted + 1
        """Steps from one fold of a request to its next."""
        self.inputs = Inputs(shape, batch * width, device, seed, out_dtype)
        self.widths = torch.full((batch,), width, dtype=torch.int32, device=device)
        self.starts = torch.arange(0, batch * width + 1, width, dtype=torch.int32, device=device)
        self.state = self.inputs.random_state(batch + 1, state_dtype)
        self.ring = Ring.allocate(shape, device)
        self.plan = StepPlan.allocate(batch, device)
        order = torch.randperm(batch, generator=torch.Generator().manual_seed(seed))
        self.rows = (order + 1).to(device)
        self.slots = order.flip(0).to(torch.int32).to(device)
        self.lens = torch.full((batch,), _START, dtype=torch.int64, device=device)
        pending = torch.arange(batch, device=device) % self.turn * accepted * int(stagger)
        set_checkpoint(self.ring, self.rows, self.lens - pending)
        if stagger:
            self.ring.u.normal_(std=0.1)
            self.ring.k.normal_()
            self.ring.g.uniform_(-0.1, 0.0)

    def forward(self) -> torch.Tensor:
        """One step of every request and layer; returns out [layers, B * width, HV, V]."""
        x = self.inputs
        wide = self.shape.max_width > 1
        self.lens.add_(self.width)
        plan_step(
            self.ring,
            self.plan,
            self.rows,
            self.lens,
            self.slots,
            widths=self.widths if wide else None,
            direct=self.direct,
        )
        materialise(self.state, self.ring, self.plan.fold)
        for layer in range(self.shape.layers):
            given = x.mixed_qkv[layer], x.a[layer], x.b[layer], x.A_log[layer], x.dt_bias[layer], self.state[layer]
            entries = self.slots, self.rows, self.plan.pending
            if wide:
                verify(*given, self.ring, layer, *entries, self.starts, self.widths, x.scale, x.out[layer], self.config)
            else:
                decode(*given, self.ring, layer, *entries, x.scale, x.out[layer], self.config, self.direct)
        if self.accepted != self.width:
            self.lens.sub_(self.width - self.accepted)
        return x.out

    def fold(self) -> torch.Tensor:
        """Fold everything; returns the states [layers, B, HV, V, K] in batch order."""
        worklist = WorkList.allocate(self.batch, self.state.device)
        plan_forced_fold(self.ring, worklist, self.rows, self.lens, self.slots, self.lens)
        materialise(self.state, self.ring, worklist)
        return self.state[:, self.slots.long()]

    def states(self) -> list[torch.Tensor]:
        """The states as they stand, fp64, one [B, HV, V, K] per layer: where a reference run starts."""
        return [layer[self.slots.long()].double() for layer in self.state]
