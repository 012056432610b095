"""Progress on stderr: one bar over all runs, one over the requests of the current run with its figures so far."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from tqdm import tqdm

from . import measures
from .client import Reply


class Progress:
    """``total``: number of measured runs. Use as a context manager; ``quiet`` shows nothing."""

    def __init__(self, total: int, quiet: bool = False) -> None:
        # In a log file a bar is a line per update, so it updates rarely there.
        self._style: dict[str, Any] = {
            "file": sys.stderr,
            "disable": quiet,
            "mininterval": 0.2 if sys.stderr.isatty() else 10.0,
            "dynamic_ncols": True,
        }
        self._runs = tqdm(total=total, desc="runs", unit="run", position=0, **self._style)
        self._requests: tqdm[Any] | None = None
        self._cached = self._prompt = self._output = self._answers = self._failed = 0
        self._ttft = 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_requests()
        self._runs.close()

    def say(self, text: str) -> None:
        """One line above the bars."""
        if not self._style["disable"]:
            tqdm.write(text, file=sys.stderr)

    def phase(self, text: str) -> None:
        """What is going on between runs, beside the bar over all runs."""
        self._runs.set_postfix_str(text, refresh=sys.stderr.isatty())

    def begin(self, name: str, requests: int) -> None:
        """A run of ``requests`` requests begins."""
        self._close_requests()
        self._cached = self._prompt = self._output = self._answers = self._failed = 0
        self._ttft = 0.0
        self._requests = tqdm(total=requests, desc=name, unit="req", position=1, leave=False, **self._style)

    def reply(self, reply: Reply) -> None:
        """A request of the current run ended."""
        if reply.ok:
            self._answers += 1
            self._cached += reply.cached_tokens
            self._prompt += reply.prompt_tokens
            self._output += reply.events[-1][1]
            self._ttft += measures.ttft(reply)
        else:
            self._failed += 1
        bar = self._requests
        if bar is None:
            return
        if self._answers:
            seconds = max(bar.format_dict["elapsed"], 1e-9)
            figures = (
                f"hit {100 * self._cached / self._prompt:.1f}%, TTFT {1e3 * self._ttft / self._answers:.0f} ms, "
                f"{self._output / seconds:.0f} tok/s"
            )
            bar.set_postfix_str(figures + (f", {self._failed} failed" if self._failed else ""), refresh=False)
        bar.update()

    def end(self) -> None:
        """The current run is over."""
        self._close_requests()
        self._runs.update()

    def _close_requests(self) -> None:
        if self._requests is not None:
            self._requests.close()
            self._requests = None
