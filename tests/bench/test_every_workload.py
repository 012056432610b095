"""One benchmark over every workload from the command line, against a fake server."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bench_rag import cli, lineup
from bench_rag.workloads import WORKLOADS

FAKES = Path(__file__).with_name("fakes.py")
DOCS = Path(__file__).parents[2] / "docs"
SIZES = (
    *("--groups=2", "--prompts-per-group=2", "--prefix-len=64", "--question-len=8", "--output-len=4"),
    *("--requests=4", "--topics=2", "--documents=2", "--document-len=48", "--documents-per-prompt=2"),
    *("--questions=2", "--question-gap=0.1", "--sessions=2", "--turns=2", "--first-len=64", "--steps=2"),
    *("--tool-len=8", "--prompt-len=8", "--batch=2", "--request-rate=inf", "--concurrency=4"),
)
REQUESTS = dict(gsp=4, zipf=4, rag=4, multi=4, agent=4, docqa=4, trace=3, burst=2)


def run(folder: Path, *options: str) -> dict[str, dict]:
    """Figures by kind of workload, from one arm and one seed."""
    trace = folder / "trace.jsonl"
    record = {"input_length": 40, "output_length": 3, "hash_ids": [7]}
    trace.write_text("".join(json.dumps({**record, "timestamp": 100 * i}) + "\n" for i in range(3)))
    words = ["--workload", ",".join(WORKLOADS), "--trace", str(trace), "--corpus", str(DOCS), "--arms", "plain"]
    assert cli.main([*words, *SIZES, "--out", str(folder / "out"), "--warmup", "light", "--quiet", *options]) == 0
    data = json.loads((folder / "out" / "results.json").read_text())
    labels = {w["label"]: w["kind"] for w in data["workloads"]}
    return {labels[r["workload"]]: {**r["figures"], "samples": r["samples"]} for r in data["runs"]}


def test_fake_server(tmp_path, monkeypatch):
    monkeypatch.setattr(lineup, "launch_command", lambda model, port, args: [sys.executable, str(FAKES), str(port)])
    figures = run(tmp_path, "--model", "tiny", "--host-profile", "gpu")
    assert {kind: f["requests"] for kind, f in figures.items()} == REQUESTS
