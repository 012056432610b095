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
