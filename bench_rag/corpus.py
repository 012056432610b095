"""A corpus of real text in passages: a folder of text and Markdown, or the documentation strings of Python itself."""

from __future__ import annotations

import ast
import functools
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import BenchError

_SUFFIXES = (".md", ".markdown", ".txt", ".rst")
_PARAGRAPHS = re.compile(r"\n\s*\n")


@dataclass(frozen=True)
class Text:
    """One file, or one module's documentation. ``name``: its place in the corpus, such as ``guide/setup.md``."""

    name: str
    body: str


@dataclass(frozen=True)
class Passage:
    """What a retriever returns: consecutive paragraphs of one text, and their token ids."""

    name: str
    body: str
    ids: tuple[int, ...]


@functools.lru_cache(maxsize=2)
def texts(folder: str) -> tuple[Text, ...]:
    """The texts of a corpus ordered by name; an empty ``folder`` is the standard library's documentation strings.

    Files of other kinds and hidden folders are left out, bytes that are not UTF-8 are replaced. BenchError if the
    folder is missing or holds no text.
    """
    if not folder:
        return tuple(_library())
    root = Path(folder)
    if not root.is_dir():
        raise BenchError(f"the corpus {folder} is not a folder")
    files = sorted(p for p in root.rglob("*") if p.suffix.lower() in _SUFFIXES and p.is_file())
    found = []
    for path in files:
        inside = path.relative_to(root)
        if any(part.startswith(".") for part in inside.parts):
            continue
        try:
            body = path.read_text(encoding="utf-8", errors="replace").strip()
        except OSError as e:
            raise BenchError(f"cannot read {path}: {e.strerror}") from e
        if body:
            found.append(Text(inside.as_posix(), body))
    if not found:
        raise BenchError(f"the corpus {folder} has no text in files named {', '.join('*' + s for s in _SUFFIXES)}")
    return tuple(found)


def passages(found: tuple[Text, ...], encode: Callable[[str], list[int]], limit: int) -> list[Passage]:
    """Texts cut between paragraphs into passages of at most ``limit`` tokens, in corpus order.

    A paragraph longer than that is cut between words, and a word longer than that is left out.
    """
    cut = []
    for text in found:
        part: list[str] = []
        ids: list[int] = []
        for piece in _pieces(text.body, encode, limit):
            more = encode(piece)
            if part and len(ids) + len(more) > limit:
                cut.append(Passage(text.name, "".join(part), tuple(ids)))
                part, ids = [], []
            part.append(piece)
            ids += more
        if part:
            cut.append(Passage(text.name, "".join(part), tuple(ids)))
    return cut


def _pieces(body: str, encode: Callable[[str], list[int]], limit: int) -> Iterator[str]:
    """Paragraphs of at most ``limit`` tokens, each with what separates it from the next."""
    for paragraph in _PARAGRAPHS.split(body):
        whole = paragraph.strip() + "\n\n"
        if len(encode(whole)) <= limit:
            yield whole
            continue
        line = ""
        for word in paragraph.split():
            if len(encode(f"{line}{word} ")) > limit:
                if line:
                    yield line
                line = ""
            if len(encode(f"{word} ")) <= limit:
                line += f"{word} "
        if line:
            yield line


def _library() -> Iterator[Text]:
    """One text per public module: the documentation strings in the order of the source, under their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "pydoc_data"}
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if skipped & set(inside.parts) or any(p.startswith("_") and p != "__init__.py" for p in inside.parts):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in old modules
            try:
                tree = ast.parse(path.read_bytes())
            except (OSError, SyntaxError, ValueError):
                continue
        module = ".".join(inside.with_suffix("").parts).removesuffix(".__init__")
        entries = list(_documented(tree, module))
        if entries:
            yield Text(module, "\n\n".join(entries))


def _documented(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Iterator[str]:
    """``name`` and documentation string of a module, class or function, then of the public ones inside."""
    text = ast.get_docstring(node)
    if text:
        yield f"{name}\n{text}"
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and child.name[0] != "_":
            yield from _documented(child, f"{name}.{child.name}")
