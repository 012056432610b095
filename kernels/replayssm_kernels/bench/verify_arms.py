"""What ring spec-verify is compared with, where SGLang is importable: its recurrent verify with a snapshot per draft,
its in-tree ring (GDN) and fold-every-commit. As in arms.py, `forward` is all that a step of all layers costs on the
device, the commit of the accepted drafts included; conv windows are left out, they cost every arm the same.
"""

from __future__ import annotations

import importlib

import torch

from ..ring import RingShape
from ..workload import Workload

_RECURRENT = "sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent"
_SCATTER = "sglang.kernels.ops.mamba.mamba_state_scatter_triton"
_RING = "sglang.kernels.ops.attention.linear.gdn_replayssm_spec_decode"
_GDN_FOLD = "sglang.kernels.ops.attention.linear.gdn_replayssm_spec_fold"
_KDA_FOLD = "sglang.kernels.ops.attention.linear.kda_replayssm_spec_decode"


class _Verify:
    """States and inputs of a Workload, whose ring stays unused, and its inputs cut as SGLang's kernels want them."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.kda = workload.shape.gate != "gdn"
        device = workload.state.device
        self.accepted = torch.full((workload.batch,), workload.accepted, dtype=torch.int32, device=device)

    def cut(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k [N, H, K] and v [N, HV, V] of mixed_qkv, as views."""
        s, mixed = self.workload.shape, self.workload.inputs.mixed_qkv[layer]
        q, k, v = mixed.split([s.k_heads * s.key_dim] * 2 + [s.v_heads * s.value_dim], 1)
        heads = (s.k_heads, s.key_dim), (s.k_heads, s.key_dim), (s.v_heads, s.value_dim)
        return tuple(t.unflatten(1, size) for t, size in zip((q, k, v), heads, strict=True))

    def recurrent(self, layer: int, **cache: object) -> torch.Tensor:
        """SGLang's recurrent kernel over the drafts; the state is read and stays as it is."""
        w, x = self.workload, self.workload.inputs
        q, k, v = (t.unsqueeze(0) for t in self.cut(layer))
        bound = dict(lower_bound=w.shape.lower_bound) if self.kda else {}
        out = importlib.import_module(_RECURRENT).fused_sigmoid_gating_delta_rule_update(
            A_log=x.A_log[layer], a=x.a[layer], dt_bias=x.dt_bias[layer], softplus_beta=1.0, softplus_threshold=20.0,
            q=q, k=k, v=v, b=x.b[layer], initial_state_source=w.state[layer], initial_state_indices=w.slots,
            use_qk_l2norm_in_kernel=True, cu_seqlens=w.starts, is_kda=self.kda, disable_state_update=True,
            **bound, **cache,
        )  # fmt: skip
        return out.view_as(x.out[layer])


