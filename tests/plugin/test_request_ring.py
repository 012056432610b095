"""The ring on SGLang's real pools: who owns a row, what an extend folds, and what a new owner sees."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from replayssm_kernels.ring import FRESH, INERT
from sglang_replayssm import hooks
from tests.plugin import launch
from tests.plugin.machine import LAYER_IDS, Machine, Sizes

CAPACITIES = (1, 2, 3, 5)


@pytest.fixture(autouse=True)
def published(isolated: None) -> None:
    launch.publish_flag()


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
    request = m.begin(2)
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
    first, second, third = (m.begin(2 + i) for i in range(3))
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
    first, second = m.begin(2), m.begin(3)
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
    old = m.begin(5)
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
    other, old = m.begin(3), m.begin(5)
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
    old = m.begin(4)
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
    old = m.begin(4)
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
    for request in (m.begin(3), m.begin(4)):
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
    request = m.begin(3)
    m.decode([request], padding=3)
    m.check()
    assert m.ring.ring.checkpoint[0] == INERT


def test_claiming_marks_only_rows_whose_generation_moved() -> None:
    m = Machine(Sizes(rows=3))
    first = m.begin(3)
    second = m.admit()
    m.decode([first])
    checkpoint = m.ring.ring.checkpoint
    assert checkpoint[first.row] == 3 and checkpoint[second.row] == FRESH
    m.extend({second: 2})
    assert checkpoint[second.row] == 2


@pytest.mark.parametrize("mode", ["IDLE", "DECODE"])
def test_idle_and_decode_forwards_fold_nothing(mode: str) -> None:
    m = Machine()
    request = m.begin(3)
    m.decode([request])
    m.forward(m.batch(mode, [request.row], [request.length + 1]))
    assert m.pending(request) == 1
    m.check()


def test_a_decode_that_is_labelled_extend_stays_a_decode() -> None:
    """SGLang relabels a decode as one-token extends to align ranks; the logical mode says what the rows carry."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    m = Machine()
    request = m.begin(3)
    m.decode([request])
    batch = m.batch("EXTEND", [request.row], [request.length + 1], extend_prefix_lens=m.ints([request.length]))
    batch.logical_forward_mode = ForwardMode.DECODE
    m.forward(batch)
    assert m.pending(request) == 1, "no fold"
    backend = SimpleNamespace(
        req_to_token_pool=m.pool,
        kernel_dispatcher=SimpleNamespace(decode_kernel=hooks.BufferedDecode(m.ring)),
        forward_metadata=SimpleNamespace(
            mamba_cache_indices=m.ints([request.slot], torch.int32), mamba_track_indices=None
        ),
    )
    m.ring.disarm(1)
    hooks.init_metadata(lambda backend, batch: None, backend, batch)
    assert m.ring.plan.pending[0] == 1, "planned like a decode"


def test_a_draft_worker_leaves_the_ring_alone() -> None:
    m = Machine()
    request = m.begin(3)
    m.decode([request])
    m.runner.is_draft_worker = True
    m.forward(m.batch("EXTEND", [request.row], [9], extend_prefix_lens=m.ints([4])))
    assert m.pending(request) == 1
