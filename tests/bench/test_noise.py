"""Intervals against simulation and scipy's own paired test; readings against their definition."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from bench_rag.noise import COMPARED, Difference, compare, half_width

HITS, TTFT = COMPARED[0], COMPARED[1]


def by_seed(**figures: list[float]) -> dict[int, dict[str, float]]:
    count = len(next(iter(figures.values())))
    return {seed: {name: values[seed] for name, values in figures.items()} for seed in range(count)}


@pytest.mark.parametrize("count", [2, 3, 8])
def test_intervals_cover_the_truth_as_often_as_they_say(count):
    rng = np.random.default_rng(0)
    samples = rng.normal(3.0, 2.0, (4000, count))
    covered = np.mean([abs(s.mean() - 3.0) <= half_width(s) for s in samples])
    # Binomial deviation of a share of 0.95 over 4000: 0.0034.
    assert covered == pytest.approx(0.95, abs=4 * 0.0034)


def test_paired_differences_agree_with_scipys_paired_test():
    rng = np.random.default_rng(1)
    theirs = 100 + 50 * rng.random(6)  # seeds differ far more than arms
    mine = theirs - 4 + rng.normal(0, 1, 6)
    (difference,) = compare(by_seed(ttft_ms_mean=list(mine)), by_seed(ttft_ms_mean=list(theirs)))
    expected = stats.ttest_rel(mine, theirs).confidence_interval(0.95)
    low, high = difference.mean - difference.half_width, difference.mean + difference.half_width
    assert (low, high) == pytest.approx((expected.low / theirs.mean(), expected.high / theirs.mean()))
    assert difference.verdict == "better" and difference.text().startswith("-") and "%" in difference.text()


@pytest.mark.parametrize(
    ("figure", "mean", "half", "verdict"),
    [
        (HITS, 0.1, 0.05, "better"),
        (HITS, -0.1, 0.05, "worse"),
        (TTFT, 0.1, 0.05, "worse"),
        (TTFT, -0.1, 0.05, "better"),
        (TTFT, -0.1, 0.11, "within noise"),
        (HITS, 0.0, 0.0, "equal"),
        (HITS, 0.2, 0.0, "better"),
        (HITS, 0.2, None, "one seed"),
    ],
)
def test_readings(figure, mean, half, verdict):
    assert Difference(figure, mean, half, 3).verdict == verdict


def test_only_seeds_and_figures_of_both_count():
    mine = {1: {"hit_rate": 0.5, "goodput": 3.0}, 2: {"hit_rate": 0.7}, 9: {"hit_rate": 0.0}}
    theirs = {1: {"hit_rate": 0.4}, 2: {"hit_rate": 0.5}, 3: {"hit_rate": 1.0}}
    (difference,) = compare(mine, theirs)
    assert difference.figure is HITS and difference.seeds == 2 and difference.mean == pytest.approx(0.15)
    assert difference.text() == f"+15.0 points ± {100 * half_width([0.1, 0.2]):.1f}"
    assert compare({1: {"hit_rate": 0.5}}, theirs)[0].text() == "+10.0 points"
    assert compare(mine, {}) == [] and compare({1: {"goodput": 1.0}}, {1: {"goodput": 0.0}}) == []


def test_no_interval_from_one_value():
    assert half_width([3.0]) is None and half_width([3.0, 3.0]) == 0.0
