"""Text that ships with Python: the sources of the standard library, split by module into seen and held out."""

from __future__ import annotations

import re
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

from ..errors import BenchError

_DIGIT = re.compile(r"\d")
HELD_OUT = 20  # one module in so many is never trained on
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "encodings"}  # the last is tables


def is_held_out(module: str) -> bool:
    """Whether no training may see this module (its path in the library, such as ``json/decoder.py``).

    The split is by name alone, so that it is the same on every machine and for every Python version.
    """
    return zlib.crc32(module.encode()) % HELD_OUT == 0


def sources(held_out: bool) -> list[str]:
    """The texts of one side of the split, ordered by name. BenchError if this Python came without its library."""
    found = [text for name, text in _library() if is_held_out(name) == held_out]
    if not found:
        raise BenchError("the sources of Python's standard library are not installed here")
    return found


def _library() -> Iterator[tuple[str, str]]:
    """Name and text of every module; tables (a quarter of the characters are digits) and empty files are left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if _SKIPPED & set(inside.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8").strip() + "\n"
        except (OSError, UnicodeDecodeError):
            continue
        if len(text) > 200 and len(_DIGIT.findall(text)) < len(text) / 4:
            yield inside.as_posix(), text
