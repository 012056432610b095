"""What the command lines of this package share."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"bench_rag: {message}\n")


def joined(argv: list[str]) -> list[str]:
    """``--server-args "--flag"`` as one word: argparse would take a value that starts with a dash for an option."""
    words: list[str] = []
    for word in argv:
        if words and words[-1] == "--server-args":
            words[-1] = f"--server-args={word}"
        else:
            words.append(word)
    return words
