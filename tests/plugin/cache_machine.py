"""SGLang's real prefix cache, pools, requests and host tier, with the plugin's real ring, and a plain recurrence.

`CacheMachine` admits, prefills, decodes, ends, aborts and retracts requests in the order in which SGLang's scheduler
does, through the plugin's hooks. A forward computes what is asked of the plugin (records, folds, snapshots, states at
boundaries) and takes the rest, prefill kernels and conv windows, from the oracle. Every state that somebody else will
read has a promise: the text that its key names. `check` compares all of them, and the owners of every pool.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from replayssm_kernels.ring import FRESH
from sglang_replayssm import cache_hooks, extend_hooks, hooks
from sglang_replayssm.boundaries import HINTS, BoundaryPolicy
from sglang_replayssm.prefix_states import ATTRIBUTE as STATES
from sglang_replayssm.prefix_states import PrefixStates
from sglang_replayssm.request_ring import ATTRIBUTE as RING
from sglang_replayssm.request_ring import RequestRing
from tests.plugin import launch
from tests.plugin.launch import DEVICE
from tests.plugin.machine import LAYER_IDS, Sizes, make_pool, ring_shape
from tests.plugin.oracle import WINDOW, Oracle
from tests.plugin.twins import replayed

CONTEXT = 250
BOUND = 2e-6  # as tests/plugin/machine.py
HOST = ("--enable-hierarchical-cache", "--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct")


@dataclass(frozen=True)
class Setting:
    """What a machine is launched with.

    Attributes:
        core: SGLang's tree core, "rust" or "python".
        policy: None is SGLang without boundaries.
        no_buffer: the radix strategy of that name, without overlap scheduling.
        mixed: decode rows may ride along with prefills.
        host: HiCache's write policy, None for no host tier.
        chunk: SGLang's grid of states, in tokens; 64 in a server.
    """

    core: str = "python"
    policy: BoundaryPolicy | None = None
    no_buffer: bool = False
    mixed: bool = False
    host: str | None = None
    chunk: int = 64
    capacity: int = 3
    slots: int = 24
    tokens: int = 1500
    rows: int = 3
    direct_batch: int = 0
    host_ratio: float = 2.0


@functools.cache
def _resolved(setting: Setting) -> Any:
    flags = ["--mamba-track-interval", str(setting.chunk)]
    if setting.no_buffer:
        flags += ["--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"]
    if setting.mixed:
        flags += ["--enable-mixed-chunk", "--chunked-prefill-size", "128"]
    if setting.host:
        flags += [*HOST, "--hicache-ratio", str(setting.host_ratio), "--hicache-write-policy", setting.host]
    server_args = launch.parse(launch.FLAG, *flags)
    server_args.resolve_once()
    server_args._mamba_cache_chunk_size = setting.chunk  # SGLang's memo of its grid
    return server_args


@dataclass(frozen=True)
class Work:
    """One row of an extend: tokens [start, end) of a text, for a request that may have ended since."""

    row: int
    text: list[int]
    start: int
    end: int
    req: Any


@dataclass(eq=False)
class Launched:
    """A batch whose forward has run and whose results nobody has looked at."""

    mode: str
    reqs: list[Any]
    riders: list[Any] = field(default_factory=list)
    retractions: list[int] = field(default_factory=list)
    chunks: list[Any] = field(default_factory=list)  # requests of which more is to be prefilled
    mamba_track_mask_cpu: list[bool] | None = None
    mamba_track_mask_next_cpu: list[bool] | None = None
    mamba_track_buffer_indices: list[int] | None = None
    mamba_decode_batch_idx_cpu: list[int] | None = None
    spec_algorithm: Any = field(default_factory=lambda: SimpleNamespace(is_none=lambda: True))
    req_to_token_pool: Any = None

    def alive(self) -> list[tuple[int, Any]]:
        """Requests that still wait for this batch's result: those that ended or left in between do not."""
        reqs = zip([*self.reqs, *self.riders], self.retractions, strict=True)
        return [(i, r) for i, (r, n) in enumerate(reqs) if not r.finished() and r.retraction_count == n]


