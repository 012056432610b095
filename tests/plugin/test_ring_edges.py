"""What leaves the ring and what must not pass unseen: snapshots, folds at the end, faults, captures, construction."""

from __future__ import annotations

import logging

import pytest
import torch

from replayssm_kernels.ring import POISON, Ring
from sglang_replayssm.request_ring import RequestRing, ring_of
from tests.plugin import launch
from tests.plugin.machine import LAYER_IDS, Machine, Request, Sizes, make_pool, ring_shape


@pytest.fixture(autouse=True)
def published(isolated: None) -> None:
    launch.publish_flag()


# -- slots that leave -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", range(4))
def test_snapshots_at_every_phase_of_the_ring(phase: int) -> None:
    """A track boundary at any number of pending records, right before, at and after a fold; the checkpoint stays."""
    m = Machine(Sizes(rows=2, slots=8, capacity=3))
    request, other = m.begin(2), m.begin(6)
    for _ in range(phase):
        m.decode([request, other])
    destination = m.pool.mamba_allocator.alloc(1)
    checkpoint = m.ring.ring.checkpoint.clone()
    (snapshot,) = m.decode([other, request], track={request: destination})
    if phase < 3:
        assert torch.equal(m.ring.ring.checkpoint, checkpoint), "a snapshot is no fold"
    for _ in range(4):
        m.decode([request, other])
    m.check([snapshot])
    reader = m.admit(prefix=snapshot) if m.pool.available_size() else None
    assert reader is None
    m.release(other)
    reader = m.admit(prefix=snapshot)
    m.extend({reader: 3})
    m.decode([reader, request])
    m.check([snapshot])


