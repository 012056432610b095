"""What SGLang's hook registry puts around its prefix cache. Each hook is a pass-through where no ring exists.

All are AROUND hooks, called with the original function first; `hooks.HOOKS` maps their targets to them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sglang_replayssm.prefix_states import PrefixStates, states_of
from sglang_replayssm.request_ring import ATTRIBUTE, ring_of

Original = Callable[..., Any]


def prepare_track_extend(original: Original, batch: Any, req: Any) -> Any:
    """ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend: a request's extend gets its boundaries."""
    if ring_of(batch.req_to_token_pool) is not None:
        original = functools.partial(_tracked_on_pages, original)
    states = states_of(batch.req_to_token_pool)
    return original(batch, req) if states is None else states.prepare_extend(batch, req, original)


def _tracked_on_pages(original: Original, batch: Any, req: Any) -> Any:
    """SGLang's own tracked state, but for an extend that starts within a page: that one gets none.

    SGLang tracks whole chunks of 64 tokens after the start. A chunk behind a mixed step may start within a page, and
    the tree would file its state under the token count where that page starts.
    """
    from sglang.srt.managers.schedule_batch import _MambaRadixCacheV2TrackEntry

    if req.prefix_len % batch.tree_cache.page_size == 0:
        return original(batch, req)
    return _MambaRadixCacheV2TrackEntry(track_mask=False, track_position=req.kv.mamba_next_track_idx, track_seqlen=-1)


def next_batch(original: Original, scheduler: Any, running_batch: Any, last_batch: Any) -> Any:
    """Scheduler.get_next_batch_to_run: boundaries in flight are in the tree when the next prompts are matched."""
    states = states_of(scheduler.req_to_token_pool)
    if states is not None and states.policy.early and last_batch is not None:
        insert_launched(states, scheduler, last_batch)
    return original(scheduler, running_batch=running_batch, last_batch=last_batch)


def insert_launched(states: PrefixStates, scheduler: Any, batch: Any) -> None:
    """Into the tree with the boundaries of a prefill whose result nobody has looked at yet.

    With overlap scheduling SGLang looks at it after the next batch is launched; prompts that begin alike and come that
    close behind each other would all be computed. It inserts the chunks of a long prompt at this point itself: whatever
    reads KV or states runs behind the forward that writes them, on its stream. SGLang's own state, and the KV behind
    the last boundary, go in with the result.

    Not a request that goes on after a retraction: its prompt ends with its own answer, of which the result may cut
    some. Not with a host tier: there a result may say that the KV of the prompt failed to load.
    """
    cache = scheduler.tree_cache
    if not scheduler.enable_overlap or not batch.forward_mode.is_extend() or cache.cache_controller is not None:
        return
    for req in batch.reqs:
        if not req.finished() and not req.output_ids:  # an aborted chunk is finished, and not released yet
            states.insert_boundaries(cache, req, req.extend_end, _insert)


def _insert(cache: Any, req: Any, *, up_to: int) -> None:
    cache.checkpoint_into_tree(req, up_to=up_to)


def checkpoint_into_tree(original: Original, cache: Any, req: Any, *, up_to: int, **kwargs: Any) -> Any:
    """UnifiedRadixCache.checkpoint_into_tree: boundaries go in before SGLang's own state."""
    states = states_of(cache.req_to_token_pool)
    if states is not None and not states.inserting:
        states.checkpoint(cache, req, up_to, original)
    return original(cache, req, up_to=up_to, **kwargs)


def match_prefix(original: Original, cache: Any, params: Any) -> Any:
    """UnifiedRadixCache.match_prefix: the ledger learns which states are used."""
    result = original(cache, params)
    states = states_of(cache.req_to_token_pool)
    if states is not None:
        states.matched(params, result)
    return result


def reset(original: Original, cache: Any) -> Any:
    """UnifiedRadixCache.reset: with the tree goes what the plugin knows of it (`/flush_cache`, an update of weights).

    Text that was seen before a flush is not in the cache after it: its prefixes must be learnt again.
    """
    states = states_of(getattr(cache, "req_to_token_pool", None))
    if states is not None:
        states.forget()
    return original(cache)


