"""SGLang's real prefix cache, pools and requests, with a forward that writes down what a state would hold.

`CacheMachine` admits, prefills, decodes, ends and aborts requests as SGLang's scheduler does. Its "forward" writes a
fingerprint of the tokens passed into a slot, so that a state under a wrong key, an unwritten one and one that somebody
else overwrote are all seen when a request starts from it.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from sglang_replayssm.boundaries import HINTS, BoundaryPolicy
from sglang_replayssm.prefix_states import ATTRIBUTE as STATES
from sglang_replayssm.prefix_states import PrefixStates
from sglang_replayssm.request_ring import ATTRIBUTE as RING
from tests.plugin.launch import DEVICE
from tests.plugin.machine import LAYER_IDS, Sizes, make_pool

CONTEXT = 250


def fingerprint(tokens: Sequence[int]) -> float:
    """A number that stands for the state after these tokens; exact in float32."""
    digest = hashlib.blake2b(array("q", tokens).tobytes(), digest_size=3).digest()
    return float(int.from_bytes(digest, "big") + 1)


class CacheMachine:
    """Pools of a few slots and tokens, and the cache over them.

    Args:
        core: SGLang's tree core, "rust" or "python".
        policy: None is SGLang without boundaries.
    """

    def __init__(
        self, core: str, policy: BoundaryPolicy | None, *, slots: int = 24, tokens: int = 1500, rows: int = 3
    ) -> None:
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        self.pool = make_pool(Sizes(rows=rows, slots=slots, extra_buffer=True))
        self.slots, self.tokens = slots, tokens
        self.allocator = TokenToKVPoolAllocator(tokens, torch.float16, DEVICE, None, False)
        self.cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.pool,
                token_to_kv_pool_allocator=self.allocator,
                page_size=1,
                enable_mamba_extra_buffer=True,
                tree_components=(ComponentType.FULL, ComponentType.MAMBA),
                tree_core_backend=core,
            )
        )
        self.states = None if policy is None else PrefixStates(policy, LAYER_IDS[-1])
        if self.states is not None:
            setattr(self.pool, STATES, self.states)
        setattr(self.pool, RING, SimpleNamespace(fold_before_next_forward=self._fold))
        self.batch: Any = SimpleNamespace(
            model_config=SimpleNamespace(hf_text_config=SimpleNamespace()),
            tree_cache=self.cache,
            req_to_token_pool=self.pool,
            reqs=[],
        )
        self.running: list[Any] = []
        self.count = 0

    # -- states -------------------------------------------------------------------------------------------------------

    def write(self, slot: torch.Tensor, tokens: Sequence[int]) -> None:
        self.pool.mamba_pool.mamba_cache.temporal[:, slot.reshape(-1).long()] = fingerprint(tokens)

    def read(self, slot: torch.Tensor) -> float:
        values = self.pool.mamba_pool.mamba_cache.temporal[:, slot.reshape(-1).long()].unique()
        assert values.numel() == 1
        return float(values)

    def _fold(self, row: int, slot: torch.Tensor, committed: int) -> None:
        (req,) = (req for req in self.running if req.kv.req_pool_idx == row)
        self.write(slot, req.full_untruncated_fill_ids[:committed])

    # -- what a scheduler does ----------------------------------------------------------------------------------------

    def start(self, prompt: Sequence[int], hints: Any = None, chunk: int = CONTEXT) -> Any:
        """Match and prefill one request, with boundaries hinted, in chunks of so many tokens.

        Returns it, its last chunk's result not looked at yet; None where the pools have no room.
        """
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams
        from sglang.srt.sampling.sampling_params import SamplingParams

        if not self.pool.available_size():
            return None
        self.count += 1
        params = SamplingParams(max_new_tokens=8, custom_params=hints and {HINTS: hints})
        req = Req(str(self.count), "", array("q", prompt), params, eos_token_ids=set())
        req.init_next_round_input(self.cache)
        req.lock = self.cache.lock(req.last_node)
        need = len(prompt) + 20 - req.prefix_len
        if self.allocator.available_size() < need:
            self.cache.evict_for_alloc(EvictParams(num_tokens=need - self.allocator.available_size()))
        room = self.pool.mamba_allocator
        if room.available_size() < 4:
            self.cache.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=4 - room.available_size()))
        if self.allocator.available_size() < need or room.available_size() < 4:
            self.cache.unlock(req.lock)
            if req.kv.holds_mamba:
                room.free(req.kv.mamba_pool_idx.reshape(1))
            return None
        if req.kv.mamba_cow_src_index is not None:
            hit = fingerprint(prompt[: req.prefix_len])
            assert self.read(req.kv.mamba_cow_src_index) == hit, f"a wrong state for {req.prefix_len} tokens"
        else:
            assert req.prefix_len == 0
        assert self.pool.alloc([req]) is not None
        row = req.kv.req_pool_idx
        self.pool.req_to_token[row, : req.prefix_len] = self.cache.prefix_device_indices(req).to(torch.int32)
        self.running.append(req)
        for end in [*range(req.prefix_len + chunk, len(prompt), chunk), len(prompt)]:
            if req.extend_end is not None:
                self.checkpoint(req)  # of the chunk before
            self._extend(req, prompt[:end])
        return req

    def _extend(self, req: Any, prompt: Sequence[int]) -> None:
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        fresh = self.allocator.alloc(len(prompt) - req.prefix_len).to(torch.int32)
        self.pool.req_to_token[req.kv.req_pool_idx, req.prefix_len : len(prompt)] = fresh
        req.kv.kv_allocated_len = req.kv.kv_committed_len = req.extend_end = len(prompt)
        self.batch.reqs = [req]
        entry = ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend(self.batch, req)
        self._forward(req, prompt, entry)

    def _forward(self, req: Any, prompt: Sequence[int], entry: Any) -> None:
        for boundary in getattr(req, "replayssm_boundaries", None) or []:
            self.write(boundary.slot, prompt[: boundary.at])
            boundary.written = True
        if entry.track_mask:
            track = req.kv.mamba_ping_pong_track_buffer[entry.track_position]
            self.write(track, prompt[: req.kv.mamba_last_track_seqlen])
        self.write(req.kv.mamba_pool_idx, prompt)
        req.kv.mamba_cow_src_index = None
        req.kv.mamba_needs_clear = False

    def checkpoint(self, req: Any) -> None:
        """The prefill's result arrives: the tree gets its states."""
        self.cache.checkpoint(req, up_to=req.extend_end)
        req.prefix_len = req.extend_end

    def decode(self, req: Any, tokens: Sequence[int]) -> None:
        for token in tokens:
            req.output_ids.append(token)
            at = req.kv.kv_committed_len
            self.pool.req_to_token[req.kv.req_pool_idx, at] = self.allocator.alloc(1).to(torch.int32)
            req.kv.kv_committed_len = req.kv.kv_allocated_len = at + 1

    def end(self, req: Any, abort: bool = False, keep: bool = True) -> None:
        """The request ends, by length, by an abort, or (`keep` False) by a retraction."""
        from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH
        from sglang.srt.mem_cache.common import release_kv_cache

        if keep:
            req.output_ids.append(7)  # the last token is never computed
            req.finished_reason = FINISH_ABORT() if abort else FINISH_LENGTH(8)
        release_kv_cache(req, self.cache, checkpoint=keep)
        self.running.remove(req)

    # -- invariants ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every slot and every KV entry has one owner: free, a running request, or the tree."""
        owners = [self.pool.mamba_allocator.free_slots, self.cache.all_mamba_values_flatten()]
        for req in self.running:
            owners += [req.kv.mamba_pool_idx.reshape(1), req.kv.mamba_ping_pong_track_buffer]
            owners += [boundary.slot for boundary in getattr(req, "replayssm_boundaries", None) or []]
        found = sorted(int(slot) for part in owners for slot in part.reshape(-1).tolist())
        assert found == list(range(1, self.slots + 1)), "a slot leaked, or has two owners"
        kv = [self.allocator.free_pages, self.allocator.release_pages, self.cache.all_values_flatten()]
        for req in self.running:
            own = slice(req.kv.cache_protected_len, req.kv.kv_allocated_len)
            kv.append(self.pool.req_to_token[req.kv.req_pool_idx, own])
        found = sorted(int(entry) for part in kv for entry in part.reshape(-1).tolist())
        assert found == list(range(1, self.tokens + 1)), "KV leaked, or has two owners"


