"""The client and the driver against a server whose every event is known."""

from __future__ import annotations

import asyncio

import pytest

from bench_rag import measures
from bench_rag.client import Client, Reply
from bench_rag.driver import drive
from bench_rag.errors import BenchError
from bench_rag.workloads import Burst, Conversation, Plan, Turn, Vocab
from tests.bench.fakes import FakeSglang

# A loaded machine wakes late, never early: lower bounds are exact, upper bounds leave this much (seconds).
LATE = 1.0


def ask(fake: FakeSglang, prompt: list[int], output_len: int, timeout: float = 30.0) -> Reply:
    async def go() -> Reply:
        async with fake as url, Client(url, timeout) as client:
            return await client.generate(prompt, output_len)

    return asyncio.run(go())


def run(fake: FakeSglang, plan: Plan) -> list[Reply]:
    async def go() -> list[Reply]:
        async with fake as url, Client(url) as client:
            return await drive(client, plan)

    return asyncio.run(go())


@pytest.mark.parametrize("incremental", [False, True], ids=["repeated ids", "incremental"])
def test_reply_carries_times_tokens_and_hits(incremental):
    fake = FakeSglang(events=[(0.2, 1), (0.1, 1), (0.3, 3)], cached=[2], incremental=incremental)
    reply = ask(fake, [5, 6, 7], 5)
    assert reply.ok and reply.output_ids == [18, 19, 20, 21, 22]
    assert (reply.prompt_tokens, reply.cached_tokens, reply.cached_by_tier) == (3, 2, {"device": 2, "host": 0})
    assert [tokens for _, tokens in reply.events] == [1, 2, 5]
    assert 0.2 <= measures.ttft(reply) < 0.2 + LATE
    assert 0.6 <= measures.e2e(reply) < 0.6 + LATE
    gaps = measures.itl(reply)
    assert len(gaps) == 4 and gaps[1] == gaps[2] == gaps[3]
    assert sum(gaps) == pytest.approx(measures.e2e(reply) - measures.ttft(reply))
    assert measures.tpot(reply) == pytest.approx(sum(gaps) / 4)


def ask_openai(fake: FakeSglang, prompt: list[int] | str, output_len: int, name: str = "") -> Reply:
    async def go() -> Reply:
        async with fake as url, Client(url, 30.0, "openai", name) as client:
            await client.choose_model()
            return await client.generate(prompt, output_len)

    return asyncio.run(go())


@pytest.mark.parametrize("incremental", [False, True], ids=["repeated", "incremental"])
def test_text_goes_out_and_comes_back(incremental):
    fake = FakeSglang(events=[(0.0, 1), (0.0, 2)], cached=[2], incremental=incremental)
    reply = ask(fake, "a bb ccc", 3)
    assert reply.ok and fake.prompts == ["a bb ccc"] and reply.prompt_tokens == 3 and reply.cached_tokens == 2
    assert reply.output_ids == [6, 7, 8] and reply.output_text == "w6 w7 w8 "


@pytest.mark.parametrize("prompt", [[1, 2, 3], "a bb ccc"], ids=["ids", "text"])
def test_openai_endpoint_of_sglang(prompt):
    fake = FakeSglang(events=[(0.2, 1), (0.1, 1), (0.1, 3)], cached=[2])
    reply = ask_openai(fake, prompt, 5)
    assert reply.ok and fake.prompts == [prompt] and fake.bodies[0]["model"] == "the-model"
    assert (reply.prompt_tokens, reply.cached_tokens, reply.cached_by_tier) == (3, 2, {"device": 2, "host": 0})
    assert reply.output_ids == [6, 7, 8, 9, 10] and reply.output_text == "w6 w7 w8 w9 w10 "
    assert [tokens for _, tokens in reply.events] == [1, 2, 5] and 0.2 <= measures.ttft(reply) < 0.2 + LATE


