"""The same answers without a radix cache, with the lazy strategy, in bfloat16, and for Qwen3.5."""

from __future__ import annotations

import pytest

from tests.harness.judge import ON_OFF, Exchange, distance, follow_transformers, recorded, same_answers
from tests.harness.pool import ServerPool, on
from tests.harness.scenarios import conversation, two_boundaries
from tests.harness.server import Server

BUFFERED = "ReplaySSM: buffered decode on"


@pytest.fixture
def off(server_pool: ServerPool, oracle: str) -> list[Exchange]:
    """Answers without the plugin. Named before `server`, which it may have to end."""
    return recorded(server_pool, oracle, conversation)


@on("deep-on-no-cache")
@pytest.mark.parametrize("oracle", ["deep-off"])
def test_without_a_radix_cache(off: list[Exchange], server: Server, oracle: str) -> None:
    answers = conversation(server)
    assert BUFFERED in server.log_text()
    follow_transformers(server, answers)
    for wanted, exchange in zip(off, answers, strict=True):
        assert exchange.hit == 0
        assert exchange.prompt == wanted.prompt
        assert distance(wanted.answer, exchange.answer) <= ON_OFF


@pytest.mark.long
@on("deep-on-lazy")
@pytest.mark.parametrize("oracle", ["deep-off-lazy"])
def test_lazy_extra_buffer(off: list[Exchange], server: Server, oracle: str) -> None:
    assert server.server_info()["mamba_radix_cache_strategy"] == "extra_buffer_lazy"
    answers = conversation(server)
    assert BUFFERED in server.log_text()
    follow_transformers(server, answers)
    same_answers(off, answers, ON_OFF)
    two_boundaries(server)