class CacheMachine:
    """Pools of a few slots and tokens, the cache over them, the ring, and the oracle."""

    def __init__(self, core: str = "python", policy: BoundaryPolicy | None = None, **more: Any) -> None:
        self.setting = s = Setting(core, policy, **more)
        server_args = launch.publish(_resolved(s))
        sizes = Sizes(
            rows=s.rows, slots=s.slots, capacity=s.capacity, extra_buffer=not s.no_buffer, overlap=not s.no_buffer
        )
        self.slots, self.tokens = s.slots, s.tokens
        self.pool = make_pool(sizes)
        shape = ring_shape(sizes, self.pool.req_to_token.shape[0])
        self.ring = RequestRing(shape, self.pool, DEVICE, direct_batch=s.direct_batch)
        setattr(self.pool, RING, self.ring)
        for tensor in (self.ring.ring.u, self.ring.ring.k, self.ring.ring.g, self.ring.state[:, 1:]):
            tensor.fill_(float("nan"))  # what was never written cannot look right
        self.states = None if policy is None else PrefixStates(policy, LAYER_IDS[-1], self.ring.decided)
        if self.states is not None:
            setattr(self.pool, STATES, self.states)
        self.oracle = _oracle()
        self._make_cache(server_args)
        self.batch: Any = SimpleNamespace(
            model_config=SimpleNamespace(hf_text_config=SimpleNamespace(mamba_chunk_size=s.chunk)),
            tree_cache=self.cache,
            req_to_token_pool=self.pool,
            reqs=[],
        )
        self.runner = SimpleNamespace(req_to_token_pool=self.pool, is_draft_worker=False)
        self.backend = SimpleNamespace(
            req_to_token_pool=self.pool,
            kernel_dispatcher=SimpleNamespace(decode_kernel=hooks.BufferedDecode(self.ring)),
            forward_metadata=None,
        )
        self.processor = self._processor()
        self.layers = [SimpleNamespace(layer_id=layer_id) for layer_id in LAYER_IDS]
        self.running: list[Any] = []
        self.count = 0

    def _processor(self) -> Any:
        """SGLang's result processor, as far as the end of a request's decode step takes it."""
        from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor

        others = (
            *("_mamba_can_cache_finished_req", "_maybe_collect_routed_experts", "_maybe_collect_indexer_topk"),
            *("_prepare_kv_cache_release", "_maybe_collect_customized_info"),
        )
        nothing = dict.fromkeys(others, lambda *args: True)
        processor = object.__new__(type("Processor", (SchedulerBatchResultProcessor,), nothing))
        for name, value in (("tree_cache", self.cache), ("draft_worker", None)):
            object.__setattr__(processor, name, value)
        return processor

    def _make_cache(self, server_args: Any) -> None:
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.hicache_storage import PoolName
        from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        s = self.setting
        kv = None
        if s.host:
            kv = HybridLinearKVPool(
                size=s.tokens,
                dtype=torch.float16,
                page_size=1,
                head_num=1,
                head_dim=16,
                full_attention_layer_ids=[0],
                device=DEVICE,
                mamba_pool=self.pool.mamba_pool,
            )
        self.allocator = TokenToKVPoolAllocator(s.tokens, torch.float16, DEVICE, kv, False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator,
            page_size=1,
            enable_mamba_extra_buffer=not s.no_buffer,
            tree_components=(ComponentType.FULL, ComponentType.MAMBA),
            tree_core_backend=s.core,
        )
        self.cache = UnifiedRadixCache(params)
        cache = self.ring.state
        self.promised: dict[int, list[int]] = {}  # slot of the tree -> its text
        self._want = np.full((cache.shape[1], *cache.shape[:1], *cache.shape[3:]), np.nan)
        self._want_windows = np.full((cache.shape[1], cache.shape[0], *self.ring.conv.shape[2:]), np.nan)
        insert = self.cache.insert

        def inserted(insert_params: Any) -> Any:
            result = insert(insert_params)
            if insert_params.mamba_value is not None and not result.mamba_exist:
                self.promise(
                    int(insert_params.mamba_value), list(insert_params.key.token_ids)[: len(insert_params.key)]
                )
            return result

        self.cache.insert = inserted
        self.host_pool = None
        if s.host:
            self.cache.init_hicache(server_args, params)
            self.host_pool = self.cache.host_pool_group.get_pool(PoolName.MAMBA)
            self.host_promised: dict[int, list[int]] = {}
            self._watch_copies(self.cache.cache_controller, PoolName.MAMBA)

    def _watch_copies(self, controller: Any, name: Any) -> None:
        """Promises go along with the copies; a copy is compared when it is made."""
        start_writing, start_loading = controller.start_writing, controller.start_loading

        def copies(queue: list[Any]) -> list[tuple[int, int]]:
            transfers = [t for op in queue for t in op.pool_transfers or () if t.name == name]
            pairs = [zip(t.device_indices.tolist(), t.host_indices.tolist(), strict=True) for t in transfers]
            return [pair for part in pairs for pair in part]

        def writing() -> Any:
            pairs = copies(controller.write_queue)
            result = start_writing()
            for slot, host in pairs:
                self.host_promised[host] = self.promised[slot]
                self._expect(self.host_pool.temporal_buffer[host, :, 0, 0].numpy(), self.promised[slot], "on the host")
            return result

        def loading() -> Any:
            pairs = copies(controller.load_queue)
            result = start_loading()
            for slot, host in pairs:
                self.promise(slot, self.host_promised[host])
            return result

        controller.start_writing, controller.start_loading = writing, loading

    # -- states -------------------------------------------------------------------------------------------------------

    def read(self, slot: torch.Tensor) -> list[float]:
        """The first layer's state in a slot, to tell two states apart."""
        return self.ring.state[0, int(slot)].flatten().tolist()

    def promise(self, slot: int, text: list[int]) -> None:
        """From now on the slot must hold the state after this text."""
        self.promised[slot] = text
        self._want[slot], self._want_windows[slot] = self.oracle.state(text), self.oracle.window(text)

    def _expect(self, found: np.ndarray, text: Sequence[int], what: str, layers: slice = slice(None)) -> None:
        wanted = self.oracle.state(text)[layers]
        error = np.linalg.norm(found - wanted, axis=(1, 2)) / np.linalg.norm(wanted, axis=(1, 2)).clip(1e-30)
        assert error.max() <= BOUND, f"the state after {len(text)} tokens is off by {error.max():.1e}: {what}"

    def _expect_slot(self, slot: int, text: Sequence[int], what: str, layers: slice = slice(None)) -> None:
        self._expect(self.ring.state[layers, slot, 0].cpu().numpy(), text, what, layers)
        window = self.ring.conv[layers, slot].cpu().numpy()
        assert np.array_equal(window, self.oracle.window(text)[layers]), f"conv window after {len(text)} tokens: {what}"

    # -- what a scheduler does: admission -----------------------------------------------------------------------------

    def request(self, prompt: Sequence[int], hints: Any = None, out: int = 8) -> Any:
        """A request that waits."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        self.count += 1
        params = SamplingParams(max_new_tokens=out, custom_params=hints and {HINTS: hints})
        return Req(str(self.count), "", array("q", prompt), params, eos_token_ids=set())

    def match(self, req: Any) -> bool:
        """What the cache has of a request, locked, and queued for loading where the host has it.

        False where there is no room for loading: SGLang asks before it loads, as it cannot do without the state then.
        """
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

        cache = self.cache
        if self.host_pool is not None:  # before: between match and load nothing may be evicted, on the host neither
            self.make_room(len(req.origin_input_ids) + len(req.output_ids) + 20, 6)
        req.init_next_round_input(cache)
        req.text = list(req.full_untruncated_fill_ids)
        req.lock = cache.lock(req.last_node)
        if req.host_hit_length or req.mamba_host_hit_length:
            need = len(req.text) + 20 - req.prefix_len
            if self.allocator.available_size() < need or self.pool.mamba_allocator.available_size() < 6:
                return False
            loaded, node = cache.init_load_back(
                InitLoadBackParams(best_match_node=req.best_match_node, host_hit_length=req.host_hit_length, req=req)
            )
            cache.unlock(req.lock)
            req.last_node = node
            req.lock = cache.lock(node)
            req.prefix_len += loaded
            req.kv.cache_protected_len = req.prefix_len
        return True

    def admit(self, req: Any, reserved: int = 0) -> bool:
        """Match and give a row and slots; False where the pools have no room beside `reserved` tokens."""
        if not self.pool.available_size():
            return False
        if not self.match(req):
            self._give_up(req)
            return False
        need = reserved + len(req.text) + 20 - req.prefix_len
        self.make_room(need, 4)
        if self.allocator.available_size() < need or self.pool.mamba_allocator.available_size() < 4:
            self._give_up(req)
            return False
        if req.kv.mamba_cow_src_index is None and not req.kv.holds_mamba:
            assert req.prefix_len == 0
        assert self.pool.alloc([req]) is not None
        row = req.kv.req_pool_idx
        self.pool.req_to_token[row, : req.prefix_len] = self.cache.prefix_device_indices(req).to(torch.int32)
        self.running.append(req)
        req.prefilled = False
        return True

    def give_up(self, req: Any) -> None:
        """A request that is matched and then waits again."""
        self.match(req)
        self._give_up(req)

    def make_room(self, tokens: int, slots: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        lacking = slots - self.pool.mamba_allocator.available_size()
        if self.allocator.available_size() < tokens:
            self.cache.evict_for_alloc(EvictParams(num_tokens=tokens - self.allocator.available_size()))
        if lacking > 0:
            self.cache.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=lacking))

    def _give_up(self, req: Any) -> None:
        from sglang.srt.mem_cache.common import release_kv_cache

        if self.host_pool is not None:
            self.cache.ready_to_load_host_cache()
        self.cache.unlock(req.lock)
        req.lock = None
        if req.kv.holds_mamba:
            release_kv_cache(req, self.cache, checkpoint=False)
        req.kv.mamba_cow_src_index = None

    def copying(self) -> bool:
        """Whether copies to or from the host have not been heard of yet."""
        return self.host_pool is not None and bool(self.cache.ongoing_write_through or self.cache.ongoing_load_back)

    # -- prefill ------------------------------------------------------------------------------------------------------

    def launch_extend(
        self, ends: dict[Any, int], riders: Sequence[Any] = (), meanwhile: Callable[[], None] = lambda: None
    ) -> Launched:
        """Prefill some requests up to a token count each; `riders` decode one token along (mixed chunk).

        `meanwhile` happens between preparing the batch and launching it: of two mixed steps in a row SGLang looks at
        the first's results there, so that a rider may have ended when its step runs.
        """
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        entries = {}
        for req, end in ends.items():
            fresh = self.allocator.alloc(end - req.prefix_len)
            self.pool.req_to_token[req.kv.req_pool_idx, req.prefix_len : end] = fresh.to(torch.int32)
            req.kv.kv_allocated_len = req.kv.kv_committed_len = req.extend_end = end
            self.batch.reqs = list(ends)
            if not self.setting.no_buffer:
                entries[req] = ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend(self.batch, req)
        self._commit(riders)
        work = [Work(req.kv.req_pool_idx, req.text, req.prefix_len, req.extend_end, req) for req in ends]
        for req in riders:
            end = req.kv.kv_committed_len
            work.append(Work(req.kv.req_pool_idx, req.text, end - 1, end, req))
        launched = self._launched("MIXED" if riders else "EXTEND", list(ends), list(riders))
        meanwhile()
        self._extend(work, entries)
        for req in ends:
            req.is_retracted = False
            req.prefilled = req.extend_end == len(req.text)
        launched.chunks = [req for req in ends if not req.prefilled]
        for req in (*filter(lambda req: req.prefilled, ends), *riders):
            if not req.finished():
                self._sample(req)
        return launched

    def _launched(self, mode: str, reqs: list[Any], riders: list[Any]) -> Launched:
        return Launched(mode, reqs, riders, [req.retraction_count for req in [*reqs, *riders]])

    def _commit(self, reqs: Sequence[Any]) -> None:
        """SGLang prepares a decode step: KV for the token that the step before has sampled."""
        for req in reqs:
            at = req.kv.kv_committed_len
            self.pool.req_to_token[req.kv.req_pool_idx, at] = self.allocator.alloc(1).to(torch.int32)
            req.kv.kv_committed_len = req.kv.kv_allocated_len = at + 1
            req.decode_batch_idx += 1

    def _sample(self, req: Any) -> None:
        """The token after a text is always the same, on the device; the host learns of it with the result."""
        if len(req.text) == req.kv.kv_committed_len:
            req.text.append(100 + hash(tuple(req.text[-4:])) % 300)

    def _extend(self, work: list[Work], entries: dict[Any, Any]) -> None:
        rows = torch.tensor([part.row for part in work])
        starts, ends = [part.start for part in work], [part.end for part in work]
        track = [entries.get(part.req) for part in work]
        positions = [entry.track_position if entry and entry.track_mask else 0 for entry in track]
        mapping = getattr(self.pool, "req_index_to_mamba_ping_pong_track_buffer_mapping", None)
        fields = dict(
            forward_mode="EXTEND",
            extend_prefix_lens=torch.tensor(starts),
            extend_prefix_lens_cpu=starts,
            extend_seq_lens=torch.tensor([end - start for start, end in zip(starts, ends, strict=True)]),
            extend_seq_lens_cpu=[end - start for start, end in zip(starts, ends, strict=True)],
            extend_start_loc=torch.tensor([0] * len(work)),
            extend_num_tokens=sum(ends) - sum(starts),
            mamba_prefill_track_mask_cpu=[bool(entry and entry.track_mask) for entry in track],
            mamba_track_seqlens_cpu=[entry.track_seqlen if entry else -1 for entry in track],
        )
        fields["mamba_track_seqlens"] = torch.tensor(fields["mamba_track_seqlens_cpu"])
        fields["mamba_track_mask"] = torch.tensor(fields["mamba_prefill_track_mask_cpu"])
        if mapping is not None:
            fields["mamba_track_indices"] = mapping[rows, torch.tensor(positions)].long()
        batch = self._forward_batch("EXTEND", rows, ends, **fields)
        self._work = {part.row: part for part in work}
        tokens = [token for part in work for token in part.text[part.start : part.end]]
        reqs = [part.req for part in work if not part.req.finished()]
        if self.host_pool is not None:
            self.cache.ready_to_load_host_cache()
        copies = [(r.kv.mamba_cow_src_index, r.kv.mamba_pool_idx.reshape(1), r.kv.mamba_needs_clear) for r in reqs]
        for req in reqs:
            req.kv.mamba_cow_src_index, req.kv.mamba_needs_clear = None, False

        def body() -> None:
            for source, slot, clear in copies:  # SGLang's deferred copy on write and clear
                if source is not None:
                    self.pool.copy_mamba_state(source.long(), slot.long())
                elif clear:
                    self.pool.mamba_pool.clear_slots(slot)
            hooks.init_metadata(self._init_metadata, self.backend, batch)
            for index, layer in enumerate(self.layers):
                hooks.forward_extend(self._prefill, self.backend, layer, batch, *self.oracle.inputs(tokens, index))

        hooks.model_forward(lambda runner, forward_batch: body(), self.runner, batch)

    def _init_metadata(self, backend: Any, batch: Any) -> None:
        slots = self.pool.get_mamba_indices(batch.req_pool_indices)
        if batch.forward_mode.is_decode():
            slots = torch.where(batch.req_pool_indices == 0, -1, slots)
        backend.forward_metadata = SimpleNamespace(
            mamba_cache_indices=slots,
            mamba_track_indices=getattr(batch, "mamba_track_indices", None),
            has_mamba_track_mask=any(getattr(batch, "mamba_prefill_track_mask_cpu", None) or ()),
        )

    def _prefill(self, backend: Any, layer: Any, batch: Any, mixed_qkv: torch.Tensor, *gates: Any) -> torch.Tensor:
        """One layer's extend: from what stands in each slot, which must be the text before it."""
        index = self.ring.layer_index[layer.layer_id]
        metadata = backend.forward_metadata
        slots = metadata.mamba_cache_indices.tolist()
        work = [self._work[row] for row in batch.req_pool_indices.tolist()]
        starts = batch.extend_prefix_lens_cpu
        ends = [start + length for start, length in zip(starts, batch.extend_seq_lens_cpu, strict=True)]
        for i, part in enumerate(work):
            if not part.req.finished():
                what = f"row {part.row} before its extend at {starts[i]}"
                self._expect_before(index, slots[i], part.text[: starts[i]], what)
        extend_hooks.chunk_states(
            lambda *args, **kwargs: None,
            None,
            lambda place, at: self.oracle.state(work[place].text[: starts[place] + at])[index][None],
            None,
            initial_state=self.ring.state[index],
            initial_state_indices=metadata.mamba_cache_indices,
        )
        for i, part in enumerate(work):
            self._set(index, slots[i], part.text[: ends[i]])
            if metadata.has_mamba_track_mask and batch.mamba_prefill_track_mask_cpu[i]:
                chunk = self.setting.chunk
                tracked = starts[i] + (batch.mamba_track_seqlens_cpu[i] - starts[i]) // chunk * chunk
                self._set(index, int(batch.mamba_track_indices[i]), part.text[:tracked])
        return mixed_qkv.new_zeros(1, len(mixed_qkv), 1, 16)

    def _expect_before(self, layer: int, slot: int, text: Sequence[int], what: str) -> None:
        if text:
            self._expect_slot(slot, text, what, slice(layer, layer + 1))
        else:
            assert not self.ring.state[layer, slot].any() and not self.ring.conv[layer, slot].any(), (
                f"not empty: {what}"
            )

    def _set(self, layer: int, slot: int, text: Sequence[int]) -> None:
        self.ring.state[layer, slot, 0] = torch.from_numpy(self.oracle.state(text)[layer])
        self.ring.conv[layer, slot] = torch.from_numpy(self.oracle.window(text)[layer])

    def _forward_batch(self, mode: str, rows: torch.Tensor, lens: Sequence[int], **fields: Any) -> Any:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        usual = dict(
            batch_size=len(rows),
            req_pool_indices=rows,
            req_pool_indices_cpu=rows,
            seq_lens=torch.tensor(list(lens)),
            seq_lens_cpu=torch.tensor(list(lens)),
            mamba_track_mask=None,
        )
        modes = dict(forward_mode=ForwardMode[mode], logical_forward_mode=ForwardMode[mode])
        return SimpleNamespace(**(usual | fields | modes))

    # -- decode -------------------------------------------------------------------------------------------------------

    def launch_decode(self, reqs: Sequence[Any], padding: int = 0) -> Launched:
        """One decode step of some requests; what the device computes is compared at once."""
        from sglang.srt.runtime_context import mamba_track_grid

        launched = self._launched("DECODE", list(reqs), [])
        self._commit(reqs)
        lens = [req.kv.kv_committed_len for req in reqs]
        rows = torch.tensor([req.kv.req_pool_idx for req in reqs] + [0] * padding)
        fields: dict[str, Any] = {}
        if not self.setting.no_buffer:
            grid = mamba_track_grid(1)
            mask = [n % grid == 0 for n in lens]
            launched.mamba_track_mask_cpu = mask
            launched.mamba_track_mask_next_cpu = [n % grid == grid - 1 for n in lens]
            launched.mamba_track_buffer_indices = [req.kv.mamba_next_track_idx for req in reqs]
            launched.mamba_decode_batch_idx_cpu = [req.decode_batch_idx for req in reqs]
            tracks = [int(req.kv.mamba_ping_pong_track_buffer[req.kv.mamba_next_track_idx]) for req in reqs]
            fields["mamba_track_mask"] = torch.tensor(mask + [False] * padding)
            fields["mamba_track_indices"] = torch.tensor(tracks + [-1] * padding)
        batch = self._forward_batch("DECODE", rows, lens + [1] * padding, **fields)
        texts = [req.text[: req.kv.kv_committed_len] for req in reqs]
        hooks.model_forward(lambda runner, forward_batch: self._decode(batch, texts), self.runner, batch)
        for req in reqs:
            self._sample(req)
        return launched

    def _decode(self, batch: Any, texts: list[list[int]]) -> None:
        hooks.init_metadata(self._init_metadata, self.backend, batch)
        slots = self.backend.forward_metadata.mamba_cache_indices
        tokens = [text[-1] for text in texts] + [0] * (batch.batch_size - len(texts))
        expected = [self.oracle.output(text) for text in texts]
        for index, layer in enumerate(self.layers):
            inputs = self.oracle.inputs(tokens, index)
            for i in range(len(texts)):  # SGLang's conv kernel moves the window by one token
                window = self.ring.conv[index, int(slots[i])]
                window.copy_(torch.cat([window[:, 1:], inputs[0][i][:, None]], 1))
            out = hooks.forward_decode(self._decode_layer, self.backend, layer, batch, index, *inputs)
            hooks.track_decode(
                self._never, self.backend, batch, self.ring.conv[index], self.ring.state[index], slots, layer.layer_id
            )
            assert not out[0, len(texts) :].any(), "padding must give zeros"
            for i, wanted in enumerate(expected):
                found = out[0, i, 0].double().numpy()
                error = np.linalg.norm(found - wanted[index]) / np.linalg.norm(wanted[index]).clip(1e-30)
                assert error <= 4 * BOUND, f"row {int(batch.req_pool_indices[i])}: output off by {error:.1e}"

    def _decode_layer(self, backend: Any, layer: Any, batch: Any, index: int, *inputs: torch.Tensor) -> torch.Tensor:
        return backend.kernel_dispatcher.decode_kernel.packed_decode(
            *inputs,
            A_log=self.oracle.A_log[index],
            dt_bias=self.oracle.dt_bias[index],
            scale=self.oracle.scale,
            ssm_states=self.ring.state[index],
            cache_indices=backend.forward_metadata.mamba_cache_indices,
            num_v_heads=1,
            head_v_dim=16,
        )

    @staticmethod
    def _never(*args: Any) -> None:
        raise AssertionError("SGLang's own tracking of decode states must not run")

    def idle(self) -> None:
        """A forward without requests."""
        batch = self._forward_batch("IDLE", torch.zeros(0, dtype=torch.int64), [])
        hooks.model_forward(lambda runner, forward_batch: None, self.runner, batch)

    # -- results ------------------------------------------------------------------------------------------------------

    def next_batch(self, launched: Launched) -> None:
        """SGLang's loop comes round: what was launched last is in flight, and the next batch is to be made."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        batch = SimpleNamespace(
            forward_mode=ForwardMode[launched.mode],
            reqs=[*launched.reqs, *launched.riders],
        )
        scheduler = SimpleNamespace(
            req_to_token_pool=self.pool, tree_cache=self.cache, enable_overlap=not self.setting.no_buffer
        )
        cache_hooks.next_batch(lambda *args, **kwargs: None, scheduler, None, batch)

    def result(self, launched: Launched) -> None:
        """The results of a batch arrive: tokens, ends, what the tree gets."""
        from sglang.srt.mem_cache.common import checkpoint_kv_cache

        for i, req in launched.alive():
            prefill = i < len(launched.reqs) and launched.mode != "DECODE"
            if req in launched.chunks:
                continue  # its tokens go to the tree before the next chunk is launched
            req.output_ids.append(req.text[len(req.origin_input_ids) + len(req.output_ids)])
            if req.to_finish is not None or len(req.output_ids) >= req.sampling_params.max_new_tokens:
                self._mark(req)
            if launched.mode == "DECODE":
                self._decoded(req, launched, i)
            elif req.finished():
                self._release(req)
            elif prefill:
                checkpoint_kv_cache(req, self.cache)

    @staticmethod
    def _mark(req: Any) -> None:
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH

        req.finished_reason = req.to_finish or FINISH_LENGTH(len(req.output_ids))
        req.finished_len = max(1, len(req.output_ids) - getattr(req, "cut", 0))  # a stop may cut what was committed

    def _decoded(self, req: Any, launched: Launched, i: int) -> None:
        """SGLang's own end of a decode step: track slots change places, and what has finished is released."""
        launched.req_to_token_pool = self.pool
        self.processor._handle_finish_state_updated_req(req, launched, None, i, None)
        if req.finished():
            self.running.remove(req)

    def _release(self, req: Any) -> None:
        from sglang.srt.mem_cache.common import release_kv_cache

        release_kv_cache(req, self.cache, checkpoint=True)
        self.running.remove(req)

    def retract(self, req: Any) -> None:
        """Thrown out, whatever of it is in flight; it may be admitted again."""
        from sglang.srt.mem_cache.common import release_kv_cache

        release_kv_cache(req, self.cache, checkpoint=False)
        self.running.remove(req)
        req.reset_for_retract()

    def next_chunk(self, req: Any) -> None:
        """Before a chunked prefill goes on: the tree gets what the last chunk computed."""
        from sglang.srt.mem_cache.common import checkpoint_kv_cache

        checkpoint_kv_cache(req, self.cache)

    def flush(self) -> None:
        """`/flush_cache` of an idle server."""
        assert not self.running
        self.cache.reset()
        self.pool.clear()
        self.allocator.clear()

    def shuffle(self, random: Random) -> None:
        """Free rows and slots come in any order: what was freed last may be handed out first."""
        random.shuffle(self.pool.free_slots)
        slots = self.pool.mamba_allocator.free_slots
        self.pool.mamba_allocator.free_slots = slots[torch.tensor(random.sample(range(len(slots)), len(slots))).long()]

    def evict_everything(self) -> None:
        """From device and host, where nothing runs and nothing is on its way; every pool must be empty then."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        self.cache.evict_for_alloc(EvictParams(num_tokens=self.tokens, mamba_num=self.slots))
        free = [self.pool.mamba_allocator.available_size(), self.allocator.available_size()]
        assert free == [self.slots, self.tokens], f"{free} slots and tokens are free on the device"
        if self.host_pool is not None:
            for kind in (ComponentType.MAMBA, ComponentType.FULL):
                self.cache.evict_host(1 << 20, kind)
            for entry in self.cache.host_pool_group.entries:
                pool = entry.host_pool
                assert pool.available_size() == pool.size, f"{pool.size - pool.available_size()} leaked on the host"

    # -- in one go, for tests that say what happens -------------------------------------------------------------------

    def start(self, prompt: Sequence[int], hints: Any = None, chunk: int = CONTEXT) -> Any:
        """Match and prefill one request, with boundaries hinted, in chunks of so many tokens.

        Returns it, its last chunk's result not looked at yet; None where the pools have no room.
        """
        req = self.request(prompt, hints)
        if not self.admit(req):
            return None
        req.hit = req.prefix_len
        for end in [*range(req.prefix_len + chunk, len(prompt), chunk), len(prompt)]:
            if req.extend_end is not None:
                self.next_chunk(req)
            self.launch_extend({req: end})
        return req

    def checkpoint(self, req: Any) -> None:
        """The prefill's result arrives: the tree gets its states."""
        self.next_chunk(req)

    def decode(self, req: Any, tokens: Sequence[int]) -> None:
        """The results of the step before arrive with these tokens, one by one, and each is decoded."""
        for token in tokens:
            req.output_ids.append(token)
            req.text[req.kv.kv_committed_len :] = [token]
            self._decoded(req, self.launch_decode([req]), 0)

    def end(self, req: Any, abort: bool = False, keep: bool = True) -> None:
        """The request ends, by length, by an abort, or (`keep` False) by a retraction."""
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        if not keep:
            self.retract(req)
            return
        req.output_ids.append(7)  # the last token is never computed
        req.to_finish = FINISH_ABORT() if abort else None
        self._mark(req)
        self._release(req)

    # -- invariants ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every row, slot and KV entry has one owner; every state is that of its text."""
        self._check_owners()
        assert not int(self.ring.ring.faults), "a cursor was out of range"
        for req in self.running:
            self._check_running(req)
        self._check_tree()

    def _check_owners(self) -> None:
        rows = [*self.pool.free_slots, *(req.kv.req_pool_idx for req in self.running)]
        assert sorted(map(int, rows)) == list(range(1, self.setting.rows + 1)), "a row leaked, or has two owners"
        owners = [self.pool.mamba_allocator.free_slots, self.cache.all_mamba_values_flatten()]
        for req in self.running:
            owners.append(req.kv.mamba_pool_idx.reshape(1))
            if not self.setting.no_buffer:
                owners.append(req.kv.mamba_ping_pong_track_buffer)
            owners += [boundary.slot for boundary in getattr(req, "replayssm_boundaries", None) or []]
        found = sorted(int(slot) for part in owners for slot in part.reshape(-1).tolist())
        assert found == list(range(1, self.slots + 1)), "a slot leaked, or has two owners"
        kv = [self.allocator.free_pages, self.allocator.release_pages, self.cache.all_values_flatten()]
        for req in self.running:
            own = slice(req.kv.cache_protected_len, req.kv.kv_allocated_len)
            kv.append(self.pool.req_to_token[req.kv.req_pool_idx, own])
        found = sorted(int(entry) for part in kv for entry in part.reshape(-1).tolist())
        assert found == list(range(1, self.tokens + 1)), "KV leaked, or has two owners"

    def _check_running(self, req: Any) -> None:
        """The logical state of a request whose forwards have run: checkpoint and records."""
        if req.extend_end is None:
            return
        row, slot, length = req.kv.req_pool_idx, int(req.kv.mamba_pool_idx), req.kv.kv_committed_len
        stands = int(self.ring.ring.checkpoint[row])
        pending = 0 if stands == FRESH else length - stands
        assert 0 <= pending <= self.setting.capacity, f"row {row}: {pending} pending at {length}"
        if DEVICE == "cpu":
            found = replayed(self.ring.state[:, slot].numpy(), self.ring.ring, row, pending)[:, 0]
            self._expect(found, req.text[:length], f"row {row} with {pending} pending")
        tracked = req.kv.mamba_last_track_seqlen
        if tracked is not None:
            keep = req.kv.mamba_ping_pong_track_buffer[self.pool.get_mamba_ping_pong_keep_idx(req)]
            self._expect_slot(int(keep), req.text[:tracked], f"the track slot of row {row}")

    def _check_tree(self) -> None:
        """States that others will read, but for those that a queued fold or load has yet to write."""
        due = {int(slot) for _, slot, _ in self.ring._leaving}
        if self.host_pool is not None:
            for op in self.cache.cache_controller.load_queue:
                due |= {int(slot) for t in op.pool_transfers or () for slot in t.device_indices}
        slots = [slot for slot in self.cache.all_mamba_values_flatten().tolist() if slot not in due]
        if not slots:
            return
        found, wanted = self.ring.state[:, slots, 0].cpu().numpy().swapaxes(0, 1), self._want[slots]
        error = np.linalg.norm(found - wanted, axis=(2, 3)) / np.linalg.norm(wanted, axis=(2, 3)).clip(1e-30)
        if not error.max() <= BOUND:
            worst = slots[int(np.nan_to_num(error, nan=np.inf).max(1).argmax())]
            raise AssertionError(f"cached slot {worst}: not the state after its {len(self.promised[worst])} tokens")
        windows = self.ring.conv[:, slots].cpu().numpy().swapaxes(0, 1)
        assert np.array_equal(windows, self._want_windows[slots]), "a cached conv window is not that of its key"


@functools.cache
def _oracle() -> Oracle:
    assert WINDOW == 3, "make_pool's conv kernel has 4 taps"
    return Oracle(Sizes())
