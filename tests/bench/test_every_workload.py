"""Every workload from the command line: against fake servers, and at a CPU's size against real ones."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench_rag import cli, lineup
from bench_rag.traces import read_trace
from bench_rag.workloads import WORKLOADS
from tests.harness import tiny
from tests.harness.server import Server

FAKES = Path(__file__).with_name("fakes.py")
DOCS = Path(__file__).parents[2] / "docs"
SIZES = (
    *("--groups=2", "--prompts-per-group=2", "--prefix-len=64", "--question-len=8", "--output-len=4"),
    *("--requests=4", "--topics=2", "--documents=2", "--document-len=64", "--documents-per-prompt=2"),
    *("--questions=2", "--question-gap=0.1", "--sessions=2", "--turns=2", "--first-len=64", "--steps=2"),
    *("--tool-len=8", "--prompt-len=8", "--batch=2", "--request-rate=inf"),
)
REQUESTS = dict(gsp=4, zipf=4, rag=4, multi=4, agent=4, docqa=4, trace=3, burst=2)
real = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed here")


def mooncake(folder: Path) -> Path:
    """Three requests that share their only block, 0.3 s apart."""
    path = folder / "mooncake.jsonl"
    record = {"input_length": 130, "output_length": 3, "hash_ids": [7]}
    path.write_text("".join(json.dumps({**record, "timestamp": 300 * i}) + "\n" for i in range(3)))
    read_trace.cache_clear()
    return path


def run(folder: Path, workloads: str, *options: str, status: int = 0) -> dict:
    """The result file of one seed."""
    words = ["--workload", workloads]
    if "rag" in workloads.split(","):
        words += ["--corpus", str(DOCS)]
    if "trace" in workloads.split(",") and "--trace" not in options:
        words += ["--trace", str(mooncake(folder))]
    assert cli.main([*words, "--out", str(folder / "out"), "--warmup", "light", "--quiet", *options]) == status
    return json.loads((folder / "out" / "results.json").read_text())


def figures(data: dict) -> dict[tuple[str, str], dict]:
    """Figures by arm and kind of workload."""
    kinds = {w["label"]: w["kind"] for w in data["workloads"]}
    return {(r["arm"], kinds[r["workload"]]): r["figures"] for r in data["runs"]}


@pytest.fixture
def fakes(monkeypatch):
    """Fake servers in the place of SGLang, with these options."""

    def use(*options: str) -> None:
        command = [sys.executable, str(FAKES)]
        monkeypatch.setattr(lineup, "launch_command", lambda model, port, args: [*command, str(port), *options])

    return use


FAKE = ("--model", "tiny", "--host-profile", "gpu", "--arms", "plain", "--concurrency=4")
GSP = SIZES[:5]


@pytest.mark.parametrize(("api", "prompts"), [("native", "ids"), ("openai", "text")])
def test_fake_server(tmp_path, fakes, api, prompts):
    fakes("--hit", "50")
    data = run(tmp_path, ",".join(WORKLOADS), *FAKE, *SIZES, "--api", api, "--prompts", prompts)
    found = {kind: f for (_, kind), f in figures(data).items()}
    assert {kind: f["requests"] for kind, f in found.items()} == REQUESTS
    assert all(0.4 < f["hit_rate"] <= 0.5 for f in found.values())
    assert (data["api"], data["prompts"]) == (api, prompts)


def test_hits_that_are_not_reported(tmp_path, fakes, capsys):
    fakes("--foreign")
    data = run(tmp_path, "gsp,zipf", *FAKE, *GSP, "--requests=3", "--api", "openai", "--prompts", "text")
    assert all("hit_rate" not in f and f["ttft_ms_mean"] > 0 for f in figures(data).values())
    assert capsys.readouterr().out.count("not reported") == 2
    assert "hits not reported" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_report_says_how_the_load_came_about(tmp_path, fakes):
    fakes("--hit", "50")
    sizes = (*GSP, "--prompts-per-group=6", "--sessions=2", "--turns=2", "--request-rate=inf")
    data = run(tmp_path, "gsp,trace,multi", *FAKE, *sizes, "--prime", "--ramp", "0.02", "--warmup", "full")
    assert [w["load"] for w in data["workloads"]] == [
        "closed loop, at most 4 requests in flight",
        "open loop, recorded arrivals over 0.6 s, at most 4 requests in flight",
        "closed loop, at most 4 requests in flight",
    ]
    assert (data["cache"], data["ramp_s"], data["warmup"]) == ("prime", 0.02, "full")
    text = (tmp_path / "out" / "report.md").read_text()
    assert "requests are sent once, unmeasured" in text and "rises from 1 over 0.02 s" in text
    assert "warm-up: a smaller run of the workload's shape" in text
    assert "Load: open loop, recorded arrivals over 0.6 s" in text
    data = run(tmp_path, "gsp", *FAKE, *GSP, "--request-rate", "20", "--no-flush")
    assert "open loop, Poisson arrivals over" in data["workloads"][0]["load"] and data["cache"] == "keep"
    assert "is not flushed: whatever came before" in (tmp_path / "out" / "report.md").read_text()


def test_a_run_that_is_all_ramp_is_no_measurement(tmp_path, fakes, capsys):
    fakes()
    assert (
        cli.main(
            [*FAKE, *GSP, "--request-rate=inf", "--out", str(tmp_path), "--ramp", "60", "--warmup", "none", "--quiet"]
        )
        == 1
    )
    assert "every request of plain gsp seed 1 was sent within the ramp of 60 s" in capsys.readouterr().err


# -- real servers -----------------------------------------------------------------------------------------------------


@real
def test_one_workload_on_a_real_server(tmp_path):
    """Later turns hit what earlier ones left, on the server with the plugin."""
    model = ("--model", str(tiny.build("qwen3-next")), "--arms", "plugin", "--server-args", "--enable-metrics")
    sizes = ("--sessions=2", "--turns=3", "--first-len=128", "--question-len=8", "--output-len=8")
    data = run(tmp_path, "multi", *model, *sizes)
    (found,) = figures(data).values()
    assert found["requests"] == 6 and found["failed"] == 0 and data["runs"][0]["server"]["replay"] == "plugin"
    assert 0.3 < found["hit_rate"] <= data["workloads"][0]["ceiling"]["1"]
    assert found["hit_rate_device"] == found["hit_rate"] and 0 < found["state_pool_max"] <= 1


@real
@pytest.mark.long
def test_every_workload_on_real_servers(tmp_path, monkeypatch):
    """One request at a time, so nothing depends on the machine: buffered decode changes neither hits nor answers."""
    monkeypatch.setenv("SGLANG_REPLAYSSM_BOUNDARIES", "off")  # more states would be more hits, see test_boundaries
    model = ("--model", str(tiny.build("qwen3-next")), "--arms", "plain,plugin", *SIZES, "--concurrency=1")
    data = run(tmp_path, ",".join(WORKLOADS), *model)
    found = figures(data)
    limits = {w["kind"]: w["ceiling"]["1"] for w in data["workloads"]}
    assert {kind: found["plugin", kind]["requests"] for kind in WORKLOADS} == REQUESTS
    for kind in WORKLOADS:
        plain, plugin = found["plain", kind], found["plugin", kind]
        assert plugin["failed"] == 0
        assert plugin["hit_rate"] - 1e-9 <= plugin["budget_hit_rate"] <= limits[kind] + 1e-9, kind
        assert plugin["cached_tokens"] == plain["cached_tokens"], kind
        assert plugin["equal_outputs"] == 1.0, kind
        assert plugin["hit_rate"] > 0.05 or kind == "burst", kind


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    """A server that somebody else started."""
    with Server(tiny.build("qwen3-next"), ["--enable-linear-replayssm"], plugin=True) as server:
        yield server


@real
@pytest.mark.long
@pytest.mark.parametrize("api", ["native", "openai"])
def test_text_to_a_running_server(tmp_path, running, api):
    sizes = ("--requests=3", "--topics=1", "--document-len=96", "--documents-per-prompt=2", "--output-len=6")
    sizes += (
        "--sessions=1",
        "--turns=3",
        "--first-len=12",
        "--question-len=3",
        "--request-rate=inf",
        "--concurrency=1",
    )
    url = ("--url", running.url, "--model", str(tiny.build("qwen3-next")))
    data = run(tmp_path, "rag,multi", *url, *sizes, "--api", api, "--prompts", "text")
    for (_, kind), found in figures(data).items():
        assert found["requests"] == 3 and found["failed"] == 0 and found["output_tokens"] == 18
        assert found["hit_rate"] > 0.1, kind


SHAREGPT = {"conversations": [{"from": "human", "value": "x" * 70}, {"from": "gpt", "value": "hello"}] * 2}
CUSTOM = {"conversations": [{"content": "y" * 70}, {"content": "four"}]}
OPENAI = {"messages": [{"role": "user", "content": "z" * 70}], "max_tokens": 5}


@real
@pytest.mark.long
@pytest.mark.parametrize(
    ("record", "requests"), [(SHAREGPT, 4), (CUSTOM, 2), (OPENAI, 2)], ids=["sharegpt", "custom", "openai"]
)
@pytest.mark.parametrize("prompts", ["ids", "text"])
def test_recorded_texts_to_a_running_server(tmp_path, running, record, requests, prompts):
    path = tmp_path / "trace.jsonl"
    path.write_text((json.dumps(record) + "\n") * 2)
    read_trace.cache_clear()
    url = ("--url", running.url, "--model", str(tiny.build("qwen3-next")), "--concurrency", "1")
    data = run(tmp_path, "trace", *url, "--trace", str(path), "--prompts", prompts)
    (found,) = figures(data).values()
    assert found["requests"] == requests and found["failed"] == 0 and found["hit_rate"] > 0.3
