"""What the reports say: only what was measured, in the words and numbers of the figures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from bench_rag import charts, demo, html, report
from bench_rag.arms import BUILT_IN, Arm, select
from bench_rag.client import Reply
from bench_rag.plot import plot
from bench_rag.runner import Benchmark, Failure, Results, Run
from bench_rag.settings import Settings
from bench_rag.workloads import Burst, SharedPrefix, Vocab

WORKLOAD = SharedPrefix(groups=2, prompts_per_group=2, prefix_len=8, question_len=2, output_len=2)


def settings(*arms: str, workloads=(WORKLOAD,), seeds=(1,), out=Path("unused")) -> Settings:
    return Settings(select(arms, BUILT_IN), list(workloads), list(seeds), out, Vocab(), model="folder/model")


def figures(hit: float, ttft: float = 100.0, **more) -> dict:
    spread = {
        f"{name}_{k}": ttft for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms") for k in ("mean", "p50", "p99")
    }
    return {
        "requests": 4,
        "failed": 0,
        "hit_rate": hit,
        "output_throughput": 10,
        "prompt_throughput": 9,
        **spread,
        **more,
    }


def results(ceiling: float = 0.8, **arms: dict) -> Results:
    found = Results(ceilings={"gsp": {1: ceiling}})
    found.runs = [Run(name, "gsp", 1, f, {"version": "0.5.23"}) for name, f in arms.items()]
    return found


def cells(line: str) -> list[str]:
    return line.split()


def test_table_has_a_row_per_arm_and_hides_nothing():
    given = settings("plain", "intree", "plugin")
    found = results(plain=figures(0.8), plugin=figures(0.7954, 123.4, equal_outputs=0.5, failed=3))
    lines = report.table(given, found, WORKLOAD).splitlines()
    groups = re.split(" {2,}", lines[0].strip())
    assert groups == ["arm", "hits", "TTFT ms", "TPOT ms", "ITL ms", "E2E ms", "tok/s", "same", "failed"]
    rows = {line.split()[0]: cells(line)[1:] for line in lines[3:]}
    assert rows["plain"][0] == "80.0" and rows["plain"][-2:] == ["ref", "0"]
    assert rows["plugin"][:3] == ["79.5", "123", "123"] and rows["plugin"][-2:] == ["50.0", "3"]
    assert set(rows["intree"][:-2]) == {"-"} and rows["intree"][-2:] == ["not", "measured"]


def test_several_seeds_show_their_spread():
    found = results()
    found.runs = [Run("plain", "gsp", seed, figures(hit), {}) for seed, hit in ((1, 0.70), (2, 0.74))]
    line = report.table(settings("plain", seeds=(1, 2)), found, WORKLOAD).splitlines()[-1]
    assert "72.0 ± 2.8" in line  # mean and sample deviation of 70 and 74


def test_report_says_what_is_within_noise():
    found = results()
    for seed in (1, 2, 3):
        found.runs += [
            Run("plain", "gsp", seed, figures(0.70 + 0.01 * seed, 100.0 + seed), {}),
            Run("plugin", "gsp", seed, figures(0.90 + 0.01 * seed, 100.0 + (-3, 1, 4)[seed - 1]), {}),
        ]
    given = settings("plain", "plugin", seeds=(1, 2, 3))
    rows = [re.split(" {2,}", line.strip()) for line in report.difference_table(given, found, WORKLOAD).splitlines()]
    assert rows[0] == ["against plain", "plugin"]
    assert ["hit rate", "+20.0 points ± 0.0, better"] in rows
    # Differences -4, -1 and 1 ms of 102: mean -1.33, deviation 2.52, t(2) = 4.30.
    assert ["TTFT mean", "-1.3% ± 6.1, within noise"] in rows
    assert "within noise" in report.terminal(given, found) and "within noise" in report.markdown(given, found)
    readings = {d["figure"]: d["reading"] for d in report.as_json(given, found)["differences"]}
    assert readings["hit_rate"] == "better" and readings["ttft_ms_mean"] == "within noise"


def test_columns_appear_with_their_figures():
    plain = results(plain=figures(0.8, hit_rate_device=0.8, hit_rate_host=0.0))
    assert "host" not in report.table(settings("plain"), plain, WORKLOAD)
    rich = results(plain=figures(0.8, hit_rate_device=0.5, hit_rate_host=0.3, goodput=1.5, state_pool_max=0.61))
    lines = report.table(settings("plain"), rich, WORKLOAD, "github").splitlines()
    row = dict(zip(*([c.strip() for c in line.strip("|").split("|")] for line in (lines[0], lines[2])), strict=True))
    assert (row["hits % device"], row["hits % host"], row["hits % storage"]) == ("50.0", "30.0", "-")
    assert (row["good req/s"], row["state pool max %"]) == ("1.50", "61")


def test_one_line_titles_repeat_their_group():
    assert report._one_line(["arm", "TTFT ms\nmean", "\np50", "tok/s\nout"]) == [
        "arm",
        "TTFT ms mean",
        "TTFT ms p50",
        "tok/s out",
    ]


def test_markdown_holds_ceiling_failure_and_sentence(tmp_path):
    given = settings("plain", "intree", out=tmp_path)
    found = results(0.94, plain=figures(0.9))
    found.failures = [Failure("intree", "the server ended while starting", "ValueError: refused")]
    report.write(given, found, "This is what it shows.", "report.png")
    text = (tmp_path / "report.md").read_text()
    for part in ("94.0% hit rate", "`intree` failed", "ValueError: refused", "This is what it shows.", "report.png"):
        assert part in text
    assert "folder" not in text  # a model's name, not where somebody keeps it
    data = json.loads((tmp_path / "results.json").read_text())
    assert not data["complete"] and data["arms"][0]["env"] == {} and data["workloads"][0]["ceiling"] == {"1": 0.94}


@pytest.mark.parametrize("workload", [WORKLOAD, Burst(batch=2)], ids=lambda w: w.kind)
def test_plot_draws_what_there_is(tmp_path, workload):
    found = Results(ceilings={workload.label: {1: 0.8}})
    found.runs = [Run("plain", workload.label, 1, figures(0.5, steady_throughput=50.0), {})]
    path = plot(settings("plain", "intree", workloads=(workload,)), found, tmp_path / "a" / "plot.png")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 5000


def replies(first_tokens: list[float], cached: int) -> list[Reply]:
    return [
        Reply(i, 0, float(i), 0.0, i + t + 1, [(i + t, 1), (i + t + 1, 2)], 10, cached, {}, [1, 2])
        for i, t in enumerate(first_tokens)
    ]


def html_results(settings_: Settings) -> Results:
    found = Benchmark(settings_).results
    for arm, cached in (("plain", 8), ("<b>plugin</b>", 4)):
        for workload in settings_.workloads:
            answers = replies([0.1, 0.2, 0.4, 0.8], cached)
            samples = [{"at": float(i), "state_pool": 0.25 * i} for i in range(3)]
            made = figures(cached / 10, steady_throughput=50.0)
            found.runs.append(Run(arm, workload.label, 1, made, {}, answers, samples))
    found.failures = [Failure("intree", "ended <early>", "ValueError: <x>")]
    return found


def test_a_wide_table_is_turned_over():
    """A row per figure, with each arm's difference beside its value; nothing is lost or said twice."""
    given = settings("plain", "intree", "plugin", seeds=(1, 2))
    found = results(plain=figures(0.8), plugin=figures(0.7, 123.4, equal_outputs=0.5, failed=3))
    found.runs += [Run(name, "gsp", 2, f, {}) for name, f in (("plain", figures(0.8)), ("plugin", figures(0.7, 140)))]
    found.ceilings["gsp"][2] = 0.8
    lines = report.terminal(given, found, width=120).splitlines()
    assert max(map(len, lines[1:])) < 130
    rows = {re.split(" {2,}", line)[0]: re.split(" {2,}", line)[1:] for line in lines[3:]}
    assert rows["hits %"] == ["80.0 ± 0.0", "not measured", "70.0 ± 0.0", "-10.0 points ± 0.0, worse"]
    assert rows["same out %"][:1] == ["ref"] and rows["failed requests"] == ["0", "-", "3"]
    assert "against plain" in lines[1] and sum("hit rate" in line for line in lines) == 1  # the ceiling's
    assert report.terminal(given, found, width=400) == report.terminal(given, found)


