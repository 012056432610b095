"""A real SGLang server as a context manager.

with Server(tiny.build("qwen3-next"), plugin=True) as server:
    answer = server.generate(prompt_ids, 16)
    assert answer.cached_tokens == 0
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from tests.harness import host

KILL_SWITCH = "SGLANG_REPLAYSSM_DISABLE"
TAIL_LINES = 40


@dataclass(frozen=True)
class Answer:
    """One finished generation: output ids, their log-probabilities, and the server's meta_info."""

    ids: list[int]
    logprobs: list[float]
    cached_tokens: int
    meta: dict[str, Any] = field(repr=False)


class ServerError(RuntimeError):
    """A server that did not start, died, or refused a request. The message ends with its last log lines."""


class Server:
    """Starts `python -m sglang.launch_server` on a free loopback port and kills its process group at exit.

    Args:
        model: checkpoint folder.
        args: server flags beside the base flags of tests/harness/host.py; the last of two equal ones wins.
        env: environment beside the host's; None removes a variable.
        plugin: False sets the plugin's kill switch, so that SGLang behaves as without it.
        start_timeout: seconds until the server must answer its health check.
        request_timeout: seconds one request may take.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        args: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
        *,
        plugin: bool = False,
        start_timeout: float = 300.0,
        request_timeout: float = 300.0,
    ) -> None:
        self.model = os.fspath(model)
        self.args = list(args)
        self.env = dict(env or {})
        self.plugin = plugin
        self.start_timeout = start_timeout
        self.request_timeout = request_timeout
        self.start_seconds = 0.0
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._last_log = ""
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy of the machine must not see loopback requests

    # life

    def __enter__(self) -> Server:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and wait until it is healthy; ServerError with its last lines otherwise."""
        self._folder = tempfile.TemporaryDirectory(prefix="replayssm-server-")
        self.port = _free_port()
        environment = {**os.environ, **host.server_env(), "TMPDIR": self._folder.name}  # its sockets, too
        environment.pop(KILL_SWITCH, None)
        if not self.plugin:
            environment[KILL_SWITCH] = "1"
        for name, value in self.env.items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value
        with open(self._log_path, "wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                cwd=self._folder.name,  # not the repository: its folder kernels/ must not be importable
                start_new_session=True,  # a process group of its own, to kill as a whole
                preexec_fn=die_with_parent,
            )
        self._wait_until_healthy()

    def stop(self) -> None:
        """End the whole process group: SIGTERM, then SIGKILL after a second. Safe to call twice."""
        process, self._process = self._process, None
        if process is not None:
            _signal_group(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)  # an orderly exit takes SGLang six seconds, and nothing here needs it
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
            self._last_log = self._read_log()
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.cleanup()

    @property
    def command(self) -> list[str]:
        """The command line, as started."""
        base = [sys.executable, "-m", "sglang.launch_server", "--model-path", self.model]
        return [*base, "--host", "127.0.0.1", "--port", str(self.port), *host.server_args(), *self.args]

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    def alive(self) -> bool:
        """Whether the server process runs."""
        return self._process is not None and self._process.poll() is None

    # requests

    def generate(
        self,
        input_ids: Sequence[int],
        max_new_tokens: int,
        *,
        logprobs: bool = True,
        rid: str | None = None,
        **sampling: Any,
    ) -> Answer:
        """Greedy generation (unless `sampling` says otherwise) that ignores end-of-sequence tokens."""
        parameters = {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True, **sampling}
        body: dict[str, Any] = {"input_ids": list(input_ids), "sampling_params": parameters}
        if logprobs:
            body["return_logprob"] = True
        if rid is not None:
            body["rid"] = rid
        reply = self.post("/generate", body).json()
        meta = reply["meta_info"]
        entries = meta.pop("output_token_logprobs", None) or []
        return Answer(
            ids=[int(token) for token in reply["output_ids"]],
            logprobs=[float(entry[0]) for entry in entries],
            cached_tokens=int(meta.get("cached_tokens", 0)),  # a request that was aborted in the queue has none
            meta=meta,
        )

    def generate_many(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        *,
        logprobs: bool = True,
        rids: Sequence[str] | None = None,
        stagger: float = 0.0,
        **sampling: Any,
    ) -> list[Answer]:
        """All prompts at once, each `stagger` seconds after the one before; answers in the prompts' order."""
        lengths = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)

        def one(index: int) -> Answer:
            time.sleep(index * stagger)
            rid = rids[index] if rids is not None else None
            return self.generate(prompts[index], lengths[index], logprobs=logprobs, rid=rid, **sampling)

        with ThreadPoolExecutor(max_workers=max(1, len(prompts))) as pool:
            return list(pool.map(one, range(len(prompts))))

    def abort(self, rid: str = "", *, everything: bool = False) -> None:
        """Abort one request by id, or every request."""
        self.post("/abort_request", {"rid": rid, "abort_all": everything})

    def flush(self, timeout: float = 60.0) -> None:
        """Empty the prefix cache, waiting for running requests to end first."""
        self.post(f"/flush_cache?timeout={timeout:g}", None)

    def server_info(self) -> dict[str, Any]:
        """Resolved arguments and scheduler state."""
        return self.get("/server_info").json()

    def metrics(self) -> dict[str, float]:
        """Prometheus samples (needs --enable-metrics), name with labels -> value."""
        samples = {}
        for line in self.get("/metrics/").text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                samples[name] = float(value)
        return samples

    def get(self, path: str) -> requests.Response:
        """GET that raises ServerError unless the status is 200."""
        return self._checked("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any] | None) -> requests.Response:
        """POST of JSON that raises ServerError unless the status is 200."""
        return self._checked("POST", path, body)

    def _checked(self, method: str, path: str, body: Mapping[str, Any] | None) -> requests.Response:
        try:
            reply = self._session.request(method, self.url + path, json=body, timeout=self.request_timeout)
        except requests.RequestException as error:
            state = "answers no more" if self.alive() else "has died"
            raise ServerError(f"{method} {path}: the server {state}: {error}\n{self.log_tail()}") from error
        if reply.status_code != 200:
            raise ServerError(f"{method} {path}: {reply.status_code} {reply.text[:2000]}\n{self.log_tail()}")
        return reply

    # log

    @property
    def _log_path(self) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / "server.log"

    def _read_log(self) -> str:
        with contextlib.suppress(OSError):
            return self._log_path.read_text(errors="replace")
        return ""

    def log_text(self) -> str:
        """Everything the server has printed, also after it was stopped."""
        return self._read_log() if self._folder is not None else self._last_log

    def log_tail(self, lines: int = TAIL_LINES) -> str:
        """The server's last lines, with its command."""
        tail = "\n".join(self.log_text().splitlines()[-lines:])
        return f"--- {' '.join(self.command)}\n--- last {lines} lines of the server:\n{tail}"

    def _wait_until_healthy(self) -> None:
        started = time.monotonic()
        with _Progress(f"SGLang server ({Path(self.model).name} {' '.join(self.args)})".strip()) as progress:
            while True:
                self.start_seconds = time.monotonic() - started
                if not self.alive():
                    code = self._process.returncode if self._process else None
                    raise ServerError(f"the server ended with status {code} while starting\n{self.log_tail()}")
                if self.start_seconds > self.start_timeout:
                    raise ServerError(f"not healthy after {self.start_seconds:.0f} s\n{self.log_tail()}")
                with contextlib.suppress(requests.RequestException):
                    if self._session.get(self.url + "/health", timeout=5).status_code == 200:
                        return
                progress.show(self.start_seconds, _stage(self.log_text()))
                time.sleep(0.25)


class _Progress:
    """One line on the terminal that counts the seconds; on anything else a single line at the end."""

    def __init__(self, title: str) -> None:
        self.title = title[:90]
        self.stream = sys.__stderr__
        self.live = self.stream is not None and self.stream.isatty()
        self.seconds = 0.0

    def __enter__(self) -> _Progress:
        return self

    def show(self, seconds: float, stage: str) -> None:
        self.seconds = seconds
        if self.live:
            print(f"\r{self.title}: {seconds:3.0f} s {stage:<24.24}", end="", file=self.stream, flush=True)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self.stream is not None:
            start = "\r" if self.live else ""
            outcome = "ready" if kind is None else "failed"
            print(f"{start}{self.title}: {outcome} after {self.seconds:.0f} s{' ' * 16}", file=self.stream)


def _stage(log: str) -> str:
    for mark, stage in (
        ("Uvicorn running", "listening"),
        ("Memory pool end", "pools allocated"),
        ("Load weight end", "weights loaded"),
        ("Load weight begin", "loading weights"),
    ):
        if mark in log:
            return stage
    return "importing"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def die_with_parent() -> None:
    """Linux: SIGKILL for the server when the thread that started it ends, however it ends.

    SGLang's own child processes ask for the same.
    """
    pr_set_pdeathsig = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def logged_errors(log: str) -> list[str]:
    """Lines of a server log that report an error or a traceback."""
    return [line for line in log.splitlines() if re.search(r"\b(ERROR|CRITICAL)\b|Traceback", line)]
