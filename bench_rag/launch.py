"""Start an SGLang server that does its imports, then waits at the GPU's door: ``python launch.py GATE [arguments]``.

A server spends most of its start on imports, in processes that do not touch the GPU yet. With this in place of
``-m sglang.launch_server`` the next server can import while the current one loads: every process stops before it
selects its device, until the file GATE exists. A process that waits says so with a file ``GATE.<pid>.waiting``.

SGLang's child processes run this file too (multiprocessing re-imports the main module as ``__mp_main__``), which is how
the wait gets into them without touching SGLang. It is run by path, so that no folder has to be importable.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_GATE = "BENCH_RAG_GATE"


def _wait_at_gate() -> None:
    gate = Path(os.environ[_GATE])
    if gate.exists():
        return
    Path(f"{gate}.{os.getpid()}.waiting").touch()
    while not gate.exists():
        time.sleep(0.05)


def _after_gate(select: Callable[..., Any]) -> Callable[..., Any]:
    def set_device(*args: Any, **kwargs: Any) -> Any:
        _wait_at_gate()
        return select(*args, **kwargs)

    return set_device


def _install() -> None:
    import torch

    # SGLang selects its device through torch.get_device_module(...).set_device before it allocates anything there.
    for module in (torch.cuda, torch.cpu):
        module.set_device = _after_gate(module.set_device)


# Python puts a script's folder first on the import path, where this package's modules would hide others of their names.
if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    del sys.path[0]
if __name__ == "__main__":
    os.environ[_GATE] = sys.argv.pop(1)
if __name__ in ("__main__", "__mp_main__"):
    _install()
if __name__ == "__main__":
    # Without alter_sys this file stays the main module, the one that child processes re-import.
    runpy.run_module("sglang.launch_server", run_name="__main__")