def test_html_page_is_whole_and_escaped():
    arms = [BUILT_IN["plain"], Arm("<b>plugin</b>", "<i>")]
    given = Settings(arms, [WORKLOAD, Burst(batch=2), Burst(batch=4)], [1], Path("o"), Vocab(), model="folder/model")
    text = html.page(given, html_results(given), "It shows <this>.")
    tree = ElementTree.fromstring(re.sub(r"<(meta|img)([^>]*)>", r"<\1\2/>", text.partition("\n")[2]))
    pictures = [i.get("src") for i in tree.iter("img")]
    # Two charts of requests and one of pools for gsp, one and one for each burst, and throughput against batch.
    assert len(pictures) == 3 + 2 + 2 + 1
    assert all(p.startswith("data:image/svg+xml;base64,") for p in pictures) and "http" not in re.sub(
        'data:[^"]+', "", text
    )
    said = " ".join(tree.itertext())
    for part in ("80.0%", "<b>plugin</b>", "ended <early>", "ValueError: <x>", "It shows <this>.", "one seed"):
        assert part in said
    assert "folder" not in said


def svg_paths(text: str, colour: str) -> list[np.ndarray]:
    """The points of every line of that colour in an SVG."""
    found = []
    for path in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}path"):
        if f"stroke: {colour}" in path.get("style", "") and path.get("clip-path"):
            found.append(np.array([[float(v) for v in xy] for xy in re.findall(r"[ML] (\S+) (\S+)", path.get("d"))]))
    return found


