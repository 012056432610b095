"""The one exception that ends a benchmark with a sentence instead of a traceback."""

from __future__ import annotations


class BenchError(Exception):
    """Something the person at the keyboard can act on; ``str()`` is one clear sentence.

    ``detail`` holds what belongs under the sentence, such as the last lines a server wrote.
    """

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail
