"""The best hit rate a workload allows: an infinite cache that keeps every prefix and is ready at once."""

from __future__ import annotations

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


def ceiling(plan: Plan) -> float:
    """Cached over prompt tokens (0 to 1) that an infinite cache would reach on ``plan``.

    Every earlier prompt counts from the moment it is sent, every earlier answer from the moment it ends, to the token.
    A prompt's last token is always computed, and so is an answer's last token if a later turn repeats it. Answers
    stand in as tokens that nothing else equals, so the figure depends on the plan alone, not on a server.
    """
    cache, cached, total = _Trie(), 0, 0
    history: list[list[int]] = [[] for _ in plan.conversations]
    unique = -1
    for turn_number in range(max((len(c.turns) for c in plan.conversations), default=0)):
        for past, conversation in zip(history, plan.conversations, strict=True):
            if turn_number >= len(conversation.turns):
                continue
            turn = conversation.turns[turn_number]
            past += turn.new_ids
            cached += min(cache.match(past), len(past) - 1)
            total += len(past)
            answer = list(range(unique, unique - turn.output_len, -1))
            unique -= turn.output_len
            cache.insert(past + answer[:-1])
            past += answer
    return cached / total if total else 0.0
