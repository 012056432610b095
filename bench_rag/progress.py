"""Progress on stderr: on a terminal, bars over all runs and over the requests of one; elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from tqdm import tqdm

from . import measures
from .client import Reply

_LINE_EVERY = 20.0  # seconds between lines where there is no terminal


class Progress:
    """``total``: number of measured runs. Use as a context manager; ``quiet`` shows nothing at all."""

    def __init__(self, total: int, quiet: bool = False) -> None:
        self._quiet = quiet
        self._style: dict[str, Any] = {
            "file": sys.stderr,
            "disable": quiet or not sys.stderr.isatty(),
            "mininterval": 0.2,
            "dynamic_ncols": True,
        }
        self._runs = tqdm(total=total, desc="runs", unit="run", position=0, **self._style)
        self._requests: tqdm[Any] | None = None
        self._name, self._planned, self._replies = "", 0, 0
        self._began = self._last_line = time.monotonic()
        self._reported = True
        self._sums = dict.fromkeys(("answers", "failed", "prompt", "cached", "output", "ttft"), 0.0)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_requests()
        self._runs.close()

    def say(self, text: str) -> None:
        """One line, above the bars."""
        if not self._quiet:
            tqdm.write(text, file=sys.stderr)

    def phase(self, text: str) -> None:
        """What is going on outside measured runs, beside the bar over all runs."""
        self._runs.set_postfix_str(text)

    def begin(self, name: str, requests: int) -> None:
        """A run of ``requests`` requests begins."""
        self._close_requests()
        self._name, self._planned, self._replies = name, requests, 0
        self._began = self._last_line = time.monotonic()
        self._sums, self._reported = dict.fromkeys(self._sums, 0.0), True
        self._requests = tqdm(total=requests, desc=name, unit="req", position=1, leave=False, **self._style)

    def reply(self, reply: Reply) -> None:
        """A request of the current run ended."""
        self._replies += 1
        if reply.ok:
            found = (1, 0, reply.prompt_tokens, reply.cached_tokens or 0, reply.events[-1][1], measures.ttft(reply))
            self._reported &= reply.cached_tokens is not None
        else:
            found = (0, 1, 0, 0, 0, 0.0)
        for name, value in zip(self._sums, found, strict=True):
            self._sums[name] += value
        if self._requests is not None:
            self._requests.set_postfix_str(self._figures(), refresh=False)
            self._requests.update()
        if self._style["disable"] and time.monotonic() - self._last_line > _LINE_EVERY:
            self._last_line = time.monotonic()
            self.say(f"{self._name}: {self._replies} of {self._planned} requests, {self._figures()}")

    def end(self) -> None:
        """The current run is over."""
        self._close_requests()
        seconds = time.monotonic() - self._began
        self.say(f"{self._name}: {self._planned} requests in {seconds:.1f} s, {self._figures()}")
        self._runs.update()

    def _figures(self) -> str:
        s = self._sums
        parts = []
        if s["answers"]:
            seconds = max(time.monotonic() - self._began, 1e-9)
            hits = f"{100 * s['cached'] / s['prompt']:.1f}%" if self._reported else "not reported"
            parts.append(f"hits {hits}")
            parts.append(f"TTFT {1e3 * s['ttft'] / s['answers']:.0f} ms")
            parts.append(f"{s['output'] / seconds:.0f} tok/s")
        if s["failed"]:
            parts.append(f"{s['failed']:.0f} failed")
        return ", ".join(parts)

    def _close_requests(self) -> None:
        if self._requests is not None:
            self._requests.close()
            self._requests = None
