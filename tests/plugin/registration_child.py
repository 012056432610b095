"""Loads SGLang's plugins in one fresh process per case and prints what came of it as JSON lines.

SGLang is imported once and every case is forked off, so that each one sees a process in which no plugin has run.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from sglang_replayssm import arguments, seams
from tests.plugin import launch


def matching() -> None:
    pass


def mismatch() -> None:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.model_executor.model_runner import ModelRunner

    del KVCacheConfigurator._handle_max_mamba_cache

    def forward(self: Any, forward_batch: Any, something_new: Any) -> None: ...

    ModelRunner.forward = forward


def mismatch_required() -> None:
    mismatch()
    os.environ[arguments.REQUIRED_ENV] = "1"


def kill_switch() -> None:
    os.environ[arguments.DISABLE_ENV] = "1"


def kill_switch_on_a_mismatch() -> None:
    mismatch()
    kill_switch()


def newer_version() -> None:
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "0.5.24" if name == "sglang" else version(name)


def broken_import() -> None:
    sys.modules["sglang_replayssm.hooks"] = None  # type: ignore[assignment]


def broken_import_required() -> None:
    broken_import()
    os.environ[arguments.REQUIRED_ENV] = "1"


CASES: tuple[Callable[[], None], ...] = (
    matching,
    mismatch,
    mismatch_required,
    kill_switch,
    kill_switch_on_a_mismatch,
    newer_version,
    broken_import,
    broken_import_required,
)


class Ours(logging.Handler):
    """Collects the records of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("sglang_replayssm"):
            self.records.append((record.levelname, record.getMessage()))


def _log_of_a_child(handler: Ours) -> list[tuple[str, str]]:
    """What a process of the server logs that this one starts: it loads the plugins anew, in this environment."""
    from sglang.srt import plugins

    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        handler.records.clear()
        plugins._plugins_loaded = False
        try:
            plugins.load_plugins()
        finally:
            with os.fdopen(writing, "w") as pipe:
                json.dump(handler.records, pipe)
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        records = json.load(pipe)
    os.waitpid(child, 0)
    return records


def run(case: Callable[[], None]) -> dict[str, Any]:
    """Load the plugins as a server process does; what is registered, live and logged, and what two launches say."""
    handler = Ours()
    logging.getLogger().addHandler(handler)
    logging.getLogger("sglang_replayssm").setLevel(logging.INFO)
    from sglang.srt.arg_groups import resolution_hooks
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    case()
    targets = {seam.target for seam in seams.SEAMS if seam.use == "override"}
    result: dict[str, Any] = {"exit": None}
    try:
        load_plugins()
    except SystemExit as error:
        result["exit"] = str(error)
    result["registered"] = sorted(targets & set(HookRegistry._hooks))
    result["resolution"] = len(resolution_hooks._HOOKS.get("handle_linear_attn_backend", ()))
    result["log"] = handler.records
    result["log_of_a_child"] = _log_of_a_child(handler)
    for name, flag in (("off", ()), ("on", (arguments.FLAG,))):
        try:
            launch.resolve(*flag)
            result[name] = "ok"
        except Exception as error:
            result[name] = str(error)
    return result


def main() -> int:
    seams.differences()  # imports all of SGLang that the plugin touches
    for case in CASES:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                print(json.dumps({"case": case.__name__, **run(case)}), flush=True)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        if status:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
