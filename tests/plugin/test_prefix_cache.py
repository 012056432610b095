"""What the prefix cache gets of a request: conv and temporal at the key's token count, or nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_replayssm import cache_hooks
from sglang_replayssm.request_ring import ATTRIBUTE
from tests.plugin import launch
from tests.plugin.machine import Machine, Request, Sizes


@pytest.fixture(autouse=True)
def published(isolated: None) -> None:
    launch.publish_flag()


class Cache:
    """SGLang's MambaComponent, hook applied, over a machine's pool; the tree around it is not needed."""

    def __init__(self, machine: Machine) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.unified_cache.components.mamba import MambaComponent

        self.machine = machine
        self.component: Any = MambaComponent.__new__(MambaComponent)
        self.component.cache = SimpleNamespace(
            req_to_token_pool=machine.pool, enable_mamba_extra_buffer=machine.sizes.extra_buffer
        )
        self.params: Any = InsertParams()

    def prepare(self, request: Request, token_ids_len: int, is_finished: bool) -> int | None:
        request.kv.kv_committed_len = request.length
        return self.component.prepare_for_caching_req(
            req=request, insert_params=self.params, token_ids_len=token_ids_len, is_finished=is_finished
        )


def decoded(machine: Machine, prompt: int, steps: int) -> Request:
    request = machine.begin(prompt)
    for _ in range(steps):
        machine.decode([request])
    return request


def no_buffer(**sizes: Any) -> Machine:
    return Machine(Sizes(extra_buffer=False, overlap=False, **sizes))


@pytest.mark.parametrize("pending", [0, 1, 2, 3])
def test_no_buffer_donates_a_folded_slot(pending: int) -> None:
    """Scenario 2: the key names the request's last token, and so does the state in its slot."""
    m = no_buffer(capacity=3)
    request = decoded(m, prompt=4, steps=pending)
    assert m.pending(request) == pending
    cache = Cache(m)
    assert cache.prepare(request, request.length, is_finished=True) == request.length
    assert cache.params.mamba_value.tolist() == [request.slot]
    m.expect_slot(request.slot, request.states, "donated")
    assert m.pending(request) == 0 and not int(m.ring.ring.faults)


