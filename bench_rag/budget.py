"""The best hit rate that a server's own pools allow: a proven upper bound, by linear programming.

Requests are taken one after another in the order in which they were sent. A clairvoyant cache may keep a state at any
token of what has passed, as long as

- the states kept while a request runs, the one that it hit included, fit into the slots beside its own, which starts as
  a copy;
- the KV tokens kept while a request runs, beside its own prompt and answer, fit into the KV pool; tokens of a shared
  prefix count once;
- a request that hits at a token finds there a state, and the KV of all tokens before it, both kept since the last
  request that passed that token.

Among all such schedules the best is a choice, for every request, of one place to hit: a packing of weighted intervals
(Belady's rule, with two resources of different sizes). Its linear relaxation is solved here exactly; fractions of
states and of tokens can only do better, so the figure is an upper bound. It is generous where a server is not: requests
do not overlap, states cost nothing to make and stand at every token, and a state that was dropped is there again when a
request passes, even if that request hit further on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from .workloads import Plan

MOST_REQUESTS = 5000  # beyond it the program takes minutes


@dataclass(frozen=True)
class Passage:
    """One request as a cache sees it.

    ``path``: the nodes of the tree of all sequences that its prompt passes, from the root: (node, depth in tokens at
    which the prompt may be hit there, depth at which the node begins). ``nodes``: every node it leaves behind, its
    answer's included. ``tokens``: of prompt and answer. ``prompt``: of the prompt.
    """

    path: tuple[tuple[int, int, int], ...]
    nodes: tuple[int, ...]
    tokens: int
    prompt: int


@dataclass
class _Node:
    """Tokens on the way here, children by their first token, and a number of its own."""

    edge: Sequence[int]
    children: dict[int, _Node] = field(default_factory=dict)
    number: int = 0


def passages(plan: Plan, order: Sequence[tuple[int, int]]) -> list[Passage]:
    """The requests (conversation, turn) of ``plan`` in ``order``; answers are tokens that nothing else equals."""
    prompts = _prompts(plan)
    root = _Node(())
    for key in order:
        prompt, answer = prompts[key]
        _insert(root, [*prompt, *answer])
    _number(root)
    found = []
    for key in order:
        prompt, answer = prompts[key]
        path, nodes, depth = [], [], 0
        for node in _walk(root, [*prompt, *answer]):
            begins, depth = depth, depth + len(node.edge)
            nodes.append(node.number)
            # a prompt's last token is always computed
            if begins < len(prompt) - 1:
                path.append((node.number, min(depth, len(prompt) - 1), begins))
        found.append(Passage(tuple(path), tuple(nodes), len(prompt) + len(answer), len(prompt)))
    return found


def _prompts(plan: Plan) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """Prompt and answer of every request; an answer's last token is computed only if a later turn repeats it."""
    found, unique = {}, -1
    for number, conversation in enumerate(plan.conversations):
        history: list[int] = []
        for turn_number, turn in enumerate(conversation.turns):
            prompt = [*history, *turn.new_ids]
            answer = list(range(unique, unique - turn.output_len, -1))
            unique -= turn.output_len
            found[number, turn_number] = prompt, answer[:-1]
            history = prompt + answer
    return found


def _insert(root: _Node, ids: list[int]) -> None:
    node, at = root, 0
    while at < len(ids):
        child = node.children.get(ids[at])
        if child is None:
            node.children[ids[at]] = _Node(ids[at:])
            return
        same = 1
        most = min(len(child.edge), len(ids) - at)
        while same < most and child.edge[same] == ids[at + same]:
            same += 1
        if same < len(child.edge):
            lower = _Node(child.edge[same:], child.children)
            child.edge, child.children = child.edge[:same], {lower.edge[0]: lower}
        node, at = child, at + same


def _number(root: _Node) -> None:
    left, count = [root], 0
    while left:
        node = left.pop()
        node.number, count = count, count + 1
        left += node.children.values()


def _walk(root: _Node, ids: list[int]) -> list[_Node]:
    """The nodes that an inserted sequence passes, without the root."""
    node, at, passed = root, 0, []
    while at < len(ids):
        node = node.children[ids[at]]
        at += len(node.edge)
        passed.append(node)
    return passed


