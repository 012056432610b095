"""Whole benchmarks against fake servers: order, reports on disk, failures that keep what was measured."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bench_rag import cli, lineup
from bench_rag.arms import BUILT_IN, Arm
from bench_rag.options import joined
from bench_rag.settings import visits
from tests.bench.fakes import FakeSglang

needs_toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is part of Python from 3.11 on")
FAKES = Path(__file__).with_name("fakes.py")
ROOT = Path(__file__).parents[2]
SIZES = [
    "--groups=2",
    "--prompts-per-group=2",
    "--prefix-len=20",
    "--question-len=4",
    "--output-len=3",
    "--request-rate=inf",
]
FAKE_ARMS = (
    Arm("good", "half of every prompt", ("--hit", "50")),
    Arm("better", "", ("--hit", "75")),
    Arm("stillborn", "", ("--die",)),
    Arm("mortal", "", ("--die-after", "3")),
    Arm("sullen", "", ("--refuse",)),
)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Runs the command line on fake servers; returns exit status and output folder."""
    for arm in FAKE_ARMS:
        monkeypatch.setitem(BUILT_IN, arm.name, arm)
    monkeypatch.setattr(lineup, "launch_command", lambda model, port, args: [*fake_command(tmp_path, port), *args])

    def run(*options: str) -> tuple[int, Path]:
        out = tmp_path / "out"
        common = ["--model", "tiny", "--host-profile", "gpu", "--out", str(out)]
        return cli.main([*common, "--warmup", "light", *SIZES, *options]), out

    return run


def fake_command(folder: Path, port: object) -> list[str]:
    """A fake server that the process list shows to belong to the test with this folder."""
    return [sys.executable, str(FAKES), str(port), f"--of={folder}"]


def no_fakes_left(folder: Path) -> bool:
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # ended meanwhile; a zombie's command line is empty
            commands.append(path.read_bytes())
    return not any(f"--of={folder}".encode() in command for command in commands)


def test_everything_is_measured_reported_and_reaped(bench, tmp_path, capsys):
    status, out = bench("--arms", "good,better", "--seeds", "1,2")
    assert status == 0 and no_fakes_left(tmp_path)
    data = json.loads((out / "results.json").read_text())
    order = [(run["arm"], run["seed"]) for run in data["runs"]]
    assert order == [("good", 1), ("better", 1), ("better", 2), ("good", 2)]
    assert [s["hit_rate"] for s in data["summary"]] == [0.5, 0.75]
    assert data["complete"] and data["summary"][1]["equal_outputs"] == 1.0 and data["summary"][0]["runs"] == 2
    assert data["workloads"][0]["ceiling"]["1"] == pytest.approx(20 / 24 / 2)
    assert data["runs"][0]["server"]["version"] == "fake" and data["runs"][0]["server"]["max_running_requests"] == 4
    requests = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    assert len(requests) == 4 * 4 and all(r["ttft_ms"] > 0 and r["prompt_tokens"] == 24 for r in requests)
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "75.0%" in (out / "report.html").read_text(encoding="utf-8")
    printed = capsys.readouterr().out
    assert "41.7% hit rate" in printed  # the ceiling
    assert re.search(r"^good +50\.0 ± 0\.0 .* ref +0$", printed, re.M)
    assert re.search(r"^better +75\.0 ± 0\.0 .* 100\.0 ± 0\.0 +0$", printed, re.M)
    report = (out / "report.md").read_text()
    assert "half of every prompt" in report and "![" in report and "| TTFT ms p99 |" in re.sub(" +", " ", report)


def test_an_arm_that_does_not_start_leaves_the_others(bench, tmp_path, capsys):
    status, out = bench("--arms", "stillborn,good", "--seeds", "1,2")
    assert status == 1 and no_fakes_left(tmp_path)
    data = json.loads((out / "results.json").read_text())
    assert [run["arm"] for run in data["runs"]] == ["good", "good"] and not data["complete"]
    (failure,) = data["failures"]  # the second seed does not try again
    assert failure["detail"] == "ValueError: these arguments do not go together"
    output = capsys.readouterr()
    assert "stillborn failed: the server ended while starting, exit status 3" in output.err
    assert "ValueError: these arguments do not go together" in output.err
    assert re.search(r"^stillborn .* not measured$", output.out, re.M)


