"""States at block boundaries on real servers: hits that SGLang alone does not have, judged by transformers.

The policy of these servers guesses 64 and 128 tokens before the end of a prompt that nothing is known of.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.harness.events import Events
from tests.harness.judge import Exchange, ask, ask_all, follow_transformers
from tests.harness.pool import on
from tests.harness.reference import prompt
from tests.harness.scenarios import cold_again
from tests.harness.server import Server

DOCUMENT = 173  # no multiple of anything


def group(server: Server, *questions: int) -> list[Exchange]:
    """Prompts that share a document, each with a question of its own of so many tokens."""
    document = prompt(DOCUMENT, seed=900)
    return [ask(server, document + prompt(n, seed=900 + n), 5) for n in questions]


@pytest.mark.parametrize(
    "server",
    ["boundaries", pytest.param("boundaries-python-core", marks=pytest.mark.long)],
    indirect=True,
)
def test_the_second_of_a_group_hits(server: Server) -> None:
    first, second, third = answers = group(server, 70, 75, 81)
    assert first.hit == 0
    assert second.hit == DOCUMENT + 70 - 128, "the deepest guess of the first that lies in the document"
    assert third.hit == DOCUMENT, "the branch, to the token"
    follow_transformers(server, answers)
    cold_again(server, second)
    cold_again(server, third)


@on("boundaries")
def test_a_prompt_hits_while_the_first_of_its_kind_is_computed(server: Server) -> None:
    """Overlap scheduling looks at a prefill's result a batch later; its states are in the tree before that."""
    document = prompt(DOCUMENT, seed=970)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(ask, server, document + prompt(70, seed=971), 1)
        time.sleep(0.3)
        assert not future.done(), "the first prefill was to be in flight"
        second = ask(server, document + prompt(71, seed=972), 5)
        first = future.result()
    assert (first.hit, second.hit) == (0, DOCUMENT + 70 - 128)
    follow_transformers(server, [first, second])
    cold_again(server, second)


@on("boundaries")
def test_server_info_says_that_they_are_kept(server: Server) -> None:
    (state,) = server.server_info()["internal_states"]
    assert state["replayssm"]["states_at_boundaries"] is True and state["replayssm"]["host_tier"] is False


@on("boundaries")
def test_metrics_tell_what_became_of_states_at_boundaries(server: Server) -> None:
    """Guesses in the first prompt and the branch in the second are taken; the second and the third start from one."""

    def counts() -> dict[str, float]:
        found = dict.fromkeys(("taken", "hit"), 0.0)
        for name, value in server.metrics().items():
            if name.startswith("sglang:replayssm_boundary_states_total") and 'event="evicted"' not in name:
                found[name.partition('event="')[2].partition('"')[0]] += value
        return found

    time.sleep(1)  # an idle server has published what came before
    before = counts()
    document = prompt(DOCUMENT, seed=960)
    _, second, third = [ask(server, document + prompt(n, seed=960 + n), 5) for n in (70, 75, 81)]
    assert [second.hit, third.hit] == [DOCUMENT + 70 - 128, DOCUMENT]
    until = time.monotonic() + 20
    while (after := counts())["hit"] < before["hit"] + 2 and time.monotonic() < until:
        time.sleep(0.2)
    assert after["hit"] == before["hit"] + 2
    assert after["taken"] >= before["taken"] + 3


@on("boundaries")
def test_turns_start_where_the_last_one_ended(server: Server) -> None:
    """Turn 2 after an unaligned turn 1, and a branch that leaves from a start off the 64-token grid."""
    first = ask(server, prompt(71, seed=910), 9)
    second = ask(server, first.tokens + prompt(40, seed=911), 7)
    assert second.hit == len(first.tokens) - 1, "the last token of an answer is never computed"
    third = ask(server, second.tokens + prompt(50, seed=912), 5)
    assert third.hit == len(second.tokens) - 1
    other = ask(server, second.prompt[:115] + prompt(45, seed=913), 5)
    assert other.hit == len(first.tokens) - 1
    again = ask(server, second.prompt[:115] + prompt(35, seed=914), 5)
    assert again.hit == 115, "learnt from a start at 79"
    follow_transformers(server, [first, second, third, other, again])
    cold_again(server, third)


