"""What the ring of a test server did: the events that tests/harness/probe wrote, read back."""

from __future__ import annotations

import atexit
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

FAULT, PAD, DIRECT = -1, -2, -3  # as replayssm_kernels.cursors has them
PROBE_FOLDER = Path(__file__).parent / "probe"
_FILE = Path(tempfile.gettempdir()) / f"replayssm-probe-{os.getpid()}.jsonl"


@dataclass(frozen=True)
class Event:
    """One decode or verify step, extend or hand-over.

    Attributes:
        kind: "decode", "verify", "verified" (what was accepted of a verify step is known), "extend" or "hand over" (a
            slot folded because someone else takes it).
        rows: request rows of the batch; lens: their token counts with this step's tokens, drafts included; of a
            "verified" step where its snapshots stand.
        pending: per row, records that the step replays (-1 fault, -2 padding, -3 a direct step).
        prefix: per row, tokens before the extend.
        folds, snapshots: (row, source slot, destination slot, number of records).
        mode: SGLang's forward mode of an extend.
    """

    kind: str
    rows: list[int]
    lens: list[int]
    folds: list[list[int]]
    pending: list[int] = field(default_factory=list)
    prefix: list[int] = field(default_factory=list)
    snapshots: list[list[int]] = field(default_factory=list)
    mode: str = ""


def environment() -> dict[str, str]:
    """Environment of a server that writes its events down, and, alone, makes the probe importable."""
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(PROBE_FOLDER), *([inherited] if inherited else [])])
    return {"PYTHONPATH": path, "REPLAYSSM_PROBE_FILE": str(_FILE)}


class Events:
    """Events from the moment of creation on; at most one server at a time may write them."""

    def __init__(self) -> None:
        self._start = _FILE.stat().st_size if _FILE.exists() else 0

    def __iter__(self) -> Iterator[Event]:
        if not _FILE.exists():
            return
        with open(_FILE) as file:
            file.seek(self._start)
            for line in file:
                if line.endswith("\n"):  # the last one may still be being written
                    yield Event(**json.loads(line))

    def of(self, kind: str) -> list[Event]:
        """Events of one kind."""
        return [event for event in self if event.kind == kind]

    def decoded_tokens(self) -> int:
        """Tokens that went through the plugin's decode."""
        return sum(count not in (FAULT, PAD) for event in self.of("decode") for count in event.pending)

    def wait_for_decoded_tokens(self, count: int, timeout: float = 60.0) -> None:
        """Return once `count` tokens went through buffered decode; TimeoutError after `timeout` seconds."""
        until = time.monotonic() + timeout
        while self.decoded_tokens() < count:
            if time.monotonic() > until:
                raise TimeoutError(f"{self.decoded_tokens()} tokens decoded in {timeout:.0f} s, waiting for {count}")
            time.sleep(0.05)

    def snapshots(self) -> list[tuple[int, int]]:
        """(token count, records materialised) of every snapshot at a track boundary."""
        found = []
        for event in [*self.of("decode"), *self.of("verified")]:
            length = dict(zip(event.rows, event.lens, strict=True))
            found += [(length[row], upto) for row, _, _, upto in event.snapshots]
        return found

    def forced_folds(self, kind: str) -> list[int]:
        """Numbers of records that extends, or hand-overs, folded."""
        return [upto for event in self.of(kind) for *_, upto in event.folds]


@atexit.register
def _remove() -> None:
    _FILE.unlink(missing_ok=True)
