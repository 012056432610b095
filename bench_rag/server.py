"""One SGLang server as a child process: start on loopback, wait until it answers, always reap it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from .client import Client
from .errors import BenchError

_TAIL = 25
# Runs before the server: the kernel then kills it should this process die without reaping (SGLang's own
# children watch their parent the same way). prctl(PR_SET_PDEATHSIG = 1) survives the exec.
_TIE_TO_PARENT = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    "if os.getppid() != int(sys.argv[1]): sys.exit(1)\n"
    "os.execv(sys.argv[2], sys.argv[2:])"
)


def free_port() -> int:
    """A TCP port that nobody listens on at the moment."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def launch_command(model: str, port: int, args: Sequence[str]) -> list[str]:
    """The server's command line; it binds to 127.0.0.1."""
    server = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
    return [*server, "--host", "127.0.0.1", "--port", str(port), *args]


class Server:
    """Context manager around one server process and everything it starts.

    Both of its output streams go to ``log``. Leaving the context ends the whole session of processes, whatever they
    do with SIGTERM, and raises BenchError if one survives. ``grace``: seconds from SIGTERM to SIGKILL.
    ``gate``: a file that the command waits for (see ``launch.py``).
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        port: int,
        grace: float = 5.0,
        gate: Path | None = None,
    ) -> None:
        self.command, self.env, self.log, self.port, self.grace = list(command), dict(env), log, port, grace
        self.base_url = f"http://127.0.0.1:{port}"
        self._gate = gate
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        return self.start()

    def start(self) -> Server:
        """Start the process unless it runs already; the caller sees to :meth:`stop`."""
        if self._process is not None:
            return self
        self._clear_gate()  # one left over from an earlier run would stand open
        self.log.parent.mkdir(parents=True, exist_ok=True)
        tied = [sys.executable, "-c", _TIE_TO_PARENT, str(os.getpid()), *self.command]
        with open(self.log, "wb") as log:
            self._process = self._spawn(tied, log)
        return self

    def _spawn(self, command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=self.env,
            cwd=self.log.parent,  # python -m puts the working folder first on the import path
            start_new_session=True,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def returncode(self) -> int | None:
        """Exit status of the server process; None while it runs."""
        return self._process.poll() if self._process else None

    def open_gate(self) -> None:
        """Let a server that was started with a gate go on."""
        if self._gate is not None:
            self._gate.touch()

    @property
    def waits_at_gate(self) -> bool:
        """Whether one of its processes has come as far as the closed gate."""
        return self._gate is not None and any(self._gate.parent.glob(f"{self._gate.name}.*.waiting"))

    def _clear_gate(self) -> None:
        if self._gate is not None:
            for path in (self._gate, *self._gate.parent.glob(f"{self._gate.name}.*.waiting")):
                path.unlink(missing_ok=True)

    async def ready(self, client: Client, timeout: float, tick: Callable[[float], None] = lambda s: None) -> float:
        """Seconds until the server answered its health check. BenchError, with its last lines, if it dies or is late.

        ``tick`` is called with the seconds waited so far, a few times a second.
        """
        began = time.monotonic()
        while (waited := time.monotonic() - began) < timeout:
            tick(waited)
            if self.returncode is not None:
                raise self.failure(f"the server ended while starting, exit status {self.returncode}")
            if await client.healthy():
                return time.monotonic() - began
            await asyncio.sleep(0.2)
        raise self.failure(f"the server did not answer its health check within {timeout:g} s")

    async def ended(self, patience: float) -> int | None:
        """Exit status, waiting up to ``patience`` seconds for it; None if the process still runs then."""
        deadline = time.monotonic() + patience
        while self.returncode is None and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return self.returncode

    def failure(self, sentence: str) -> BenchError:
        """An error that carries the server's own last lines."""
        return BenchError(f"{sentence} (log: {self.log})", self.last_lines())

    def last_lines(self, count: int = _TAIL) -> str:
        """The end of the log; empty if nothing was written."""
        try:
            with open(self.log, "rb") as f:
                f.seek(max(0, self.log.stat().st_size - 64 * 1024))
                return "\n".join(f.read().decode(errors="replace").splitlines()[-count:])
        except OSError:
            return ""

    def stop(self) -> None:
        """Ask the server to end, after ``grace`` seconds kill every process of its session; wait for all to go."""
        if self._process is None:
            return
        session = self._process.pid
        self._process.terminate()
        for patience in (self.grace, 30.0):
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline:
                self._process.poll()
                if not _session_members(session):
                    self._process.wait()
                    self._process = None
                    self._clear_gate()
                    return
                time.sleep(0.05)
            _kill_session(session)
        raise BenchError(f"server processes survive SIGKILL: {sorted(_session_members(session))}")


def _session_members(session: int) -> set[int]:
    """Live processes of a session; zombies have released everything and do not count."""
    members = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # After the command, which may hold any character: state, parent, group, session.
            state, _, _, its_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if int(its_session) == session and state not in "ZX":
            members.add(int(entry.name))
    return members


def _kill_session(session: int) -> None:
    for pid in _session_members(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
