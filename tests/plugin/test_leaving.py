"""A slot that leaves its request while a step may be in flight: folded at the start of the next forward."""

from __future__ import annotations

import pytest

from tests.plugin import launch
from tests.plugin.machine import Machine, Request, Sizes


@pytest.fixture(autouse=True)
def published(isolated: None) -> None:
    launch.publish_flag()


def leave(m: Machine, request: Request) -> int:
    """The request ends and its slot becomes the cache's; nothing is launched."""
    slot = request.slot
    m.ring.fold_before_next_forward(request.row, request.kv.mamba_pool_idx, request.length)
    m.running.remove(request)
    request.kv.mamba_pool_idx = None
    m.pool.free(request)
    return slot


@pytest.mark.parametrize("pending", [0, 1, 2, 3])
def test_the_slot_is_exact_before_the_next_forward_reads_it(pending: int) -> None:
    m = Machine(Sizes(capacity=3))
    request = m.begin(prompt=4)
    for _ in range(pending):
        m.decode([request])
    assert m.pending(request) == pending
    slot = leave(m, request)
    m.begin(prompt=2)
    m.expect_slot(slot, request.states, "the slot that left")
    assert not int(m.ring.ring.faults)


def test_the_rows_next_owner_comes_after() -> None:
    """Scenario 6: the row is handed on before anything was launched; its new owner starts with nothing pending."""
    m = Machine(Sizes(capacity=3, rows=1))
    first = m.begin(prompt=5)
    m.decode([first])
    row, slot = first.row, leave(m, first)
    second = m.begin(prompt=3)
    assert second.row == row
    m.expect_slot(slot, first.states, "the first owner's slot")
    for _ in range(5):
        m.decode([second])
    m.check()


def test_several_leave_between_two_forwards_and_one_at_idle() -> None:
    m = Machine(Sizes(capacity=3))
    requests = [m.begin(prompt=n) for n in (3, 6)]
    for steps, request in enumerate(requests, start=1):
        for _ in range(steps):
            m.decode([request])
    slots = [leave(m, request) for request in requests]
    m.forward(m.batch("IDLE", [], []))
    for slot, request in zip(slots, requests, strict=True):
        m.expect_slot(slot, request.states, "a slot that left")
    assert not int(m.ring.ring.faults)