@pytest.mark.parametrize("difference", [-1, -4, 1])
def test_no_buffer_donates_nothing_where_the_key_names_another_length(difference: int) -> None:
    """Stripped reasoning, or a stop before the last committed token: no conv window exists for that key."""
    m = no_buffer(capacity=3)
    request = decoded(m, prompt=4, steps=2)
    before, checkpoint = m.ring.state.clone(), m.ring.ring.checkpoint.clone()
    cache = Cache(m)
    assert cache.prepare(request, request.length + difference, is_finished=True) == 0
    assert cache.params.mamba_value is None
    torch.testing.assert_close(m.ring.state, before, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(m.ring.ring.checkpoint, checkpoint)
    free = m.pool.mamba_allocator.available_size()
    cache.component.cleanup_after_caching_req(request, is_finished=True, insert_params=cache.params)
    assert m.pool.mamba_allocator.available_size() == free + 1, "the slot goes back to the pool"


@pytest.mark.parametrize("steps", [0, 2])
def test_no_buffer_forks_an_exact_copy_of_an_unfinished_request(steps: int) -> None:
    """After a prefill chunk (and after decode steps, as a session would have them) the request keeps its slot."""
    m = no_buffer(capacity=3)
    request = decoded(m, prompt=4, steps=steps)
    cache = Cache(m)
    assert cache.prepare(request, request.length, is_finished=False) == request.length
    copy = int(cache.params.mamba_value)
    assert copy != request.slot
    m.expect_slot(copy, request.states, "forked")
    m.extend({request: 3})
    m.decode([request])
    m.check()


def test_no_buffer_row_that_never_ran_has_nothing_pending() -> None:
    """The generation moved, no forward has seen it yet: the old owner's records are not the new one's."""
    m = no_buffer(rows=1, capacity=3)
    old = decoded(m, prompt=4, steps=2)
    m.release(old)
    new = m.admit()
    assert new is not None
    m.pool.mamba_pool.clear_slots(new.kv.mamba_pool_idx.reshape(1))
    new.length = 6
    Cache(m).prepare(new, 6, is_finished=True)
    assert not m.ring.state[:, new.slot].any()
    assert not int(m.ring.ring.faults)


@pytest.mark.parametrize("is_finished", [True, False])
def test_extra_buffer_keeps_track_slots_and_the_ring_as_it_is(is_finished: bool) -> None:
    """Scenario 1: the cached state is the last snapshot, at the boundary that SGLang recorded."""
    m = Machine(Sizes(extra_buffer=True, capacity=3, slots=12))
    request = decoded(m, prompt=4, steps=1)
    keep = request.kv.mamba_last_track_idx
    track = request.kv.mamba_ping_pong_track_buffer[keep].clone()
    (snapshot,) = m.decode([request], track={request: track})
    request.kv.mamba_last_track_seqlen = request.length
    m.decode([request])
    before, checkpoint = m.ring.state.clone(), m.ring.ring.checkpoint.clone()
    cache = Cache(m)
    # shorter than what is committed: under extra_buffer that is SGLang's own business
    assert cache.prepare(request, request.length - 1, is_finished) == snapshot.length
    assert cache.params.mamba_value.tolist() == [int(track)]
    torch.testing.assert_close(m.ring.state, before, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(m.ring.ring.checkpoint, checkpoint)
    m.expect_slot(track, snapshot.states, "the snapshot")


@pytest.mark.parametrize("extra_buffer", [True, False])
def test_sglangs_function_gets_the_same_arguments(extra_buffer: bool) -> None:
    m = Machine(Sizes(extra_buffer=extra_buffer, overlap=False, slots=12))
    request = decoded(m, prompt=4, steps=1)
    request.kv.kv_committed_len = request.length
    cache = Cache(m)
    seen: list[Any] = []

    def original(component: Any, **kwargs: Any) -> str:
        seen.append((component, kwargs))
        return "result"

    arguments = dict(req=request, insert_params=cache.params, token_ids_len=request.length, is_finished=True)
    assert cache_hooks.prepare_for_caching_req(original, cache.component, **arguments) == "result"
    assert seen == [(cache.component, arguments)]


def test_without_a_ring_a_shorter_key_is_sglangs_business() -> None:
    m = no_buffer()
    request = decoded(m, prompt=4, steps=0)
    delattr(m.pool, ATTRIBUTE)
    cache = Cache(m)
    assert cache.prepare(request, request.length - 1, is_finished=True) == request.length - 1
    assert cache.params.mamba_value.tolist() == [request.slot]


@pytest.mark.parametrize("page", [1, 16, 64, 128])
@pytest.mark.parametrize("plugin", [True, False], ids=["on", "off"])
def test_what_an_extend_tracks_is_what_its_key_can_name(page: int, plugin: bool) -> None:
    """A chunk behind a mixed step may start within a page. Without a ring SGLang goes on as it does."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    launch.publish_flag("--page-size", str(page), "--mamba-track-interval", "128")
    pool = SimpleNamespace(get_mamba_ping_pong_other_idx=lambda index: 1 - index)
    if plugin:
        setattr(pool, ATTRIBUTE, SimpleNamespace())
    batch = SimpleNamespace(
        tree_cache=SimpleNamespace(page_size=page),
        req_to_token_pool=pool,
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace()),
    )
    tracked, before = [], 17
    for start in (0, 64, 100, 127, 128, 254, 256):
        kv = SimpleNamespace(mamba_next_track_idx=0, mamba_last_track_idx=None, mamba_last_track_seqlen=before)
        req = SimpleNamespace(prefix_len=start, extend_end=start + 130, extend_len=130, kv=kv)
        req.mamba_branching_seqlen = None
        entry = ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend(batch, req)
        assert entry.track_mask == (kv.mamba_last_track_seqlen != before) == (kv.mamba_next_track_idx == 1)
        if entry.track_mask:
            tracked.append(kv.mamba_last_track_seqlen)
    wrong = [at for at in tracked if at % page]
    assert tracked and (wrong == [] if plugin or page == 1 else wrong)
