"""Figures against numpy, against hand-made timelines, and against their definitions."""

from __future__ import annotations

import numpy as np
import pytest

from bench_rag import measures
from bench_rag.client import Reply


def reply(number: int, sent: float, events: list[tuple[float, int]], prompt=10, cached=0, ids=None, error="") -> Reply:
    return Reply(
        conversation=number,
        sent=sent,
        ended=events[-1][0] if events else sent,
        events=events,
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_ids=ids if ids is not None else [number],
        error=error,
    )


def test_percentiles_are_numpys():
    rng = np.random.default_rng(0)
    first = rng.exponential(1.0, 57)
    replies = [reply(i, 5.0, [(5.0 + t, 1), (5.0 + t + 2.0, 5)]) for i, t in enumerate(first)]
    figures = measures.measure(replies)
    for p in (50, 90, 99):
        assert figures[f"ttft_ms_p{p}"] == pytest.approx(1e3 * np.percentile(first, p))
    assert figures["ttft_ms_mean"] == pytest.approx(1e3 * first.mean())
    # Four tokens came together, two seconds after the first.
    assert figures["tpot_ms_mean"] == pytest.approx(500) and figures["itl_ms_p99"] == pytest.approx(500)
    assert figures["e2e_ms_mean"] == pytest.approx(1e3 * (first.mean() + 2))


def test_rates_hits_and_failures():
    replies = [
        reply(0, 0.0, [(1.0, 1), (2.0, 2)], prompt=100, cached=75),
        reply(1, 1.0, [(4.0, 1), (5.0, 2)], prompt=300, cached=0),
        reply(2, 0.0, [], prompt=1000, error="HTTP 500"),
    ]
    figures = measures.measure(replies)
    assert (figures["requests"], figures["failed"], figures["first_error"]) == (2, 1, "HTTP 500")
    assert figures["hit_rate"] == pytest.approx(75 / 400) and figures["requests_without_hit"] == 1
    assert figures["duration_s"] == 5.0
    assert figures["output_throughput"] == pytest.approx(4 / 5)
    assert figures["prompt_throughput"] == pytest.approx(400 / 5)
    assert figures["request_throughput"] == pytest.approx(2 / 5)


def test_nothing_but_failures():
    figures = measures.measure([reply(0, 0.0, [], error="gone")])
    assert figures == {"requests": 0, "failed": 1, "first_error": "gone"}


def test_hits_by_tier_add_up():
    a, b = reply(0, 0.0, [(1.0, 1)], cached=7), reply(1, 0.0, [(1.0, 1)], cached=5)
    a.cached_by_tier, b.cached_by_tier = {"device": 3, "host": 4}, {"device": 5}
    figures = measures.measure([a, b])
    assert figures["cached_tokens_by_tier"] == {"device": 8, "host": 4}
    assert (figures["hit_rate_device"], figures["hit_rate_host"]) == (8 / 20, 4 / 20)


def test_goodput_counts_first_tokens_in_time():
    replies = [reply(i, 0.0, [(first, 1), (4.0, 2)]) for i, first in enumerate((0.5, 1.0, 1.5, 3.0))]
    figures = measures.measure([*replies, reply(4, 0.0, [], error="gone")], ttft_limit=1.0)
    assert figures["goodput"] == pytest.approx(2 / 4.0) and figures["in_time"] == pytest.approx(2 / 5)
    assert "goodput" not in measures.measure(replies)


def test_one_event_has_no_time_per_token():
    figures = measures.measure([reply(0, 0.0, [(1.0, 4)])])
    assert "tpot_ms_mean" not in figures and "itl_ms_mean" not in figures and figures["output_tokens"] == 4


def test_steady_decode_counts_the_common_window_only():
    # Request 0 decodes at 10 tokens/s from 1.0 s to 3.0 s, request 1 at 20/s from 2.0 s to 4.0 s: both in (2, 3].
    slow = reply(0, 0.0, [(1.0 + 0.1 * i, i + 1) for i in range(21)])
    fast = reply(1, 0.0, [(2.0 + 0.05 * i, i + 1) for i in range(41)])
    rate, seconds = measures.steady_decode([slow, fast])
    assert seconds == pytest.approx(1.0) and rate == pytest.approx(30, abs=2)
    figures = measures.measure([slow, fast], steady=True)
    assert figures["steady_throughput"] == rate and "steady_throughput" not in measures.measure([slow, fast])


def test_steady_decode_counts_every_token_of_an_event():
    # Events of 4 tokens every second: throughput is 4/s however few events there are.
    replies = [reply(i, 0.0, [(float(t), 4 * t) for t in range(1, 12)]) for i in range(3)]
    rate, seconds = measures.steady_decode(replies)
    assert seconds == 10 and rate == pytest.approx(12)


def test_no_steady_window_without_overlap():
    assert measures.steady_decode([reply(0, 0.0, [(1.0, 1), (2.0, 2)]), reply(1, 0.0, [(3.0, 1), (4.0, 2)])]) is None


def test_equal_outputs_compares_what_both_answered():
    first = [reply(0, 0, [(1, 1)], ids=[1, 2]), reply(1, 0, [(1, 1)], ids=[3]), reply(2, 0, [], error="x")]
    other = [reply(0, 0, [(1, 1)], ids=[1, 2]), reply(1, 0, [(1, 1)], ids=[4]), reply(2, 0, [(1, 1)], ids=[5])]
    assert measures.equal_outputs(other, first) == 0.5
    assert measures.equal_outputs(first, first) == 1.0
    assert measures.equal_outputs([], first) is None


def test_average_over_seeds():
    summary = measures.average([{"hit_rate": 0.8, "first_error": ""}, {"hit_rate": 0.9, "steady": 3}])
    assert summary["runs"] == 2 and summary["hit_rate"] == pytest.approx(0.85)
    assert summary["hit_rate_sd"] == pytest.approx(np.std([0.8, 0.9], ddof=1))
    assert summary["hit_rate_ci95"] == pytest.approx(12.706 * 0.05, rel=1e-4)  # Student's t at one degree of freedom
    assert summary["steady"] == 3 and "steady_sd" not in summary and "first_error" not in summary
    assert "hit_rate_sd" not in measures.average([{"hit_rate": 0.8}])
