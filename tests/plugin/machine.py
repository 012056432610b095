"""A tiny scheduler over SGLang's real request and slot pools, with a plain fp64 recurrence for every request.

`Machine` admits, extends, decodes and releases requests in the order in which SGLang launches those things, through
the plugin's `ModelRunner.forward` hook. What a forward pass would read of a slot is compared with the oracle before
it is used, every decode output and every snapshot too, so that each method doubles as a check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from replayssm_kernels import reference
from replayssm_kernels.ring import FRESH, INERT, RingShape
from sglang_replayssm import hooks
from sglang_replayssm.request_ring import ATTRIBUTE, RequestRing
from tests.plugin.launch import DEVICE

# fp32 state and u, a few dozen tokens: outputs measured 3e-8 to 7.4e-7, states 2e-8 to 2.6e-7 (interpreter).
BOUND = 2e-6
LAYER_IDS = (1, 4)  # as in a model where other layers lie between


@dataclass(eq=False)
class Request:
    """What the pools know of a request (`kv`, SGLang's own record), and the oracle: its states after `length` tokens.

    `cached` tokens come from the prefix cache: the slot is filled from `cow` (a slot) by the first extend.
    """

    kv: Any = field(repr=False)
    states: list[torch.Tensor] = field(repr=False)
    length: int = 0
    cached: int = 0
    cow: int | None = None
    started: bool = False

    @property
    def row(self) -> int:
        return self.kv.req_pool_idx

    @property
    def slot(self) -> int:
        return int(self.kv.mamba_pool_idx)


@dataclass(eq=False)
class Snapshot:
    """A slot that left its request, and what it must hold."""

    slot: torch.Tensor
    states: list[torch.Tensor] = field(repr=False)
    length: int


@dataclass
class Tokens:
    """One layer's inputs of some tokens."""

    mixed_qkv: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor

    def __getitem__(self, index: Any) -> Tokens:
        return Tokens(self.mixed_qkv[index], self.a[index], self.b[index])


@dataclass
class Sizes:
    """Sizes of the pools; minimal ones by default."""

    rows: int = 3
    slots: int = 8
    capacity: int = 3
    width: int = 1  # tokens of a verify step; 1: no speculative decoding
    k_heads: int = 1
    v_heads: int = 1
    key_dim: int = 16
    value_dim: int = 16
    layer_ids: Sequence[int] = LAYER_IDS
    state_dtype: torch.dtype = torch.float32
    extra_buffer: bool = False
    overlap: bool = True
    direct_batch: int = 0


def make_pool(sizes: Sizes) -> Any:
    """SGLang's HybridReqToTokenPool. Server arguments must have been published."""
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=sizes.v_heads * sizes.value_dim,
        n_groups=sizes.k_heads,
        num_heads=sizes.v_heads,
        head_dim=sizes.value_dim,
        state_size=sizes.key_dim,
        conv_kernel=4,
    )
    return HybridReqToTokenPool(
        size=sizes.rows,
        mamba_size=sizes.slots,
        mamba_spec_state_size=sizes.rows,
        max_context_len=256,
        device=DEVICE,
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(
            shape=shape,
            layers=list(sizes.layer_ids),
            dtype=Mamba2StateDType(conv=torch.float32, temporal=sizes.state_dtype),
        ),
        mamba_layer_ids=list(sizes.layer_ids),
        speculative_num_draft_tokens=sizes.width if sizes.width > 1 else None,
        speculative_eagle_topk=1,
        enable_mamba_extra_buffer=sizes.extra_buffer,
        enable_overlap_schedule=sizes.overlap,
    )


def ring_shape(sizes: Sizes, rows: int) -> RingShape:
    return RingShape(
        layers=len(sizes.layer_ids),
        rows=rows,
        k_heads=sizes.k_heads,
        v_heads=sizes.v_heads,
        key_dim=sizes.key_dim,
        value_dim=sizes.value_dim,
        capacity=sizes.capacity,
        key_dtype=torch.float32,
        max_width=sizes.width,
    )


