"""States at block boundaries for SGLang's prefix cache: chosen before a prefill, written by it, inserted after it.

Who owns a boundary's slot, from left to right:

    chosen            written by the forward      inserted                     afterwards
    this class        (extend_hooks.py)           SGLang's tree, as a node     SGLang's tree: evictable, unlocked
    allocated here                                of its own; or freed, where  the request holds the node at its end
                                                  the tree has one already

A boundary that is not inserted (the request was aborted or retracted, or the forward did not write it) is freed when
the request gives up its own slot. Inserting goes through SGLang's own `checkpoint_into_tree`, shorter keys first, so
that duplicate KV, locks and the request's row are handled as for any other insert.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang_replayssm import arguments, extend_hooks
from sglang_replayssm.boundaries import BoundaryPolicy, StateLedger, TextHistory, parse_hints
from sglang_replayssm.extend_hooks import Leaving, Point

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_replayssm.request_ring import RequestRing

logger = logging.getLogger(__name__)

ATTRIBUTE = "replayssm_states"  # where the request pool carries its PrefixStates
_ON_REQUEST = "replayssm_boundaries"  # where a request carries its boundaries
_GIVE_UP_AFTER = 64  # boundaries in a row that no forward has written
_TEXT = "replayssm_text"  # where a request carries its length, cached tokens, branch and joints


def states_of(pool: Any) -> PrefixStates | None:
    """The PrefixStates of a request pool, or None where boundaries are off."""
    return getattr(pool, ATTRIBUTE, None)


@dataclass
class Boundary:
    """A state that a request's prefill leaves: at which token count, why, in which slot ([1], device)."""

    at: int
    kind: str
    slot: torch.Tensor
    written: bool = False


