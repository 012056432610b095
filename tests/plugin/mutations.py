"""The plugin with one fold, reset or guard taken out: each must make the judge fail.

A mutation replaces a piece of a function's source, which must be there exactly once, so that this list stays true.
"""

from __future__ import annotations

import inspect
import pkgutil
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType


@dataclass(frozen=True)
class Mutation:
    """`old` becomes `new` in a function of sglang_replayssm; `setting` (of test_judge.py) shows what breaks."""

    what: str
    where: str
    old: str
    new: str
    setting: str = "boundaries"


RING = "request_ring.RequestRing."
STATES = "prefix_states.PrefixStates."
FOLD = "materialise(self.state, self.ring, self.plan.fold)"
MIXED, NO_BUFFER = "mixed chunk", "no_buffer"

MUTATIONS = (
    Mutation("slots that left are not folded", RING + "before_forward", "self._fold_leaving()", "pass"),
    Mutation("a row's new owner is not noticed", RING + "before_forward", "self._claim_rows()", "pass"),
    Mutation("a new owner is noticed in every forward", RING + "_claim_rows", "self._generation.copy_", "len"),
    Mutation(
        "a new owner's row is not reset", RING + "_claim_rows", "mark_fresh(self.ring, self._to_device(rows))", "pass"
    ),
    Mutation("rows that extend are not folded", RING + "before_forward", FOLD, "pass", MIXED),
    Mutation(
        "an extend does not move the checkpoint",
        RING + "before_forward",
        "plan_forced_fold(self.ring, self.plan.fold, rows, lens, slots, ends, self.counters, Counters.EXTENDS)",
        "self.plan.fold.count.zero_()",
        MIXED,
    ),
    Mutation("a full ring is not folded", RING + "plan_decode", FOLD, "pass"),
    Mutation(
        "no snapshot at a track boundary", RING + "snapshot", "materialise(", "max(0, 1) or (", "SGLang's own states"
    ),
    Mutation("a slot that left is not folded", RING + "_fold_leaving", FOLD, "pass"),
    Mutation("a slot that left is folded again", RING + "_fold_leaving", "self._leaving = []", "pass"),
    Mutation("no fold when a request ends", RING + "fold_row", FOLD, "pass", NO_BUFFER),
    Mutation(
        "a copy to the host does not wait for the fold",
        "cache_hooks.start_writing",
        "ring.fold_leaving_on(controller.write_fence_stream, _overlap())",
        "pass",
        "host, written through",
    ),
    Mutation(
        "the key may stop short of the state",
        "cache_hooks.prepare_for_caching_req",
        "if is_finished and token_ids_len != req.kv.kv_committed_len:",
        "if False:",
        NO_BUFFER,
    ),
    Mutation(
        "the next snapshot may go over the last one",
        "cache_hooks.decode_result",
        "not req.finished() and",
        "False and",
        "SGLang's own states",
    ),
    Mutation(
        "a request that ends keeps its boundaries",
        "cache_hooks.cleanup_after_caching_req",
        "states.drop(req, component.cache)",
        "pass",
    ),
    Mutation(
        "SGLang cleans up after a boundary's insert",
        "cache_hooks.cleanup_after_caching_req",
        "return None",
        "pass",
    ),
    Mutation(
        "a boundary's insert takes SGLang's state",
        "cache_hooks.prepare_for_caching_req",
        "(at := states.prepare_insert(insert_params)) is not None",
        "False",
    ),
    Mutation(
        "boundaries take slots that requests need",
        STATES + "_allocate",
        "if free + evictable <= reserve:",
        "if False:",
        "host, a small one",
    ),
    Mutation("boundaries outlive their forward", STATES + "end_forward", "self._by_row.clear()", "pass", MIXED),
    Mutation("what no forward wrote is inserted", STATES + "insert_boundaries", "boundary.written and ", ""),
    Mutation(
        "what no forward wrote is not freed",
        STATES + "insert_boundaries",
        "cache.req_to_token_pool.mamba_allocator.free(boundary.slot)",
        "pass",
    ),
    Mutation(
        "SGLang inserts a shorter key after a boundary's",
        STATES + "insert_boundaries",
        "if tracked is not None and tracked <= req.kv.cache_protected_len:",
        "if False:",
    ),
    Mutation(
        "a slot is handed over whose key stops short", STATES + "donate", "or token_ids_len != kv.kv_committed_len", ""
    ),
    Mutation(
        "a slot is handed over whose last step is not launched",
        STATES + "donate",
        "or not self._launched(req)",
        "",
        MIXED,
    ),
    Mutation(
        "a slot is handed over unfolded",
        STATES + "donate",
        "ring.fold_before_next_forward(kv.req_pool_idx, insert_params.mamba_value, token_ids_len)",
        "pass",
    ),
    Mutation("the slot handed over is freed as well", STATES + "donate", "self._donating = True", "pass"),
    Mutation(
        "a boundary that the tree has already is not freed",
        STATES + "cleanup_insert",
        "cache.req_to_token_pool.mamba_allocator.free(self._inserting.slot)",
        "pass",
    ),
    Mutation(
        "SGLang frees the slot that was handed over",
        STATES + "cleanup_insert",
        "req.kv.mamba_pool_idx = req.kv.mamba_ping_pong_track_buffer[keep].clone()",
        "pass",
    ),
    Mutation(
        "no conv window at a boundary",
        "extend_hooks.forward",
        "leave_windows(conv, mixed_qkv, metadata.mamba_cache_indices, leaving.points)",
        "pass",
    ),
    Mutation(
        "no state at a boundary",
        "extend_hooks.chunk_states",
        "leave_states(initial_state, initial_state_indices, _running.points, w, u, keys, gates, decayed)",
        "pass",
    ),
    Mutation(
        "SGLang's tracked state of a forward that leaves states is nobody's",
        "extend_hooks.plan",
        "*([tracked] if tracked else [])",
        "",
    ),
    Mutation("no snapshot of a decode step", "hooks.track_decode", "ring.snapshot()", "pass", "SGLang's own states"),
    Mutation(
        "no conv window of a snapshot",
        "hooks.track_decode",
        "track_mamba_states_all_layers(\n",
        "(lambda *unused: None)(\n",
        "SGLang's own states",
    ),
)


@contextmanager
def applied(mutation: Mutation) -> Iterator[None]:
    """Within it the plugin runs with the mutation, wherever the function is referred to."""
    found = pkgutil.resolve_name("sglang_replayssm." + mutation.where)
    function = inspect.unwrap(found)
    assert isinstance(function, FunctionType) and not function.__closure__
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(mutation.old) == 1, f"{mutation.where} has {source.count(mutation.old)} of {mutation.old!r}"
    names: dict[str, object] = {}
    text = "from __future__ import annotations\n" + source.replace(mutation.old, mutation.new)
    exec(compile(text, mutation.what, "exec"), function.__globals__, names)
    mutant = names[function.__name__]
    code, function.__code__ = function.__code__, getattr(mutant, "__func__", mutant).__code__
    try:
        yield
    finally:
        function.__code__ = code
