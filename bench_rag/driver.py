"""Send a plan to a server: open loop by arrival time, a cap on requests in flight, turns in sequence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from .client import Client, Reply
from .workloads import Conversation, Plan


async def drive(
    client: Client,
    plan: Plan,
    on_reply: Callable[[Reply], None] = lambda reply: None,
    *,
    as_text: bool = False,
    ramp: float = 0.0,
) -> list[Reply]:
    """Run ``plan`` and return its replies ordered by conversation and turn.

    Conversations start at their arrival time whether or not the server keeps up; a request that finds
    ``plan.concurrency`` others in flight waits its turn in order of arrival, and the wait is recorded, not hidden. A
    conversation ends at its first failed turn. ``on_reply`` sees every reply as it ends. ``as_text``: prompts go out
    as text, and a later turn repeats the text of the answers. ``ramp``: seconds over which the limit on requests in
    flight rises evenly from 1; replies to what was sent within them are marked.
    """
    in_flight = asyncio.Semaphore(plan.concurrency if ramp <= 0 else 1)
    began = time.perf_counter()

    async def open_up() -> None:
        for number in range(1, plan.concurrency):
            await asyncio.sleep(max(0.0, began + ramp * number / plan.concurrency - time.perf_counter()))
            in_flight.release()

    async def converse(number: int, conversation: Conversation) -> list[Reply]:
        await asyncio.sleep(max(0.0, conversation.arrival - (time.perf_counter() - began)))
        history: list[int] | str = "" if as_text else []
        replies: list[Reply] = []
        for turn_number, turn in enumerate(conversation.turns):
            prompt = history + turn.spoken() if isinstance(history, str) else history + turn.new_ids
            if turn.pause:
                await asyncio.sleep(turn.pause)
            due = time.perf_counter()
            async with in_flight:
                reply = await client.generate(prompt, turn.output_len)
            reply.conversation, reply.turn, reply.waited = number, turn_number, reply.sent - due
            reply.ramp = reply.sent - began < ramp
            replies.append(reply)
            on_reply(reply)
            if not reply.ok:
                break
            if turn_number + 1 < len(conversation.turns) and (error := _no_answer(reply, as_text)):
                reply.error = error
                break
            history = prompt + reply.output_text if isinstance(prompt, str) else prompt + reply.output_ids
        return replies

    tasks = [asyncio.create_task(converse(i, c)) for i, c in enumerate(plan.conversations)]
    opening = asyncio.create_task(open_up()) if ramp > 0 else None
    try:
        return [reply for replies in await asyncio.gather(*tasks) for reply in replies]
    finally:
        for task in (*tasks, *([opening] if opening else [])):
            task.cancel()


def _no_answer(reply: Reply, as_text: bool) -> str:
    """Why a conversation can not go on: its next prompt repeats the answer, and the endpoint did not give it."""
    if as_text:
        return "" if reply.output_text else "the answer came without its text: send token ids (--prompts ids)"
    return "" if reply.output_ids else "the answer came without its token ids: send text (--prompts text)"