class PrefixStates:
    """Boundaries of one request pool's prefills, and which states the cache should spare.

    Args:
        policy: what to keep.
        last_layer_id: the linear layer that runs last in a forward.
        decided: told what was chosen, see `RequestRing.decided`.
    """

    def __init__(
        self, policy: BoundaryPolicy, last_layer_id: int, decided: Callable[..., None] = lambda *_: None
    ) -> None:
        self._decided = decided
        self.policy = policy
        self.ledger = StateLedger(policy)
        self.history = TextHistory()
        self._last_layer_id = last_layer_id
        logger.info("ReplaySSM: states at boundaries on, %s.", policy)
        self._by_row: dict[int, list[Boundary]] = {}  # of the extends that come next
        self._open: set[int] = set()  # rows whose last extend is not in the tree yet
        self._inserting: Boundary | None = None
        self._donating = False
        self._unwritten = 0  # boundaries in a row
        self._recent: deque[list[torch.Tensor]] = deque(maxlen=4)
        self._warned: set[str] = set()

    @property
    def asks(self) -> bool:
        """Whether prefills are still asked for states: not once too many in a row were not written."""
        return self._unwritten < _GIVE_UP_AFTER

    @property
    def inserting(self) -> bool:
        """Whether the insert that is running is a boundary's."""
        return self._inserting is not None

    # -- before a prefill: choose -------------------------------------------------------------------------------------

    def prepare_extend(self, batch: Any, req: Any, original: Any) -> Any:
        """Around `ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend`: SGLang's tracked state, and ours.

        SGLang tracks one state per extend, at its end or at a branch on the 64-token grid. Branches are ours, exact
        and on any grid, so it is left with the end.
        """
        self.drop(req, batch.tree_cache)
        self._open.add(req.kv.req_pool_idx)
        if not self._eligible(req):
            return original(batch, req)
        req.mamba_branching_seqlen = None
        entry = original(batch, req)
        tracked = req.kv.mamba_last_track_seqlen if entry.track_mask else None
        chosen = [(at, kind) for at, kind in self._choose(req, batch.tree_cache) if at != tracked]
        boundaries = self._allocate(chosen, batch)
        if boundaries:
            self._decided("leave", [(each.at, each.kind) for each in boundaries])
            setattr(req, _ON_REQUEST, boundaries)
            self._by_row[req.kv.req_pool_idx] = boundaries
        return entry

    @staticmethod
    def _eligible(req: Any) -> bool:
        """Whether token ids alone say what the request's prompt is."""
        return (
            not req.skip_radix_cache_insert
            and req.multimodal_inputs is None
            and req.input_embeds is None
            and req.positional_embed_overrides is None
        )

    def _choose(self, req: Any, cache: Any) -> list[tuple[int, str]]:
        if not self.asks:
            return []
        ids = req.full_untruncated_fill_ids
        text = getattr(req, _TEXT, None)
        if text is None or text[0] != len(ids):
            salt = (req.extra_key, req.cache_salt)
            text = (len(ids), req.prefix_len, *self.history.read(ids, salt, req.prefix_len))
            setattr(req, _TEXT, text)
        _, cached, branch, joints = text
        hints, problem = parse_hints(getattr(req.sampling_params, "custom_params", None))
        if problem is not None and problem not in self._warned and len(self._warned) < 16:
            self._warned.add(problem)
            logger.warning("ReplaySSM: request %s: %s", req.rid, problem)
        return self.policy.choose(
            req.prefix_len,
            req.extend_end,
            len(ids),
            branch=branch,
            joints=joints,
            hints=hints,
            page_size=cache.page_size,
            cached=cached,
        )

    def _allocate(self, chosen: list[tuple[int, str]], batch: Any) -> list[Boundary]:
        """Slots for the boundaries that may have one now.

        What requests still need for themselves stays: two slots for each whose prefill is not in the tree yet, which
        SGLang's own hand-over to the tree passes through.
        """
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        if not chosen:
            return []
        cache, allocator = batch.tree_cache, batch.req_to_token_pool.mamba_allocator
        reserve = 2 * (len(self._open) + len(batch.reqs))
        boundaries: list[Boundary] = []
        for at, kind in chosen:
            free, evictable = allocator.available_size(), cache.mamba_evictable_size()
            if free + evictable <= reserve:
                break
            if kind != "branch":
                if not self.ledger.worth(kind, allocator.size, free):
                    continue
                if not self.ledger.allowance(allocator.size, free, evictable):
                    continue
            if not free:
                cache.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=1))
            slot = allocator.alloc(1)
            if slot is None:
                break
            boundaries.append(Boundary(at, kind, slot))
        return boundaries

    # -- the forward: write -------------------------------------------------------------------------------------------

    def leaving_of(self, metadata: Any, batch: ForwardBatch) -> Leaving | None:
        """What this forward's extends leave, or None where nothing. After the backend's own metadata is made."""
        if not self._by_row or batch.req_pool_indices_cpu is None or not extend_hooks.can_leave(batch):
            return None
        from sglang.srt.runtime_context import mamba_cache_chunk_size

        points: dict[int, list[Point]] = {}
        taken: list[Boundary] = []
        for number, row in enumerate(batch.req_pool_indices_cpu.tolist()):
            start, length = int(batch.extend_prefix_lens_cpu[number]), int(batch.extend_seq_lens_cpu[number])
            mine = [b for b in self._by_row.get(row, ()) if start < b.at < start + length]
            if mine:
                points[number] = [Point(b.at - start, b.slot) for b in mine]
                taken += mine
        if not points:
            return None

        def written() -> None:
            for boundary in taken:
                boundary.written = True

        # Slots come from the stream that prepared the batch: their memory must last until this one has read it.
        self._recent.append([boundary.slot for boundary in taken])
        return Leaving(
            extend_hooks.plan(batch, points, mamba_cache_chunk_size()),
            extend_hooks.without_tracking(metadata),
            self._last_layer_id,
            written,
        )

    def end_forward(self, batch: ForwardBatch) -> None:
        """After any forward: the extends of its rows have run."""
        mode = batch.logical_forward_mode
        if self._by_row and not (mode.is_decode_or_idle() or mode.is_target_verify()):
            self._by_row.clear()

    # -- after the prefill: insert ------------------------------------------------------------------------------------

    def checkpoint(self, cache: Any, req: Any, up_to: int, original: Any) -> None:
        """Before `checkpoint_into_tree`: the request's boundaries become nodes, if they are none yet."""
        self._open.discard(req.kv.req_pool_idx)
        self.insert_boundaries(cache, req, up_to, original)

    def insert_boundaries(self, cache: Any, req: Any, up_to: int, original: Any) -> None:
        """The boundaries of a request's extend become nodes, shorter keys first; those beyond `up_to` are given up.

        Args:
            original: `checkpoint_into_tree`.
        """
        boundaries = getattr(req, _ON_REQUEST, None)
        if not boundaries:
            return
        setattr(req, _ON_REQUEST, None)
        try:
            while boundaries:
                boundary = boundaries.pop(0)
                self._note(boundary.written)
                if boundary.written and req.kv.cache_protected_len < boundary.at <= up_to:
                    self._inserting = boundary
                    original(cache, req, up_to=boundary.at)
                else:
                    cache.req_to_token_pool.mamba_allocator.free(boundary.slot)
        finally:
            self._inserting = None
            setattr(req, _ON_REQUEST, boundaries or None)
        tracked = req.kv.mamba_last_track_seqlen
        if tracked is not None and tracked <= req.kv.cache_protected_len:
            # A boundary is deeper than SGLang's own state: that one is not kept, the keys of inserts must grow.
            req.kv.mamba_last_track_seqlen = req.kv.mamba_prev_track_seqlen = None

    def _note(self, written: bool) -> None:
        """Stop to take slots where no forward ever writes them: the linear layers run inside a CUDA graph."""
        self._unwritten = 0 if written else self._unwritten + 1
        if self._unwritten == _GIVE_UP_AFTER:
            logger.warning(
                "ReplaySSM: prefills of this server run the linear layers from a CUDA graph, which leaves no states at "
                "boundaries; they are off from now on. --disable-prefill-cuda-graph brings them back."
            )

    def prepare_insert(self, insert_params: Any) -> int | None:
        """In `MambaComponent.prepare_for_caching_req`: the boundary that is being inserted, None for SGLang's own."""
        if self._inserting is None:
            return None
        insert_params.mamba_value = self._inserting.slot
        return self._inserting.at

    def donate(self, cache: Any, ring: RequestRing, req: Any, insert_params: Any, token_ids_len: int) -> int | None:
        """At the end of a request: its own slot becomes the tree's, exact at the key's last token. None: it can not.

        The slot, folded, and its conv window stand at the last token whose KV is committed; where the key stops short
        of that (a stop inside a committed run, stripped reasoning, a page that is not full) no state is offered.
        """
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        kv = req.kv
        if (
            not self.policy.finish
            or token_ids_len != kv.kv_committed_len
            or token_ids_len % cache.page_size
            or token_ids_len <= kv.cache_protected_len
            or isinstance(req.finished_reason, FINISH_ABORT)
            or not self._eligible(req)
            or not self._launched(req)
            or all(kv.mamba_ping_pong_empty)
            or not self._worth("finish", cache)
        ):
            return None
        insert_params.mamba_value = kv.mamba_pool_idx.reshape(1).clone()
        insert_params.mamba_keep_idx = kv.mamba_ping_pong_empty.index(False)
        self._donating = True
        ring.fold_before_next_forward(kv.req_pool_idx, insert_params.mamba_value, token_ids_len)
        return token_ids_len

    def _launched(self, req: Any) -> bool:
        """Whether the slot stands at the last committed token once everything that was launched has run.

        SGLang commits a decode step's token when it prepares the step, and launches it before it looks at the results
        of the step before; except that of two mixed steps in a row the second waits for the first's results.

        A verify step that is one too many moves the slot's conv window past the key, and so do drafts that were
        accepted and then cut by a grammar.
        """
        from sglang.srt.runtime_context import get_schedule

        if arguments.spec_requested():
            return get_schedule().disable_overlap_schedule and req.grammar is None
        ahead = req.kv.kv_committed_len - (len(req.origin_input_ids) + len(req.output_ids) - 1)
        return not ahead or not get_schedule().enable_mixed_chunk

    def keeps(self, cache: Any, req: Any) -> bool:
        """Whether SGLang's own state of a prefill's end goes into the tree: not where such states are never used."""
        return req.kv.mamba_last_track_seqlen is None or self._worth("end", cache)

    def _worth(self, kind: str, cache: Any) -> bool:
        allocator = cache.req_to_token_pool.mamba_allocator
        return self.ledger.worth(kind, allocator.size, allocator.available_size())

    def cleanup_insert(self, cache: Any, req: Any, insert_params: Any, insert_result: Any) -> bool:
        """In `MambaComponent.cleanup_after_caching_req`: a boundary that the tree did not take is freed.

        Returns whether it was a boundary's insert; the request then keeps all that it holds.
        """
        donating, self._donating = self._donating, False
        if self._inserting is None:
            if donating and insert_result is not None and not insert_result.mamba_exist:
                # What SGLang frees as the request's own slot is a track slot, in place of the one that it keeps.
                keep = insert_params.mamba_keep_idx
                req.kv.mamba_pool_idx = req.kv.mamba_ping_pong_track_buffer[keep].clone()
            return False
        if insert_result is None or insert_result.mamba_exist:
            cache.req_to_token_pool.mamba_allocator.free(self._inserting.slot)
        return True

    def inserted(self, insert_params: Any, insert_result: Any, is_finished: bool) -> None:
        """After any insert of a state: the ledger learns of it."""
        if insert_result is None or insert_params is None or insert_params.mamba_value is None:
            return
        kind = "finish" if is_finished else "end"
        if self._inserting is not None:
            kind = self._inserting.kind
        node = insert_result.last_device_node
        if insert_result.mamba_exist and node not in self.ledger:
            kind = ""
        self.ledger.stored(node, kind, insert_params.key)

    def drop(self, req: Any, cache: Any) -> None:
        """Free what a request's boundaries still hold."""
        self._open.discard(req.kv.req_pool_idx)
        boundaries = getattr(req, _ON_REQUEST, None)
        if boundaries:
            setattr(req, _ON_REQUEST, None)
            cache.req_to_token_pool.mamba_allocator.free(torch.cat([boundary.slot for boundary in boundaries]))

    def forget(self) -> None:
        """The cache is empty: nothing is stored any more, and no text can be hit that was seen before."""
        self.ledger.clear()
        self.history.clear()
        self._open.clear()
        self._by_row.clear()

    # -- hits and evictions -------------------------------------------------------------------------------------------

    def matched(self, params: Any, result: Any) -> None:
        """After a match for a request: the state it starts from is proven."""
        length = result.device_prefix_len + result.host_hit_length
        if params.req is not None and params.cow_mamba and length:
            self.ledger.used(result.best_match_node, lambda: params.key[:length])

    def before_eviction(self, cache: Any, states: int) -> None:
        """Before SGLang evicts states, oldest first: spare the proven ones, see `StateLedger.spare`."""
        self.ledger.spare(lambda node, key: self._touch(cache, node, key), states)

    def after_eviction(self, cache: Any) -> None:
        """After it: forget those at the old end that are gone."""
        self.ledger.prune(lambda node: _alive(cache, node))

    @staticmethod
    def _touch(cache: Any, node: Any, key: Any) -> bool:
        if not _alive(cache, node):
            return False
        cache.touch_prefix(key)
        return True


def _alive(cache: Any, node: Any) -> bool:
    """Whether the tree still has a state at this node."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    try:
        return cache.tree_core.get_component_device_value(node, ComponentType.MAMBA) is not None
    except Exception:  # each tree core has its own error for a node that is gone
        return False
