"""One server's answers, and what they are worth by quartile of position."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..client import Client
from .recall import RecallFormat
from .tasks import QUARTILES, Opening, cuts, questions

Tick = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Sizes:
    """``context``: tokens written per text. ``questions``, ``cuts``: per text and quartile. ``continued``: tokens."""

    context: int
    questions: int
    cuts: int
    continued: int
    concurrency: int = 16


@dataclass
class Written:
    """A text that a server wrote: token ids, the log-probability of each as decoded, and as prefilled later."""

    ids: list[int]
    decoded: list[float]
    prefilled: list[float] = field(default_factory=list)


@dataclass
class Answers:
    """Everything one server said.

    ``recalled``: by quartile, for each question the share of the answer's tokens that are right, up to the first wrong
    one. ``recall_cached``: share of the questions' prompts that came from the prefix cache. ``continued``: greedy
    continuations of the reference texts, with their quartile.
    """

    written: list[Written]
    recalled: list[list[float]] = field(default_factory=lambda: [[] for _ in range(QUARTILES)])
    recall_cached: float = 0.0
    continued: list[tuple[int, list[int]]] = field(default_factory=list)


async def ask(
    client: Client,
    openings: Sequence[Opening],
    form: RecallFormat | None,
    sizes: Sizes,
    reference: Answers | None,
    seed: int,
    tick: Tick = lambda phase, done, total: None,
) -> Answers:
    """Put all tasks to one server.

    It writes every text at temperature 1, token by token through its decode path; is asked for facts behind what it
    wrote, while the states of that decoding are in its prefix cache; scores its own texts once more by a prefill with
    an empty cache; and continues the texts of ``reference`` (its own if None) greedily from places in every quartile.
    """
    await client.flush()
    began = [_sampled(client, opening, sizes.context) for opening in openings]
    answers = Answers(await _all(began, sizes.concurrency, "writing", tick))

    if form is not None and sizes.questions:
        rng = random.Random(seed)
        asked = [
            q
            for opening, w in zip(openings, answers.written, strict=True)
            for q in questions(opening, w.ids, form, sizes.questions, rng)
        ]
        replies = await _all(
            [client.complete(q.ids, len(q.answer)) for q in asked], sizes.concurrency, "asking for facts", tick
        )
        for question, reply in zip(asked, replies, strict=True):
            answers.recalled[question.quartile].append(_equal(reply.ids, question.answer) / len(question.answer))
        answers.recall_cached = sum(r.cached_tokens for r in replies) / sum(len(q.ids) for q in asked)

    await client.flush()
    scored = [
        client.complete([*opening.ids, *w.ids], 1, score_from=len(opening.ids))
        for opening, w in zip(openings, answers.written, strict=True)
    ]
    # one at a time: a text behind another must not find its opening in the cache, and pools stay small
    for w, reply in zip(answers.written, await _all(scored, 1, "scoring by prefill", tick), strict=True):
        w.prefilled = reply.prompt_logprobs

    await client.flush()
    rng = random.Random(seed + 1)
    texts = (reference or answers).written
    ends = [cut for opening, w in zip(openings, texts, strict=True) for cut in cuts(opening, w.ids, sizes.cuts, rng)]
    replies = await _all(
        [client.complete(ids, sizes.continued) for ids, _ in ends], sizes.concurrency, "continuing greedily", tick
    )
    answers.continued = [(quartile, reply.ids) for (_, quartile), reply in zip(ends, replies, strict=True)]
    return answers


async def _sampled(client: Client, opening: Opening, count: int) -> Written:
    reply = await client.complete(opening.ids, count, temperature=1.0, logprobs=True)
    return Written(reply.ids, reply.logprobs)


async def _all(requests: Sequence[Any], most: int, phase: str, tick: Tick) -> list[Any]:
    """The replies in order, at most ``most`` requests in flight; the first failure ends the rest."""
    slots, done = asyncio.Semaphore(most), 0

    async def one(request: Any) -> Any:
        nonlocal done
        async with slots:
            reply = await request
        done += 1
        tick(phase, done, len(requests))
        return reply

    tick(phase, 0, len(requests))
    tasks = [asyncio.ensure_future(one(r)) for r in requests]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for request in requests:
            request.close()  # one that never had its turn


def _equal(ids: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common beginning."""
    for i, (a, b) in enumerate(zip(ids, right, strict=False)):
        if a != b:
            return i
    return min(len(ids), len(right))


def figures(answers: Answers, reference: Answers | None) -> list[dict[str, Any]]:
    """One table per quartile; ``reference`` is the first server's answers, None for itself.

    - ``perplexity``: of the tokens the server wrote, by the probabilities it decoded them with, and ``_se``, the
      standard error of its logarithm;
    - ``perplexity_prefilled``: of the same tokens by a prefill with an empty cache;
    - ``drift``: mean of the differences of the two log-probabilities (decoded less prefilled, nats), ``drift_se`` its
      standard error, ``noise`` the mean of their sizes: what decoding from a wrong state would raise;
    - ``recall``: share of answers that are right to the last token, ``recall_tokens``: of their tokens, up to the
      first wrong one;
    - ``agreement``: share of greedy continuations equal to the reference's, ``agreement_tokens``: of their tokens, up
      to the first difference.
    """
    return [_quartile(answers, reference, i) for i in range(QUARTILES)]


def _quartile(answers: Answers, reference: Answers | None, i: int) -> dict[str, Any]:
    decoded, prefilled = (
        np.concatenate([np.array(getattr(w, side)[_part(len(w.ids), i)]) for w in answers.written])
        for side in ("decoded", "prefilled")
    )
    gap = decoded - prefilled
    found: dict[str, Any] = {
        "tokens": len(decoded),
        "perplexity": math.exp(-decoded.mean()),
        "perplexity_se": _error(decoded),
        "perplexity_prefilled": math.exp(-prefilled.mean()),
        "drift": float(gap.mean()),
        "drift_se": _error(gap),
        "noise": float(np.abs(gap).mean()),
    }
    if answers.recalled[i]:
        found["recall"] = sum(share == 1.0 for share in answers.recalled[i]) / len(answers.recalled[i])
        found["recall_tokens"] = float(np.mean(answers.recalled[i]))
        found["questions"] = len(answers.recalled[i])
    if reference is not None:
        pairs = [
            (mine, theirs)
            for (quartile, mine), (_, theirs) in zip(answers.continued, reference.continued, strict=True)
            if quartile == i
        ]
        if pairs:
            found["agreement"] = sum(a == b for a, b in pairs) / len(pairs)
            found["agreement_tokens"] = sum(_equal(a, b) for a, b in pairs) / sum(len(b) for _, b in pairs)
            found["continuations"] = len(pairs)
    return found


def _part(length: int, i: int) -> slice:
    return slice(length * i // QUARTILES, length * (i + 1) // QUARTILES)


def _error(values: np.ndarray) -> float:
    """Standard error of the mean, values taken as independent."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.inf
