"""What every test shares: the kind of host, `--long`, and the skips with their reasons.

Conventions:

- `@pytest.mark.long` for what takes more than about a minute; deselected without `--long`.
- `@pytest.mark.device` for what needs an NVIDIA GPU (tests/integration/device/ and some kernel tests).
- `@pytest.mark.server("name")`, or `on("a", "b")`, for what runs against a real server of a configuration in
  tests/harness/configs.py. Those run last, ordered by configuration, so that each server starts once; `./run test`
  gives them a process of their own.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from tests.harness import host
from tests.harness.configs import CONFIGS

SERVERS_OF_THEIR_OWN = ("test_launch.py", "test_no_buffer.py", "test_speculation.py")
"""Files of tests/integration whose servers no other file uses."""

# Before Triton is imported: it decides at import whether `@triton.jit` compiles or interprets.
if not host.has_gpu():
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: threads only get in each other's way


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the tests marked `long`")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests one by one to whoever is free, but servers to one process, first of all: each then starts once.

    Files that share no server with another go as a whole to whoever is free.

    (pytest-xdist 3.8.0 has groups for that, which pytest 9.2 silently ignores.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class ServersApart(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if not file.startswith("tests/integration/"):
                return nodeid
            return file if Path(file).name in SERVERS_OF_THEIR_OWN else "servers"

    return ServersApart(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        long = [item for item in items if item.get_closest_marker("long")]
        if long:
            config.hook.pytest_deselected(items=long)
            items[:] = [item for item in items if not item.get_closest_marker("long")]

    no_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU")
    no_sglang = pytest.mark.skip(reason="SGLang is not installed here (its release needs Python 3.11 or newer)")
    has_sglang = importlib.util.find_spec("sglang") is not None
    for item in items:
        if item.get_closest_marker("device") and not host.has_gpu():
            item.add_marker(no_gpu)
        elif server_config(item) is not None and not has_sglang:
            item.add_marker(no_sglang)

    order = {name: rank for rank, name in enumerate(CONFIGS, start=1)}
    items.sort(key=lambda item: order.get(server_config(item) or "", 0))  # stable: files stay in order


def server_config(item: pytest.Item) -> str | None:
    """The configuration a test's `server` fixture will have, or None for a test without a server."""
    callspec = getattr(item, "callspec", None)
    if callspec is not None and isinstance(callspec.params.get("server"), str):
        return callspec.params["server"]
    marker = item.get_closest_marker("server")
    return marker.args[0] if marker else None
