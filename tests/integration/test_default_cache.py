"""The flag alone: buffered decode with SGLang's default prefix cache (extra_buffer, overlap scheduling).

Each scenario runs on a server without the plugin and on one with it; both are judged by transformers, and the two
must agree in ids, hits and, within rounding, log-probabilities.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.harness.events import Events
from tests.harness.judge import (
    Exchange,
    Scenario,
    ask,
    ask_all,
    distance,
    distance_to_transformers,
    recorded,
    same_answers,
)
from tests.harness.pool import ServerPool, on
from tests.harness.reference import prompt
from tests.harness.server import Server, ServerError

FP16 = 0.15
ON_OFF = 0.03
COLD_WARM = 0.005
CAPACITY = 16  # SGLang's default --linear-replayssm-cache-len


def later_turn(server: Server) -> list[Exchange]:
    """Scenario 1: P and 8 tokens out, then P with another suffix; then the same without a cache."""
    document = prompt(150, seed=1)
    question = document + prompt(40, seed=2)
    first = ask(server, document, 8)
    warm = ask(server, question, 8)
    server.flush()
    cold = ask(server, question, 8)
    assert [first.hit, warm.hit, cold.hit] == [0, 128, 0]
    assert distance(warm.answer, cold.answer) <= COLD_WARM
    return [first, warm, cold]


def decoded_boundary(server: Server) -> list[Exchange]:
    """Scenario 3: decoding crosses the track boundary at 256; what follows starts from the state saved there."""
    first = ask(server, prompt(250, seed=3), 12)
    question = first.tokens[:-1] + prompt(5, seed=4)
    warm = ask(server, question, 6)
    server.flush()
    cold = ask(server, question, 6)
    assert [first.hit, warm.hit, cold.hit] == [0, 256, 0]
    assert distance(warm.answer, cold.answer) <= COLD_WARM
    return [first, warm, cold]


def conversation(server: Server) -> list[Exchange]:
    """Turns that keep what was said; most output is not a multiple of anything."""
    turns = [ask(server, prompt(70, seed=5), 21)]
    for seed, length, out in ((6, 23, 19), (7, 40, 9), (8, 5, 18)):
        turns.append(ask(server, turns[-1].tokens + prompt(length, seed=seed), out))
    return turns


SCENARIOS = [later_turn, decoded_boundary, conversation]
by_scenario = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)


@by_scenario
@on("deep-off")
def test_the_oracle_follows_transformers(server_pool: ServerPool, server: Server, scenario: Scenario) -> None:
    for exchange in recorded(server_pool, "deep-off", scenario):
        assert distance_to_transformers(server.model, exchange, tie=FP16) <= FP16


@pytest.fixture
def off(server_pool: ServerPool, scenario: Scenario) -> list[Exchange]:
    """The scenario's answers without the plugin. Named before `server`, which it may have to end."""
    return recorded(server_pool, "deep-off", scenario)


@by_scenario
@on("deep-on")
def test_on_equals_off(off: list[Exchange], server: Server, scenario: Scenario) -> None:
    events = Events()
    answers = scenario(server)
    for exchange in answers:
        assert distance_to_transformers(server.model, exchange, tie=FP16) <= FP16
    print("on = off:", same_answers(off, answers, bound=ON_OFF))
    # The first output token of a request comes from its prefill, every other one from buffered decode.
    assert events.decoded_tokens() == sum(len(exchange.answer.ids) - 1 for exchange in answers)
    assert all(-1 not in event.pending for event in events.of("decode"))


@on("deep-on")
def test_the_flag_alone_means_default_cache_and_buffered_decode(server: Server) -> None:
    info = server.server_info()
    assert info["mamba_radix_cache_strategy"] == "extra_buffer"
    assert info["disable_overlap_schedule"] is False
    assert info["disable_radix_cache"] is False
    assert info["enable_linear_replayssm"] is False  # as resolved: SGLang's own replay sleeps
    rows = 4 + 1  # --max-running-requests of the test host, and the padding row
    assert (
        f"ReplaySSM: buffered decode on, ring of {CAPACITY} records x {rows} request rows x 3 layers"
        in server.log_text()
    )


@on("deep-on")
def test_snapshot_holds_pending_records_and_this_steps_own(server: Server) -> None:
    """A boundary reached with records in the ring: the checkpoint alone would be a stale state."""
    events = Events()
    ask(server, prompt(250, seed=3), 12)
    assert events.snapshots() == [(256, 6)]  # tokens 251 .. 255 pending, and token 256 itself


@on("deep-on")
def test_more_requests_than_rows(server: Server) -> None:
    """Scenario 6: rows and slots change hands while others decode, arrivals staggered, stops by token included."""
    prompts = [prompt(length, seed=20 + index) for index, length in enumerate((40, 66, 25, 70, 31, 64, 50, 33))]
    prompts[5] = prompts[3][:64] + prompts[5][:9]  # starts from a copy of another's state
    events = Events()
    answers = ask_all(server, prompts, [14, 9, 18, 7, 11, 12, 6, 16], stagger=0.3)
    for exchange in answers:
        assert distance_to_transformers(server.model, exchange, tie=FP16) <= FP16
    used = [row for event in events.of("extend") for row in event.rows]
    assert len(used) == len(prompts) and len(set(used)) <= 4, "rows were to be reused"
    left = {}
    for event in events.of("decode"):
        left.update(zip(event.rows, event.pending, strict=True))
    assert max(left.values()) > 0, "a row was to be handed on with records in its ring"


@on("deep-on")
def test_stop_token_with_a_step_in_flight(server: Server) -> None:
    """Overlap scheduling runs a step past a stop token; neither the cache nor the row's next owner may see it."""
    document = prompt(122, seed=30)
    full = ask(server, document, 12)
    for length in (5, 6, 7, 8):  # committed tokens 126, 127, 128 and 129, around no boundary of this server
        stop = full.answer.ids[length - 1]
        if stop in full.answer.ids[: length - 1]:
            continue
        server.flush()
        short = ask(server, document, 12, ignore_eos=False, stop_token_ids=[stop])
        assert short.answer.ids == full.answer.ids[:length]
        following = ask(server, short.tokens + prompt(4, seed=31), 5)
        assert distance_to_transformers(server.model, following, tie=FP16) <= FP16


@on("deep-on")
def test_abort_and_instant_retry(server: Server) -> None:
    document = prompt(90, seed=40)
    with ThreadPoolExecutor(1) as pool:
        events = Events()
        doomed = pool.submit(server.generate, document, 3000, rid="doomed")
        until = time.monotonic() + 60
        while events.decoded_tokens() < 5:
            assert time.monotonic() < until, "the request to abort never decoded"
            time.sleep(0.05)
        server.abort("doomed")
        retry = ask(server, document, 20)
        try:
            assert doomed.result(timeout=60).meta["finish_reason"]["type"] == "abort"
        except ServerError as error:
            assert "abort" in str(error).lower()
    assert distance_to_transformers(server.model, retry, tie=FP16) <= FP16
    server.flush()
    cold = ask(server, document, 20)
    assert cold.hit == 0
    assert distance(retry.answer, cold.answer) <= ON_OFF
