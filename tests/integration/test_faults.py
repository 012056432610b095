"""What goes wrong on a real server ends with one clear error, or with the server, and leaves nothing behind.

Faults that need no server have their tests elsewhere: docs/contributing.md lists them.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.harness import tiny
from tests.harness.configs import CONFIGS
from tests.harness.reference import prompt
from tests.harness.server import Server, ServerError

pytestmark = pytest.mark.long


def start(**env: str) -> Server:
    config = CONFIGS["deep-on"]
    return Server(tiny.build(config.model), config.args, {**config.env, **env}, plugin=True)


def processes(server: Server) -> list[psutil.Process]:
    assert server._process is not None
    parent = psutil.Process(server._process.pid)
    return [parent, *parent.children(recursive=True)]


def gone(found: list[psutil.Process], seconds: float) -> bool:
    return not psutil.wait_procs(found, timeout=seconds)[1]


def test_a_launch_that_fails_ends_the_server_with_its_error() -> None:
    """The third fold fails, as on a device that has gone: no request gets a wrong token, all get an error."""
    with start(REPLAYSSM_PROBE_FAIL_LAUNCH="materialise:9") as server, ThreadPoolExecutor(2) as pool:
        found = processes(server)
        answers = [pool.submit(server.generate, prompt(40, seed=i), 400) for i in range(2)]
        for answer in answers:
            with pytest.raises(ServerError):
                answer.result(timeout=120)
        assert gone(found, seconds=60)
        assert server.log_text().count("RuntimeError: the probe makes this launch fail") >= 1


def test_a_dead_detokenizer_ends_the_server() -> None:
    with start() as server, ThreadPoolExecutor(1) as pool:
        found = processes(server)
        answer = pool.submit(server.generate, prompt(40, seed=1), 400)
        time.sleep(3)
        (detokenizer,) = (p for p in found if "detokenizer" in " ".join(p.cmdline()) + p.name())
        detokenizer.kill()
        with pytest.raises(ServerError):
            answer.result(timeout=120)
        assert gone(found, seconds=60)
