"""A slot that leaves its request while a step may be in flight: folded at the start of the next forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from replayssm_kernels.cursors import Counters
from sglang_replayssm.cache_hooks import start_loading, start_writing
from tests.plugin import launch
from tests.plugin.machine import Machine, Request, Sizes


@pytest.fixture(autouse=True)
def published(isolated: None) -> None:
    launch.publish_flag()


def leave(m: Machine, request: Request) -> int:
    return int(m.leave(request).slot)


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


def test_a_copy_to_the_host_reads_the_folded_slot() -> None:
    """A write-through starts right after the insert, before any forward."""
    m = Machine(Sizes(capacity=3))
    request = m.begin(prompt=4)
    m.decode([request])
    m.decode([request])
    slot = leave(m, request)
    copies: list[torch.Tensor] = []
    start_writing(lambda c: copies.append(m.ring.state[:, slot].clone()), m.controller(write_queue=[object()]))
    m.ring.state[:, slot] = copies[0]
    m.expect_slot(slot, request.states, "what went to the host")
    m.forward(m.batch("IDLE", [], []))
    m.expect_slot(slot, request.states, "the slot after the next forward: folded once, not twice")


def test_no_fold_comes_after_what_is_loaded_into_the_slot() -> None:
    """The slot that left is evicted and given to a load from the host before any forward."""
    m = Machine(Sizes(capacity=3))
    request = m.begin(prompt=4)
    m.decode([request])
    slot = leave(m, request)
    loaded = torch.full_like(m.ring.state[:, slot], 0.25)

    def load(_: object) -> int:
        m.ring.state[:, slot] = loaded
        return 7

    assert start_loading(load, m.controller(load_queue=[object()])) == 7
    m.begin(prompt=2)
    assert torch.equal(m.ring.state[:, slot], loaded)
    assert not int(m.ring.ring.faults)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("copies", ["write", "load"])
def test_the_fold_runs_where_forwards_run(overlap: bool, copies: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fence is always the forward stream's; without overlap scheduling forwards run on the scheduler's own."""
    from sglang.srt.runtime_context import get_context

    launch.publish_flag(*([] if overlap else ["--disable-overlap-schedule"]))
    get_context().override("test", disable_overlap_schedule=not overlap)
    m = Machine(Sizes(capacity=3))
    request = m.begin(prompt=4)
    m.decode([request])
    leave(m, request)
    log: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            log.append(f"{self.name} waits for {other.name}")

    current = [Stream("scheduler")]

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(m.ring, "_pinned", True)
    monkeypatch.setattr(m.ring, "_fold_leaving", lambda: log.append(f"fold on {current[-1].name}"))
    fence = {f"{copies}_fence_stream": Stream("forward"), f"{copies}_queue": [object()]}
    hook = start_writing if copies == "write" else start_loading
    hook(lambda controller: log.append("copy"), m.controller(**fence))
    folded = ["fold on scheduler", "forward waits for scheduler"]
    assert log == [*(["forward waits for scheduler", "fold on forward"] if overlap else folded), "copy"]


def test_nothing_to_copy_launches_nothing() -> None:
    m = Machine(Sizes(capacity=3))
    request = m.begin(prompt=4)
    m.decode([request])
    slot = leave(m, request)
    before = m.ring.state[:, slot].clone()
    start_writing(lambda c: None, m.controller())
    start_loading(lambda c: -1, m.controller())
    assert torch.equal(m.ring.state[:, slot], before)
    m.forward(m.batch("IDLE", [], []))
    m.expect_slot(slot, request.states, "the slot after the next forward")


def test_folds_of_slots_that_leave_are_counted() -> None:
    """The default configuration folds at every request's end: metrics must see it."""
    m = Machine(Sizes(capacity=3))
    m.ring.counters = Counters.allocate(3, m.ring.ring.checkpoint.device)
    request = m.begin(prompt=4)
    for _ in range(2):
        m.decode([request])
    leave(m, request)
    m.forward(m.batch("IDLE", [], []))
    assert int(m.ring.counters.totals[Counters.HAND_OVERS]) == 1