def test_snapshots_of_a_batch_are_each_ones_own() -> None:
    """Scenario 17: unequal lengths, all tracked at once, one of them with no destination (-1)."""
    m = Machine(Sizes(rows=3, slots=8))
    first, second, third = m.begin(1), m.begin(5), m.begin(9)
    m.decode([first, second, third])
    m.decode([second])
    one, two = m.pool.mamba_allocator.alloc(1), m.pool.mamba_allocator.alloc(1)
    before = m.ring.state.clone()
    snapshots = m.decode([third, first, second], track={first: -1, third: one, second: two}, padding=1)
    assert len(snapshots) == 2
    m.check(snapshots)
    untouched = [s for s in range(9) if s not in (int(one), int(two))]
    torch.testing.assert_close(m.ring.state[:, untouched], before[:, untouched], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("pending", [0, 1, 2, 3])
def test_fold_row_is_exact_and_repeatable(pending: int) -> None:
    m = Machine(Sizes(capacity=3))
    request, other = m.begin(2), m.begin(4)
    for _ in range(pending):
        m.decode([request, other])
    m.ring.fold_row(request.row, request.kv.mamba_pool_idx, request.length)
    m.expect_slot(request.slot, request.states, "folded")
    folded = m.ring.state.clone()
    m.ring.fold_row(request.row, request.kv.mamba_pool_idx, request.length)
    torch.testing.assert_close(m.ring.state, folded, rtol=0, atol=0, equal_nan=True)
    assert m.pending(request) == 0 and m.pending(other) == pending
    m.decode([request, other])
    m.check()


# -- faults -----------------------------------------------------------------------------------------------------------


def extend_until_raised(m: Machine, request: Request) -> None:
    """On a GPU the count of faults arrives with a copy that an earlier extend started."""
    for _ in range(3):
        m.forward(m.batch("EXTEND", [request.row], [request.length], extend_prefix_lens=m.ints([request.length])))
        torch.cuda.synchronize() if launch.DEVICE == "cuda" else None


@pytest.mark.parametrize("checkpoint", [9, 2, 0], ids=["ahead", "one record too far behind", "of another request"])
def test_a_stale_cursor_is_loud(checkpoint: int) -> None:
    """A checkpoint that cannot belong to the token count: NaN for that request only, then an error, decode or not."""
    m = Machine(Sizes(capacity=3))
    good, bad = m.begin(5), m.begin(6)
    m.ring.ring.checkpoint[bad.row] = checkpoint
    before = m.ring.state[:, bad.slot].clone()
    m.decode([good], dead=[bad])
    assert all(output[1].isnan().all() for output in m.outputs)
    assert torch.equal(m.ring.state[:, bad.slot], before), "the checkpoint stays"
    assert int(m.ring.ring.faults) == 1
    assert int(m.ring.ring.checkpoint[bad.row]) == POISON, "a wrong cursor must not heal while the counts grow"
    with pytest.raises(RuntimeError, match=r"1 request row\(s\) .* NaN rather than wrong"):
        for _ in range(3):  # on a GPU the count of faults arrives with a copy that an earlier step started
            m.decode([good])
            torch.cuda.synchronize() if launch.DEVICE == "cuda" else None


def test_a_snapshot_of_a_faulty_row_is_nan() -> None:
    """A destination must not keep an older state that would pass for the requested one."""
    m = Machine(Sizes(capacity=3))
    bad = m.begin(5)
    destination = m.pool.mamba_allocator.alloc(1)
    m.ring.state[:, int(destination)] = 1.0
    m.ring.ring.checkpoint[bad.row] = 0
    m.decode([], dead=[bad], track={bad: destination})
    assert m.ring.state[:, int(destination)].isnan().all()


def test_an_extend_with_a_stale_cursor_is_loud_too() -> None:
    m = Machine(Sizes(capacity=3))
    bad = m.begin(5)
    m.ring.ring.checkpoint[bad.row] = 0
    with pytest.raises(RuntimeError, match="checkpoint that does not fit"):
        extend_until_raised(m, bad)
    assert m.ring.state[:, bad.slot].isnan().all(), "the extend would have run from a stale slot and looked right"


def test_a_poisoned_row_is_clean_for_its_next_owner() -> None:
    m = Machine(Sizes(rows=1, slots=1, capacity=3))
    bad = m.begin(5)
    m.ring.ring.checkpoint[bad.row] = 0
    m.decode([], dead=[bad])
    m.release(bad)
    m.ring.ring.faults.zero_()  # a server would have ended; what matters is that nothing of it sticks to the row
    heir = m.begin(4)
    for _ in range(4):
        m.decode([heir])
        m.check()


def test_nan_in_one_request_stays_there() -> None:
    m = Machine(Sizes(rows=2, slots=2))
    sick, healthy = m.begin(3), m.begin(3)
    m.ring.state[:, sick.slot] = float("nan")
    sick.states = [state * float("nan") for state in sick.states]
    for _ in range(4):
        m.decode([healthy], dead=[sick])
        sick.length += 1
    m.release(sick)
    heir = m.admit()
    m.extend({heir: 2})
    for _ in range(4):
        m.decode([heir, healthy])
    m.check()


# -- capture ----------------------------------------------------------------------------------------------------------


def test_disarmed_forwards_touch_nothing() -> None:
    """Captured launches see padding only, even over rows that are in use and lists that were just filled."""
    m = Machine(Sizes(capacity=3))
    first, second = m.begin(4), m.begin(4)
    destination = m.pool.mamba_allocator.alloc(1)
    for _ in range(3):
        m.decode([first, second], track={first: destination})
    ring = m.ring.ring
    tensors = (ring.u, ring.k, ring.g, ring.checkpoint, ring.faults, m.ring.state)
    before = [t.clone() for t in tensors]
    m.ring.disarm(2)
    x = m.tokens(2)
    slots, rows = m.ints([first.slot, second.slot], torch.int32), m.ints([first.row, second.row])
    for layer, layer_id in enumerate(LAYER_IDS):
        output = m.ring.decode_layer(
            layer_id, x[layer].mixed_qkv, x[layer].a, x[layer].b, A_log=m.A_log[layer], dt_bias=m.dt_bias[layer],
            scale=m.scale, slots=slots, rows=rows,
        )  # fmt: skip
        assert not output.any()
    m.ring.snapshot()
    for tensor, old in zip(tensors, before, strict=True):
        torch.testing.assert_close(tensor, old, rtol=0, atol=0, equal_nan=True)
    m.decode([first, second])
    m.check()


# -- construction -----------------------------------------------------------------------------------------------------


def test_out_of_memory_is_refused_with_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes(rows=5, capacity=64)
    pool = make_pool(sizes)
    shape = ring_shape(sizes, 6)

    def no_memory(*args: object) -> Ring:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Ring, "allocate", no_memory)
    with pytest.raises(RuntimeError) as error:
        RequestRing(shape, pool, launch.DEVICE)
    message = str(error.value)
    assert f"6 request rows x {shape.bytes_per_row() / (1 << 20):.2f} MiB" in message
    for flag in ("--max-running-requests", "--linear-replayssm-cache-len", "--mem-fraction-static"):
        assert flag in message
    assert isinstance(error.value.__cause__, torch.OutOfMemoryError)
    assert ring_of(pool) is None


def test_a_shape_outside_what_is_tested_is_refused() -> None:
    sizes = Sizes(key_dim=24)
    with pytest.raises(ValueError, match="key_dim must be one of"):
        RequestRing(ring_shape(sizes, 4), make_pool(sizes), launch.DEVICE)


def test_two_conv_states_per_layer_are_refused() -> None:
    pool = make_pool(Sizes())
    pool.mamba_pool.mamba_cache.conv.append(pool.mamba_pool.mamba_cache.conv[0])
    with pytest.raises(ValueError, match="one conv state per layer, found 2"):
        RequestRing(ring_shape(Sizes(), 4), pool, launch.DEVICE)


def test_the_log_says_that_buffered_decode_is_on(caplog: pytest.LogCaptureFixture) -> None:
    """Server tests look for this line, so that a pass-through cannot pass them."""
    with caplog.at_level(logging.INFO, logger="sglang_replayssm.request_ring"):
        Machine(Sizes(rows=3, capacity=5))
    (line,) = [r.getMessage() for r in caplog.records if r.name == "sglang_replayssm.request_ring"]
    assert "ring of 5 records x 4 request rows x 2 layers" in line and "u in float32" in line
