"""Real servers for tests: `server` (one configuration, empty prefix cache) and `server_pool` (several)."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest

from tests.harness.pool import ServerPool
from tests.harness.server import Server


@pytest.fixture(scope="session")
def server_pool() -> Iterator[ServerPool]:
    """All servers of this session; see tests/harness/pool.py."""
    pool = ServerPool()
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture
def server(request: pytest.FixtureRequest, server_pool: ServerPool) -> Server:
    """The server of the test's configuration, from `@on("name", ...)` or `@pytest.mark.server("name")`."""
    name = getattr(request, "param", None)
    if name is None:
        marker = request.node.get_closest_marker("server")
        assert marker is not None, "a test with a `server` names its configuration: @pytest.mark.server(...)"
        name = marker.args[0]
    running = server_pool.get(name)
    running.abort(everything=True)
    running.flush()
    return running


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """A failure shows the server's last lines."""
    report = yield
    server = getattr(item, "funcargs", {}).get("server")
    if report.failed and isinstance(server, Server):
        report.sections.append(("SGLang server", server.log_tail()))
    return report
