"""The way from the device's counters to prometheus: nothing waits, nothing is counted twice, nothing is lost."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
import torch

from replayssm_kernels.cursors import Counters
from sglang_replayssm import metrics, operator_hooks
from tests.plugin import launch

LABELS = {"model_name": "tiny", "tp_rank": 0}
CAPACITY = 4
DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "deployment" / "grafana-dashboard.json"


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The metrics in a registry of their own."""
    registry = prometheus_client.CollectorRegistry()
    for kind in ("Counter", "Gauge", "Histogram"):
        made = getattr(prometheus_client, kind)
        monkeypatch.setattr(
            prometheus_client, kind, lambda *args, made=made, **kwargs: made(*args, **kwargs, registry=registry)
        )
    monkeypatch.setattr(metrics, "_families", None)
    metrics.start(LABELS, CAPACITY)
    first = metrics.families()
    metrics.start(LABELS, CAPACITY)  # a second collector in the process registers nothing
    assert metrics.families() is first
    return registry


def value(registry: Any, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(metrics.PREFIX + name, {"model_name": "tiny", "tp_rank": "0", **labels})


def ring(free: int = 30) -> Any:
    """What a Reporter reads of a ring."""
    pool = SimpleNamespace(
        mamba_pool=SimpleNamespace(size=32), mamba_allocator=SimpleNamespace(available_size=lambda: free)
    )
    return SimpleNamespace(
        counters=Counters.allocate(CAPACITY, launch.DEVICE), tally=metrics.Tally(), ring_bytes=4096, pool=pool
    )


def test_copies_are_published_once_and_about_once_a_second(families: Any) -> None:
    clock = [100.0]
    made = ring()
    reporter = metrics.Reporter(made, now=lambda: clock[0])
    asked = []
    ask = reporter._ask
    reporter._ask = lambda: (asked.append(clock[0]), ask())  # type: ignore[method-assign]
    made.counters.totals.add_(torch.tensor([3, 2, 1, 0, 5, 0, 0, 7], device=launch.DEVICE))
    for _ in range(100):
        reporter.before_forward()
        clock[0] += 0.05
        if launch.DEVICE == "cuda":
            torch.cuda.synchronize()
    assert len(asked) == 5
    assert value(families, "folds_total") == 3
    assert value(families, "forced_folds_total") == 1
    assert value(families, "snapshots_total") == 2
    assert [value(families, "materialisations_total", reason=reason) for reason in metrics.REASONS] == [3, 1, 0, 2]
    assert value(families, "pending_records_bucket", le="0.0") == 5
    assert value(families, "pending_records_bucket", le="2.0") == 5
    assert value(families, "pending_records_count") == 12 and value(families, "pending_records_sum") == 21
    assert [value(families, name) for name in ("ring_bytes", "state_slots", "state_slots_used")] == [4096, 32, 2]


def test_an_idle_server_publishes_the_rest_and_then_does_nothing(families: Any) -> None:
    made = ring()
    reporter = metrics.Reporter(made, now=lambda: 0.0)
    reporter.when_idle()
    assert value(families, "ring_bytes") == 0  # nothing ran yet
    reporter.before_forward()
    made.counters.totals[Counters.HAND_OVERS] += 4
    made.tally.events["taken"] += 3
    reporter.when_idle()
    assert value(families, "forced_folds_total") == 4
    assert value(families, "boundary_states_total", event="taken") == 3
    made.tally.events["taken"] += 1
    made.tally.events["evicted"] += 1
    reporter.when_idle()  # no forward since
    assert value(families, "boundary_states_total", event="taken") == 3
    reporter.before_forward()
    reporter.when_idle()
    assert value(families, "boundary_states_total", event="taken") == 4
    assert value(families, "boundary_states_total", event="evicted") == 1
    assert value(families, "forced_folds_total") == 4


def test_counts_before_sglangs_metrics_exist_are_not_lost(families: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up forwards run before the scheduler makes its collector."""
    made = ring()
    reporter = metrics.Reporter(made, now=lambda: 0.0)
    made.counters.totals[Counters.FOLDS] += 2
    with monkeypatch.context() as patch:
        patch.setattr(metrics, "_families", None)
        reporter.before_forward()
        reporter.when_idle()
    assert value(families, "folds_total") == 0
    reporter.before_forward()
    reporter.when_idle()
    assert value(families, "folds_total") == 2


@pytest.mark.parametrize("flag", [True, False])
def test_the_collector_hook_registers_with_the_flag_only(flag: bool, families: Any, monkeypatch: Any) -> None:
    launch.publish_flag() if flag else launch.publish(launch.parse())
    started = []
    monkeypatch.setattr(metrics, "start", lambda labels, capacity: started.append((labels, capacity)))
    collector = SimpleNamespace()

    def original(made: Any, **kwargs: Any) -> None:
        made.labels = kwargs["labels"]

    operator_hooks.collector_init(original, collector, labels=LABELS)
    assert started == ([(LABELS, 16)] if flag else [])
    assert collector.labels is LABELS


def test_every_query_of_the_dashboard_is_about_a_metric_that_exists(families: Any) -> None:
    ours = {sample.name for family in families.collect() for sample in family.samples}
    sglangs = {"sglang:num_running_reqs", "sglang:gen_throughput", "sglang:cache_hit_rate", "sglang:mamba_usage"}
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(queries) >= 8
    named = {name for query in queries for name in re.findall(r"sglang:\w+", query)}
    assert named <= ours | sglangs | {metrics.PREFIX + "boundary_states_total"}
    from sglang.srt.observability import metrics_collector

    source = Path(metrics_collector.__file__).read_text()
    assert all(f'"{name}"' in source for name in named & sglangs)
    shown = {name.removeprefix(metrics.PREFIX) for name in named}
    assert {"folds_total", "forced_folds_total", "snapshots_total", "ring_bytes", "state_slots_used"} <= shown
    assert {"materialisations_total", "boundary_states_total", "pending_records_bucket"} <= shown
