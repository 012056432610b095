"""What goes wrong on a real server ends with one clear error, or with the server, and leaves nothing behind.

Faults that need no server have their tests elsewhere: docs/contributing.md lists them.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.harness import tiny
from tests.harness.configs import CONFIGS
from tests.harness.events import Events
from tests.harness.judge import Exchange, follow_transformers
from tests.harness.reference import prompt
from tests.harness.server import Server, ServerError, logged_errors

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


def test_sigterm_while_requests_decode() -> None:
    """SGLang answers what is in flight, exactly, and every process ends."""
    events = Events()
    with start() as server, ThreadPoolExecutor(2) as pool:
        found = processes(server)
        prompts = [prompt(40, seed=i) for i in range(2)]
        answers = [pool.submit(server.generate, each, 40) for each in prompts]
        events.wait_for_decoded_tokens(6)
        os.kill(found[0].pid, signal.SIGTERM)
        exchanges = [Exchange(p, a.result(timeout=240)) for p, a in zip(prompts, answers, strict=True)]
        follow_transformers(server, exchanges)
        assert gone(found, seconds=120), "a process of the server is left"
        assert "ReplaySSM" not in "".join(logged_errors(server.log_text()))


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
