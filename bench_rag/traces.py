"""Recorded traffic from files: Mooncake's traces, ShareGPT conversations, and the JSONL of SGLang's own benchmark."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import BenchError

HASH_BLOCK = 512  # tokens that one of Mooncake's hash ids stands for
_ASKED = ("human", "user", "system", "tool")


@dataclass(frozen=True)
class Exchange:
    """One turn. A prompt is text, or ``length`` tokens made of ``blocks``; an answer is text, or its length.

    Exactly one of ``answer_text`` and ``answer_len`` is set; neither for a last turn whose answer was not recorded.
    """

    text: str = ""
    blocks: tuple[int, ...] = ()
    length: int = 0
    answer_text: str = ""
    answer_len: int = 0


@dataclass(frozen=True)
class Record:
    """A conversation of the trace; ``timestamp`` in seconds, None where the file has no times."""

    exchanges: tuple[Exchange, ...]
    timestamp: float | None = None


@dataclass(frozen=True)
class Trace:
    """The records of a file in order of time. ``form``: ``mooncake``, ``conversations``, ``messages`` or ``turns``."""

    form: str
    records: tuple[Record, ...]


@functools.lru_cache(maxsize=2)
def read_trace(path: str, most: int = 0) -> Trace:
    """The first ``most`` records of a trace file (0: all). BenchError names the file and the line that is wrong.

    Every line is a JSON object of one of these forms, the same in the whole file; a file may also be one JSON array:

    - ``mooncake``: ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` (one per 512 prompt tokens,
      the last one's may be partial; equal ids stand for equal prefixes);
    - ``conversations`` (ShareGPT and SGLang's custom data set): a list of ``{"from" or "role", "value" or "content"}``,
      questions and answers in turn;
    - ``messages`` (OpenAI requests): a list of ``{"role", "content"}`` and ``max_tokens``, sent as one prompt.

    SGLang's agentic trace is one JSON object instead: under ``conversations`` a list of conversations, each a list of
    turns with the new ``messages`` of each.
    """
    records: list[Record] = []
    form = ""
    for where, value in _objects(Path(path)):
        this = next((k for k, key in _FORMS.items() if key in value), "")
        if not this:
            raise BenchError(f"{where}: a record needs one of {', '.join(_FORMS.values())}")
        if form and this != form:
            raise BenchError(f"{where}: a record of the form {this} in a file of the form {form}")
        form = this
        try:
            record = _PARSERS[form](value)
        except (KeyError, TypeError, ValueError) as e:
            reason = f"has no {e}" if isinstance(e, KeyError) else str(e)
            raise BenchError(f"{where}: {reason}") from e
        if record.exchanges:
            records.append(record)
        if most and len(records) == most:
            break
    if not records:
        raise BenchError(f"{path}: no requests in this trace")
    if all(r.timestamp is not None for r in records):
        records.sort(key=lambda r: r.timestamp or 0.0)
    return Trace(form, tuple(records))


def _objects(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """Every record with its place in the file, such as ``trace.jsonl:12``."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise BenchError(f"cannot read the trace {path}: {getattr(e, 'strerror', None) or e}") from e
    found: list[tuple[str, Any]] = []
    if (conversations := _agentic(text)) is not None:
        return [(f"{path}: conversation {i}", {"turns": c}) for i, c in enumerate(conversations, 1)]
    if text.lstrip().startswith("["):
        try:
            found = [(f"{path}: record {i}", value) for i, value in enumerate(json.loads(text), 1)]
        except json.JSONDecodeError as e:
            raise BenchError(f"{path}:{e.lineno}: not JSON: {e.msg}") from e
    else:
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            try:
                found.append((f"{path}:{number}", json.loads(line)))
            except json.JSONDecodeError as e:
                raise BenchError(f"{path}:{number}: not JSON: {e.msg}") from e
    for where, value in found:
        if not isinstance(value, dict):
            raise BenchError(f"{where}: a record is a JSON object")
    return found


def _agentic(text: str) -> list[Any] | None:
    """The conversations of an agentic trace; None for a file of another form."""
    try:
        whole = json.loads(text)  # ends early, at the second line of a file of JSON lines
    except json.JSONDecodeError:
        return None
    listed = whole.get("conversations") if isinstance(whole, dict) else None
    return listed if isinstance(listed, list) and any(isinstance(c, list) for c in listed) else None


def _count(value: Mapping[str, Any], key: str, least: int) -> int:
    number = value[key]
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise ValueError(f"{key} must be an integer of at least {least}, got {number!r}")
    return number


def _listed(value: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    if not isinstance(value[key], list) or not all(isinstance(m, dict) for m in value[key]):
        raise ValueError(f"{key} must be a list of objects")
    return value[key]


def _time(value: Mapping[str, Any], unit: float) -> float | None:
    if value.get("timestamp") is None:
        return None
    seconds = value["timestamp"]
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not math.isfinite(seconds):
        raise ValueError(f"timestamp must be a number, got {seconds!r}")
    return seconds / unit


def _mooncake(value: Mapping[str, Any]) -> Record:
    length, blocks = _count(value, "input_length", 1), value["hash_ids"]
    if not isinstance(blocks, list) or not all(isinstance(b, int) for b in blocks):
        raise ValueError("hash_ids must be a list of integers")
    if len(blocks) != -(-length // HASH_BLOCK):
        needed = -(-length // HASH_BLOCK)
        raise ValueError(f"{length} prompt tokens need {needed} hash_ids of {HASH_BLOCK}, got {len(blocks)}")
    exchange = Exchange(blocks=tuple(blocks), length=length, answer_len=max(1, _count(value, "output_length", 0)))
    return Record((exchange,), _time(value, 1000.0))


def _conversations(value: Mapping[str, Any]) -> Record:
    """Questions are what comes before an answer, joined; a question without an answer at the end is left out."""
    exchanges: list[Exchange] = []
    asked: list[str] = []
    for i, message in enumerate(_listed(value, "conversations")):
        said = message.get("value", message.get("content"))
        if not isinstance(said, str):
            raise ValueError(f"message {i + 1} has no text under value or content")
        who = message.get("from", message.get("role")) or ("user" if i % 2 == 0 else "assistant")
        if who in _ASKED:
            asked.append(said)
        elif "".join(asked):
            if said:
                exchanges.append(Exchange(text="\n".join(asked), answer_text=said))
            asked = []
    return Record(tuple(exchanges), _time(value, 1.0))


def _said(value: Mapping[str, Any]) -> str:
    """The messages as lines of role and content."""
    lines = []
    for i, message in enumerate(_listed(value, "messages")):
        said = message.get("content")
        if not isinstance(said, str):
            raise ValueError(f"message {i + 1} has no text under content")
        lines.append(f"{message.get('role', 'user')}: {said}\n")
    return "".join(lines)


def _turns(value: Mapping[str, Any]) -> Record:
    return Record(tuple(Exchange(text=said) for turn in _listed(value, "turns") if (said := _said(turn))))


def _messages(value: Mapping[str, Any]) -> Record:
    said = _said(value)
    if not said:
        return Record(())
    key = "max_completion_tokens" if "max_completion_tokens" in value else "max_tokens"
    limit = _count(value, key, 1) if key in value else 0
    return Record((Exchange(text=said, answer_len=limit),), _time(value, 1.0))


_FORMS = {"mooncake": "input_length", "conversations": "conversations", "messages": "messages", "turns": "turns"}
_PARSERS = {"mooncake": _mooncake, "conversations": _conversations, "messages": _messages, "turns": _turns}
