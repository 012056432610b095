"""The plugin's metrics in SGLang's own /metrics (`--enable-metrics`), under its names and labels.

What the device knows is counted there by launches that run anyway, and copied to the host about once a second without
waiting; an idle server copies what is left. SGLang's processes share metrics through files (prometheus_client's
multiprocess mode), so whatever the scheduler process registers appears in the HTTP server's /metrics.

    sglang:replayssm_folds_total                       folds of a full ring, or before a direct step
    sglang:replayssm_forced_folds_total                folds because an extend, or another owner, needs the slot exact
    sglang:replayssm_snapshots_total                   states materialised for a track boundary
    sglang:replayssm_materialisations_total{reason}    fold, extend, hand_over, snapshot: the sum of the three above
    sglang:replayssm_boundary_states_total{event}      states left at boundaries inside an extend: taken, hit, evicted
    sglang:replayssm_pending_records                   histogram: records that a request replayed in a decode step
    sglang:replayssm_ring_bytes                        memory of the ring
    sglang:replayssm_state_slots, .._state_slots_used  slots of SGLang's state pool, and those not free
"""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from replayssm_kernels.cursors import Counters
from sglang_replayssm.boundaries import EVENTS

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
    import prometheus_client  # here and not above: SGLang sets its environment first

    global _families
    if _families is None:
        _families = Families(labels, capacity, prometheus_client.REGISTRY)


def families() -> Families | None:
    """The metrics of this process, None where SGLang keeps none."""
    return _families


class BulkHistogram:
    """A histogram that takes any number of equal observations in one call; prometheus_client's takes one.

    A busy server makes tens of thousands a second. The values are prometheus_client's own: where processes share
    metrics, they lie in this process's file, and the HTTP server's collector adds the histogram up from it.

    Args:
        name, text: of the metric.
        labels: their names and values.
        bounds: upper bounds of the buckets, ascending; a bucket for everything comes on top.
        registry: where the histogram is collected from, in this process.
    """

    def __init__(self, name: str, text: str, labels: Mapping[str, Any], bounds: Sequence[float], registry: Any) -> None:
        from prometheus_client import values
        from prometheus_client.utils import floatToGoString

        self._name, self._text = name, text
        self._labels = {label: str(value) for label, value in labels.items()}

        def value(suffix: str, **more: str) -> Any:
            every = {**self._labels, **more}
            return values.ValueClass("histogram", name, name + suffix, list(every), list(every.values()), text)

        self._bounds = [*bounds, math.inf]
        self._le = [floatToGoString(bound) for bound in self._bounds]
        self._buckets = [value("_bucket", le=le) for le in self._le]  # each without those below it
        self._sum = value("_sum")
        registry.register(self)

    def observe(self, observed: float, times: int) -> None:
        """Count `times` observations of the value `observed`."""
        self._buckets[bisect.bisect_left(self._bounds, observed)].inc(times)
        self._sum.inc(observed * times)

    def collect(self) -> Iterator[Any]:
        """What prometheus_client asks a registered metric for."""
        from prometheus_client.core import HistogramMetricFamily

        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        counts = itertools.accumulate(bucket.get() for bucket in self._buckets)
        family.add_metric(list(self._labels.values()), list(zip(self._le, counts, strict=True)), self._sum.get())
        yield family


class Families:
    """The metrics themselves, in `registry`."""

    def __init__(self, labels: Mapping[str, Any], capacity: int, registry: Any) -> None:
        import prometheus_client as prometheus

        names = list(labels)

        def counter(name: str, text: str, *more: str) -> Any:
            return prometheus.Counter(PREFIX + name, text, [*names, *more], registry=registry)

        def gauge(name: str, text: str) -> Any:
            made = prometheus.Gauge(PREFIX + name, text, names, multiprocess_mode="mostrecent", registry=registry)
            return made.labels(**labels)

        self._labels = dict(labels)
        self.folds = counter("folds", "Folds of a full ring, or before a direct step.").labels(**labels)
        self.forced_folds = counter(
            "forced_folds", "Folds before an extend, or before another owner takes the slot."
        ).labels(**labels)
        self.snapshots = counter("snapshots", "States materialised for a track boundary.").labels(**labels)
        self._materialisations = counter("materialisations", "States materialised, by reason.", "reason")
        self._boundary_states = counter(
            "boundary_states", "States left at boundaries inside an extend, by event.", "event"
        )
        self.pending = BulkHistogram(
            PREFIX + "pending_records",
            "Records that a request replayed in a decode step.",
            labels,
            range(capacity),
            registry,
        )
        self.ring_bytes = gauge("ring_bytes", "Bytes of the ring of pending records.")
        self.slots = gauge("state_slots", "Slots of the state pool.")
        self.slots_used = gauge("state_slots_used", "Slots of the state pool that are not free.")
        for reason in REASONS:  # a rate needs the zero before the first event
            self.materialisations(reason)
        for event in EVENTS:
            self.boundary_states(event)

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
                self.pending.observe(records, times)


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
        self._shown: int | None = None  # slots in use, as last published

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
        """A server without work: publish what is left. Nothing is running, so the wait is the copy's own time.

        SGLang calls this over and over. Without a forward since the last time only slots can have changed hands,
        when the cache is flushed: two integers are compared.
        """
        if not self._news:
            if self._slots_used() != self._shown:
                self._publish_host()
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
        self._publish_host()

    def _slots_used(self) -> int:
        pool = self._ring.pool
        return pool.mamba_pool.size - pool.mamba_allocator.available_size()

    def _publish_host(self) -> None:
        """What the host knows by itself: events of the prefix cache, and memory."""
        to = families()
        if to is None:
            return
        self._ring.tally.publish(to)
        to.ring_bytes.set(self._ring.ring_bytes)
        to.slots.set(self._ring.pool.mamba_pool.size)
        self._shown = self._slots_used()
        to.slots_used.set(self._shown)
