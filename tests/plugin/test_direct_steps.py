"""Small batches step directly: which do, what they leave behind, and how they mix with buffered steps."""

from __future__ import annotations

import pytest

from replayssm_kernels.launch_shapes import direct_batch as measured
from sglang_replayssm import arguments
from tests.plugin import launch
from tests.plugin.machine import Machine, Sizes, ring_shape


@pytest.fixture(autouse=True)
def published(isolated: None) -> None:
    launch.publish_flag()


def test_the_batch_with_its_padding_decides() -> None:
    """Up to `direct_batch` entries nothing is left pending; above it records are; the states agree throughout."""
    m = Machine(Sizes(capacity=3, direct_batch=2))
    one, two, three = (m.begin(prompt=n) for n in (4, 6, 3))
    for batch, padding, direct in (
        ([one], 0, True),
        ([one, two], 0, True),
        ([one, two], 1, False),
        ([one, two, three], 0, False),
        ([two, one], 0, True),
        ([three], 2, False),
        ([three], 1, True),
    ):
        before = {request: m.pending(request) for request in batch}
        m.decode(batch, padding=padding)
        for request in batch:
            assert m.pending(request) == (0 if direct else before[request] + 1)
        m.check()


@pytest.mark.parametrize("pending", [0, 1, 3])
@pytest.mark.parametrize("end", ["donate", "leave", "extend", "track"])
def test_every_way_out_of_a_direct_step(pending: int, end: str) -> None:
    """After buffered steps and a direct one the slot leaves, extends or is snapshot at the very last token."""
    m = Machine(Sizes(capacity=3, direct_batch=1))
    request, other = m.begin(prompt=5), m.begin(prompt=2)
    for _ in range(pending):
        m.decode([request, other])
    if end == "track":
        slot = m.pool.mamba_allocator.alloc(1)
        m.check(m.decode([request], track={request: slot}))
        return
    m.decode([request])
    assert m.pending(request) == 0
    if end == "extend":
        m.extend({request: 4})
        m.decode([request, other])
        m.check()
        return
    snapshot = m.release(request, donate=True) if end == "donate" else m.leave(request)
    m.decode([other])
    m.check([snapshot])


def test_the_next_owner_of_a_row() -> None:
    """Nothing of a row that ended directly is pending for the request that gets it."""
    m = Machine(Sizes(capacity=3, rows=1, direct_batch=1))
    first = m.begin(prompt=5)
    m.decode([first])
    m.release(first)
    m.decode([m.begin(prompt=3)])
    m.check()


def test_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert arguments.direct_batch() is None
    monkeypatch.setenv(arguments.DIRECT_BATCH_ENV, "3")
    assert arguments.direct_batch() == 3
    monkeypatch.setenv(arguments.DIRECT_BATCH_ENV, "-1")
    with pytest.raises(ValueError, match="set it to a batch size"):
        arguments.direct_batch()


def test_measured_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels never step directly of themselves; on a GPU few v-heads allow larger batches."""
    from replayssm_kernels import launch_shapes

    shape = ring_shape(Sizes(), 4)
    monkeypatch.setattr(launch_shapes, "INTERPRETED", True)
    assert measured(shape, 4) == 0
    monkeypatch.setattr(launch_shapes, "INTERPRETED", False)
    monkeypatch.setitem(launch_shapes._DIRECT_PAIRS, (launch_shapes.GDN, 4), 3 * shape.v_heads)
    assert measured(shape, 4) == 3