def test_an_arm_that_dies_keeps_what_was_measured(bench, tmp_path, capsys):
    status, out = bench("--arms", "good,mortal")
    assert status == 1
    data = json.loads((out / "results.json").read_text())
    assert [run["arm"] for run in data["runs"]] == ["good"]
    assert "the server ended during mortal gsp seed 1, exit status 7" in data["failures"][0]["sentence"]
    assert "CUDA error: out of luck" in data["failures"][0]["detail"]


def test_no_server_starts_after_the_deadline(bench, tmp_path, capsys):
    status, out = bench("--arms", "good,better", "--deadline", "0.01", "--seeds", "1,2")
    measured = [(run["arm"], run["seed"]) for run in json.loads((out / "results.json").read_text())["runs"]]
    assert status == 1 and measured == [("good", 1)]  # up before the deadline, and measured to the end
    assert "better failed: not started, the deadline of 0.01 s has passed" in capsys.readouterr().err


def test_an_arm_that_refuses_says_why(bench, tmp_path, capsys):
    status, out = bench("--arms", "sullen", "--warmup", "none")
    assert status == 1 and not (out / "report.png").exists()
    assert "every request of sullen gsp seed 1 failed" in capsys.readouterr().err
    assert "not today" in json.loads((out / "results.json").read_text())["failures"][0]["sentence"]


def test_what_a_server_runs_is_what_it_says(bench, tmp_path):
    status, out = bench("--arms", "plain,intree,plugin", "--server-args", "--no-plugin")
    data = json.loads((out / "results.json").read_text())
    assert status == 1 and [run["server"]["replay"] for run in data["runs"]] == ["off", "in-tree"]
    assert "the server runs SGLang's own replay, not the plugin" in data["failures"][0]["sentence"]
    status, out = bench("--arms", "plain,plugin")
    data = json.loads((out / "results.json").read_text())
    assert status == 0 and [run["server"]["replay"] for run in data["runs"]] == ["off", "plugin"]


@needs_toml
def test_arms_and_arguments_from_a_file(bench, tmp_path):
    config = tmp_path / "arms.toml"
    config.write_text('[server]\nargs = "--hit 25"\n[arms.mine]\nargs = ["--hit", "100"]\nplugin = true\n')
    status, out = bench("--config", str(config), "--arms", "mine,plain")
    data = json.loads((out / "results.json").read_text())
    assert status == 0 and [s["hit_rate"] for s in data["summary"]] == [1.0, 0.25]
    assert data["arms"][0]["plugin"] and data["arms"][0]["command"][-4:] == ["--hit", "25", "--hit", "100"]


def test_several_workloads_on_one_server(bench, tmp_path, capsys):
    status, out = bench("--arms", "good", "--workload", "gsp,burst", "--batch", "2,8")
    data = json.loads((out / "results.json").read_text())
    assert status == 0
    assert [run["workload"] for run in data["runs"]] == ["gsp", "burst-2", "burst-8"]
    assert data["summary"][2]["steady_throughput"] > 0
    assert "at most 4 requests at once, fewer than burst-8" in capsys.readouterr().err


def test_goodput_and_pools_over_time(bench, capsys):
    status, out = bench("--arms", "good,better", "--ttft-slo", "30000", "--server-args", "--enable-metrics")
    assert status == 0
    data = json.loads((out / "results.json").read_text())
    figures = data["runs"][0]["figures"]
    assert figures["in_time"] == 1.0 and figures["goodput"] == figures["request_throughput"]
    assert data["ttft_limit_ms"] == 30000 and figures["state_pool_max"] == data["runs"][0]["samples"][0]["state_pool"]
    assert "state pool" in capsys.readouterr().out and "within 30000 ms" in (out / "report.md").read_text()
    assert [d["reading"] for d in data["differences"]][0] == "one seed"