def evict(original: Original, cache: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
    """UnifiedRadixCache._evict: states that nobody used go before those that somebody did."""
    states = states_of(cache.req_to_token_pool)
    if states is None or not params.mamba_num:
        return original(cache, params, *args, **kwargs)
    states.before_eviction(cache, params.mamba_num)
    result = original(cache, params, *args, **kwargs)
    states.after_eviction(cache)
    return result


def prepare_for_caching_req(
    original: Original, component: Any, req: Any, insert_params: Any, token_ids_len: int, is_finished: bool
) -> int | None:
    """MambaComponent.prepare_for_caching_req: which state an insert brings, and for how many tokens.

    Under extra_buffer the tree keeps boundaries and track slots, which are exact already. Under no_buffer the
    request's own slot is what it keeps, and that is folded first; where the key stops short of the state (stop inside
    a committed run, stripped reasoning), no state can be named by that key and none is kept: conv and temporal must
    stand at the key's token count.
    """
    states = states_of(component.cache.req_to_token_pool)
    if states is not None and (at := states.prepare_insert(insert_params)) is not None:
        return at
    ring = ring_of(component.cache.req_to_token_pool)
    if ring is not None and not component.cache.enable_mamba_extra_buffer:
        if is_finished and token_ids_len != req.kv.kv_committed_len:
            return 0
        ring.fold_row(req.kv.req_pool_idx, req.kv.mamba_pool_idx, token_ids_len)
    elif states is not None and is_finished:
        at = states.donate(component.cache, ring, req, insert_params, token_ids_len)
        if at is not None:
            return at
    elif states is not None and not states.keeps(component.cache, req):
        return 0
    return original(
        component, req=req, insert_params=insert_params, token_ids_len=token_ids_len, is_finished=is_finished
    )


def cleanup_after_caching_req(
    original: Original,
    component: Any,
    req: Any,
    is_finished: bool,
    insert_result: Any = None,
    insert_params: Any = None,
) -> Any:
    """MambaComponent.cleanup_after_caching_req: what became of the state that an insert brought."""
    states = states_of(component.cache.req_to_token_pool)
    if states is not None:
        states.inserted(insert_params, insert_result, is_finished)
        if states.cleanup_insert(component.cache, req, insert_params, insert_result):
            return None
        if is_finished:
            states.drop(req, component.cache)
    return original(component, req, is_finished, insert_result=insert_result, insert_params=insert_params)


def decode_result(original: Original, processor: Any, req: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """SchedulerBatchResultProcessor._handle_finish_state_updated_req: a request's next snapshot spares its last one.

    SGLang changes a request's two track slots over when the step before a boundary is seen, and once more when the
    boundary's own result comes with no further step in flight (a prefill was launched in between). Twice is not at all:
    the snapshot of the next boundary would then overwrite the one that a request which ends meanwhile hands over.
    """
    result = original(processor, req, batch, *args, **kwargs)
    pool = batch.req_to_token_pool
    if ring_of(pool) is not None and not req.finished() and req.kv.mamba_ping_pong_track_buffer is not None:
        from sglang.srt.runtime_context import get_exec

        if not get_exec().mamba.enable_mamba_extra_buffer_lazy:
            req.kv.mamba_next_track_idx = pool.get_mamba_ping_pong_other_idx(req.kv.mamba_last_track_idx)
    return result


# -- host tier --------------------------------------------------------------------------------------------------------


def attach_host_pools(original: Original, cache: Any, *args: Any, **kwargs: Any) -> Any:
    """hybrid_pool_assembler.attach_hybrid_pool_to_unified_cache: the controller of host copies learns of the ring."""
    result = original(cache, *args, **kwargs)
    ring = ring_of(cache.req_to_token_pool)
    if ring is not None:
        setattr(cache.cache_controller, ATTRIBUTE, ring)
        ring.host_tier = True
    return result


def start_writing(original: Original, controller: Any) -> Any:
    """HiCacheController.start_writing: a slot that goes to the host is folded first; SGLang's fence covers the fold."""
    ring = ring_of(controller)
    if ring is not None and controller.write_queue:
        ring.fold_leaving_on(controller.write_fence_stream, _overlap())
    return original(controller)


def start_loading(original: Original, controller: Any) -> Any:
    """HiCacheController.start_loading: no fold of a slot's past comes after what is loaded into it."""
    ring = ring_of(controller)
    if ring is not None and controller.load_queue:
        ring.fold_leaving_on(controller.load_fence_stream, _overlap())
    return original(controller)


def _overlap() -> bool:
    """Whether forwards run on a stream of their own. The controller's fence is that stream in either case."""
    from sglang.srt.runtime_context import get_schedule

    return not get_schedule().disable_overlap_schedule