@dataclass
class Machine:
    """Pools, ring and oracle. Slots and ring start as NaN, so that what was never written cannot look right."""

    sizes: Sizes = field(default_factory=Sizes)
    seed: int = 0

    def __post_init__(self) -> None:
        s = self.sizes
        self.random = torch.Generator().manual_seed(self.seed)
        self.pool = make_pool(s)
        shape = ring_shape(s, self.pool.req_to_token.shape[0])
        self.ring = RequestRing(shape, self.pool, DEVICE, direct_batch=s.direct_batch)
        setattr(self.pool, ATTRIBUTE, self.ring)
        for tensor in (self.ring.ring.u, self.ring.ring.k, self.ring.ring.g, self.ring.state[:, 1:]):
            tensor.fill_(float("nan"))
        self.runner = SimpleNamespace(req_to_token_pool=self.pool, is_draft_worker=False)
        self.A_log = [self.randn(s.v_heads) - 1.0 for _ in s.layer_ids]
        self.dt_bias = [self.randn(s.v_heads) for _ in s.layer_ids]
        self.scale = s.key_dim**-0.5
        self.running: list[Request] = []
        self.outputs: list[torch.Tensor] = []

    # -- small things -------------------------------------------------------------------------------------------------

    def randn(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.random).to(DEVICE)

    def ints(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(list(values), dtype=dtype, device=DEVICE)

    def tokens(self, count: int) -> list[Tokens]:
        """Random inputs of `count` tokens, per layer."""
        s = self.sizes
        width = 2 * s.k_heads * s.key_dim + s.v_heads * s.value_dim
        return [
            Tokens(self.randn(count, width), self.randn(count, s.v_heads), self.randn(count, s.v_heads))
            for _ in s.layer_ids
        ]

    def gates(self, layer: int, x: Tokens) -> reference.Token:
        g = reference.gdn_gate(x.a, self.A_log[layer], self.dt_bias[layer])
        beta = reference.update_rate(x.b, rounded=True)
        return reference.token(x.mixed_qkv, g, beta, self.sizes.k_heads, self.sizes.key_dim, self.scale)

    def zeros(self) -> list[torch.Tensor]:
        s = self.sizes
        return [torch.zeros(s.v_heads, s.value_dim, s.key_dim, dtype=torch.float64, device=DEVICE) for _ in s.layer_ids]

    def batch(self, mode: str, rows: Sequence[int], seq_lens: Sequence[int], **more: Any) -> Any:
        """What the hooks read of a ForwardBatch."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        fields = dict(
            forward_mode=ForwardMode[mode],
            logical_forward_mode=ForwardMode[mode],
            batch_size=len(rows),
            req_pool_indices=self.ints(rows),
            seq_lens=self.ints(seq_lens),
            extend_prefix_lens=None,
            mamba_track_mask=None,
        )
        return SimpleNamespace(**{**fields, **more})

    def forward(self, batch: Any, body: Any = lambda: None) -> Any:
        """Run `body` as the forward pass of `batch`, with the plugin's hook around it."""
        return hooks.model_forward(lambda runner, forward_batch: body(), self.runner, batch)

    def expect_slot(self, slot: int | torch.Tensor, states: Sequence[torch.Tensor], what: str) -> None:
        for layer, expected in enumerate(states):
            actual = self.ring.state[layer, int(slot)]
            if not expected.any():
                assert not actual.any(), f"{what}: layer {layer} should be zeros"
                continue
            error = reference.relative_error(actual, expected)
            assert error <= BOUND, f"{what}: layer {layer} is off by {error:.1e}"

    # -- what a scheduler does ----------------------------------------------------------------------------------------

    def admit(self, prefix: Snapshot | None = None) -> Request | None:
        """Give a new request a row and a slot; None when there is none. Nothing is launched yet."""
        from sglang.srt.managers.schedule_batch import ReqKvInfo

        if not self.pool.available_size() or not self.pool.mamba_allocator.available_size():
            return None
        request = Request(ReqKvInfo(), states=self.zeros())
        if prefix is not None:
            request.states = [state.clone() for state in prefix.states]
            request.length = request.cached = prefix.length
            request.cow = int(prefix.slot)
        assert self.pool.alloc([request]) is not None
        request.kv.kv_allocated_len = request.length + 1
        self.running.append(request)
        return request

    def begin(self, prompt: int) -> Request:
        """A request after its prefill of `prompt` tokens."""
        request = self.admit()
        assert request is not None, "no row or slot is free"
        self.extend({request: prompt})
        return request

    def extend(self, chunks: dict[Request, int], decodes: Sequence[Request] = ()) -> None:
        """Prefill the next tokens of some requests; `decodes` ride along as extends of one token (mixed chunk).

        The prefill runs from what stands in the slot, so that a wrong slot spoils everything after it.
        """
        work = {**chunks, **dict.fromkeys(decodes, 1)}
        inputs = {request: self.tokens(count) for request, count in work.items()}
        rows = [request.row for request in work]
        batch = self.batch(
            "MIXED" if decodes else "EXTEND",
            rows,
            [request.length + count for request, count in work.items()],
            extend_prefix_lens=self.ints([request.length for request in work]),
        )
        self.forward(batch, lambda: self._prefill(work, inputs))

    def _prefill(self, work: dict[Request, int], inputs: dict[Request, list[Tokens]]) -> None:
        for request in work:
            slot = request.kv.mamba_pool_idx.reshape(1)
            if not request.started:  # SGLang's deferred clear and copy on write, inside the forward pass
                if request.cow is None:
                    self.pool.mamba_pool.clear_slots(slot)
                else:
                    self.pool.copy_mamba_state(self.ints([request.cow]), slot.long())
                request.started, request.kv.mamba_needs_clear = True, False
            self.expect_slot(request.slot, request.states, f"row {request.row} before an extend at {request.length}")
        for request, count in work.items():
            for layer, x in enumerate(inputs[request]):
                state = self.ring.state[layer, request.slot].double()[None]
                for t in range(count):
                    token = self.gates(layer, x[t : t + 1])
                    _, state, _ = reference.step(state, token)
                    _, expected, _ = reference.step(request.states[layer][None], token)
                    request.states[layer] = expected[0]
                self.ring.state[layer, request.slot] = state[0].to(self.ring.state.dtype)
            request.length += count

    def decode(
        self,
        requests: Sequence[Request],
        track: dict[Request, torch.Tensor | int] | None = None,
        padding: int = 0,
        dead: Sequence[Request] = (),
    ) -> list[Snapshot]:
        """One decode step of the batch, `padding` entries at its end; returns the snapshots of `track` (-1: none kept).

        `dead` requests have ended: the step that overlap scheduling launched for them is one too many, and nothing
        of it is looked at (`outputs` keeps what every layer wrote).
        """
        s = self.sizes
        live = [*requests, *dead]
        rows = [request.row for request in live] + [0] * padding
        lens = [request.length + 1 for request in live] + [1] * padding
        slots = self.ints([request.slot for request in live] + [-1] * padding, torch.int32)
        mask = destinations = None
        if track is not None:
            mask = torch.tensor([request in track for request in live] + [False] * padding, device=DEVICE)
            destinations = self.ints([int(track.get(request, -1)) for request in live] + [-1] * padding)
        inputs = self.tokens(len(rows))
        batch = self.batch("DECODE", rows, lens, mamba_track_mask=mask)

        def step() -> list[torch.Tensor]:
            self.ring.plan_decode(batch.req_pool_indices, batch.seq_lens, slots, mask, destinations)
            outputs = [
                self.ring.decode_layer(
                    layer_id,
                    inputs[layer].mixed_qkv,
                    inputs[layer].a,
                    inputs[layer].b,
                    A_log=self.A_log[layer],
                    dt_bias=self.dt_bias[layer],
                    scale=self.scale,
                    slots=slots,
                    rows=batch.req_pool_indices,
                )
                for layer, layer_id in enumerate(s.layer_ids)
            ]
            self.ring.snapshot()
            return outputs

        self.outputs = outputs = self.forward(batch, step)
        for layer, output in enumerate(outputs):
            assert not output[len(live) :].any(), "padding must give zeros"
            for i, request in enumerate(requests):
                token = self.gates(layer, inputs[layer][i : i + 1])
                expected, state, _ = reference.step(request.states[layer][None], token)
                request.states[layer] = state[0]
                error = reference.relative_error(output[i], expected[0])
                assert error <= BOUND, f"row {request.row} at {request.length}: output off by {error:.1e}"
        for request in requests:
            request.length += 1
        snapshots = []
        for request, slot in (track or {}).items():
            if int(slot) >= 0 and request in requests:
                copies = [state.clone() for state in request.states]
                snapshots.append(Snapshot(self.ints([int(slot)]), copies, request.length))
                self.expect_slot(slot, copies, f"snapshot of row {request.row} at {request.length}")
        return snapshots

    def verify(
        self,
        requests: Sequence[Request],
        accepted: Sequence[int],
        track: dict[Request, tuple[torch.Tensor | int, int]] | None = None,
        padding: int = 0,
        dead: Sequence[Request] = (),
        width: int | None = None,
    ) -> list[Snapshot]:
        """One verify step of the batch, of which each request keeps its first `accepted` tokens; all drafts are judged.

        Args:
            track: per request a destination slot (-1: none kept) and the number of its accepted tokens at which a track
                boundary lies; returns those snapshots.
            padding, dead: as in `decode`.
            width: tokens of this step, up to the ring's; None for all.
        """
        s = self.sizes
        width = width or s.width
        live = [*requests, *dead]
        rows = [request.row for request in live] + [0] * padding
        lens = [request.length for request in live] + [1] * padding
        slots = self.ints([request.slot for request in live] + [-1] * padding, torch.int32)
        inputs = self.tokens(len(rows) * width)
        batch = self.batch("TARGET_VERIFY", rows, lens)

        def step() -> list[torch.Tensor]:
            self.ring.plan_verify(batch.req_pool_indices, batch.seq_lens, slots, width)
            return [
                self.ring.verify_layer(
                    layer_id,
                    inputs[layer].mixed_qkv,
                    inputs[layer].a,
                    inputs[layer].b,
                    A_log=self.A_log[layer],
                    dt_bias=self.dt_bias[layer],
                    scale=self.scale,
                    slots=slots,
                    rows=batch.req_pool_indices,
                    width=width,
                )
                for layer, layer_id in enumerate(s.layer_ids)
            ]

        self.outputs = outputs = self.forward(batch, step)
        if track is not None:
            steps = self.ints([track[r][1] - 1 if r in track else -1 for r in live])
            destinations = self.ints([int(track[r][0]) if r in track else -1 for r in live])
            count = len(live)  # SGLang commits the requests of the batch, without its padding
            self.ring.snapshot_verified(
                batch.req_pool_indices[:count], batch.seq_lens[:count], slots[:count], steps, destinations
            )
        snapshots = []
        before = {request: request.length for request in requests}
        for i, (request, count) in enumerate(zip(requests, accepted, strict=True)):
            for layer, output in enumerate(outputs):
                state = request.states[layer][None]
                passed = [state]
                for t in range(width):
                    token = self.gates(layer, inputs[layer][i * width + t : i * width + t + 1])
                    expected, state, _ = reference.step(state, token)
                    passed.append(state)
                    error = reference.relative_error(output[i * width + t], expected[0])
                    assert error <= BOUND, f"row {request.row} at {request.length} + {t}: output off by {error:.1e}"
                request.states[layer] = passed[count][0]
                if track is not None and request in track:
                    slot, at = track[request]
                    if int(slot) >= 0:
                        if layer == 0:
                            snapshots.append(Snapshot(self.ints([int(slot)]), [], before[request] + at))
                        snapshots[-1].states.append(passed[at][0].clone())
            request.length += count
        for output in outputs:
            assert not output[len(live) * width :].any(), "padding must give zeros"
        for snapshot in snapshots:
            self.expect_slot(snapshot.slot, snapshot.states, f"snapshot at {snapshot.length}")
        return snapshots

    def release(self, request: Request, donate: bool = False) -> Snapshot | None:
        """The request leaves its row. `donate`: its slot, folded, stays for the prefix cache (no_buffer)."""
        self.running.remove(request)
        snapshot = None
        if donate:
            self.ring.fold_row(request.row, request.kv.mamba_pool_idx, request.length)
            self.expect_slot(request.slot, request.states, f"row {request.row} at its end")
            snapshot = Snapshot(request.kv.mamba_pool_idx.reshape(1).clone(), request.states, request.length)
            request.kv.mamba_pool_idx = None
        else:
            self.pool.free_mamba_cache(request)
        self.pool.free(request)
        return snapshot

    def leave(self, request: Request) -> Snapshot:
        """The request ends and its slot becomes the cache's (extra_buffer); nothing is launched, a fold is due."""
        self.ring.fold_before_next_forward(request.row, request.kv.mamba_pool_idx, request.length)
        self.running.remove(request)
        snapshot = Snapshot(request.kv.mamba_pool_idx.reshape(1).clone(), request.states, request.length)
        request.kv.mamba_pool_idx = None
        self.pool.free(request)
        return snapshot

    def controller(self, **fields: Any) -> SimpleNamespace:
        """HiCache's controller as far as the plugin's hooks look at it; forwards run on the current stream."""
        usual = {"write_queue": [], "load_queue": [], "write_fence_stream": None, "load_fence_stream": None}
        return SimpleNamespace(**{ATTRIBUTE: self.ring}, **(usual | fields))

    def drop(self, snapshot: Snapshot) -> None:
        """Evict a cached slot."""
        self.pool.mamba_allocator.free(snapshot.slot)

    # -- invariants ---------------------------------------------------------------------------------------------------

    def pending(self, request: Request) -> int:
        """Committed records in the request's row."""
        stands = int(self.ring.ring.checkpoint[request.row])
        assert stands != INERT, "the row was never claimed"
        return 0 if stands == FRESH else request.length - stands

    def check(self, snapshots: Sequence[Snapshot] = ()) -> None:
        """DESIGN invariants 1 and 2: the logical state of every running request, and every slot that left one."""
        ring = self.ring.ring
        assert not int(ring.faults), "a cursor was out of range"
        for request in self.running:
            if not request.started:
                continue
            pending = self.pending(request)
            assert 0 <= pending <= self.sizes.capacity
            for layer, expected in enumerate(request.states):
                slot, row = self.ring.state[layer, request.slot], request.row
                records = [tensor[layer, row, :, :pending] for tensor in (ring.u, ring.k, ring.g)]
                keys = records[1].repeat_interleave(self.sizes.v_heads // self.sizes.k_heads, 0)
                logical = reference.replay(slot, records[0], keys, records[2][..., None])
                error = reference.relative_error(logical, expected)
                assert error <= BOUND, f"row {row} at {request.length}, {pending} pending: state off by {error:.1e}"
        for snapshot in snapshots:
            self.expect_slot(snapshot.slot, snapshot.states, f"cached slot {int(snapshot.slot)} at {snapshot.length}")
