"""The way from the device's counters to prometheus: nothing waits, nothing is counted twice, nothing is lost."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import prometheus_client.multiprocess
import pytest
import torch

from replayssm_kernels.cursors import Counters
from sglang_replayssm import metrics, operator_hooks
from sglang_replayssm.boundaries import EVENTS, BoundaryPolicy, StateLedger
from tests.plugin import launch

LABELS = {"model_name": "tiny", "tp_rank": 0}
CAPACITY = 4
ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "docs" / "deployment" / "grafana-dashboard.json"


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The metrics in a registry of their own."""
    registry = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(prometheus_client, "REGISTRY", registry)
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
    assert value(families, "ring_bytes") == 4096  # known before anything ran
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


def test_gauges_follow_a_flush_of_an_idle_server(families: Any) -> None:
    """Flushing the cache frees slots and runs no forward."""
    free = [20]
    made = ring()
    made.pool.mamba_allocator.available_size = lambda: free[0]
    reporter = metrics.Reporter(made, now=lambda: 0.0)
    reporter.before_forward()
    reporter.when_idle()
    assert value(families, "state_slots_used") == 12
    free[0] = 32
    reporter.when_idle()
    assert value(families, "state_slots_used") == 0


def test_every_series_that_can_be_starts_at_zero(families: Any) -> None:
    """The rate of a counter that appears with its first event misses that event."""
    before = {(sample.name, *sorted(sample.labels.items())) for each in families.collect() for sample in each.samples}
    assert all(value(families, "boundary_states_total", event=event) == 0 for event in EVENTS)
    made = ring()
    made.counters.totals.add_(1)
    made.tally.events.update(dict.fromkeys(EVENTS, 1))
    reporter = metrics.Reporter(made, now=lambda: 0.0)
    reporter.before_forward()
    reporter.when_idle()
    after = {(sample.name, *sorted(sample.labels.items())) for each in families.collect() for sample in each.samples}
    assert after == before


def test_the_ledger_counts_events_of_these_names_only() -> None:
    ledger = StateLedger(BoundaryPolicy())
    ledger.stored(1, "tail")
    ledger.used(1, lambda: None)
    ledger.prune(lambda name: False)
    assert set(ledger.events) == set(EVENTS)


OBSERVED = {0: 3, 1: 0, 2: 70_000, 3: 1, 9: 2}  # 9 lies above every bound


def bulk(registry: Any) -> None:
    """The same observations in a BulkHistogram and, one by one, in prometheus_client's own histogram."""
    made = metrics.BulkHistogram("x:bulk", "Text.", LABELS, range(CAPACITY), registry)
    own = prometheus_client.Histogram("x:own", "Text.", list(LABELS), buckets=range(CAPACITY), registry=registry)
    for observed, times in OBSERVED.items():
        made.observe(observed, times)
        for _ in range(times):
            own.labels(**LABELS).observe(observed)


def shown(text: str, name: str) -> list[str]:
    """What a scrape shows of one metric, but for the name and the time of creation."""
    lines = [line.replace(name, "") for line in text.splitlines() if name in line and f"{name}_created" not in line]
    return sorted(lines)


@pytest.mark.parametrize("shared", [False, True], ids=["one process", "shared by files"])
def test_a_histogram_in_bulk_is_the_histogram_of_its_values(shared: bool, tmp_path: Path) -> None:
    """Also where the HTTP server collects it from the files of another process, as SGLang's does."""
    if shared:
        environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
        program = "import prometheus_client as p, tests.plugin.test_metrics as t; t.bulk(p.CollectorRegistry())"
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, check=True, timeout=120)
        registry = prometheus_client.CollectorRegistry()
        prometheus_client.multiprocess.MultiProcessCollector(registry, str(tmp_path))
    else:
        registry = prometheus_client.CollectorRegistry()
        bulk(registry)
    text = prometheus_client.generate_latest(registry).decode()
    assert shown(text, "x:bulk") == shown(text, "x:own")
    assert '_bucket{le="2.0",model_name="tiny",tp_rank="0"} 70003.0' in shown(text, "x:bulk")


def test_nothing_private_of_prometheus_client_is_touched() -> None:
    tree = ast.parse(Path(metrics.__file__).read_text())
    private = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr.startswith("_")]
    assert private and {ast.unparse(node.value) for node in private} == {"self"}


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
    assert named <= ours | sglangs
    from sglang.srt.observability import metrics_collector

    source = Path(metrics_collector.__file__).read_text()
    assert all(f'"{name}"' in source for name in named & sglangs)
    seen = {name.removeprefix(metrics.PREFIX) for name in named}
    assert {"folds_total", "forced_folds_total", "snapshots_total", "ring_bytes", "state_slots_used"} <= seen
    assert {"materialisations_total", "boundary_states_total", "pending_records_bucket"} <= seen
