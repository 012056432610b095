"""The ground the other tests stand on: plain SGLang on this host agrees with transformers, cold and warm."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.harness import reference, tiny
from tests.harness.configs import CONFIGS
from tests.harness.pool import ServerPool, on
from tests.harness.server import Server, ServerError

# A hit on a prefix that prefill computed restores the very states a cold run passes through: measured 0.0. Past a
# boundary that decoding crossed, the cold run prefills by chunks what was decoded step by step: measured 0.0041.
DECODED_AGAINST_PREFILLED = 0.015


@pytest.mark.parametrize(
    "server",
    [
        "plain",
        "plain-deep",
        pytest.param("plain-qwen3.5", marks=pytest.mark.long),
    ],
    indirect=True,
)
@pytest.mark.parametrize("length", [1, 64, 103, 300])
def test_greedy_equals_transformers(server: Server, length: int) -> None:
    prompt = reference.prompt(length, seed=length)
    answer = server.generate(prompt, 24)
    reference.assert_greedy(server.model, prompt, answer.ids, answer.logprobs)


@on("plain")
def test_warm_equals_cold_and_hits(server: Server) -> None:
    prompt = reference.prompt(200, seed=5)
    cold = server.generate(prompt, 12)
    warm = server.generate(prompt, 12)
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == 192  # the last chunk boundary of 64 within the prompt
    assert warm.ids == cold.ids
    assert warm.logprobs == cold.logprobs


@on("plain")
def test_snapshot_of_a_decoded_boundary_is_hit(server: Server) -> None:
    prompt = reference.prompt(100, seed=6)
    first = server.generate(prompt, 64)
    conversation = prompt + first.ids[:63] + reference.prompt(9, seed=7)
    second = server.generate(conversation, 8)
    assert second.cached_tokens == 128  # 100 + 28: decoding crossed it
    server.flush()
    cold = server.generate(conversation, 8)
    assert cold.cached_tokens == 0
    assert second.ids == cold.ids
    assert second.logprobs == pytest.approx(cold.logprobs, abs=DECODED_AGAINST_PREFILLED)


@on("plain")
def test_concurrent_requests_are_independent(server: Server) -> None:
    prompts = [reference.prompt(n, seed=n) for n in (40, 77, 130)]
    alone = []
    for prompt in prompts:
        server.flush()
        alone.append(server.generate(prompt, 10).ids)
    server.flush()
    together = server.generate_many(prompts, 10, stagger=0.05)
    assert [answer.ids for answer in together] == alone


@on("plain")
def test_abort_ends_a_request(server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(server.generate, reference.prompt(30), 2000, rid="to-abort")
        time.sleep(1)
        server.abort("to-abort")
        answer = pending.result(timeout=60)
    assert answer.meta["finish_reason"]["type"] == "abort"
    assert 0 < len(answer.ids) < 2000
    assert len(server.generate(reference.prompt(30), 4).ids) == 4


@on("plain")
def test_plain_is_the_default_cache_without_the_plugin(server: Server) -> None:
    info = server.server_info()
    assert info["disable_radix_cache"] is False
    assert info["disable_overlap_schedule"] is False
    assert "Components: (<ComponentType.FULL" in server.log_text()
    assert "sglang-replayssm" not in server.log_text()


def test_failed_start_shows_the_last_lines_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    server = Server(tmp_path, start_timeout=120)
    with pytest.raises(ServerError, match="last 40 lines of the server(.|\n)*(Error|error)"), server:
        pass
    assert not server.alive()


def test_every_configuration_names_a_tiny_model() -> None:
    assert {config.model for config in CONFIGS.values()} <= set(tiny.NAMES)


def test_every_configuration_is_used() -> None:
    files = Path(__file__).parent.rglob("test_*.py")
    text = "".join(path.read_text() for path in files)
    assert {name for name in CONFIGS if f'"{name}"' not in text} == set()


def test_pool_refuses_unknown_names() -> None:
    with pytest.raises(KeyError):
        ServerPool().get("no such configuration")