def bound(found: Sequence[Passage], slots: int, kv_tokens: int, counted: Collection[int] | None = None) -> float | None:
    """Upper bound of the hit rate (0 to 1) with ``slots`` states and ``kv_tokens`` of KV; see the module.

    ``counted``: the places in ``found`` of the requests whose hits count, None for all. None for no requests, for more
    than :data:`MOST_REQUESTS`, or where the solver gives up.
    """
    from scipy import sparse
    from scipy.optimize import linprog

    if not 0 < len(found) <= MOST_REQUESTS:
        return None
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    right: list[float] = []

    def add(entries: list[tuple[int, float]], most: float) -> None:
        """A row: the sum of value times variable is at most ``most``."""
        rows.extend([len(right)] * len(entries))
        columns.extend(column for column, _ in entries)
        values.extend(value for _, value in entries)
        right.append(most)

    gains: list[float] = []  # of every variable
    states: list[tuple[int, int, int]] = []  # kept from one request to another: variable, both
    tokens: list[tuple[int, int, int, float]] = []  # likewise for a stretch of tokens, and its length
    last: dict[int, int] = {}
    for now, passage in enumerate(found):
        known = [(node, depth, begins) for node, depth, begins in passage.path if node in last]
        held = range(len(gains), len(gains) + len(known))
        gains += [0.0] * len(known)
        tokens += [(v, last[n], now, float(d - b)) for v, (n, d, b) in zip(held, known, strict=True)]
        choices: list[tuple[int, int]] = []  # variable, and how many of the known nodes it needs
        for i, (node, depth, _) in enumerate(known):
            # Of nodes passed last by one request the deepest is the best, at no higher cost in slots.
            if i + 1 < len(known) and last[known[i + 1][0]] == last[node]:
                continue
            choices.append((len(gains), i + 1))
            states.append((len(gains), last[node], now))
            gains.append(float(depth) if counted is None or now in counted else 0.0)
        if choices:
            add([(v, 1.0) for v, _ in choices], 1.0)
        for i, variable in enumerate(held):
            add([(variable, -1.0), *((v, 1.0) for v, needs in choices if needs > i)], 0.0)
        for node in passage.nodes:
            last[node] = now
    if not states:
        return 0.0

    # What is kept while a request runs, by differences: a variable per request and resource.
    count = len(found)
    kept_states, kept_tokens = len(gains), len(gains) + count
    changes: list[list[tuple[int, float]]] = [[] for _ in range(2 * count)]
    for variable, since, until in states:
        _span(changes, 0, variable, since, until + 1, 1.0)  # up to and with the request that hits it
    for variable, since, until, size in tokens:
        _span(changes, count, variable, since, until, size)
    total = len(gains) + 2 * count
    equal_rows, equal_columns, equal_values = [], [], []
    for row in range(2 * count):
        first = kept_states if row < count else kept_tokens
        now = row % count
        entries = [(first + now, 1.0), *((first + now - 1, -1.0) for _ in range(now > 0)), *changes[row]]
        equal_rows += [row] * len(entries)
        equal_columns += [column for column, _ in entries]
        equal_values += [value for _, value in entries]
    limits = [(0.0, 1.0)] * len(gains)
    limits += [(0.0, float(max(0, slots - 1)))] * count
    limits += [(0.0, float(max(0, kv_tokens - p.tokens))) for p in found]
    solved = linprog(
        -np.array([*gains, *([0.0] * 2 * count)]),
        A_ub=sparse.csr_matrix((values, (rows, columns)), (len(right), total)),
        b_ub=right,
        A_eq=sparse.csr_matrix((equal_values, (equal_rows, equal_columns)), (2 * count, total)),
        b_eq=np.zeros(2 * count),
        bounds=limits,
        method="highs",
    )
    if solved.status != 0:
        return None
    prompts = sum(p.prompt for i, p in enumerate(found) if counted is None or i in counted)
    return min(1.0, float(-solved.fun) / prompts) if prompts else None


def _span(
    changes: list[list[tuple[int, float]]], first: int, variable: int, since: int, until: int, size: float
) -> None:
    """Count ``variable`` as kept while the requests strictly between ``since`` and ``until`` run."""
    if until > since + 1:
        changes[first + since + 1].append((variable, -size))
        if first + until < first + len(changes) // 2:
            changes[first + until].append((variable, size))
