"""The CPU host's own tests run in the interpreter; on a GPU host there is nothing of it to test."""

from __future__ import annotations

import pytest

from tests.harness import host


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if host.has_gpu():
        skip = pytest.mark.skip(reason="the interpreter is not used on a GPU host")
        for item in items:
            if "cpu_host" in item.path.parts:
                item.add_marker(skip)


if not host.has_gpu():
    from replayssm_cpu_host import interpreter, torch_gaps

    torch_gaps.install()
    interpreter.install()
