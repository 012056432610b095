"""The flag alone: buffered decode with SGLang's default prefix cache (extra_buffer, overlap scheduling).

Each scenario runs on a server without the plugin and on one with it; both are judged by transformers, and the two
must agree in ids, hits and, within rounding, log-probabilities.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.harness import scenarios
from tests.harness.events import Events
from tests.harness.judge import (
    ON_OFF,
    Exchange,
    Scenario,
    ask,
    ask_all,
    follow_transformers,
    recorded,
    same_answers,
)
from tests.harness.pool import ServerPool, on
from tests.harness.reference import prompt
from tests.harness.scenarios import cold_again
from tests.harness.server import Server, ServerError

CAPACITY = 16  # SGLang's default --linear-replayssm-cache-len
SNAPSHOTS = {
    # With 250 tokens prefilled, 251 .. 255 are pending when the step of token 256 reaches the boundary. The question
    # after it starts at 261.
    scenarios.decoded_boundary: [(256, 6)],
}
by_scenario = pytest.mark.parametrize(
    "scenario",
    [scenarios.later_turn, scenarios.decoded_boundary, scenarios.conversation],
    ids=lambda scenario: scenario.__name__,
)


@by_scenario
@on("deep-off")
def test_the_oracle_follows_transformers(server_pool: ServerPool, server: Server, scenario: Scenario) -> None:
    follow_transformers(server, recorded(server_pool, "deep-off", scenario))


@pytest.fixture
def off(server_pool: ServerPool, scenario: Scenario) -> list[Exchange]:
    """The scenario's answers without the plugin. Named before `server`, which it may have to end."""
    return recorded(server_pool, "deep-off", scenario)


@by_scenario
@on("deep-on")
def test_on_equals_off(off: list[Exchange], server: Server, scenario: Scenario) -> None:
    events = Events()
    answers = scenario(server)
    follow_transformers(server, answers)
    same_answers(off, answers, ON_OFF)
    # The first output token of a request comes from its prefill, every other one from buffered decode.
    assert events.decoded_tokens() == sum(len(exchange.answer.ids) - 1 for exchange in answers)
    assert events.snapshots() == SNAPSHOTS.get(scenario, [])


@on("deep-on")
def test_the_flag_alone_means_default_cache_and_buffered_decode(server: Server) -> None:
    info = server.server_info()
    assert info["mamba_radix_cache_strategy"] == "extra_buffer"
    assert info["disable_overlap_schedule"] is False
    assert info["disable_radix_cache"] is False
    assert info["enable_linear_replayssm"] is False  # as resolved: SGLang's own replay sleeps
    rows = 4 + 1  # --max-running-requests of the test host, and the padding row
    line = f"ReplaySSM: buffered decode on, ring of {CAPACITY} records x {rows} request rows x 3 layers"
    assert line in server.log_text()


@on("deep-on")
def test_more_requests_than_rows(server: Server) -> None:
    """Scenario 6: rows and slots change hands while others decode; arrivals staggered."""
    prompts = [prompt(length, seed=20 + index) for index, length in enumerate((40, 66, 25, 70, 31, 64, 50, 33))]
    prompts[5] = prompts[3][:64] + prompts[5][:9]  # starts from a copy of another's state
    events = Events()
    follow_transformers(server, ask_all(server, prompts, [14, 9, 18, 7, 11, 12, 6, 16], stagger=0.3))
    used = [row for event in events.of("extend") for row in event.rows]
    assert len(used) == len(prompts)
    assert len(set(used)) <= 4, "rows were to be used again"
    left: dict[int, int] = {}
    handed_on = []
    for event in events:
        if event.kind == "extend":
            handed_on += [left.pop(row) for row in event.rows if row in left]
        else:
            left.update(zip(event.rows, event.pending, strict=True))
    assert max(handed_on) > 0, "a row was to change hands with records in its ring"


@on("deep-on")
def test_stop_token_with_a_step_in_flight(server: Server) -> None:
    """Overlap scheduling runs a step past a stop token; neither the cache nor the row's next owner may see it."""
    document = prompt(62, seed=30)
    full = ask(server, document, 9)
    stop = full.answer.ids[6]
    assert stop not in full.answer.ids[:6], "choose another seed"
    events = Events()
    short = ask(server, document, 9, ignore_eos=False, stop_token_ids=[stop])
    assert short.answer.ids == full.answer.ids[:7]
    assert events.decoded_tokens() == 7, "a step past the stop token was to run"
    following = ask(server, short.tokens + prompt(4, seed=31), 5)
    follow_transformers(server, [full, following, cold_again(server, following)])


@on("deep-on")
def test_abort_and_instant_retry(server: Server) -> None:
    document = prompt(90, seed=40)
    with ThreadPoolExecutor(1) as pool:
        events = Events()
        doomed = pool.submit(server.generate, document, 3000, rid="doomed")
        events.wait_for_decoded_tokens(5)
        server.abort("doomed")
        retry = ask(server, document, 20)
        try:
            assert doomed.result(timeout=60).meta["finish_reason"]["type"] == "abort"
        except ServerError as error:
            assert "abort" in str(error).lower()
    follow_transformers(server, [retry, cold_again(server, retry)])
