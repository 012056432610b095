"""A server is always reaped, whatever it does, and its failures show its own last lines."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench_rag.client import Client
from bench_rag.errors import BenchError
from bench_rag.server import Server, free_port, launch_command

# Ignores SIGTERM and starts a child; both print their ids.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 1:
    subprocess.Popen([sys.executable, __file__, "child"])
print(os.getpid(), flush=True)
time.sleep(600)
"""

HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def start(folder: Path, *command: str, port: int = 0, grace: float = 0.3) -> Server:
    return Server([sys.executable, *command], dict(os.environ), folder / "logs" / "server.log", port, grace)


def running(pid: int) -> bool:
    """Alive and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def pids_in(log: Path, count: int) -> list[int]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = log.read_text().split() if log.exists() else []
        if len(found) == count:
            return [int(pid) for pid in found]
        time.sleep(0.05)
    raise AssertionError(f"{count} processes did not report within 20 s")


def wait_ready(server: Server, timeout: float) -> float:
    async def go() -> float:
        async with Client(server.base_url) as client:
            return await server.ready(client, timeout)

    return asyncio.run(go())


def test_processes_that_ignore_sigterm_are_killed_with_their_children(tmp_path):
    with start(tmp_path, script(tmp_path, STUBBORN)) as server:
        pids = pids_in(server.log, 2)
        assert all(running(pid) for pid in pids)
    assert not any(running(pid) for pid in pids)


def test_reaped_when_the_body_fails(tmp_path):
    with pytest.raises(KeyboardInterrupt), start(tmp_path, script(tmp_path, STUBBORN)) as server:
        pids = pids_in(server.log, 2)
        raise KeyboardInterrupt
    assert not any(running(pid) for pid in pids)


def test_server_dies_with_a_benchmark_that_is_killed(tmp_path):
    benchmark = f"""
import os, sys, time
from pathlib import Path
from bench_rag.server import Server
with Server([sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"],
            dict(os.environ), Path({str(tmp_path / "server.log")!r}), 0):
    time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, script(tmp_path, benchmark)], cwd=Path(__file__).parents[2])
    try:
        (pid,) = pids_in(tmp_path / "server.log", 1)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 10
    while running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(pid)


def test_ready_when_the_health_check_answers(tmp_path):
    port = free_port()
    with start(tmp_path, script(tmp_path, HEALTHY), str(port), port=port) as server:
        assert 0 < wait_ready(server, 20) < 20
        assert server.returncode is None


def test_death_while_starting_shows_the_last_lines(tmp_path):
    text = "print('\\n'.join(f'line {i}' for i in range(100)))\nraise SystemExit('ValueError: no such flag')"
    with (
        start(tmp_path, script(tmp_path, text)) as server,
        pytest.raises(BenchError, match="ended while starting, exit status 1") as failure,
    ):
        wait_ready(server, 20)
    assert failure.value.detail.endswith("ValueError: no such flag")
    assert "line 99" in failure.value.detail and "line 50" not in failure.value.detail
    assert str(server.log) in str(failure.value)


def test_a_server_that_never_answers_is_given_up(tmp_path):
    with (
        start(tmp_path, "-c", "import time; print('loading', flush=True); time.sleep(600)") as server,
        pytest.raises(BenchError, match="did not answer its health check within 2 s") as failure,
    ):
        pids_before = server.returncode
        wait_ready(server, 2)
    assert pids_before is None and failure.value.detail == "loading"


def test_servers_bind_to_loopback_and_the_arm_comes_last():
    command = launch_command("model", 1234, ["--dtype", "auto"])
    assert command[1:3] == ["-m", "sglang.launch_server"]
    assert command[command.index("--host") + 1] == "127.0.0.1" and command[-2:] == ["--dtype", "auto"]