def random_life(machine: CacheMachine, steps: int, seed: int, check_every: int = 50) -> dict[str, int]:
    """`steps` random operations on prompts that share documents; returns what happened how often."""
    rng = random.Random(seed)
    documents = [[rng.randrange(100, 30_000) for _ in range(rng.randrange(20, 110))] for _ in range(8)]
    seen: dict[str, int] = dict.fromkeys(("hit", "boundary", "finish", "abort", "retract", "no room"), 0)
    waiting: list[Any] = []  # prefilled, results not looked at yet
    chats: list[list[int]] = []
    for step in range(steps):
        action = rng.random()
        if action < 0.45:
            prompt = list(rng.choice(chats)) if chats and rng.random() < 0.3 else []
            for _ in range(rng.randrange(1, 3)):
                prompt += rng.choice(documents)
            prompt = prompt[: CONTEXT - 60] + [rng.randrange(100, 30_000) for _ in range(rng.randrange(1, 40))]
            req = machine.start(prompt, chunk=rng.choice([CONTEXT, 70, 33]))
            if req is None:
                seen["no room"] += 1
            else:
                seen["hit"] += req.prefix_len > 0
                seen["boundary"] += len(getattr(req, "replayssm_boundaries", None) or [])
                waiting.append(req)
        elif action < 0.7 and waiting:
            machine.checkpoint(waiting.pop(0))
        elif action < 0.8:
            ready = [req for req in machine.running if req not in waiting]
            if ready and machine.allocator.available_size() > 8:
                machine.decode(rng.choice(ready), [rng.randrange(100, 30_000) for _ in range(rng.randrange(1, 4))])
        elif machine.running:
            req = rng.choice(machine.running)
            if req in waiting:  # its prefill's result was not looked at yet
                waiting.remove(req)
                kind = rng.choice(["finish", "retract", "retract"])  # one output token, or thrown out
            else:
                kind = rng.choice(["finish", "finish", "finish", "abort", "retract"])
            if kind == "finish":
                chats = [*chats[-3:], [*req.origin_input_ids, *req.output_ids]]
            machine.end(req, abort=kind == "abort", keep=kind != "retract")
            seen[kind] += 1
        if step % check_every == 0:
            machine.check()
    for req in list(machine.running):
        machine.end(req, keep=False)
    machine.check()
    return seen
