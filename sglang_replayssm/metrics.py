"""The plugin's metrics in SGLang's own /metrics (`--enable-metrics`), under its names and labels.

What the device knows is counted there by launches that run anyway, and copied to the host about once a second without
waiting; an idle server copies what is left. SGLang's processes share metrics through files (prometheus_client's
multiprocess mode), so whatever the scheduler process registers appears in the HTTP server's /metrics.

    sglang:replayssm_folds_total                       folds of a full ring
    sglang:replayssm_forced_folds_total                folds because an extend, or another owner, needs the slot exact
    sglang:replayssm_snapshots_total                   states materialised for a track boundary
    sglang:replayssm_materialisations_total{reason}    fold, extend, hand_over, snapshot: the sum of the three above
    sglang:replayssm_boundary_states_total{event}      states left at boundaries inside an extend: taken, hit, evicted
    sglang:replayssm_pending_records                   histogram: records that a request replayed in a decode step
    sglang:replayssm_ring_bytes                        memory of the ring
    sglang:replayssm_state_slots, .._state_slots_used  slots of SGLang's state pool, and those not free
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from replayssm_kernels.cursors import Counters

if TYPE_CHECKING:
    from sglang_replayssm.request_ring import RequestRing

INTERVAL = 1.0  # seconds between copies while the server is busy
PREFIX = "sglang:replayssm_"
REASONS = {
    "fold": Counters.FOLDS,
    "extend": Counters.EXTENDS,
    "hand_over": Counters.HAND_OVERS,
    "snapshot": Counters.SNAPSHOTS,
}

_families: Families | None = None


def start(labels: Mapping[str, Any], capacity: int) -> None:
    """Register the metrics of this process once, with SGLang's labels, for a ring of `capacity` records."""
    global _families
    if _families is None:
        _families = Families(labels, capacity)


def families() -> Families | None:
    """The metrics of this process, None where SGLang keeps none."""
    return _families


class Families:
    """The metrics themselves. prometheus_client is imported here: SGLang sets its environment first."""

    def __init__(self, labels: Mapping[str, Any], capacity: int) -> None:
        import prometheus_client as prometheus

        names = list(labels)

        def counter(name: str, text: str, *more: str) -> Any:
            return prometheus.Counter(PREFIX + name, text, [*names, *more])

        def gauge(name: str, text: str) -> Any:
            made = prometheus.Gauge(PREFIX + name, text, names, multiprocess_mode="mostrecent")
            return made.labels(**labels)

        self._labels = dict(labels)
        self.folds = counter("folds", "Folds of a full ring.").labels(**labels)
        self.forced_folds = counter(
            "forced_folds", "Folds before an extend, or before another owner takes the slot."
        ).labels(**labels)
        self.snapshots = counter("snapshots", "States materialised for a track boundary.").labels(**labels)
        self._materialisations = counter("materialisations", "States materialised, by reason.", "reason")
        self._boundary_states = counter(
            "boundary_states", "States left at boundaries inside an extend, by event.", "event"
        )
        self.pending = prometheus.Histogram(
            PREFIX + "pending_records",
            "Records that a request replayed in a decode step.",
            names,
            buckets=tuple(range(capacity)),
        ).labels(**labels)
        self.ring_bytes = gauge("ring_bytes", "Bytes of the ring of pending records.")
        self.slots = gauge("state_slots", "Slots of the state pool.")
        self.slots_used = gauge("state_slots_used", "Slots of the state pool that are not free.")
        for reason in REASONS:  # a rate needs the zero before the first event
            self.materialisations(reason)

    def materialisations(self, reason: str) -> Any:
        """The counter of one reason."""
        return self._materialisations.labels(**self._labels, reason=reason)

    def boundary_states(self, event: str) -> Any:
        """The counter of one event."""
        return self._boundary_states.labels(**self._labels, event=event)

    def add(self, new: list[int]) -> None:
        """Add what the device counted since the last time, laid out as `Counters.totals`."""
        self.folds.inc(new[Counters.FOLDS])
        self.forced_folds.inc(new[Counters.EXTENDS] + new[Counters.HAND_OVERS])
        self.snapshots.inc(new[Counters.SNAPSHOTS])
        for reason, index in REASONS.items():
            self.materialisations(reason).inc(new[index])
        for records, times in enumerate(new[Counters.HISTOGRAM :]):
            if times:
                # In bulk: `observe` takes one value a call, and a busy server makes tens of thousands a second.
                self.pending._buckets[records].inc(times)
                self.pending._sum.inc(records * times)


class Tally:
    """Host-side events of the prefix cache, counted where they happen and published with the rest.

    Args:
        events: totals by event, see `boundaries.StateLedger.events`; None where no states are kept at boundaries.
    """

    def __init__(self, events: Counter[str] | None = None) -> None:
        self.events: Counter[str] = Counter() if events is None else events
        self._published: Counter[str] = Counter()

    def publish(self, to: Families) -> None:
        """Add what came since the last time."""
        for event, total in self.events.items():
            to.boundary_states(event).inc(total - self._published[event])
        self._published = Counter(self.events)


class Reporter:
    """Brings the counters of one ring to the metrics of this process, without ever waiting in a busy server.

    Args:
        ring: whose counters; `now`: a clock in seconds.
    """

    def __init__(self, ring: RequestRing, now: Callable[[], float] = time.monotonic) -> None:
        self._ring, self._now = ring, now
        self._totals = ring.counters.totals
        on_gpu = self._totals.is_cuda
        self._copy = torch.zeros(self._totals.shape, dtype=self._totals.dtype, pin_memory=on_gpu)
        self._event = torch.cuda.Event() if on_gpu else None
        self._published = [0] * len(self._copy)
        self._in_flight = False
        self._news = False
        self._next = 0.0

    def before_forward(self) -> None:
        """Before a forward of a busy server: publish a copy that has arrived, and ask for the next one in time."""
        self._news = True
        if self._in_flight:
            if self._event is None or self._event.query():
                self._publish()
        elif self._now() >= self._next:
            self._next = self._now() + INTERVAL
            self._ask()

    def when_idle(self) -> None:
        """A server without work: publish what is left. Nothing is running, so the wait is the copy's own time."""
        if not self._news:
            return
        self._news = False
        self._ask()
        if self._event is not None:
            self._event.synchronize()
        self._publish()

    def _ask(self) -> None:
        self._copy.copy_(self._totals, non_blocking=True)
        if self._event is not None:
            self._event.record()
        self._in_flight = True

    def _publish(self) -> None:
        self._in_flight = False
        to = families()
        if to is None:  # SGLang registers its metrics after the first warm-up forwards
            return
        totals = self._copy.tolist()
        to.add([new - old for new, old in zip(totals, self._published, strict=True)])
        self._published = totals
        self._ring.tally.publish(to)
        to.ring_bytes.set(self._ring.ring_bytes)
        slots = self._ring.pool.mamba_pool.size
        to.slots.set(slots)
        to.slots_used.set(slots - self._ring.pool.mamba_allocator.available_size())
