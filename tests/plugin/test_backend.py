"""SGLang's real GDN and KDA backends with the hooks applied, next to the same backends of a plain launch.

Both get the same inputs and start from the same slots. The oracle is SGLang's own decode: outputs, conv windows and
snapshots have to agree, eagerly and through the static buffers of a CUDA graph (whose replay is emulated by running
the captured Python again, so that this also works without a GPU).
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from replayssm_kernels import reference
from sglang_replayssm.arguments import FLAG
from sglang_replayssm.hooks import BufferedDecode
from sglang_replayssm.request_ring import ATTRIBUTE, ring_of
from tests.plugin import launch
from tests.plugin.launch import DEVICE

# Two computations in fp32 that are rounded to fp16 at the end: they differ where a value lies between two fp16
# numbers. Measured up to 7.4e-5 (interpreter).
OUTPUT_BOUND = 3e-4
# fp32 states of the two after the same tokens, measured 8e-8 to 2.5e-7.
STATE_BOUND = 1e-6
CAPACITY = 3


@dataclasses.dataclass(frozen=True)
class Model:
    """A tiny model's linear layers. All have 2 v-heads and head dims of 32."""

    name: str
    k_heads: int
    gate_width: int  # of `a`, per token
    lower_bound: float | None = None

    @property
    def is_kda(self) -> bool:
        return self.gate_width > 2

    @property
    def width(self) -> int:
        return 2 * self.k_heads * 32 + 2 * 32


GDN = Model("qwen3-next-deep", k_heads=1, gate_width=2)
KDA = Model("kimi-linear", k_heads=2, gate_width=64)
BOUNDED_KDA = Model("ling-v3", k_heads=2, gate_width=64, lower_bound=-5.0)
MODELS = [GDN, KDA, BOUNDED_KDA]


def make_backend(pool: Any, server_args: Any, model: Model = GDN, is_draft_worker: bool = False) -> Any:
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
    from sglang.srt.layers.attention.linear.kda_backend import KDAAttnBackend
    from sglang.srt.layers.attention.linear.utils import resolve_linear_attn_backends

    backend = KDAAttnBackend if model.is_kda else GDNAttnBackend
    return backend(
        SimpleNamespace(
            server_args=server_args,
            device=DEVICE,
            is_draft_worker=is_draft_worker,
            req_to_token_pool=pool,
            token_to_kv_pool=None,
            linear_attn_backends=resolve_linear_attn_backends(),
        )
    )


def make_layers(model: Model) -> list[torch.nn.Module]:
    """SGLang's linear-attention layers 0 to 2 with random weights."""
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

    random = torch.Generator().manual_seed(5)
    layers = []
    for layer_id in range(3):
        conv = torch.randn(model.width, 4, generator=random).to(DEVICE, torch.float16) * 0.5
        a_log = torch.randn(2, generator=random).to(DEVICE) - 1.0
        dt_bias = torch.randn(model.gate_width, generator=random).to(DEVICE)
        layers.append(
            RadixLinearAttention(
                layer_id,
                model.k_heads,
                model.k_heads,
                2,
                32,
                32,
                32,
                conv_weights=conv,
                activation="silu",
                A_log=a_log.view(1, 1, 2, 1) if model.is_kda else a_log,
                dt_bias=dt_bias,
                lower_bound=model.lower_bound,
            )  # fmt: skip
        )
    return layers


