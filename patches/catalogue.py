"""The patches by name, in the order in which they stack, and what each makes of the release."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import libcst as cst

from patches.edit import Edit
from patches.pristine import read, unified_diff

NAMES = (
    "help_text",
    "memory_plan",
    "cpu_backup",
    "conv_window",
    "mixed_pages",
    "host_synchronisations",
    "extra_buffer",
)


@dataclass(frozen=True)
class Patch:
    """One defect and its repair.

    Attributes:
        name: its folder in patches/, with codemod.py, shows.py (the script) and README.md (the page).
        title: what goes wrong, in one line.
        issues: public threads that it answers.
        edits: by path of a file ("sglang/srt/..."), what is done to it.
    """

    name: str
    title: str
    issues: str
    edits: Mapping[str, Edit]

    @property
    def folder(self) -> Path:
        return Path(__file__).parent / self.name

    def apply(self, text: Mapping[str, str] | None = None) -> dict[str, str]:
        """The changed files.

        Args:
            text: files that other patches changed already; all others are the release's.

        Raises:
            NotPristine: the installed SGLang is not the release.
            NoPlace: the file does not have what an edit is about.
        """
        given = text or {}
        changed = {}
        for path, edit in self.edits.items():
            module = cst.parse_module(given.get(path) or read(path))
            changed[path] = edit(module).code
            compile(changed[path], path, "exec")
        return changed


def load(name: str) -> Patch:
    """A patch by name; ValueError for one that does not exist."""
    if name not in NAMES:
        raise ValueError(f"there is no patch {name!r}; there are {', '.join(NAMES)}")
    codemod = importlib.import_module(f"patches.{name}.codemod")
    return Patch(name, codemod.TITLE, codemod.ISSUES, codemod.EDITS)


def diff(changed: Mapping[str, str]) -> str:
    """Unified diff of changed files against the release."""
    return "".join(unified_diff(path, read(path), text) for path, text in sorted(changed.items()))