def test_the_ceiling_of_a_servers_own_pools(bench, capsys):
    """Two slots: one for the running request, one for a state; the two groups of prompts take turns in the plan."""
    status, out = bench("--arms", "good,better", "--groups", "3", "--server-args", "--slots 2 --tokens 1000")
    assert status == 0
    data = json.loads((out / "results.json").read_text())
    found = [run["figures"]["budget_hit_rate"] for run in data["runs"]]
    assert 0 <= found[0] < data["workloads"][0]["ceiling"]["1"] and data["summary"][0]["budget_hit_rate"] == found[0]
    output = capsys.readouterr().out
    assert "budget" in output and "a clairvoyant cache could supply" in (out / "report.md").read_text()
    assert "its pools at most" in (out / "report.html").read_text(encoding="utf-8")
    status, out = bench("--arms", "good", "--server-args", "--slots 2 --tokens 1000", "--no-flush")
    data = json.loads((out / "results.json").read_text())
    assert "budget_hit_rate" not in data["runs"][0]["figures"]  # nobody knows what the cache held
    status, out = bench("--arms", "good", "--server-args", "--slots 2 --tokens 1000 --enable-hierarchical-cache")
    data = json.loads((out / "results.json").read_text())
    assert "budget_hit_rate" not in data["runs"][0]["figures"]  # the host holds more than the pools


def test_real_text_and_agents_on_one_server(bench, tmp_path, capsys):
    (tmp_path / "corpus").mkdir()
    for word in ("apple", "banana", "cherry", "damson"):
        text = " ".join(f"{word}{part}" for part in ("stem", "skin", "seed", "core", "juice", "leaf", "tree"))
        (tmp_path / "corpus" / f"{word}.md").write_text(text)
    options = ["--workload", "gsp,rag,agent", "--corpus", str(tmp_path / "corpus"), "--requests", "6"]
    status, out = bench("--arms", "good", *options, "--sessions", "2", "--steps", "2", "--tool-len", "4")
    assert status == 0
    data = json.loads((out / "results.json").read_text())
    assert [(run["workload"], run["figures"]["requests"]) for run in data["runs"]] == [
        ("gsp", 4),
        ("rag", 6),
        ("agent", 4),
    ]
    rag = data["workloads"][1]
    assert rag["corpus"] == "corpus" and rag["facts"]["passages"] == 4 and rag["facts"]["tokenizer"] == "bytes"
    assert "passages 4, tokens" in capsys.readouterr().out and str(tmp_path) not in (out / "report.md").read_text()


