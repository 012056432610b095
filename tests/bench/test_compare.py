"""Two result files side by side: figures, readings, and what makes them hard to compare."""

from __future__ import annotations

import copy
import json
import re

import pytest

from bench_rag import cli


def result(*arms: str, hit: float = 0.5, ttft: float = 100.0, seeds: tuple[int, ...] = (1, 2, 3)) -> dict:
    return {
        "machine": "one",
        "created": "today",
        "seeds": list(seeds),
        "workloads": [{"kind": "gsp", "label": "gsp", "groups": 8, "ceiling": {"1": 0.9}, "facts": {}}],
        "arms": [{"name": arm} for arm in arms],
        "runs": [
            {
                "arm": arm,
                "workload": "gsp",
                "seed": seed,
                "figures": {"hit_rate": hit + 0.01 * seed, "ttft_ms_mean": ttft + 5 * (-1) ** seed},
            }
            for arm in arms
            for seed in seeds
        ],
    }


@pytest.fixture
def compare(tmp_path, capsys):
    """Runs the command on two results; exit status, printed lines, error."""

    def run(first: object, second: object) -> tuple[int, list[str], str]:
        for name, data in (("a.json", first), ("b.json", second)):
            (tmp_path / name).write_text(data if isinstance(data, str) else json.dumps(data))
        status = cli.main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")])
        output = capsys.readouterr()
        return status, [re.sub(" {2,}", " | ", line.strip()) for line in output.out.splitlines()], output.err

    return run


def test_arms_of_one_name_are_compared_seed_by_seed(compare):
    other = result("plugin", "extra", hit=0.6)
    for run, ttft in zip(other["runs"], (120.0, 80.0, 100.0), strict=False):
        run["figures"]["ttft_ms_mean"] = ttft
    status, lines, _ = compare(result("plain", "plugin"), other)
    assert status == 0
    assert "gsp | plugin | hit rate | 52.0 | 62.0 | +10.0 points ± 0.0 | better" in lines
    # Seed by seed 120-95, 80-105, 100-95: mean 1.67 of 98.3, deviation 25.2, half width 62.5.
    assert "gsp | plugin | TTFT mean | 98.3 | 100.0 | +1.7% ± 63.6 | within noise" in lines
    assert not any("plain" in line or "extra" in line or line.startswith("differs") for line in lines)


def test_single_arms_are_compared_whatever_they_are_called(compare):
    status, lines, _ = compare(result("old"), result("new", ttft=90.0))
    assert status == 0 and "gsp | new against old | TTFT mean | 98.3 | 88.3 | -10.2% ± 0.0 | better" in lines
    assert "gsp | new against old | hit rate | 52.0 | 52.0 | +0.0 points ± 0.0 | equal" in lines


def test_other_conditions_are_named(compare):
    other = copy.deepcopy(result("plain"))
    other["machine"] = "two"
    other["workloads"][0]["groups"] = 4
    other["workloads"].append({"kind": "multi", "label": "multi"})
    _, lines, _ = compare(result("plain"), other)
    assert [line for line in lines if line.startswith("differs")] == [
        "differs: machine: one and two",
        "differs: gsp, groups: 8 and 4",
        "differs: multi is only in the second file",
    ]


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        ("{", "b.json is not JSON"),
        ("[]", "b.json is not a result file of bench_rag"),
        (result(), "b.json: no run was measured"),
        (result("other", "more"), "no arm is in both files: plain in the first, other, more in the second"),
        (result("plain", seeds=(7,)), "the files share no workload, arm and seed"),
    ],
)
def test_files_that_cannot_be_compared_are_one_line(compare, second, sentence):
    status, _, error = compare(result("plain"), second)
    assert status == 2 and sentence in error and error.count("\n") == 1


def test_a_missing_file_is_one_line(tmp_path, capsys):
    assert cli.main(["compare", str(tmp_path / "x.json"), str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"bench_rag: cannot read {tmp_path / 'x.json'}: No such file or directory\n"
