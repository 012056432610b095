"""Send a plan with SGLang's own benchmark client: ``python serving_client.py PLAN.json [its arguments]``.

The file holds the requests ([token ids, tokens to answer, seconds after the start] each). The client is
``sglang.benchmark.serving`` as installed, with its own arguments; only where its requests come from and when they are
sent is replaced, so that both clients measure the same traffic. Run by path: this package need not be importable where
SGLang is.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import time
import types
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any


def main() -> None:
    """Replace the two functions, then hand over to the client's command line."""
    if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
        del sys.path[0]  # the modules of this folder must not hide others of their names
    planned = json.loads(Path(sys.argv.pop(1)).read_text(encoding="utf-8"))

    if importlib.util.find_spec("datasets") is None:
        # The client imports every data set it knows, and one of them this library; none of them is used here.
        sys.modules["datasets"] = types.ModuleType("datasets")
        sys.modules["datasets"].load_dataset = None  # type: ignore[attr-defined]

    from sglang.benchmark import serving
    from sglang.benchmark.datasets.common import DatasetRow

    rows = [DatasetRow(prompt=ids, prompt_len=len(ids), output_len=count) for ids, count, _ in planned]

    async def in_time(*args: Any, **kwargs: Any) -> AsyncIterator[DatasetRow]:
        began = time.perf_counter()
        for row, (_, _, arrival) in zip(rows, planned, strict=True):
            await asyncio.sleep(max(0.0, began + arrival - time.perf_counter()))
            yield row

    serving.get_dataset = lambda *args, **kwargs: rows
    serving.get_request = in_time
    serving.cli_main()


if __name__ == "__main__":
    main()
