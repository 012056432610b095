"""The best hit rate a workload allows: an infinite cache that keeps every prefix and is ready at once."""

from __future__ import annotations

from collections.abc import Iterable

from .workloads import Plan


class _Trie:
    """Token sequences by prefix; node 0 is the root. One dictionary, so a million tokens stay cheap."""

    def __init__(self) -> None:
        self._child: dict[tuple[int, int], int] = {}

    def match(self, ids: list[int]) -> int:
        """Length of the longest stored prefix of ``ids``."""
        node = 0
        for depth, token in enumerate(ids):
            child = self._child.get((node, token))
            if child is None:
                return depth
            node = child
        return len(ids)

    def insert(self, ids: list[int]) -> None:
        node = 0
        for token in ids:
            node = self._child.setdefault((node, token), len(self._child) + 1)


def ceilings(plan: Plan) -> dict[tuple[int, int], tuple[int, int]]:
    """By conversation and turn: the tokens an infinite cache would supply, and all tokens of that prompt.

    Every earlier prompt counts from the moment it is sent, every earlier answer from the moment it ends, to the token.
    A prompt's last token is always computed, and so is an answer's last token if a later turn repeats it. Answers
    stand in as tokens that nothing else equals, so the figure depends on the plan alone, not on a server.
    """
    cache, unique = _Trie(), -1
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


def share(found: Iterable[tuple[int, int]]) -> float:
    """Cached over all prompt tokens (0 to 1); 0 for no prompts."""
    cached, total = (sum(column) for column in zip(*found, strict=True)) if found else (0, 0)
    return cached / total if total else 0.0


def ceiling(plan: Plan) -> float:
    """Hit rate (0 to 1) that an infinite cache would reach on ``plan``; see :func:`ceilings`."""
    return share(ceilings(plan).values())
