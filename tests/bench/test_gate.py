"""A server started ahead of its turn stops before it selects its device, in every process, until the gate opens."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

import bench_rag
from bench_rag.arms import Arm
from bench_rag.hosts import HostProfile
from bench_rag.lineup import Lineup
from bench_rag.server import Server
from bench_rag.settings import Settings, visits
from bench_rag.workloads import Burst, Vocab

TORCH = """
class _Device:
    def set_device(self, index): print("selected", index, flush=True)
cuda, cpu = _Device(), _Device()
"""
# As SGLang does: the device is selected in a child process that multiprocessing spawns.
LAUNCH_SERVER = """
import importlib.util, multiprocessing, sys, time
from sglang.work import work
if __name__ == "__main__":
    print("arguments", *sys.argv[1:], flush=True)
    print("hidden", importlib.util.find_spec("ceiling") is None, flush=True)
    child = multiprocessing.get_context("spawn").Process(target=work)
    child.start()
    time.sleep(600)
"""
WORK = """
import time
def work():
    import torch
    print("imported", flush=True)
    torch.cuda.set_device(5)
    time.sleep(600)
"""


@pytest.fixture
def fake_packages(tmp_path: Path) -> dict[str, str]:
    """An environment in which torch and sglang are the ones above."""
    packages = tmp_path / "packages"
    (packages / "sglang").mkdir(parents=True)
    (packages / "torch.py").write_text(TORCH)
    (packages / "sglang" / "__init__.py").write_text("")
    (packages / "sglang" / "launch_server.py").write_text(LAUNCH_SERVER)
    (packages / "sglang" / "work.py").write_text(WORK)
    return {**os.environ, "PYTHONPATH": str(packages)}


def until(condition, what: str, patience: float = 20.0) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {patience} s"
        time.sleep(0.02)


def test_child_waits_until_the_gate_opens(tmp_path, fake_packages):
    launch, gate = Path(bench_rag.__file__).with_name("launch.py"), tmp_path / "a.gate"
    command = [sys.executable, str(launch), str(gate), "--model-path", "m"]
    with Server(command, fake_packages, tmp_path / "server.log", 0, grace=0.3, gate=gate) as server:
        until(lambda: server.waits_at_gate, "waiting")
        time.sleep(0.3)
        assert server.last_lines().splitlines() == ["arguments --model-path m", "hidden True", "imported"]
        server.open_gate()
        until(lambda: "selected 5" in server.last_lines(), "selecting the device")


def test_next_server_is_ahead_but_never_at_work(tmp_path, fake_packages, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", fake_packages["PYTHONPATH"])
    settings = Settings(
        arms=[Arm("one", "", ("--one",)), Arm("two", "", ("--two",)), Arm("three", "")],
        workloads=[Burst(batch=1)],
        seeds=[1],
        out=tmp_path,
        vocab=Vocab(),
        model="m",
        profile=HostProfile("cpu"),
        overlap_starts=True,
    )
    one, two, three = visits(settings.arms, settings.seeds, "grouped")
    log = {name: tmp_path / "logs" / f"{name}-seed1.log" for name in ("one", "two", "three")}

    def says(name: str, text: str) -> bool:
        return log[name].exists() and text in log[name].read_text()

    with Lineup(settings) as lineup:
        with lineup.server(one, two) as server:
            server.grace = 0.3
            until(lambda: says("one", "selected 5"), "the first server's start")
            until(lambda: says("two", "imported"), "the second server's imports")
            assert not says("two", "selected")
        with lineup.server(two, three) as server:
            server.grace = 0.3
            assert says("two", "imported")  # the one that was ahead, not another
            until(lambda: says("two", "selected 5"), "the second server's start")
            until(lambda: says("three", "imported"), "the third server's imports")
        lineup._ahead[1].grace = 0.3
    assert not says("three", "selected")
    assert sorted(p.suffix for p in (tmp_path / "logs").iterdir()) == [".log"] * 3  # no gate is left behind
    assert lineup.commands["two"][1:3] == ["-m", "sglang.launch_server"] and lineup.commands["two"][-1] == "--two"
