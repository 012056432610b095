"""Servers one after another: the one in use, and if asked, the next one importing ahead of its turn."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from .arms import Arm
from .hosts import gpu_memory_used
from .server import Server, free_port, launch_command
from .settings import Settings, Visit

_LAUNCH = Path(__file__).with_name("launch.py")


class Lineup:
    """Starts the server of each visit, at most one of them at work; a context manager that leaves none behind."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ahead: tuple[Visit, Server] | None = None
        self.commands: dict[str, list[str]] = {}

    def __enter__(self) -> Lineup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drop_ahead()

    @contextmanager
    def server(self, visit: Visit, then: Visit | None) -> Iterator[Server]:
        """The server of ``visit``, starting; ``then`` is the visit that follows. It is gone when the context ends."""
        gpu = self._settings.profile.name == "gpu"
        before = gpu_memory_used() if gpu else None
        with self._take(visit) as server:
            server.open_gate()
            if self._settings.overlap_starts and then is not None:
                self._ahead = (then, self._start(then, gated=True))
            yield server
        if before is not None:
            _wait_for_memory(before)

    async def settle(self, patience: float = 180.0) -> None:
        """Wait until the server ahead has done its imports, so that it takes no CPU time from a measurement."""
        deadline = time.monotonic() + patience
        while self._ahead is not None and time.monotonic() < deadline:
            server = self._ahead[1]
            if server.waits_at_gate or server.returncode is not None:
                return
            await asyncio.sleep(0.1)

    def _take(self, visit: Visit) -> Server:
        if self._ahead is not None and self._ahead[0] == visit:
            server, self._ahead = self._ahead[1], None
            return server
        self._drop_ahead()  # it was meant for a visit that is skipped now
        return self._start(visit, gated=False)

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            server, self._ahead = self._ahead[1], None
            server.stop()

    def _start(self, visit: Visit, gated: bool) -> Server:
        s, arm = self._settings, visit.arm
        port = free_port()
        args: Sequence[str] = [*s.profile.args, *s.server_args, *arm.args]
        command = launch_command(s.model, port, args)
        self.commands[arm.name] = command
        log = (s.out / "logs" / f"{_file_name(arm)}-seed{visit.seeds[0]}.log").absolute()
        gate = log.with_suffix(".gate") if gated else None
        if gate is not None:
            command = [command[0], str(_LAUNCH), str(gate), *command[3:]]
        env = arm.environment({**os.environ, **s.profile.env, **s.server_env})
        if "PYTHONPATH" in env:  # a server runs in another folder, where a relative entry would mean something else
            env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(p) for p in env["PYTHONPATH"].split(os.pathsep) if p)
        return Server(command, env, log, port, gate=gate).start()


def _file_name(arm: Arm) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in arm.name)


def _wait_for_memory(before: int, patience: float = 30.0, slack: int = 1024) -> None:
    """Wait until GPU memory in use is within ``slack`` MiB of ``before``: the next server plans by what is free."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        used = gpu_memory_used()
        if used is None or used <= before + slack:
            return
        time.sleep(0.5)