class Shard:
    """Pool, backend and linear layers of one launch, all of them SGLang's."""

    def __init__(self, flag: bool, model: Model = GDN) -> None:
        extra = (FLAG, "--linear-replayssm-cache-len", str(CAPACITY)) if flag else ()
        if model.is_kda:
            extra = (*extra, "--attention-backend", "triton")
        self.server_args = launch.publish(launch.parse(*extra, "--max-running-requests", "4", model=model.name))
        self.layers = make_layers(model)
        configurator = launch.configurator(self.server_args, layers=self.layers)
        configurator._handle_max_mamba_cache(0.25)
        self.pool = configurator._build_hybrid_req_pool(max_num_reqs=4, extra_max_context_len=4)
        assert list(self.pool.mamba_map) == [layer.layer_id for layer in self.layers]
        self.backend = make_backend(self.pool, self.server_args, model)
        self.ring = ring_of(self.pool)
        self.cache = self.pool.mamba_pool.mamba_cache

    def fill(self, slots: list[int]) -> None:
        """As if a prefill had run: the same random states and conv windows in both launches."""
        random = torch.Generator().manual_seed(9)
        for slot in slots:
            for tensor in (self.cache.temporal, self.cache.conv[0]):
                value = torch.randn(tensor[:, slot].shape, generator=random)
                tensor[:, slot] = value.to(DEVICE, tensor.dtype)

    def run_layers(self, batch: Any, inputs: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        return [
            self.backend.forward_decode(layer, batch, mixed_qkv.clone(), a, b)
            for layer, (mixed_qkv, a, b) in zip(self.layers, inputs, strict=True)
        ]


def ints(values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


class Pair:
    """A plain launch and one with the flag, holding the same requests in the same rows and slots."""

    def __init__(self, lens: list[int], model: Model = GDN) -> None:
        from sglang.srt.managers.schedule_batch import ReqKvInfo

        self.random = torch.Generator().manual_seed(3)
        self.model = model
        self.plain, self.ours = Shard(flag=False, model=model), Shard(flag=True, model=model)
        self.lens = list(lens)
        for shard in (self.plain, self.ours):
            requests = [SimpleNamespace(kv=ReqKvInfo()) for _ in lens]
            self.rows = shard.pool.alloc(requests)
            self.slots = [int(request.kv.mamba_pool_idx) for request in requests]
            self.track = [request.kv.mamba_ping_pong_track_buffer.tolist() for request in requests]
            shard.fill(self.slots)
        self.ours.ring.before_forward(self.batch([], extend_of=self.lens))

    def batch(self, tracked: list[int], extend_of: list[int] | None = None) -> Any:
        """A batch over all requests; `tracked` ones cross a track boundary with this step."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        size = len(self.rows)
        lens = [n + 1 for n in self.lens] if extend_of is None else extend_of
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE if extend_of is None else ForwardMode.EXTEND,
            batch_size=size,
            input_ids=ints([0] * size),
            req_pool_indices=ints(self.rows),
            seq_lens=ints(lens),
            seq_lens_cpu=torch.tensor(lens),
            out_cache_loc=ints([0] * size),
            seq_lens_sum=sum(lens),
            extend_prefix_lens=None if extend_of is None else ints([0] * size),
            mamba_track_mask=torch.tensor([i in tracked for i in range(size)], device=DEVICE),
            mamba_track_indices=ints([track[0] for track in self.track]),
        )

    def inputs(self, size: int) -> list[tuple[torch.Tensor, ...]]:
        def half(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=self.random).to(DEVICE, torch.float16)

        m = self.model
        return [
            (half(size, m.width), half(size, m.gate_width), half(1, size, 2) if m.is_kda else half(size, 2))
            for _ in self.plain.layers
        ]

    def eager_step(self, tracked: list[int]) -> None:
        inputs = self.inputs(len(self.rows))
        outputs = []
        for shard in (self.plain, self.ours):
            batch = self.batch(tracked)
            if shard.ring is not None:
                shard.ring.before_forward(batch)
            shard.backend.init_forward_metadata(batch)
            outputs.append(shard.run_layers(batch, inputs))
        self.compare(outputs, len(self.rows))
        self.after_step(tracked)

    def compare(self, outputs: list[list[torch.Tensor]], live: int) -> None:
        for plain, ours in zip(*outputs, strict=True):
            assert ours.shape == plain.shape and ours.dtype is plain.dtype
            assert reference.relative_error(ours[:, :live], plain[:, :live]) <= OUTPUT_BOUND

    def after_step(self, tracked: list[int]) -> None:
        self.lens = [n + 1 for n in self.lens]
        assert torch.equal(self.ours.cache.conv[0], self.plain.cache.conv[0]), "conv windows, track slots included"
        for i in tracked:
            slot = self.track[i][0]
            error = reference.relative_error(self.ours.cache.temporal[:, slot], self.plain.cache.temporal[:, slot])
            assert error <= STATE_BOUND, f"snapshot of request {i} at {self.lens[i]} is off by {error:.1e}"
        assert not int(self.ours.ring.ring.faults)

    def finish(self) -> None:
        """Fold every row: the slots then hold what plain decode left there."""
        for row, slot, length in zip(self.rows, self.slots, self.lens, strict=True):
            self.ours.ring.fold_row(row, ints([slot])[0], length)
            error = reference.relative_error(self.ours.cache.temporal[:, slot], self.plain.cache.temporal[:, slot])
            assert error <= STATE_BOUND, f"row {row} is off by {error:.1e}"


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_eager_decode_equals_plain_sglang(model: Model) -> None:
    """Past two folds, with track boundaries before, at and after them, of one request and of several."""
    pair = Pair([7, 20, 3], model)
    assert isinstance(pair.ours.backend.kernel_dispatcher.decode_kernel, BufferedDecode)
    assert not isinstance(pair.plain.backend.kernel_dispatcher.decode_kernel, BufferedDecode)
    boundaries = ([], [1], [0, 2], [2], [], [0, 1, 2], [], [1])
    with mock.patch.object(pair.ours.ring, "snapshot", wraps=pair.ours.ring.snapshot) as snapshot:
        for tracked in boundaries:
            pair.eager_step(tracked)
    assert snapshot.call_count == len(boundaries), "one launch a step, after the last layer"
    pair.finish()


class Graph:
    """The static side of a captured decode: buffers by address, filled before every replay."""

    def __init__(self, shard: Shard, size: int, inputs: list[tuple[torch.Tensor, ...]]) -> None:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        self.shard, self.size = shard, size
        shard.backend.init_cuda_graph_state(size, size)
        self.inputs = inputs  # of `size` entries: the static buffers
        self.captured = SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            logical_forward_mode=ForwardMode.DECODE,
            batch_size=size,
            req_pool_indices=torch.arange(size, device=DEVICE),
            seq_lens=torch.ones(size, dtype=torch.int64, device=DEVICE),
            seq_lens_cpu=torch.ones(size, dtype=torch.int64),
            spec_info=None,
            mamba_track_mask=torch.zeros(size, dtype=torch.bool, device=DEVICE),
            mamba_track_indices=torch.zeros(size, dtype=torch.int64, device=DEVICE),
        )
        shard.backend.init_forward_metadata_out_graph(self.captured, in_capture=True)
        self.metadata = shard.backend.forward_metadata
        self.outputs = shard.run_layers(self.captured, self.inputs)

    def replay(self, batch: Any, inputs: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        """Copy the batch into the static buffers, pad it, plan, and run what was captured."""
        live, static = batch.batch_size, self.captured
        static.req_pool_indices[live:], static.seq_lens[live:], static.seq_lens_cpu[live:] = 0, 1, 1
        static.mamba_track_mask[live:], static.mamba_track_indices[live:] = False, 0
        for name in ("req_pool_indices", "seq_lens", "seq_lens_cpu", "mamba_track_mask", "mamba_track_indices"):
            getattr(static, name)[:live] = getattr(batch, name)
        for buffers, values in zip(self.inputs, inputs, strict=True):
            for buffer, value in zip(buffers, values, strict=True):  # KDA's b has a leading 1
                buffer.view(self.size, -1)[:live] = value.view(live, -1)
        view = SimpleNamespace(**vars(static), num_padding=self.size - live)
        del view.mamba_track_mask, view.logical_forward_mode  # SGLang's view before a replay has neither
        if self.shard.ring is not None:
            self.shard.ring.before_forward(batch)
        self.shard.backend.init_forward_metadata_out_graph(view)
        planned = self.shard.backend.forward_metadata
        assert planned.mamba_cache_indices.data_ptr() == self.metadata.mamba_cache_indices.data_ptr()
        return self.shard.run_layers(static, self.inputs)


@pytest.mark.parametrize("padding,model", [(0, GDN), (2, GDN), (1, KDA)], ids=["full", "padded", "padded KDA"])
def test_graph_replay_equals_plain_sglang(padding: int, model: Model) -> None:
    """Scenario 9: padded rows give zeros and touch nothing; boundaries are seen through the captured mask."""
    pair = Pair([5, 11], model)
    size = 2 + padding
    graphs = [Graph(shard, size, pair.inputs(size)) for shard in (pair.plain, pair.ours)]
    assert not any(output.any() for output in graphs[1].outputs), "a capture computes nothing"
    # the capture of the plain launch ran over its live slots, as no server does once requests run: start again
    for shard in (pair.plain, pair.ours):
        shard.cache.temporal.zero_()
        shard.cache.conv[0].zero_()
        shard.fill(pair.slots)
    for tracked in ([], [1], [0], [], [0, 1], [1]):
        inputs = pair.inputs(2)
        outputs = [graph.replay(pair.batch(tracked), inputs) for graph in graphs]
        pair.compare(outputs, live=2)
        assert not any(output[:, 2:].any() for output in outputs[1])
        pair.after_step(tracked)
    pair.finish()


def test_a_capture_over_live_rows_moves_nothing() -> None:
    """A graph captured late (after a weight update, say) runs over rows and slots that requests hold."""
    pair = Pair([5, 11, 8])
    pair.eager_step([])
    ring = pair.ours.ring
    tensors = (ring.ring.u, ring.ring.k, ring.ring.g, ring.ring.checkpoint, ring.ring.faults, ring.state)
    before = [tensor.clone() for tensor in tensors]
    windows = pair.ours.cache.conv[0].clone()
    Graph(pair.ours, 4, pair.inputs(4))
    for tensor, old in zip(tensors, before, strict=True):
        torch.testing.assert_close(tensor, old, rtol=0, atol=0, equal_nan=True)
    pair.ours.cache.conv[0].copy_(windows)  # the conv kernel is SGLang's, and does run
    for _ in range(CAPACITY + 1):
        pair.eager_step([])
    pair.finish()


def test_a_backend_whose_pool_has_no_ring_does_not_serve() -> None:
    shard = Shard(flag=True)
    delattr(shard.pool, ATTRIBUTE)
    with pytest.raises(RuntimeError, match="request pool has no ring: a hook of sglang-replayssm was not reached"):
        make_backend(shard.pool, shard.server_args)


def test_a_draft_worker_keeps_sglangs_kernel() -> None:
    shard = Shard(flag=True)
    draft = make_backend(shard.pool, shard.server_args, is_draft_worker=True)
    assert not isinstance(draft.kernel_dispatcher.decode_kernel, BufferedDecode)


# -- Kimi-K3's fused decode -------------------------------------------------------------------------------------------

FUSED_WEIGHTS = tuple(range(7))  # as many as SGLang unpacks


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Inputs of SGLang's fused kernel. It is CUDA for 12 heads of 128; here it takes any shape and gives zeros."""
    from sglang.kernels.ops.attention import kda_fused_decode

    calls: list[torch.Tensor] = []

    def fused(mixed_qkv: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(mixed_qkv)
        return mixed_qkv.new_zeros(1, mixed_qkv.shape[0], 2, 32)

    monkeypatch.setattr(kda_fused_decode, "covered", lambda *args: True)
    monkeypatch.setattr(kda_fused_decode, "kda_fused_decode", fused)
    return calls


def offer_fused_decode(layers: list[torch.nn.Module]) -> None:
    """What the model leaves on its layers before each decode for SGLang to take the fused path."""
    for layer in layers:
        layer._k3_fused_decode_args = FUSED_WEIGHTS
        layer._k3_onorm_gate = torch.zeros(1)
        layer._k3_onorm_consumed = False


def test_fused_decode_is_off_while_the_ring_is_on(fused_calls: list[torch.Tensor]) -> None:
    """It goes past the dispatcher and updates the slot in place: the offer is declined, and stands for others."""
    pair = Pair([7, 20], KDA)
    offer_fused_decode(pair.ours.layers)
    for tracked in ([], [1], [], [0]):
        pair.eager_step(tracked)
    pair.finish()
    assert not fused_calls
    for layer in pair.ours.layers:
        assert layer._k3_fused_decode_args is FUSED_WEIGHTS
        assert not layer._k3_onorm_consumed, "the model is to apply the output norm itself"

    offer_fused_decode(pair.plain.layers)
    batch = pair.batch([])
    pair.plain.backend.init_forward_metadata(batch)
    pair.plain.run_layers(batch, pair.inputs(2))
    assert len(fused_calls) == 3, "without the ring SGLang takes it"
    assert all(layer._k3_onorm_consumed for layer in pair.plain.layers)


def test_the_offer_stands_after_an_error(fused_calls: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair([7], KDA)
    offer_fused_decode(pair.ours.layers)
    monkeypatch.setattr(pair.ours.ring, "decode_layer", mock.Mock(side_effect=RuntimeError("no")))
    with pytest.raises(RuntimeError, match="no"):
        pair.eager_step([])
    assert not fused_calls
    assert pair.ours.layers[0]._k3_fused_decode_args is FUSED_WEIGHTS
