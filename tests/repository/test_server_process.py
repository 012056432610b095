"""Server's life and death (tests/harness/server.py), on a stand-in process: whatever happens, nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.server import Server, ServerError

ROOT = Path(__file__).resolve().parents[2]

# Answers like a server, ignores SIGTERM, and has a child of its own that ignores it too.
STAND_IN = """
import http.server, json, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200 if self.path == "/health" else 404, {})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
        if self.path != "/generate":
            self.answer(503, {"error": "no such thing"})
        elif body["input_ids"] == [0]:
            sys.exit("told to die")
        else:
            n = body["sampling_params"]["max_new_tokens"]
            ids = [sum(body["input_ids"])] * n
            probabilities = [[-0.5, i, None] for i in ids] if body.get("return_logprob") else []
            self.answer(200, {"output_ids": ids, "meta_info": {"cached_tokens": 3, "id": body.get("rid"),
                "output_token_logprobs": probabilities}})
    def answer(self, status, value):
        self.send_response(status); self.end_headers(); self.wfile.write(json.dumps(value).encode())
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""


class StandIn(Server):
    """A server whose command runs the given program."""

    program = STAND_IN

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", self.program.replace("PORT", str(self.port))]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(*pids: int, within: float = 5.0) -> bool:
    deadline = time.monotonic() + within
    while any(runs(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def pids(server: Server) -> tuple[int, int]:
    assert server._process is not None
    return server._process.pid, int(server.log_text().split()[1])


def test_the_whole_group_ends_though_it_ignores_sigterm() -> None:
    with StandIn("model") as server:
        process, child = pids(server)
        assert runs(process) and runs(child)
    assert gone(process, child)
    assert "child" in server.log_text()  # kept after the end


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_in_the_body_ends_it(error: type[BaseException]) -> None:
    with pytest.raises(error), StandIn("model") as server:
        process, child = pids(server)
        raise error
    assert gone(process, child)


def test_it_dies_with_the_process_that_started_it() -> None:
    program = (
        "import os, time; from tests.repository.test_server_process import StandIn, pids\n"
        "server = StandIn('model'); server.start(); print(*pids(server), flush=True); time.sleep(600)"
    )
    starter = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    process, child = map(int, starter.stdout.readline().split())
    starter.kill()
    starter.wait()
    try:
        assert gone(process)
    finally:  # the stand-in's child, unlike SGLang's, does not ask to die with its parent
        os.kill(child, signal.SIGKILL)


def test_requests_and_answers() -> None:
    with StandIn("model") as server:
        answer = server.generate([1, 2, 3], 2, rid="mine")
        assert (answer.ids, answer.logprobs, answer.cached_tokens, answer.meta["id"]) == (
            [6, 6],
            [-0.5, -0.5],
            3,
            "mine",
        )
        assert server.generate([1], 1, logprobs=False).logprobs == []
        many = server.generate_many([[1], [2], [3]], [1, 2, 3])
        assert [a.ids for a in many] == [[1], [2, 2], [3, 3, 3]]
        with pytest.raises(ServerError, match="503 .*no such thing(.|\n)*child"):
            server.flush()


def test_a_death_shows_the_last_lines() -> None:
    with StandIn("model") as server, pytest.raises(ServerError, match="POST /generate: the server (.|\n)*child"):
        server.generate([0], 1)


class Broken(StandIn):
    program = "import sys; print('line one'); sys.exit('no such model')"


class Stuck(StandIn):
    program = "import time; print('thinking', flush=True); time.sleep(600)"


def test_a_failed_start_shows_the_last_lines() -> None:
    server = Broken("model")
    with (
        pytest.raises(ServerError, match="ended with status 1 while starting(.|\n)*line one(.|\n)*no such model"),
        server,
    ):
        pass


def test_a_start_that_takes_too_long_is_given_up() -> None:
    server = Stuck("model", start_timeout=0.5)
    with pytest.raises(ServerError, match="not healthy after(.|\n)*thinking"), server:
        pass
    assert not server.alive()


def test_environment_and_kill_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Show(StandIn):
        program = (
            "import os; print([os.environ.get(n) for n in "
            "('SGLANG_REPLAYSSM_DISABLE', 'GIVEN', 'REMOVED')], 'kernels' in os.listdir('.'))"
        )

    monkeypatch.setenv("SGLANG_REPLAYSSM_DISABLE", "1")
    monkeypatch.setenv("REMOVED", "here")
    for plugin, switch in ((True, "None"), (False, "'1'")):
        server = Show("model", env={"GIVEN": "yes", "REMOVED": None}, plugin=plugin)
        with pytest.raises(ServerError, match=rf"\[{switch}, 'yes', None\] False"), server:
            pass
