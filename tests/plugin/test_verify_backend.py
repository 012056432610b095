"""SGLang's real backend in verify steps with the ring, next to the same backend of a plain launch with its snapshots.

For Gated DeltaNet and Kimi Delta Attention. The oracle is SGLang's recurrent verify with a state per draft: outputs of
all drafts, conv windows, committed states and track slots have to agree, eagerly and through the static buffers of a
CUDA graph, with plain decode in between.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from replayssm_kernels import reference
from sglang_replayssm import arguments
from sglang_replayssm.arguments import FLAG, SPEC_FLAG
from sglang_replayssm.prefix_states import PrefixStates
from sglang_replayssm.request_ring import ring_of
from tests.plugin import launch
from tests.plugin.launch import DEVICE
from tests.plugin.test_backend import (
    BOUNDED_KDA,
    GDN,
    KDA,
    MODELS,
    OUTPUT_BOUND,
    STATE_BOUND,
    Model,
    ints,
    make_backend,
    make_layers,
)

WIDTH, CACHE_LEN = 3, 4


class Shard:
    """Pool, backend and linear layers of one launch with speculative decoding, all of them SGLang's."""

    def __init__(self, *flags: str, model: Model = GDN) -> None:
        from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

        extra = (*flags, "--linear-replayssm-cache-len", str(CACHE_LEN), "--mamba-ssm-dtype", "float32")
        cache = ("--max-running-requests", "4", "--mamba-radix-cache-strategy", "extra_buffer")
        cache = (*cache, "--linear-attn-verify-backend", "triton")  # SGLang has one for Blackwell in mind for Kimi
        with mock.patch.object(arguments, "_WITHOUT_DRAFTS", {}):  # of Kimi-Linear; these drafts are the test's own
            self.server_args = launch.publish(launch.parse(*launch.drafts(WIDTH), *extra, *cache, model=model.name))
        self.layers = make_layers(model)
        configurator = launch.configurator(self.server_args, layers=self.layers)
        configurator._handle_max_mamba_cache(0.25)
        self.pool = configurator._build_hybrid_req_pool(max_num_reqs=4, extra_max_context_len=4)
        self.backend = make_backend(self.pool, self.server_args, model)
        self.hybrid = object.__new__(HybridLinearAttnBackend)
        self.hybrid.linear_attn_backend = self.backend
        self.ring = ring_of(self.pool)
        self.cache = self.pool.mamba_pool.mamba_cache

    def before(self, batch: Any) -> None:
        if self.ring is not None:
            self.ring.before_forward(batch)

    def layers_of(self, batch: Any, inputs: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        run = self.backend.forward_decode if batch.forward_mode.is_decode() else self.backend.forward_extend
        return [
            run(layer, batch, mixed_qkv=qkv.clone(), a=a, b=b)
            for layer, (qkv, a, b) in zip(self.layers, inputs, strict=True)
        ]

    def commit(self, accepted: list[int], rows: torch.Tensor, track: list[int], steps: list[int]) -> None:
        self.hybrid.update_mamba_state_after_mtp_verify(
            last_correct_step_indices=ints([n - 1 for n in accepted]),
            mamba_track_indices=ints(track),
            mamba_steps_to_track=ints(steps),
            model=None,
            req_pool_indices=rows,
        )


class Pair:
    """A plain launch and one with the ring, holding the same requests in the same rows and slots."""

    def __init__(self, lens: list[int], model: Model = GDN) -> None:
        from sglang.srt.managers.schedule_batch import ReqKvInfo

        self.random = torch.Generator().manual_seed(3)
        self.model = model
        self.plain, self.ours = Shard(model=model), Shard(SPEC_FLAG, model=model)
        self.shards = (self.plain, self.ours)
        self.lens = list(lens)
        for shard in self.shards:
            requests = [SimpleNamespace(kv=ReqKvInfo()) for _ in lens]
            self.rows = shard.pool.alloc(requests)
            self.slots = [int(request.kv.mamba_pool_idx) for request in requests]
            self.track = [int(request.kv.mamba_ping_pong_track_buffer[0]) for request in requests]
            random = torch.Generator().manual_seed(9)
            for slot in self.slots:  # as if a prefill had run
                for tensor in (shard.cache.temporal, shard.cache.conv[0]):
                    tensor[:, slot] = torch.randn(tensor[:, slot].shape, generator=random).to(DEVICE, tensor.dtype)
        self.ours.ring.before_forward(self.batch("EXTEND", self.lens, prefix=True))

    def batch(self, mode: str, lens: list[int], prefix: bool = False) -> Any:
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
        from sglang.srt.speculative.eagle_info import EagleVerifyInput

        size = len(self.rows)
        spec_info = object.__new__(EagleVerifyInput)
        spec_info.draft_token_num, spec_info.ragged_verify_layout = WIDTH, None
        return ForwardBatch(
            forward_mode=ForwardMode[mode],
            batch_size=size,
            input_ids=ints([0] * size * (WIDTH if mode == "TARGET_VERIFY" else 1)),
            req_pool_indices=ints(self.rows),
            seq_lens=ints(lens),
            seq_lens_cpu=torch.tensor(lens),
            out_cache_loc=ints([0] * size),
            seq_lens_sum=sum(lens),
            extend_prefix_lens=ints([0] * size) if prefix else None,
            spec_info=spec_info if mode == "TARGET_VERIFY" else None,
        )

    def inputs(self, tokens: int) -> list[tuple[torch.Tensor, ...]]:
        def half(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=self.random).to(DEVICE, torch.float16)

        model = self.model
        # SGLang's prefill and decode of Gated DeltaNet, and the ring, round beta to the dtype of b, its verify kernel
        # does not: fp32 here
        return [
            (half(tokens, model.width), half(tokens, model.gate_width), half(tokens, 2).float())
            for _ in self.plain.layers
        ]

    def verify(self, accepted: list[int], boundaries: dict[int, int] | None = None) -> None:
        """One eager verify step; `boundaries`: by request, the accepted token (from 1) at which one lies."""
        inputs, outputs = self.inputs(len(self.rows) * WIDTH), []
        for shard in self.shards:
            batch = self.batch("TARGET_VERIFY", self.lens)
            shard.before(batch)
            shard.backend.init_forward_metadata(batch)
            outputs.append(shard.layers_of(batch, inputs))
        self.compare(outputs, len(self.rows) * WIDTH)
        self.commit(accepted, boundaries or {})

    def decode(self) -> None:
        """One eager decode step."""
        inputs, outputs = self.inputs(len(self.rows)), []
        for shard in self.shards:
            batch = self.batch("DECODE", [n + 1 for n in self.lens])
            shard.before(batch)
            shard.backend.init_forward_metadata(batch)
            outputs.append(shard.layers_of(batch, inputs))
        self.compare(outputs, len(self.rows))
        self.lens = [n + 1 for n in self.lens]

    def compare(self, outputs: list[list[torch.Tensor]], live: int) -> None:
        for plain, ours in zip(*outputs, strict=True):
            assert ours.shape == plain.shape and ours.dtype is plain.dtype
            assert reference.relative_error(ours[:, :live], plain[:, :live]) <= OUTPUT_BOUND

    def commit(self, accepted: list[int], boundaries: dict[int, int]) -> None:
        steps = [boundaries.get(i, 0) - 1 for i in range(len(self.rows))]
        for shard in self.shards:
            shard.commit(accepted, ints(self.rows), self.track, steps)
        assert torch.equal(self.ours.cache.conv[0], self.plain.cache.conv[0]), "conv windows, track slots included"
        self.lens = [n + count for n, count in zip(self.lens, accepted, strict=True)]
        for i in boundaries:
            self.same_state(self.track[i], f"snapshot of request {i}")
        assert not int(self.ours.ring.ring.faults)

    def same_state(self, slot: int, what: str) -> None:
        error = reference.relative_error(self.ours.cache.temporal[:, slot], self.plain.cache.temporal[:, slot])
        assert error <= STATE_BOUND, f"{what} is off by {error:.1e}"

    def finish(self) -> None:
        """Fold every row: the slots then hold what SGLang committed to them."""
        for row, slot, length in zip(self.rows, self.slots, self.lens, strict=True):
            self.ours.ring.fold_row(row, ints([slot])[0], length)
            self.same_state(slot, f"row {row}")


STEPS = (
    ([1, 3, 2], {}),
    ([3, 3, 3], {0: 3, 1: 1}),
    ([1, 2, 1], {1: 2}),
    ([2, 1, 3], {0: 1, 2: 2}),
    ([3, 1, 1], {}),
    ([2, 3, 3], {0: 2, 1: 3, 2: 1}),
)
by_model = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)


