"""In-process tests of the plugin on the installed SGLang: its real arguments, pools and hook registry.

SGLang is imported once per session, on the device of this machine, with every plugin of the environment loaded,
as in a process of a server. A test may publish server arguments and set variables: both are undone after it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.harness import host

# Before SGLang is imported: it picks its platform and dtypes from these.
if not host.has_gpu():
    os.environ.update(host.CPU_ENV)
os.environ.update(host.COMMON_ENV)


@pytest.fixture(scope="session", autouse=True)
def plugins() -> None:
    """SGLang with the hooks of this environment applied."""
    pytest.importorskip("sglang", reason="SGLang is not installed here")
    from sglang.srt.plugins import load_plugins

    from sglang_replayssm import arguments, plugin

    with pytest.MonkeyPatch.context() as patch:
        for name in ("SGLANG_PLUGINS", arguments.DISABLE_ENV, arguments.REQUIRED_ENV):
            patch.delenv(name, raising=False)
        load_plugins()
        plugin.require_live_hooks()


@pytest.fixture(autouse=True)
def isolated(plugins: None) -> Iterator[None]:
    """Every test starts with nothing published and leaves environment and SGLang's context as they were."""
    from sglang.srt import runtime_context

    environment, context = dict(os.environ), runtime_context.snapshot_context()
    # SGLang's `override` writes into the dict that the snapshot holds, and leaves a copy behind.
    parallel = runtime_context.get_parallel()
    parallel._overrides = dict(parallel._overrides)
    yield
    runtime_context.restore_context(context)
    os.environ.clear()
    os.environ.update(environment)
