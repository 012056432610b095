"""Pools over time: the page as SGLang writes it, sampled while a run goes on."""

from __future__ import annotations

import asyncio

import pytest

from bench_rag.client import Client
from bench_rag.metrics import occupancy, read_gauges, sampled
from tests.bench.fakes import FakeSglang

PAGE = """\
# HELP sglang:mamba_usage The token usage for Mamba layers.
# TYPE sglang:mamba_usage gauge
sglang:mamba_usage{engine_type="unified",model_name="a b}",tp_rank="0"} 0.25
sglang:mamba_usage{engine_type="unified",model_name="a b}",tp_rank="1"} 0.5
sglang:mamba_usage_extra 9.0
sglang:full_token_usage{tp_rank="0"} 1e-1
sglang:num_running_reqs 3.0
sglang:num_queue_reqs nonsense
"""


def test_gauges_are_read_by_name_and_the_largest_rank_counts():
    assert read_gauges(PAGE) == {"state_pool": 0.5, "kv_pool": 0.1, "running": 3.0}
    assert read_gauges("") == {} and read_gauges("<html>no</html>") == {}


def collect(fake: FakeSglang, count: int) -> list:
    """At least ``count`` samples, however slow the machine; some time for more that should not come."""

    async def go() -> list:
        async with fake as url, Client(url) as client, sampled(client, interval=0.02) as samples:
            for _ in range(500):
                await asyncio.sleep(0.02)
                if len(samples) >= count and fake.metrics_asked:
                    break
            await asyncio.sleep(0.1)
            return samples

    return asyncio.run(go())


def test_samples_follow_the_server():
    pages = [PAGE, PAGE.replace("0.5", "0.75")]
    samples = collect(FakeSglang(events=[], metrics=pages), 3)
    assert len(samples) >= 3 and samples[0]["state_pool"] == 0.5 and samples[1]["state_pool"] == 0.75
    assert all(a["at"] < b["at"] for a, b in zip(samples, samples[1:], strict=False))


def test_a_server_without_metrics_is_asked_once():
    fake = FakeSglang(events=[])
    assert collect(fake, 0) == [] and fake.metrics_asked == 1


def test_occupancy_is_mean_and_maximum():
    samples = [{"at": 0.0, "state_pool": 0.2}, {"at": 1.0, "state_pool": 0.6, "kv_pool": 0.1}]
    assert occupancy(samples) == {
        "state_pool_mean": pytest.approx(0.4),
        "state_pool_max": 0.6,
        "kv_pool_mean": 0.1,
        "kv_pool_max": 0.1,
    }
    assert occupancy([]) == {}
