"""SGLang's own client on the same requests: what can be checked, and on a real server that the two agree."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest

from bench_rag import cli, crosscheck, lineup
from tests.bench.test_runner import FAKES
from tests.harness import tiny

real = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed here")


def test_rows_read_the_difference():
    mine = {"hit_rate": 0.500, "ttft_ms_mean": 100.0, "e2e_ms_mean": 200.0, "output_throughput": 50.0}
    theirs = {"hit_rate": 0.515, "ttft_ms_mean": 130.0, "e2e_ms_mean": 205.0, "output_throughput": 44.0}
    assert crosscheck.rows(mine, theirs) == [
        ("hit rate", "50.0%", "51.5%", "+1.5 points", "agree within 2 points"),
        ("TTFT mean, ms", "100.0", "130.0", "+23.1%", "differ by more than 15%"),
        ("E2E mean, ms", "200.0", "205.0", "+2.4%", "agree within 10%"),
        ("output tok/s", "50.0", "44.0", "-12.0%", "differ by more than 10%"),
    ]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--workload", "multi"], "takes workloads of single requests, and multi has conversations"),
        (["--api", "openai"], "sends token ids to SGLang's own endpoint"),
        (["--prompts", "text"], "sends token ids to SGLang's own endpoint"),
        (["--ramp", "1"], "leave out --ramp"),
        (["--model", "nowhere"], "needs --model with the folder of the tokenizer"),
    ],
)
@real
def test_what_cannot_be_checked_is_said_before_a_server_starts(options, sentence, capsys):
    model = [] if "--model" in options else ["--model", str(tiny.build("qwen3-next"))]
    assert cli.main([*model, "--host-profile", "gpu", "--cross-check", *options]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


@real
def test_a_client_that_fails_keeps_what_was_measured(tmp_path, monkeypatch, capsys):
    """The run stands, the sentence has the client's last lines, the server is not blamed."""
    broken = tmp_path / "client.py"
    broken.write_text("raise SystemExit('no such dataset')")
    monkeypatch.setattr(crosscheck, "_CLIENT", broken)
    monkeypatch.setattr(lineup, "launch_command", lambda model, port, args: [sys.executable, str(FAKES), str(port)])
    options = ["--model", str(tiny.build("qwen3-next")), "--host-profile", "gpu", "--arms", "plain", "--quiet"]
    sizes = ["--groups=1", "--prompts-per-group=2", "--prefix-len=8", "--output-len=2", "--request-rate=inf"]
    assert cli.main([*options, *sizes, "--warmup=none", "--cross-check", "--out", str(tmp_path / "out")]) == 1
    data = json.loads((tmp_path / "out" / "results.json").read_text())
    assert data["runs"][0]["figures"]["requests"] == 2 and data["failures"][0]["detail"] == "no such dataset"
    assert "sglang.benchmark.serving ended with status 1" in capsys.readouterr().err


@real
@pytest.mark.long
def test_both_clients_agree_where_every_time_is_known(tmp_path, monkeypatch):
    """A fake server that answers a token every 10 ms and says that half of every prompt was cached."""
    command = [sys.executable, str(FAKES)]
    monkeypatch.setattr(lineup, "launch_command", lambda model, port, args: [*command, str(port), "--hit", "50"])
    options = ["--model", str(tiny.build("qwen3-next")), "--host-profile", "auto", "--arms", "plain", "--quiet"]
    sizes = ["--groups=2", "--prompts-per-group=8", "--prefix-len=40", "--question-len=10", "--output-len=40"]
    load = ["--request-rate=20", "--concurrency=4", "--warmup=none"]
    assert cli.main([*options, *sizes, *load, "--cross-check", "--out", str(tmp_path)]) == 0
    (run,) = json.loads((tmp_path / "results.json").read_text())["runs"]
    readings = [row[-1] for row in crosscheck.rows(run["figures"], run["cross_check"])]
    assert run["cross_check"]["hit_rate"] == pytest.approx(run["figures"]["hit_rate"]) == 0.5
    assert len(readings) == 5 and all(r.startswith("agree within") for r in readings), run


@real
@pytest.mark.long
def test_both_clients_agree_on_a_real_server(tmp_path, capsys):
    """One request at a time: hits are equal. Times differ by what a busy machine makes of two runs, at most by half.

    Plain SGLang, since the plugin's policy for states at boundaries has learnt the prompts when they come again.
    """
    options = ["--model", str(tiny.build("qwen3-next")), "--arms", "plain", "--workload", "gsp,docqa", "--quiet"]
    sizes = ["--groups=2", "--prompts-per-group=4", "--prefix-len=96", "--question-len=8", "--output-len=24"]
    sizes += ["--documents=2", "--questions=3", "--document-len=80", "--question-gap=1", "--concurrency=1"]
    assert cli.main([*options, *sizes, "--request-rate=inf", "--cross-check", "--out", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "results.json").read_text())
    assert len(data["runs"]) == 2
    for run in data["runs"]:
        mine, theirs = run["figures"], run["cross_check"]
        assert mine["hit_rate"] == pytest.approx(theirs["hit_rate"], abs=1e-9) and mine["hit_rate"] > 0.3
        for name in ("ttft_ms_mean", "e2e_ms_mean", "output_throughput"):
            assert 0.5 < theirs[name] / mine[name] < 2, name
    assert "sglang.benchmark.serving" in capsys.readouterr().out
    assert "The same requests by another client" in (tmp_path / "report.html").read_text(encoding="utf-8")
