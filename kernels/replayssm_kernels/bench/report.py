"""Tables for people and JSON lines for files."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path

import torch
import triton


def machine(device: torch.device) -> dict[str, str]:
    """What a figure must be quoted with: device, torch and Triton versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
    return {"device": name, "torch": torch.__version__, "triton": triton.__version__}


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Right-aligned columns; the first is left-aligned."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def write_json(path: str | None, records: Sequence[dict[str, object]]) -> None:
    """Append one JSON line per record."""
    if path:
        with Path(path).open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
