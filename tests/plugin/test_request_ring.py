"""The ring on SGLang's real pools: who owns a row, what folds, what faults, and what a slot holds when it leaves."""

from __future__ import annotations

import logging

import pytest
import torch

from replayssm_kernels.ring import FRESH, INERT, Ring
from sglang_replayssm.request_ring import RequestRing, ring_of
from tests.plugin import launch
from tests.plugin.machine import LAYER_IDS, Machine, Request, Sizes, make_pool, ring_shape

CAPACITIES = (1, 2, 3, 5)


@pytest.fixture(autouse=True)
def published(isolated: None) -> None:
    launch.publish_flag()


def running(machine: Machine, prompt: int) -> Request:
    """A request after its prefill."""
    request = machine.admit()
    assert request is not None
    machine.extend({request: prompt})
    return request


# -- one request ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_prompt_decode_finish(capacity: int) -> None:
    """A request through several folds; at its end the slot holds the state of its very last token."""
    m = Machine(Sizes(capacity=capacity))
    request = m.admit()
    m.extend({request: 4})
    assert m.pending(request) == 0
    for step in range(2 * capacity + 2):
        m.decode([request])
        assert m.pending(request) == step % capacity + 1
        m.check()
    snapshot = m.release(request, donate=True)
    m.check([snapshot])


def test_layers_are_found_by_their_ids() -> None:
    m = Machine()
    assert m.ring.layer_index == {1: 0, 4: 1} and m.ring.last_layer_id == LAYER_IDS[-1]
    with pytest.raises(KeyError):
        m.ring.decode_layer(
            0, *[torch.zeros(0)] * 3, A_log=None, dt_bias=None, scale=1.0, slots=None, rows=None
        )  # fmt: skip


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_state_dtype_is_the_pools(state_dtype: torch.dtype) -> None:
    m = Machine(Sizes(state_dtype=state_dtype))
    assert m.ring.state.dtype is state_dtype and m.ring.state is m.pool.mamba_pool.mamba_cache.temporal


# -- extends ----------------------------------------------------------------------------------------------------------


def test_chunked_prefill() -> None:
    """Every chunk starts where the one before it ended; the slot is exact between them."""
    m = Machine()
    request = m.admit()
    for count in (3, 1, 5):
        m.extend({request: count})
        assert m.pending(request) == 0
        m.check()
    m.decode([request])
    m.check()


@pytest.mark.parametrize("pending", [0, 1, 2, 3])
def test_an_extend_of_the_same_owner_folds(pending: int) -> None:
    """A row that decodes and then extends, as a session or a mixed chunk makes it, starts from a folded slot."""
    m = Machine(Sizes(capacity=3))
    request = running(m, 2)
    for _ in range(pending):
        m.decode([request])
    assert m.pending(request) == pending
    m.extend({request: 4})  # compares the slot with the oracle before it prefills
    assert m.pending(request) == 0
    m.decode([request])
    m.check()


def test_mixed_chunk_with_decode_rows_at_every_depth() -> None:
    """Scenario 13: rows that decode see their pending records when they run as one-token extends, again and again."""
    m = Machine(Sizes(rows=4, capacity=3))
    first, second, third = (running(m, 2 + i) for i in range(3))
    m.decode([first, second, third])
    m.decode([second, third])
    m.decode([third])
    assert [m.pending(r) for r in (first, second, third)] == [1, 2, 3]
    late = m.admit()
    for _ in range(2):
        m.extend({late: 3}, decodes=[second, first, third])
        m.check()
    m.decode([third, late, first, second])
    m.decode([late, first])
    m.extend({late: 2}, decodes=[first])
    m.decode([first, late, second])
    m.check()


def test_the_rows_of_others_stay_as_they_are() -> None:
    """An extend of one request neither folds nor moves another's records."""
    m = Machine()
    first, second = running(m, 2), running(m, 3)
    m.decode([first, second])
    m.decode([first, second])
    m.extend({second: 2})
    assert m.pending(first) == 2 and m.pending(second) == 0
    m.check()


# -- rows change hands ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pending", [0, 1, 3])
def test_a_reused_row_starts_with_nothing_pending(pending: int) -> None:
    """Scenario 6: the new owner of a row, at whatever length, does not see the old one's records."""
    m = Machine(Sizes(rows=1, capacity=3))
    old = running(m, 5)
    for _ in range(pending):
        m.decode([old])
    m.release(old)
    new = m.admit()
    assert new.row == 1
    m.extend({new: 5})
    assert m.pending(new) == 0
    m.decode([new])
    m.check()


@pytest.mark.parametrize("prompt", [1, 7, 8, 9, 12])
def test_the_step_too_many_of_overlap_scheduling(prompt: int) -> None:
    """The old owner's last step is launched before its end is known; its row and slot go to another at once.

    Launch order: the step too many, then (row freed, row allocated) the extend of the new owner. The new prompt's
    length covers every relation to the old owner's checkpoint and to its stray record.
    """
    m = Machine(Sizes(rows=2, slots=2, capacity=3))
    other, old = running(m, 3), running(m, 5)
    row, slot = old.row, old.slot
    for _ in range(3):
        m.decode([old, other])  # old stands at 8 tokens, 3 pending
    m.decode([other], dead=[old])  # folds old's records and appends a stray one
    m.release(old)
    new = m.admit()
    assert (new.row, new.slot) == (row, slot)
    m.extend({new: prompt})
    for _ in range(4):
        m.decode([new, other])
        m.check()