def test_terminated_benchmark_leaves_no_server(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys\nfrom bench_rag import cli, lineup\n"
        f"command = {fake_command(tmp_path, 'PORT')!r}\n"
        f"lineup.launch_command = lambda model, port, args: [*command[:2], str(port), *command[3:]]\n"
        f"sys.exit(cli.main(['--model', 'x', '--arms', 'plain', '--host-profile', 'gpu', '--request-rate', '0.01',\n"
        f"                   '--prefix-len', '10', '--warmup', 'none', '--out', {str(tmp_path / 'out')!r}]))\n"
    )
    process = subprocess.Popen([sys.executable, str(program)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        deadline = time.monotonic() + 20
        while no_fakes_left(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not no_fakes_left(tmp_path)
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    assert no_fakes_left(tmp_path)


def test_running_server_by_address(tmp_path, capsys):
    """``--url`` measures a server it did not start, flushes it before each run, and leaves it running."""
    fake = FakeSglang(events=[(0.01, 1)] * 3, cached=[0, 12])
    address: list[str] = []
    up, done = threading.Event(), threading.Event()

    async def serve() -> None:
        async with fake as url:
            address.append(url)
            up.set()
            while not done.is_set():
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert up.wait(10)
        options = ["--url", address[0], "--name", "mine", "--warmup", "none", "--out", str(tmp_path), "--seeds", "1,2"]
        assert cli.main([*options, *SIZES]) == 0
    finally:
        done.set()
        thread.join()
    data = json.loads((tmp_path / "results.json").read_text())
    assert fake.flushes == 2 and len(fake.prompts) == 8
    assert [run["figures"]["cached_tokens"] for run in data["runs"]] == [12, 0]
    assert "mine" in capsys.readouterr().out


def test_rounds_rotate_so_that_no_arm_is_always_first():
    a, b, c = (Arm(name, "") for name in "abc")
    order = [(v.arm.name, v.seeds) for v in visits([a, b, c], [7, 8], "interleaved")]
    assert order == [("a", (7,)), ("b", (7,)), ("c", (7,)), ("b", (8,)), ("c", (8,)), ("a", (8,))]
    assert [(v.arm.name, v.seeds) for v in visits([a, b], [7, 8], "grouped")] == [("a", (7, 8)), ("b", (7, 8))]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "name a model with --model, a running server with --url, or try --demo"),
        (["--url", "localhost:1"], "--url needs an address such as"),
        (["--url", "http://127.0.0.1:1", "--arms", "plain"], "--url measures a running server"),
        (["--model", "m", "--arms", "best"], "no arm is called 'best'"),
        (["--model", "m", "--workload", "chess"], "no workload is called 'chess'"),
        (["--demo", "--model", "m", "--groups", "3"], "--demo has a workload of its own: leave out --groups"),
        (["--model", "m", "--turns", "3"], "--turns has no meaning for gsp"),
        (["--model", "m", "--batch", "3"], "--batch has no meaning for gsp"),
        (["--model", "m", "--request-rate", "0"], "request-rate must be above 0"),
        (["--model", "m", "--workload", "rag", "--corpus", "/nowhere"], "the corpus /nowhere is not a folder"),
        (["--model", "m", "--ttft-slo", "0"], "--ttft-slo is a time above 0 ms, got 0"),
        (["--model", "m", "--groups", "0"], "groups must be at least 1"),
        (["--model", "m", "--ramp", "-1"], "--ramp is a time of at least 0 s, got -1"),
        (["--model", "m", "--served-model", "x"], "--served-model goes with --api openai"),
        pytest.param(["--model", "m", "--config", "/nowhere.toml"], "cannot read /nowhere.toml", marks=needs_toml),
    ],
)
def test_options_that_do_not_fit_are_one_line(options, sentence, capsys):
    assert cli.main(["--host-profile", "gpu", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench_rag: ") and sentence in error and error.count("\n") == 1


def test_inputs_that_do_not_read_are_one_line_and_start_no_server(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lineup, "launch_command", lambda *args: pytest.fail("a server was started"))
    (tmp_path / "corpus" / ".hidden").mkdir(parents=True)
    (tmp_path / "corpus" / ".hidden" / "a.md").write_text("not read")
    (tmp_path / "corpus" / "picture.png").write_text("no text")
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}\n{"messages": [}\n')
    for options, sentence in (
        (["rag", "--corpus", str(tmp_path / "corpus")], f"the corpus {tmp_path / 'corpus'} has no text in files named"),
        (["trace", "--trace", str(trace)], f"{trace}:2: not JSON: Expecting value"),
        (["zipf", "--request-rate", "nan"], "zipf: request-rate must be above 0"),
        (["docqa", "--request-rate", "-3"], "docqa: request-rate must be above 0"),
    ):
        out = tmp_path / "out"
        assert cli.main(["--model", "m", "--host-profile", "gpu", "--out", str(out), "--workload", *options]) == 2
        error = capsys.readouterr().err
        assert error.startswith("bench_rag: ") and sentence in error and error.count("\n") == 1 and not out.exists()


@pytest.mark.parametrize("options", [["--seeds", "1,1"], ["--seeds", "x"], ["--token-ids", "9"], ["--groups", "many"]])
def test_values_that_do_not_parse_are_one_line(options, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(options)
    assert ended.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_unreachable_server_is_one_line(tmp_path, capsys):
    assert cli.main(["--url", "http://127.0.0.1:9", "--out", str(tmp_path), "--quiet"]) == 1
    assert capsys.readouterr().err == "bench_rag: server failed: no healthy server answers at http://127.0.0.1:9\n"


def test_server_arguments_may_start_with_a_dash():
    options = cli.parser().parse_args(joined(["--server-args", "--sleep-on-idle", "--seeds", "3"]))
    assert options.server_args == "--sleep-on-idle" and options.seeds == [3]