@pytest.mark.parametrize("report", [False, True], ids=["no hits", "hits"])
def test_openai_endpoint_of_another_server(report):
    """No ids, no counts before the end: an event per piece of text, tokens spread over them; hits may be missing."""
    fake = FakeSglang(events=[(0.0, 2), (0.1, 2), (0.1, 2)], cached=[1], foreign=True, cache_report=report)
    reply = ask_openai(fake, "a bb", 6, "mine")
    assert reply.ok and fake.bodies[0]["model"] == "mine" and reply.output_ids == []
    assert [tokens for _, tokens in reply.events] == [2, 4, 6]
    assert reply.cached_tokens == (1 if report else None)
    figures = measures.measure([reply])
    assert figures.get("hit_rate") == (0.5 if report else None) and figures["output_tokens"] == 6


def test_an_endpoint_that_names_no_model_says_so():
    async def go() -> None:
        async with Client("http://127.0.0.1:9", api="openai") as client:
            await client.choose_model()

    with pytest.raises(BenchError, match="names no model: name it with --served-model"):
        asyncio.run(go())


def test_short_answer_is_a_failure():
    assert ask(FakeSglang(events=[(0, 2)]), [1], 5).error == "2 output tokens instead of 5"


def test_error_event_is_a_failure():
    reply = ask(FakeSglang(events=[], fail_with={"error": {"message": "no such token"}}), [1], 1)
    assert not reply.ok and "no such token" in reply.error


def test_abort_is_a_failure():
    meta = {
        "prompt_tokens": 1,
        "completion_tokens": 0,
        "finish_reason": {"type": "abort", "message": "out of slots"},
    }
    reply = ask(FakeSglang(events=[], fail_with={"output_ids": [], "meta_info": meta}), [1], 1)
    assert reply.error == "aborted by the server: out of slots"


def test_slow_answer_times_out():
    reply = ask(FakeSglang(events=[(5, 1)]), [1], 1, timeout=0.2)
    assert reply.error == "no answer within 0.2 s"


def test_no_server_is_a_failure_not_an_exception():
    async def go() -> tuple[Reply, bool]:
        async with Client("http://127.0.0.1:9") as client:  # the discard port: nobody listens
            with pytest.raises(BenchError, match="could not flush"):
                await client.flush()
            return await client.generate([1], 1), await client.healthy()

    reply, healthy = asyncio.run(go())
    assert "Connect" in reply.error and not healthy


def test_concurrency_is_capped_and_the_wait_is_recorded():
    fake = FakeSglang(events=[(0.1, 1)])
    replies = run(fake, Plan([Conversation([Turn([i], 1)]) for i in range(6)], concurrency=2))
    assert fake.most_in_flight == 2 and all(r.ok for r in replies)
    assert [p[0] for p in fake.prompts] == list(range(6))  # first come, first served
    waits = [r.waited for r in replies]
    assert max(waits[:2]) < waits[2] and waits[2] >= 0.1 and 0.2 <= waits[4] < 0.2 + LATE
    assert all(0.1 <= measures.ttft(r) < 0.1 + LATE for r in replies)  # the wait is not in TTFT


def test_arrivals_do_not_wait_for_a_slow_server():
    fake = FakeSglang(events=[(1.5, 1)])
    plan = Plan([Conversation([Turn([i], 1)], arrival=0.05 * i) for i in range(8)], concurrency=8)
    replies = run(fake, plan)
    sent = [r.sent - replies[0].sent for r in replies]
    # A closed loop would send each request after the answer to the one before it, 1.5 s later.
    assert all(0.05 * i - 0.02 <= s < 0.05 * i + LATE for i, s in enumerate(sent))
    assert fake.most_in_flight == 8