def test_a_row_reallocated_without_ever_running() -> None:
    """Aborted while it waited: the generation moved twice by the next forward, once is enough."""
    m = Machine(Sizes(rows=1))
    old = running(m, 4)
    m.decode([old])
    m.release(old)
    m.release(m.admit())
    new = m.admit()
    m.extend({new: 5})
    m.decode([new])
    m.check()


def test_a_decode_without_an_extend_starts_fresh() -> None:
    """A restored request may decode first: its slot is exact where it stands, whatever the old owner left."""
    m = Machine(Sizes(rows=1))
    old = running(m, 4)
    m.decode([old])
    snapshot = m.release(old, donate=True)
    new = m.admit(prefix=snapshot)
    m.pool.copy_mamba_state(snapshot.slot, new.kv.mamba_pool_idx.reshape(1).long())
    new.started = True
    for _ in range(5):
        m.decode([new])
        m.check([snapshot])


def test_clear_keeps_generations_apart() -> None:
    """`flush_cache` frees every row at once without touching the generations: the next owners start fresh."""
    m = Machine(Sizes(rows=2, capacity=3))
    for request in (running(m, 3), running(m, 4)):
        m.decode([request])
    m.pool.clear()
    m.running.clear()
    first, second = m.admit(), m.admit()
    m.extend({first: 4, second: 5})
    m.decode([first, second])
    m.check()


def test_padding_row_and_rows_without_an_owner_are_inert() -> None:
    """Warm-up forwards run over rows that nobody holds (0, and arange while a graph is captured)."""
    m = Machine(Sizes(rows=3))
    assert m.ring.ring.checkpoint.tolist() == [INERT] * 4
    before = m.ring.state.clone()
    batch = m.batch("DECODE", [0, 1, 2, 3], [1, 1, 1, 1])
    slots = m.ints([0, 0, 0, 0], torch.int32)
    m.forward(batch, lambda: m.ring.plan_decode(batch.req_pool_indices, batch.seq_lens, slots, None, None))
    m.forward(m.batch("EXTEND", [0, 1, 2, 3], [5] * 4, extend_prefix_lens=m.ints([0] * 4)))
    assert m.ring.ring.checkpoint.tolist() == [INERT] * 4 and not int(m.ring.ring.faults)
    torch.testing.assert_close(m.ring.state, before, rtol=0, atol=0, equal_nan=True)
    request = running(m, 3)
    m.decode([request], padding=3)
    m.check()
    assert m.ring.ring.checkpoint[0] == INERT


def test_claiming_marks_only_rows_whose_generation_moved() -> None:
    m = Machine(Sizes(rows=3))
    first = running(m, 3)
    second = m.admit()
    m.decode([first])
    checkpoint = m.ring.ring.checkpoint
    assert checkpoint[first.row] == 3 and checkpoint[second.row] == FRESH
    m.extend({second: 2})
    assert checkpoint[second.row] == 2


@pytest.mark.parametrize("mode", ["IDLE", "DECODE"])
def test_idle_and_decode_forwards_fold_nothing(mode: str) -> None:
    m = Machine()
    request = running(m, 3)
    m.decode([request])
    m.forward(m.batch(mode, [request.row], [request.length + 1]))
    assert m.pending(request) == 1
    m.check()


def test_a_draft_worker_leaves_the_ring_alone() -> None:
    m = Machine()
    request = running(m, 3)
    m.decode([request])
    m.runner.is_draft_worker = True
    m.forward(m.batch("EXTEND", [request.row], [9], extend_prefix_lens=m.ints([4])))
    assert m.pending(request) == 1


# -- slots that leave -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", range(4))
def test_snapshots_at_every_phase_of_the_ring(phase: int) -> None:
    """A track boundary at any number of pending records, right before, at and after a fold; the checkpoint stays."""
    m = Machine(Sizes(rows=2, slots=8, capacity=3))
    request, other = running(m, 2), running(m, 6)
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
    first, second, third = running(m, 1), running(m, 5), running(m, 9)
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
    request, other = running(m, 2), running(m, 4)
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
    """A checkpoint that cannot belong to the token count: NaN for that request only, an error at the next extend."""
    m = Machine(Sizes(capacity=3))
    good, bad = running(m, 5), running(m, 6)
    m.ring.ring.checkpoint[bad.row] = checkpoint
    before = m.ring.state[:, bad.slot].clone()
    m.decode([good], dead=[bad])
    assert all(output[1].isnan().all() for output in m.outputs)
    assert torch.equal(m.ring.state[:, bad.slot], before), "the checkpoint stays"
    assert int(m.ring.ring.faults) == 1
    m.decode([good])
    with pytest.raises(RuntimeError, match=r"1 request row\(s\) .* NaN rather than wrong"):
        extend_until_raised(m, good)


def test_a_snapshot_of_a_faulty_row_is_nan() -> None:
    """A destination must not keep an older state that would pass for the requested one."""
    m = Machine(Sizes(capacity=3))
    bad = running(m, 5)
    destination = m.pool.mamba_allocator.alloc(1)
    m.ring.state[:, int(destination)] = 1.0
    m.ring.ring.checkpoint[bad.row] = 0
    m.decode([], dead=[bad], track={bad: destination})
    assert m.ring.state[:, int(destination)].isnan().all()


def test_an_extend_with_a_stale_cursor_is_loud_too() -> None:
    m = Machine(Sizes(capacity=3))
    bad = running(m, 5)
    m.ring.ring.checkpoint[bad.row] = 0
    with pytest.raises(RuntimeError, match="checkpoint that does not fit"):
        extend_until_raised(m, bad)


def test_nan_in_one_request_stays_there() -> None:
    m = Machine(Sizes(rows=2, slots=2))
    sick, healthy = running(m, 3), running(m, 3)
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
    first, second = running(m, 4), running(m, 4)
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
