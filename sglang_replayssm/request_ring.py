"""The ring of one model shard, keyed by request row, and the moments at which SGLang's steps touch it.

Who owns what, and when it changes hands:

    thing            owner                               changes hands
    slot             SGLang's MambaPool allocator        exact whenever anyone but the running request reads it
    request row      SGLang's ReqToTokenPool             at allocation: its generation moves, `_claim_rows` sees it
    records of a row the request that holds the row      dropped with the row; a fold turns them into the slot's state
    checkpoint[row]  this class, on the forward stream   set after an extend, moved by folds and direct steps

Everything is launched on the stream that is current when SGLang calls us, which is the forward stream, so a reset
can not be overtaken by the previous owner's last step (it was launched earlier on the same stream).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from replayssm_kernels.cursors import Counters, StepPlan, mark_fresh, plan_forced_fold, plan_snapshot, plan_step
from replayssm_kernels.decode import decode
from replayssm_kernels.launch_shapes import direct_batch as measured_direct_batch
from replayssm_kernels.materialise import materialise
from replayssm_kernels.ring import Ring, RingShape
from replayssm_kernels.verify import verify
from sglang_replayssm.agreement import Agreement
from sglang_replayssm.metrics import Reporter, Tally

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

logger = logging.getLogger(__name__)

ATTRIBUTE = "replayssm"  # where the pool carries its RequestRing
GIB = 1 << 30
# Warm-up batches may be padded past the pool's rows; the plan's buffers are 36 bytes an entry.
_MIN_PLAN = 4096


def ring_of(pool: Any) -> RequestRing | None:
    """The RequestRing that belongs to a request pool, or None where buffered decode is off."""
    return getattr(pool, ATTRIBUTE, None)


class RequestRing:
    """Ring, cursors and per-step plan of one HybridReqToTokenPool.

    Args:
        shape: the ring's shape; `shape.rows` must equal the pool's rows (row 0 is padding).
        pool: the request pool whose rows key the ring; its MambaPool holds the slots.
        device: where the pool lives.
        count: count what the cursors do, for SGLang's metrics.
        direct_batch: decode steps of up to so many entries, padding included, write the state themselves and leave
            nothing pending; None takes what was measured to be faster.

    Raises:
        ValueError: the shape is outside what the kernels are tested for.
        RuntimeError: the device has not enough memory for the ring.
    """

    def __init__(
        self,
        shape: RingShape,
        pool: HybridReqToTokenPool,
        device: str | torch.device,
        *,
        count: bool = False,
        direct_batch: int | None = None,
    ) -> None:
        shape.validate()
        size = shape.bytes_per_row() * shape.rows
        try:
            self.ring = Ring.allocate(shape, device)
            self.plan = StepPlan.allocate(max(_MIN_PLAN, shape.rows), device)
        except torch.OutOfMemoryError as error:
            raise RuntimeError(
                f"ReplaySSM ring: no memory for {size / GIB:.2f} GiB ({shape.rows} request rows x "
                f"{shape.bytes_per_row() / (1 << 20):.2f} MiB). Lower --max-running-requests, "
                f"--linear-replayssm-cache-len or --mem-fraction-static."
            ) from error
        cache = pool.mamba_pool.mamba_cache
        if len(cache.conv) != 1:
            raise ValueError(f"expected one conv state per layer, found {len(cache.conv)}")
        self.pool = pool
        self.ring_bytes = size
        self.tally = Tally()
        self.host_tier = False  # set where HiCache's host pools are attached
        self.counters = Counters.allocate(shape.capacity, device) if count else None
        self.reporter = Reporter(self) if count else None
        self.state: torch.Tensor = cache.temporal
        self.conv: torch.Tensor = cache.conv[0]
        self.direct_batch = (
            measured_direct_batch(shape, self.state.element_size()) if direct_batch is None else direct_batch
        )
        self.layer_index: dict[int, int] = dict(pool.mamba_map)
        self.last_layer_id = max(self.layer_index, key=self.layer_index.__getitem__)
        self.graph_track_masks: dict[int, torch.Tensor | None] = {}  # by captured batch size; see hooks.py
        self._device = torch.device(device)
        self._pinned = self._device.type == "cuda"
        self._generation = pool.req_generation.clone()
        self._fault_copy = torch.zeros(1, dtype=torch.int32, pin_memory=self._pinned)
        self._fault_event = torch.cuda.Event() if self._pinned else None
        self._fault_pending = False
        self._agreement = None
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            self._agreement = Agreement(self.ring.checkpoint)
        self._leaving: list[tuple[int, torch.Tensor, int]] = []
        self._layouts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        logger.info(
            "ReplaySSM: %s on, ring of %d records x %d request rows x %d layers = %.2f GiB (u in %s).",
            f"ring spec-verify of {shape.max_width} tokens a step" if self.verifies else "buffered decode",
            shape.capacity,
            shape.rows,
            shape.layers,
            size / GIB,
            str(shape.u_dtype).removeprefix("torch."),
        )

    @property
    def verifies(self) -> bool:
        """Whether this is the ring of a server with speculative decoding."""
        return self.ring.shape.max_width > 1

    def decided(self, *decision: object) -> None:
        """Something that every tensor-parallel rank must decide alike, in plain values: for their comparison."""
        if self._agreement is not None:
            self._agreement.note(*decision)

    def describe(self) -> dict[str, Any]:
        """What is on, for /server_info: plain values."""
        shape = self.ring.shape
        return {
            "buffered_decode": True,
            "verify_width": shape.max_width,
            "gate": shape.gate,
            "layers": shape.layers,
            "capacity": shape.capacity,
            "u_dtype": str(shape.u_dtype).removeprefix("torch."),
            "ring_rows": shape.rows,
            "ring_bytes": self.ring_bytes,
            "direct_batch": self.direct_batch,
            "host_tier": self.host_tier,
            "metrics": self.counters is not None,
        }

    # -- before a forward ---------------------------------------------------------------------------------------------

    def before_forward(self, batch: ForwardBatch) -> None:
        """Before any forward of the target model: resets rows that changed owner, folds rows that extend.

        A forward that is neither buffered decode, nor ring verify, nor idle reads and writes the slot itself, so it
        starts from a folded slot and leaves the checkpoint at the end of the extend (DESIGN invariant 3).
        """
        self._fold_leaving()
        self._claim_rows()
        self._check_faults()
        if self._agreement is not None:
            self._agreement.before_forward()
        if self.reporter is not None:
            self.reporter.before_forward()
        mode = batch.logical_forward_mode
        if mode.is_decode_or_idle() or mode.is_target_verify():
            return
        rows = batch.req_pool_indices
        slots = self.pool.get_mamba_indices(rows)
        lens, ends = batch.extend_prefix_lens, batch.seq_lens
        plan_forced_fold(self.ring, self.plan.fold, rows, lens, slots, ends, self.counters, Counters.EXTENDS)
        materialise(self.state, self.ring, self.plan.fold)

    def _claim_rows(self) -> None:
        """Rows whose generation moved since the last forward have a new owner: nothing of the old one is pending."""
        generation = self.pool.req_generation
        if torch.equal(generation, self._generation):
            return
        rows = (generation != self._generation).nonzero().flatten()
        self._generation.copy_(generation)
        mark_fresh(self.ring, self._to_device(rows))

    # -- decode -------------------------------------------------------------------------------------------------------

    def plan_decode(
        self,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        slots: torch.Tensor,
        track_mask: torch.Tensor | None,
        track_slots: torch.Tensor | None,
    ) -> None:
        """Once per decode forward, before the first layer: cursors, lists, and the folds that are due.

        B, padding included, says whether the step is direct; `decode_layer` sees the same B.

        Args: [B] device vectors: request rows, token counts with this step's token, slots (-1 padding), track
            mask and destination slots (-1 none) or None where nothing tracks.
        """
        direct = rows.shape[0] <= self.direct_batch
        plan_step(self.ring, self.plan, rows, seq_lens, slots, track_mask, track_slots, self.counters, direct=direct)
        materialise(self.state, self.ring, self.plan.fold)

    def disarm(self, batch_size: int) -> None:
        """While a graph is captured: the captured launches see padding only and touch no row."""
        self.plan.disarm(batch_size)

    def decode_layer(
        self,
        layer_id: int,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        scale: float,
        slots: torch.Tensor,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """One layer's decode: output [B, HV, V] in mixed_qkv's dtype; appends one record per row, or writes the state.

        Args: as `replayssm_kernels.decode.decode`.
        """
        index = self.layer_index[layer_id]
        pending = self.plan.pending[: mixed_qkv.shape[0]]
        return decode(
            mixed_qkv,
            a,
            b,
            A_log,
            dt_bias,
            self.state[index],
            self.ring,
            index,
            slots,
            rows,
            pending,
            scale,
            direct=mixed_qkv.shape[0] <= self.direct_batch,
        )

    def snapshot(self) -> None:
        """After the last layer: the states that track boundaries of this step asked for, into their track slots."""
        materialise(self.state, self.ring, self.plan.snapshot)

    # -- verify -------------------------------------------------------------------------------------------------------

    def plan_verify(self, rows: torch.Tensor, committed: torch.Tensor, slots: torch.Tensor, width: int) -> None:
        """Once per verify forward, before the first layer: cursors, and the folds that are due.

        Accepted drafts are pending from the next step on and rejected ones are written over: `committed` says which.

        Args:
            rows, committed, slots: [B] device vectors: request rows, token counts without this step's `width` tokens,
                slots (-1 padding).
            width: tokens that the step brings to every entry.
        """
        _, widths = self.layout(width)
        plan_step(
            self.ring,
            self.plan,
            rows,
            committed + width,
            slots,
            counters=self.counters,
            widths=widths[: rows.shape[0]],
        )
        materialise(self.state, self.ring, self.plan.fold)

    def layout(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(starts, widths) of entries that bring `width` tokens each, as `verify` takes them: int32, for the largest
        batch. Made once, before a CUDA graph that reads them is captured.
        """
        if width not in self._layouts:
            most = self.plan.pending.shape[0]
            starts = torch.arange(0, (most + 1) * width, width, dtype=torch.int32, device=self._device)
            self._layouts[width] = starts, torch.full((most,), width, dtype=torch.int32, device=self._device)
        return self._layouts[width]

    def verify_layer(
        self,
        layer_id: int,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        scale: float,
        slots: torch.Tensor,
        rows: torch.Tensor,
        width: int,
    ) -> torch.Tensor:
        """One layer's ring verify of B entries x `width` tokens: output [B * width, HV, V] in mixed_qkv's dtype, zeros
        for padding; writes one record per token.

        Args: as `replayssm_kernels.verify.verify`.
        """
        index = self.layer_index[layer_id]
        batch = rows.shape[0]
        starts, widths = self.layout(width)
        return verify(
            mixed_qkv,
            a,
            b,
            A_log,
            dt_bias,
            self.state[index],
            self.ring,
            index,
            slots,
            rows,
            self.plan.pending[:batch],
            starts[: batch + 1],
            widths[:batch],
            scale,
        )

    def snapshot_verified(
        self,
        rows: torch.Tensor,
        committed: torch.Tensor,
        slots: torch.Tensor,
        steps: torch.Tensor,
        track_slots: torch.Tensor,
    ) -> None:
        """After acceptance: the states that track boundaries inside accepted runs asked for, into their track slots.

        Args: [B] device vectors: as `plan_verify` had them; the step after whose token a boundary lies (0 is the
            step's first token, negative: no boundary was crossed), and destination slots (negative: none).
        """
        positions = torch.where(steps >= 0, committed + steps + 1, -1)
        plan_snapshot(self.ring, self.plan.snapshot, rows, positions, slots, track_slots, self.counters)
        materialise(self.state, self.ring, self.plan.snapshot)

    # -- slot leaves the request --------------------------------------------------------------------------------------

    def fold_row(self, row: int, slot: torch.Tensor, committed: int) -> None:
        """Make `slot` (0-dim device tensor) exact at `committed` tokens before it is handed to someone else."""
        self._claim_rows()  # an owner that never ran has nothing pending
        rows = self._to_device(torch.tensor([row]))
        lens = self._to_device(torch.tensor([committed]))
        slots = slot.reshape(1)
        plan_forced_fold(self.ring, self.plan.fold, rows, lens, slots, lens, self.counters, Counters.HAND_OVERS)
        materialise(self.state, self.ring, self.plan.fold)

    def fold_before_next_forward(self, row: int, slot: torch.Tensor, committed: int) -> None:
        """As `fold_row`, but on the forward stream, at the start of whatever forward comes next.

        For a slot that leaves while a step of its request may still be in flight on that stream. Who takes the slot
        reads it in a forward, and the row's next owner runs in one: both come after. Who does not wait for a forward
        calls `fold_leaving_on` first.
        """
        self.decided("leaves", row, committed)
        self._leaving.append((row, slot.reshape(1), committed))

    def fold_leaving_on(self, stream: torch.cuda.Stream | None, overlap: bool = True) -> None:
        """Launch the folds of slots that have left now, where forwards run, instead of before the next forward.

        For copies between slots and the host: they wait for what the forward stream has been given so far. A copy
        from a slot that has left needs its fold; and a copy into such a slot, evicted and given out again, must not
        be followed by one.

        Args:
            stream: what the copies wait for; None where that is the current stream.
            overlap: whether forwards run on `stream`. Without overlap scheduling they run on the current one, and
                `stream` is one that no forward waits for.
        """
        if not self._leaving:
            return
        if stream is None or not self._pinned:
            self._fold_leaving()
            return
        if not overlap:  # on `stream`, the next forward would use list, cursors and records beside the fold
            self._fold_leaving()
            stream.wait_stream(torch.cuda.current_stream())
            return
        stream.wait_stream(torch.cuda.current_stream())  # the slots' ids were written there
        with torch.cuda.stream(stream):
            self._fold_leaving()

    def _fold_leaving(self) -> None:
        if not self._leaving:
            return
        rows, slots, lens = zip(*self._leaving, strict=True)
        if self._pinned:  # the stream that made these must not hand their memory on before this one has read it
            for slot in slots:
                slot.record_stream(torch.cuda.current_stream())
        self._leaving = []
        row_ids = self._to_device(torch.tensor(rows))
        counts = self._to_device(torch.tensor(lens))
        slot_ids = torch.cat(slots)
        plan_forced_fold(
            self.ring, self.plan.fold, row_ids, counts, slot_ids, counts, self.counters, Counters.HAND_OVERS
        )
        materialise(self.state, self.ring, self.plan.fold)

    # -- faults -------------------------------------------------------------------------------------------------------

    def _check_faults(self) -> None:
        """Raise when a kernel met a cursor that can not be right; looks at an asynchronous copy, never waits."""
        if self._fault_event is None:
            self._fault_copy.copy_(self.ring.faults)
        elif self._fault_pending and not self._fault_event.query():
            return
        if int(self._fault_copy):
            raise RuntimeError(
                f"ReplaySSM: {int(self._fault_copy)} request row(s) had a checkpoint that does not fit their token "
                "count. Their output is NaN rather than wrong. This is a bug: please report it with the server's "
                "arguments and log; SGLANG_REPLAYSSM_DISABLE=1 without the flag serves without buffered decode."
            )
        if self._fault_event is not None:
            self._fault_copy.copy_(self.ring.faults, non_blocking=True)
            self._fault_event.record()
            self._fault_pending = True

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._pinned:
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)