def test_later_turns_repeat_the_answer():
    fake = FakeSglang(events=[(0, 1), (0, 1)])
    replies = run(fake, Plan([Conversation([Turn([1, 2], 2), Turn([7], 2), Turn([8, 9], 2)])], concurrency=1))
    first = [1, 2]
    second = [*first, 3, 4, 7]
    third = [*second, 17, 18, 8, 9]
    assert fake.prompts == [first, second, third]
    assert [(r.conversation, r.turn, r.prompt_tokens) for r in replies] == [(0, 0, 2), (0, 1, 5), (0, 2, 9)]


def test_later_turns_repeat_the_text_of_the_answer():
    fake = FakeSglang(events=[(0, 1), (0, 1)])
    plan = Plan([Conversation([Turn([0], 2, text="a bb "), Turn([7], 2)])], concurrency=1)

    async def go() -> list[Reply]:
        async with fake as url, Client(url) as client:
            return await drive(client, plan, as_text=True)

    replies = asyncio.run(go())
    assert fake.prompts == ["a bb ", f"a bb w3 w4 {Turn([7], 2).spoken()}"] and all(r.ok for r in replies)


def test_a_conversation_needs_the_answer_in_the_form_it_goes_on_in():
    plan = Plan([Conversation([Turn([1], 2), Turn([7], 2)])], concurrency=1)

    async def go() -> list[Reply]:
        async with FakeSglang(events=[(0, 2)], foreign=True) as url, Client(url, api="openai", model="m") as client:
            return await drive(client, plan)

    (reply,) = asyncio.run(go())
    assert reply.error == "the answer came without its token ids: send text (--prompts text)"


def test_words_share_what_ids_share():
    a, b = Turn([5, 300, 29_999], 1).spoken(), Turn([5, 300, 0], 1).spoken()
    assert a.split()[:2] == b.split()[:2] and a.split()[2] != b.split()[2]
    words = {Turn([i], 1).spoken() for i in range(30_000)}
    assert len(words) == 30_000 and all(w.endswith(" ") and w.strip().isalpha() for w in words)


def test_ramp_raises_the_limit_evenly_and_marks_what_is_sent_in_it():
    fake = FakeSglang(events=[(0.1, 1)])
    plan = Plan([Conversation([Turn([i], 1)]) for i in range(30)], concurrency=3)

    async def go() -> list[Reply]:
        async with fake as url, Client(url) as client:
            return await drive(client, plan, ramp=0.6)

    replies = asyncio.run(go())
    began = min(r.sent for r in replies)
    assert fake.most_in_flight == 3 and all(r.ok for r in replies)
    early = [r for r in replies if r.sent - began < 0.15]
    assert 1 <= len(early) <= 2  # one at a time at first; three at once would have sent six
    assert {r.ramp for r in replies if r.sent - began < 0.5} == {True}
    assert not replies[-1].ramp
    figures = measures.measure(replies)
    assert figures["in_ramp"] == sum(r.ramp for r in replies) and figures["requests"] == 30 - figures["in_ramp"]


def test_conversation_ends_at_its_first_failure():
    fake = FakeSglang(events=[], fail_with={"error": "busy"})
    replies = run(fake, Plan([Conversation([Turn([1], 1), Turn([2], 1)])], concurrency=1))
    assert len(replies) == 1 and not replies[0].ok


def test_burst_reaches_its_batch():
    fake = FakeSglang(events=[(0.6, 1), (0.1, 1)])
    replies = run(fake, Burst(batch=20, prompt_len=2, output_len=2).plan(1, Vocab()))
    assert len(replies) == 20 and all(r.ok for r in replies) and fake.most_in_flight == 20


def test_a_pause_comes_before_its_turn():
    plan = Plan([Conversation([Turn([1], 1), Turn([2], 1, pause=0.3)])], concurrency=1)
    first, second = run(FakeSglang(events=[(0.0, 1)]), plan)
    assert 0.3 <= second.sent - first.ended < 0.3 + LATE
    assert second.waited < 0.3  # a tool's time is not a wait for the client's limit