class Recurrent(_Verify):
    """Recurrent verify that writes the state after every draft; the accepted one is then copied to the slot."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        w, s = workload, workload.shape
        self.snapshots = torch.empty(
            s.layers, w.batch, w.width, *w.state.shape[2:], dtype=w.state.dtype, device=w.state.device
        )
        self.entries = torch.arange(w.batch, dtype=torch.int32, device=w.state.device)

    def forward(self) -> list[torch.Tensor]:
        w = self.workload
        outs = [
            self.recurrent(
                i, intermediate_states_buffer=self.snapshots[i], intermediate_state_indices=self.entries,
                cache_steps=w.width,
            )
            for i in range(w.shape.layers)
        ]  # fmt: skip
        if w.state.is_cuda:
            scatter = importlib.import_module(_SCATTER).fused_mamba_state_scatter_with_mask
            scatter(w.state, self.snapshots, w.slots, self.accepted - 1)
        else:  # SGLang's copy takes CUDA tensors only
            w.state[:, w.slots.long()] = self.snapshots[:, :, w.accepted - 1]
        return outs


class FoldEveryCommit(_Verify):
    """Recurrent verify that keeps the drafts' inputs; the accepted ones are replayed into every slot in every step."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        w, s = workload, workload.shape
        room = s.layers, w.batch + 1

        def ring(heads: int, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(*room, heads, w.width, *size, dtype=dtype, device=w.state.device)

        self.v = ring(s.v_heads, s.value_dim, dtype=s.key_dtype)
        self.k = ring(s.k_heads, s.key_dim, dtype=s.key_dtype)
        self.g = ring(s.v_heads, *((s.key_dim,) if self.kda else ()))
        self.beta = ring(s.v_heads)

    def forward(self) -> list[torch.Tensor]:
        w, s = self.workload, self.workload.shape
        outs = [
            self.recurrent(
                i, cache_ring=True, replayssm_rawv=self.v[i], replayssm_rawk=self.k[i], replayssm_g=self.g[i],
                replayssm_beta=self.beta[i],
            )
            for i in range(s.layers)
        ]  # fmt: skip
        if self.kda:
            fold = importlib.import_module(_KDA_FOLD).commit_kda_replayssm_spec_all_layers
        else:
            fold = importlib.import_module(_GDN_FOLD).commit_gdn_replayssm_fold_all_layers
        fold(w.state, self.v, self.k, self.g, self.beta, w.slots, self.accepted, w.width, s.k_heads, null_block_id=-1)
        return outs


class InTreeRing(_Verify):
    """SGLang's circular ring of (d, k, g), GDN only: output from checkpoint and records, then a commit over all layers.

    Its capacity is the largest power of two within ours; staggered requests start anywhere in its turn.
    """

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        w, s = workload, workload.shape
        device = w.state.device
        self.capacity = 1 << (s.capacity.bit_length() - 1)
        rows = w.batch + 1

        def ring(heads: int, *size: int, dtype: torch.dtype = s.key_dtype) -> torch.Tensor:
            return torch.zeros(s.layers, rows, heads, self.capacity, *size, dtype=dtype, device=device)

        self.d, self.k = ring(s.v_heads, s.value_dim), ring(s.k_heads, s.key_dim)
        low = s.key_dtype is not torch.float32
        self.d_low = ring(s.v_heads, s.value_dim) if low else None
        self.k_low = ring(s.k_heads, s.key_dim) if low else None
        self.g = ring(s.v_heads, dtype=torch.float32)
        self.cursors = [torch.zeros(rows, dtype=t, device=device) for t in (torch.int32, torch.int32, torch.int8)]

    def stagger(self) -> None:
        """Spread the requests over the turn, with plausible records."""
        w = self.workload
        steps = max(1, (self.capacity - 2 * w.width) // w.accepted + 1)
        self.cursors[0][w.rows] = (torch.arange(w.batch, device=w.rows.device) % steps * w.accepted).int()
        self.d.normal_(std=0.1)
        self.k.normal_(std=w.shape.key_dim**-0.5)
        self.g.uniform_(-0.1, 0.0)

    def forward(self) -> torch.Tensor:
        w, x, s = self.workload, self.workload.inputs, self.workload.shape
        module = importlib.import_module(_RING)
        write_pos, base, flush = self.cursors
        cursors = dict(write_pos=write_pos, cache_base=base, is_flush=flush)
        for i in range(s.layers):
            q, k, v = self.cut(i)
            module.gdn_replayssm_spec_decode(
                q, k, v, x.a[i], x.b[i], x.A_log[i], x.dt_bias[i], w.state[i], self.d[i], self.k[i], self.g[i],
                self.d_low[i] if self.d_low is not None else None, self.k_low[i] if self.k_low is not None else None,
                None, x.out[i], w.starts, w.slots, w.rows, **cursors, max_cache_len=self.capacity,
                max_spec_len=w.width, scale=x.scale, null_block_id=-1, launch_mode="verify",
            )  # fmt: skip
        module.commit_gdn_replayssm_spec(
            **cursors, num_accepted=self.accepted, replay_indices=w.rows, max_cache_len=self.capacity,
            max_spec_len=w.width, fold_every_commit=w.state.dtype is not torch.float32, null_block_id=-1,
        )  # fmt: skip
        module.commit_gdn_replayssm_circular(
            checkpoint_state=w.state, d_cache=self.d, k_cache=self.k, g_cache=self.g, d_residual_cache=self.d_low,
            k_residual_cache=self.k_low, state_batch_indices=w.slots, replay_indices=w.rows, **cursors,
            accept_lens=self.accepted, null_block_id=-1,
        )  # fmt: skip
        return x.out


Baseline = type[Recurrent] | type[FoldEveryCommit] | type[InTreeRing]


def available_baselines(shape: RingShape) -> tuple[dict[str, Baseline], str]:
    """The baselines that this Python can import and that know the gate, and a sentence where there are none."""
    try:
        for name in (_RECURRENT, _SCATTER, _RING, _GDN_FOLD, _KDA_FOLD):
            importlib.import_module(name)
    except Exception as error:  # SGLang's imports fail in many ways on a machine that it does not support
        return {}, f"SGLang's kernels are not importable here ({type(error).__name__}: {error}); no baselines."
    baselines: dict[str, Baseline] = {"sglang recurrent": Recurrent, "sglang fold every commit": FoldEveryCommit}
    if shape.gate == "gdn":
        baselines["sglang in-tree ring"] = InTreeRing
    return baselines, ""
