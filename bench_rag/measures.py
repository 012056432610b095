"""From replies to figures. Times in milliseconds, rates in tokens or requests per second, shares from 0 to 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .client import Reply
from .noise import half_width

PERCENTILES = (50, 90, 99)


def ttft(reply: Reply) -> float:
    """Seconds from send to the first token."""
    return reply.events[0][0] - reply.sent


def e2e(reply: Reply) -> float:
    """Seconds from send to the last token."""
    return reply.events[-1][0] - reply.sent


def tpot(reply: Reply) -> float | None:
    """Seconds per output token after the first event's; None for an answer that came in one event."""
    (first, had), (last, total) = reply.events[0], reply.events[-1]
    return (last - first) / (total - had) if total > had else None


def itl(reply: Reply) -> list[float]:
    """Seconds between consecutive tokens; an event of m tokens counts as m equal gaps."""
    gaps = []
    for (before, had), (now, has) in zip(reply.events, reply.events[1:], strict=False):
        gaps += [(now - before) / (has - had)] * (has - had)
    return gaps


def steady_decode(replies: Sequence[Reply]) -> tuple[float, float] | None:
    """Decode throughput while every request is decoding: (tokens per second, seconds of that window).

    The window opens with the last request's first token and closes with the first request's last token; a token counts
    if it arrives after the opening and no later than the closing. None where there is no such window.
    """
    opens = max(r.events[0][0] for r in replies)
    closes = min(r.events[-1][0] for r in replies)
    if closes <= opens:
        return None
    tokens = 0
    for reply in replies:
        had = 0
        for arrived, has in reply.events:
            if opens < arrived <= closes:
                tokens += has - had
            had = has
    return tokens / (closes - opens), closes - opens


def measure(replies: Sequence[Reply], *, steady: bool = False, ttft_limit: float | None = None) -> dict[str, Any]:
    """All figures of one run. Failed requests are counted, and left out of every other figure.

    Requests sent within the ramp are left out of every figure but their own number. Where an endpoint does not report
    cached tokens, there is no hit rate.

    ``steady`` adds the steady decode throughput, which only means something when all requests start together.
    ``ttft_limit`` (seconds) adds the goodput, requests per second whose first token came in time, and
    ``in_time``, their share of all requests, failed ones included.
    """
    good = [r for r in replies if r.ok and not r.ramp]
    figures: dict[str, Any] = {
        "requests": len(good),
        "failed": sum(not r.ok for r in replies),
        "first_error": next((r.error for r in replies if not r.ok), ""),
    }
    if any(r.ramp for r in replies):
        figures["in_ramp"] = sum(r.ramp for r in replies)
    if not good:
        return figures
    prompt = sum(r.prompt_tokens for r in good)
    output = sum(r.events[-1][1] for r in good)
    seconds = max(r.ended for r in good) - min(r.sent for r in good)
    figures |= {
        "duration_s": seconds,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "request_throughput": len(good) / seconds,
        "prompt_throughput": prompt / seconds,
        "output_throughput": output / seconds,
        "client_wait_ms_mean": 1e3 * float(np.mean([r.waited for r in good])),
    }
    told = [r.cached_tokens for r in good if r.cached_tokens is not None]
    if len(told) == len(good):
        figures |= {
            "cached_tokens": sum(told),
            "hit_rate": sum(told) / prompt,
            "requests_without_hit": sum(tokens == 0 for tokens in told),
        }
    tiers: dict[str, int] = {}
    for reply in good:
        for tier, tokens in reply.cached_by_tier.items():
            tiers[tier] = tiers.get(tier, 0) + tokens
    if tiers:
        figures["cached_tokens_by_tier"] = tiers
        figures |= {f"hit_rate_{tier}": tokens / prompt for tier, tokens in tiers.items()}
    if ttft_limit is not None:
        in_time = sum(ttft(r) <= ttft_limit for r in good)
        asked = sum(not r.ramp for r in replies)
        figures |= {"goodput": in_time / seconds, "in_time": in_time / asked}
    per_token = [t for r in good if (t := tpot(r)) is not None]
    figures |= _spread("ttft_ms", [ttft(r) for r in good])
    figures |= _spread("tpot_ms", per_token)
    figures |= _spread("itl_ms", [gap for r in good for gap in itl(r)])
    figures |= _spread("e2e_ms", [e2e(r) for r in good])
    if steady and (window := steady_decode(good)):
        figures["steady_throughput"], figures["steady_window_s"] = window
    return figures


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles in milliseconds, linear interpolation between the closest ranks; empty for no values."""
    if not seconds:
        return {}
    values = 1e3 * np.asarray(seconds)
    figures = {f"{name}_mean": float(values.mean())}
    for p, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True):
        figures[f"{name}_p{p}"] = float(value)
    return figures


def equal_outputs(replies: Sequence[Reply], reference: Sequence[Reply]) -> float | None:
    """Share of requests that both sides answered whose output ids are identical; None if there are none.

    Where an endpoint gives no ids, the texts count.

    In a conversation of several turns a difference changes every later prompt, so later turns usually differ too.
    """
    theirs: Mapping[tuple[int, int], Reply] = {(r.conversation, r.turn): r for r in reference if r.ok}
    both = [(r, theirs[r.conversation, r.turn]) for r in replies if r.ok and (r.conversation, r.turn) in theirs]
    same = (
        a.output_ids == b.output_ids if a.output_ids and b.output_ids else a.output_text == b.output_text
        for a, b in both
    )
    return sum(same) / len(both) if both else None


def average(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean over runs (seeds) of every numeric figure; from two runs on also its spread.

    ``<name>_sd`` is the sample deviation, ``<name>_ci95`` half of the 95% interval of the mean.
    """
    summary: dict[str, Any] = {"runs": len(runs)}
    for name in dict.fromkeys(k for run in runs for k in run):
        values = [run[name] for run in runs if isinstance(run.get(name), (int, float))]
        if not values:
            continue
        summary[name] = float(np.mean(values))
        if len(values) > 1:
            summary[f"{name}_sd"] = float(np.std(values, ddof=1))
            summary[f"{name}_ci95"] = half_width(values)
    return summary
