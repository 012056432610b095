"""Hooks for operators: the plugin's metrics beside SGLang's, and what of it is on. Pass-throughs without a ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_replayssm import __version__, arguments, metrics
from sglang_replayssm.prefix_states import states_of
from sglang_replayssm.request_ring import ring_of

Original = Callable[..., Any]


def metrics_enabled() -> bool:
    """Whether this server keeps metrics (--enable-metrics)."""
    from sglang.srt.runtime_context import get_observability

    return bool(get_observability().enable_metrics)


def collector_init(original: Original, collector: Any, *args: Any, **kwargs: Any) -> None:
    """SchedulerMetricsCollector.__init__: the plugin's metrics join SGLang's, under the same labels."""
    original(collector, *args, **kwargs)
    if arguments.requested():
        metrics.start(collector.labels, arguments.ring_capacity())


def on_idle(original: Original, scheduler: Any) -> Any:
    """Scheduler.on_idle: publish what was counted since the last copy, before SGLang goes to sleep."""
    ring = ring_of(scheduler.req_to_token_pool)
    if ring is not None and ring.reporter is not None:
        ring.reporter.when_idle()
    return original(scheduler)


def get_internal_state(original: Original, controller: Any, recv_req: Any) -> Any:
    """SchedulerInternalStateController.get_internal_state: /server_info says what of the plugin is on."""
    reply = original(controller, recv_req)
    pool = controller.scheduler.req_to_token_pool
    ring = ring_of(pool)
    if ring is not None:
        states = states_of(pool)
        reply.internal_state["replayssm"] = {
            "version": __version__,
            **ring.describe(),
            "states_at_boundaries": states is not None and states.asks,
        }
    return reply
