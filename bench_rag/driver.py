"""Send a plan to a server: open loop by arrival time, a cap on requests in flight, turns in sequence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from .client import Client, Reply
from .workloads import Conversation, Plan


async def drive(client: Client, plan: Plan, on_reply: Callable[[Reply], None] = lambda reply: None) -> list[Reply]:
    """Run ``plan`` and return its replies ordered by conversation and turn.

    Conversations start at their arrival time whether or not the server keeps up; a request that finds
    ``plan.concurrency`` others in flight waits its turn in order of arrival, and the wait is recorded, not hidden. A
    conversation ends at its first failed turn. ``on_reply`` sees every reply as it ends.
    """
    in_flight = asyncio.Semaphore(plan.concurrency)
    began = time.perf_counter()

    async def converse(number: int, conversation: Conversation) -> list[Reply]:
        await asyncio.sleep(max(0.0, conversation.arrival - (time.perf_counter() - began)))
        history: list[int] = []
        replies = []
        for turn_number, turn in enumerate(conversation.turns):
            prompt = history + turn.new_ids
            if turn.pause:
                await asyncio.sleep(turn.pause)
            due = time.perf_counter()
            async with in_flight:
                reply = await client.generate(prompt, turn.output_len)
            reply.conversation, reply.turn, reply.waited = number, turn_number, reply.sent - due
            replies.append(reply)
            on_reply(reply)
            if not reply.ok:
                break
            history = prompt + reply.output_ids
        return replies

    tasks = [asyncio.create_task(converse(i, c)) for i, c in enumerate(plan.conversations)]
    try:
        return [reply for replies in await asyncio.gather(*tasks) for reply in replies]
    finally:
        for task in tasks:
            task.cancel()