@by_model
def test_eager_verify_equals_plain_sglang(model: Model) -> None:
    """Acceptances of every length, past several folds, with track boundaries anywhere in the accepted runs."""
    pair = Pair([7, 20, 3], model)
    for accepted, boundaries in STEPS:
        pair.verify(accepted, boundaries)
    pair.finish()


@by_model
def test_verify_and_decode_take_turns(model: Model) -> None:
    """One cursor rule for both: a server may stop to draft at any step."""
    pair = Pair([7, 20, 3], model)
    for accepted, boundaries in STEPS[:3]:
        pair.verify(accepted, boundaries)
        pair.decode()
        pair.decode()
    pair.finish()


class Graph:
    """The static side of a captured verify step: buffers by address, filled before every replay."""

    def __init__(self, shard: Shard, size: int, inputs: list[tuple[torch.Tensor, ...]]) -> None:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        self.shard, self.size, self.inputs = shard, size, inputs
        shard.backend.init_cuda_graph_state(size, size * WIDTH)
        self.captured = SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY,
            logical_forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=size,
            req_pool_indices=torch.arange(size, device=DEVICE),
            seq_lens=torch.ones(size, dtype=torch.int64, device=DEVICE),
            seq_lens_cpu=torch.ones(size, dtype=torch.int64),
            spec_info=SimpleNamespace(draft_token_num=WIDTH, ragged_verify_layout=None),
            mamba_track_mask=None,
            mamba_track_indices=torch.zeros(size, dtype=torch.int64, device=DEVICE),
        )
        shard.backend.init_forward_metadata_out_graph(self.captured, in_capture=True)
        self.outputs = shard.layers_of(self.captured, self.inputs)

    def replay(self, batch: Any, inputs: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        """Copy the batch into the static buffers, pad it, plan, and run what was captured."""
        live, static = batch.batch_size, self.captured
        static.req_pool_indices[live:], static.seq_lens[live:], static.seq_lens_cpu[live:] = 0, 1, 1
        for name in ("req_pool_indices", "seq_lens", "seq_lens_cpu"):
            getattr(static, name)[:live] = getattr(batch, name)
        for buffers, values in zip(self.inputs, inputs, strict=True):
            for buffer, value in zip(buffers, values, strict=True):
                buffer[: live * WIDTH] = value
        view = SimpleNamespace(**vars(static), num_padding=self.size - live)
        # SGLang prepares a verify step's graph before the forward that replays it
        self.shard.backend.init_forward_metadata_out_graph(view)
        self.shard.before(batch)
        return self.shard.layers_of(static, self.inputs)


@pytest.mark.parametrize(
    "padding,model",
    [pytest.param(0, GDN, marks=pytest.mark.long), (2, GDN), (2, KDA), (1, BOUNDED_KDA)],
    ids=["full", "padded", "padded KDA", "padded bounded KDA"],
)
def test_graph_replay_equals_plain_sglang(padding: int, model: Model) -> None:
    """Scenario 9 for verify: padded entries give zeros and touch nothing, a capture computes nothing."""
    pair = Pair([5, 11], model)
    size = 2 + padding
    graphs = [Graph(shard, size, pair.inputs(size * WIDTH)) for shard in pair.shards]
    assert not any(output.any() for output in graphs[1].outputs), "a capture computes nothing"
    for shard in pair.shards:  # the captured conv ran over live slots, as on no server: start again
        shard.cache.conv[0].zero_()
        shard.cache.temporal.zero_()
    for accepted, boundaries in (
        ([1, 3], {}),
        ([3, 2], {0: 2}),
        ([2, 1], {1: 1}),
        ([3, 3], {0: 3, 1: 2}),
        ([1, 1], {}),
    ):
        inputs = pair.inputs(2 * WIDTH)
        outputs = [graph.replay(pair.batch("TARGET_VERIFY", pair.lens), inputs) for graph in graphs]
        pair.compare(outputs, live=2 * WIDTH)
        assert not any(output[:, 2 * WIDTH :].any() for output in outputs[1])
        pair.commit(accepted, boundaries)
    pair.finish()


@pytest.mark.parametrize("model", [GDN, KDA], ids=lambda model: model.name)
def test_a_capture_over_live_rows_moves_nothing(model: Model) -> None:
    pair = Pair([5, 11, 8], model)
    pair.verify([2, 3, 1])
    ring = pair.ours.ring
    tensors = (ring.ring.u, ring.ring.k, ring.ring.g, ring.ring.checkpoint, ring.ring.faults, ring.state)
    before = [tensor.clone() for tensor in tensors]
    windows = pair.ours.cache.conv[0].clone()
    Graph(pair.ours, 4, pair.inputs(4 * WIDTH))
    for tensor, old in zip(tensors, before, strict=True):
        torch.testing.assert_close(tensor, old, rtol=0, atol=0, equal_nan=True)
    pair.ours.cache.conv[0].copy_(windows)  # the conv kernel is SGLang's, and does run
    for accepted, boundaries in STEPS[1:3]:
        pair.verify(accepted, boundaries)
    pair.finish()


# -- the pool ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [GDN, KDA], ids=lambda model: model.name)
def test_no_state_per_draft_is_allocated(model: Model) -> None:
    """The conv windows are SGLang's to the byte, and the pool's own account of its memory is right."""
    plain, ours = Shard(model=model), Shard(SPEC_FLAG, FLAG, model=model)
    snapshots = plain.cache.intermediate_ssm
    assert snapshots.shape[2] == WIDTH
    assert ours.cache.intermediate_ssm is None
    for one, other in zip(plain.cache.intermediate_conv_window, ours.cache.intermediate_conv_window, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    stored = [tensor.nbytes for tensor in ours.pool.mamba_pool._intermediate_conv_window_phys]
    assert stored == [tensor.nbytes for tensor in plain.pool.mamba_pool._intermediate_conv_window_phys]
    slots = plain.pool.mamba_pool.size - ours.pool.mamba_pool.size
    per_slot = plain.cache.temporal[:, 0].nbytes + plain.cache.conv[0][:, 0].nbytes
    account = (plain.pool.mamba_pool.mem_usage - ours.pool.mamba_pool.mem_usage) * (1 << 30)
    assert account == pytest.approx(snapshots.nbytes + slots * per_slot, abs=1)
    assert ours.ring.ring.shape.max_width == WIDTH
    assert ours.ring.ring.shape.capacity == CACHE_LEN + WIDTH


def test_a_slot_whose_conv_window_drafts_have_moved_is_not_offered() -> None:
    """At the end of a request: a verify step too many (overlap), or accepted drafts that a grammar cut."""
    from sglang.srt.runtime_context import get_context

    launch.publish_spec_flag(WIDTH)
    states = object.__new__(PrefixStates)
    assert states._launched(SimpleNamespace(grammar=None))
    assert not states._launched(SimpleNamespace(grammar=object()))
    get_context().override("test", disable_overlap_schedule=False)
    assert not states._launched(SimpleNamespace(grammar=None))
