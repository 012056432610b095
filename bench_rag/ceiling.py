"""The best hit rate a workload allows: an infinite cache that keeps every prefix and is ready at once."""

from __future__ import annotations

from collections.abc import Collection

from .workloads import Plan

# Children by first token: the tokens on the way there, and the child. A leaf has none.
_Node = dict[int, "tuple[list[int], _Node]"]


class _Tree:
    """Token sequences by prefix, one node per place where they part, so that recorded traffic of a day fits."""

    def __init__(self) -> None:
        self._root: _Node = {}

    def match(self, ids: list[int]) -> int:
        """Length of the longest stored prefix of ``ids``."""
        node, at = self._root, 0
        while at < len(ids) and ids[at] in node:
            edge, child = node[ids[at]]
            same = _common(edge, ids, at)
            at += same
            if same < len(edge):
                break
            node = child
        return at

    def insert(self, ids: list[int]) -> None:
        node, at = self._root, 0
        while at < len(ids):
            first = ids[at]
            if first not in node:
                node[first] = (ids[at:], {})
                return
            edge, child = node[first]
            same = _common(edge, ids, at)
            at += same
            if same < len(edge):
                child = {edge[same]: (edge[same:], child)}
                node[first] = (edge[:same], child)
            node = child


def _common(edge: list[int], ids: list[int], at: int) -> int:
    """How many tokens of ``edge`` equal those of ``ids`` from ``at`` on; lists compare faster than a loop."""
    equal, unequal = 0, min(len(edge), len(ids) - at) + 1
    step = unequal - 1  # try all first, then halve what is open
    while step:
        if edge[equal : equal + step] == ids[at + equal : at + equal + step]:
            equal += step
        else:
            unequal = equal + step
        step = (unequal - equal) // 2
    return equal


def ceilings(plan: Plan, primed: bool = False) -> dict[tuple[int, int], tuple[int, int]]:
    """By conversation and turn: the tokens an infinite cache would supply, and all tokens of that prompt.

    Every earlier prompt counts from the moment it is sent, every earlier answer from the moment it ends, to the token.
    A prompt's last token is always computed, and so is an answer's last token if a later turn repeats it. Answers
    stand in as tokens that nothing else equals, so the figure depends on the plan alone, not on a server. ``primed``:
    all of the plan has been served once before.
    """
    cache = _Tree()
    if primed:
        _serve(plan, cache)
    return _serve(plan, cache)


def _serve(plan: Plan, cache: _Tree) -> dict[tuple[int, int], tuple[int, int]]:
    unique = -1
    found: dict[tuple[int, int], tuple[int, int]] = {}
    history: list[list[int]] = [[] for _ in plan.conversations]
    for turn_number in range(max((len(c.turns) for c in plan.conversations), default=0)):
        for number, (past, conversation) in enumerate(zip(history, plan.conversations, strict=True)):
            if turn_number >= len(conversation.turns):
                continue
            turn = conversation.turns[turn_number]
            past += turn.new_ids
            found[number, turn_number] = min(cache.match(past), len(past) - 1), len(past)
            answer = list(range(unique, unique - turn.output_len, -1))
            unique -= turn.output_len
            cache.insert(past + answer[:-1])
            past += answer
    return found


def share(found: Collection[tuple[int, int]]) -> float:
    """Cached over all prompt tokens (0 to 1); 0 for no prompts."""
    cached, total = (sum(column) for column in zip(*found, strict=True)) if found else (0, 0)
    return cached / total if total else 0.0


def ceiling(plan: Plan) -> float:
    """Hit rate (0 to 1) that an infinite cache would reach on ``plan``; see :func:`ceilings`."""
    return share(ceilings(plan).values())