def test_charts_draw_the_requests():
    given = settings("plain")
    found = Benchmark(given).results
    found.runs = [
        Run("plain", "gsp", 1, figures(0.5), {}, replies([0.1, 0.2, 0.4, 0.8], 5), [{"at": 0.0, "state_pool": 0.5}])
    ]
    (steps,) = svg_paths(charts.first_tokens(given, found, WORKLOAD), "#7f8fa6")
    widths = np.diff(sorted(set(steps[:, 0])))
    assert len(widths) == 3 and np.ptp(widths) < 0.01  # doubling times are equal steps on a log axis
    picture = charts.hits_over_time(given, found, WORKLOAD)
    (hits,) = svg_paths(picture, "#7f8fa6")
    (limit,) = svg_paths(picture, "#737373")
    assert np.ptp(hits[:, 1]) < 0.01 and len(hits) == 4  # half of every prompt was cached
    # SVG counts from the top: the infinite cache starts at nothing and ends above the run only if its share is larger.
    assert limit[0, 1] > hits[0, 1]
    assert (limit[-1, 1] < hits[-1, 1]) == (report.mean_ceiling(found, "gsp") > 0.5)
    assert charts.pool_over_time(given, found, WORKLOAD) == ""
    assert charts.throughput_by_batch(given, found) == ""


@pytest.mark.parametrize(
    ("arms", "sentence"),
    [
        (
            dict(plain=figures(0.8), intree=figures(0.5), plugin=figures(0.797, equal_outputs=1.0)),
            "With the plugin, the prefix cache supplied 79.7% of all prompt tokens (an infinite cache: 90.0%), "
            "as much as plain SGLang (80.0%) and 29.7 points more than SGLang's in-tree replay (50.0%), "
            "100% of its greedy answers were identical to plain's.",
        ),
        (
            dict(plain=figures(0.8), plugin=figures(0.7)),
            "With the plugin, the prefix cache supplied 70.0% of all prompt tokens (an infinite cache: 90.0%), "
            "10.0 points less than plain SGLang (80.0%).",
        ),
        (
            dict(plain=figures(0.8), intree=figures(0.5)),
            "Of all prompt tokens the prefix cache supplied plain 80.0%, intree 50.0%; "
            "an infinite cache would supply 90.0%.",
        ),
    ],
    ids=["as good", "worse", "no plugin"],
)
def test_closing_sentence_follows_the_figures(arms, sentence):
    assert demo.sentence(settings("plain", "intree", "plugin"), results(0.9, **arms)) == sentence