@on("boundaries")
def test_a_stop_token_with_a_step_in_flight(server: Server) -> None:
    """The step past the stop token computes that token: the next turn starts after it."""
    document = prompt(62, seed=30)
    full = ask(server, document, 9)
    stop = full.answer.ids[6]
    assert stop not in full.answer.ids[:6], "choose another seed"
    server.flush()
    short = ask(server, document, 9, ignore_eos=False, stop_token_ids=[stop])
    assert short.answer.ids == full.answer.ids[:7]
    following = ask(server, short.tokens + prompt(9, seed=31), 5)
    assert following.hit in (len(short.tokens), len(short.tokens) - 1)
    follow_transformers(server, [short, following])
    cold_again(server, following)


@on("boundaries")
def test_hinted_documents(server: Server) -> None:
    first, second = prompt(67, seed=920), prompt(90, seed=921)
    hints = {"replayssm_boundaries": [67, 157]}
    warm = [
        ask(server, first + second + prompt(30, seed=922), 4, custom_params=hints),
        ask(server, first + prompt(33, seed=923), 4, custom_params={"replayssm_boundaries": "everywhere"}),
        ask(server, first + second + prompt(20, seed=924), 4),
    ]
    assert [exchange.hit for exchange in warm] == [0, 67, 157]
    assert "replayssm_boundaries must be a list of token counts" in server.log_text()
    follow_transformers(server, warm)


@on("boundaries")
def test_a_batch_of_unequal_lengths(server: Server) -> None:
    """Scenario 17: prompts of one batch, each with boundaries of its own, and one with none."""
    lengths = (150, 40, 203, 171)
    documents = [prompt(n, seed=930 + n) for n in lengths]
    together = ask_all(server, documents, 5)
    assert [exchange.hit for exchange in together] == [0] * 4
    reused = [ask(server, document[:-60] + prompt(25, seed=935), 4) for document in documents if len(document) > 60]
    assert [exchange.hit for exchange in reused] == [86, 203 - 64, 171 - 64]
    follow_transformers(server, [*together, *reused])


@pytest.mark.long
@on("boundaries-pages", "boundaries-pages-128")
def test_pages(server: Server) -> None:
    """Scenario 12: keys name whole pages, chunks of 256 tokens; states stand at the keys' token counts."""
    first = ask(server, prompt(350, seed=940), 5)
    second = ask(server, first.prompt[:300] + prompt(70, seed=941), 5)
    third = ask(server, first.prompt[:300] + prompt(80, seed=942), 5)
    assert [exchange.hit for exchange in (first, second, third)] == [0, 256, 256]
    follow_transformers(server, [first, second, third])
    cold_again(server, second)


@pytest.mark.long
@on("boundaries-mixed")
def test_prefill_beside_decode(server: Server) -> None:
    """Scenario 13: rows that prefill with boundaries beside rows that decode, in one forward."""
    lengths = (60, 130, 190, 150, 145, 160)
    answers = ask_all(server, [prompt(n, seed=950 + n) for n in lengths], 20, stagger=0.4)
    assert "MIXED" in {event.mode for event in Events()} or answers
    follow_transformers(server, answers)
    again = [ask(server, exchange.prompt + prompt(9, seed=951), 4) for exchange in answers[-2:]]
    assert all(exchange.hit >= 64 for exchange in again)
    follow_transformers(server, again)


@pytest.mark.long
@on("boundaries-retract", "boundaries-lazy")
def test_retraction_and_lazy_track_slots(server: Server) -> None:
    """Scenarios 5, 18 and 19: a few pools are nearly full, requests are thrown out and resume, nothing leaks."""
    document = prompt(100, seed=960)
    answers = ask_all(server, [document + prompt(60 + n, seed=961 + n) for n in range(4)], 24, stagger=0.3)
    follow_transformers(server, answers)
    server.flush()
    assert server.alive()
    cold_again(server, ask(server, document + prompt(60, seed=961), 24))


@pytest.mark.long
@on("kimi-boundaries")
def test_kda(server: Server) -> None:
    """Scenario 4 at boundaries, with chunks of 128 tokens."""
    first, second, third = answers = group(server, 70, 75, 81)
    assert [first.hit, third.hit] == [0, DOCUMENT]
    assert 64 <= second.hit <= DOCUMENT
    turn = ask(server, third.tokens + prompt(20, seed=970), 5)
    assert turn.hit == len(third.tokens) - 1
    follow_transformers(server, [*answers, turn])
    cold_again(server, third, bound=0.05)
