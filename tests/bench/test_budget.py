"""The bound by budget: above every real schedule, below the infinite cache, and exact where Belady's rule is known."""

from __future__ import annotations

import itertools
import random

import pytest

from bench_rag.budget import bound, passages
from bench_rag.ceiling import ceiling
from bench_rag.workloads import Conversation, DocumentQa, MultiTurn, Plan, SharedPrefix, Turn, Vocab

ENOUGH = 10**9


def best(plan: Plan, slots: int, kv_tokens: int = ENOUGH) -> float:
    order = sorted((t, i) for i, c in enumerate(plan.conversations) for t in range(len(c.turns)))
    order = [(i, t) for t, i in order]
    found = bound(passages(plan, order), slots, kv_tokens)
    assert found is not None
    return found


def asked(sequence: str, document: int = 100, question: int = 10) -> Plan:
    """One request per letter: the letter's document and a question of its own."""
    conversations = []
    for i, letter in enumerate(sequence):
        ids = [1000 * ord(letter) + t for t in range(document)] + [10**6 + 100 * i + t for t in range(question)]
        conversations.append(Conversation([Turn(ids, 1)]))
    return Plan(conversations, 1)


@pytest.mark.parametrize(
    ("sequence", "kept", "hits"),
    [
        ("AAAA", 0, 0),  # the only slot is the running request's
        ("AAAA", 1, 3),
        ("ABABAB", 1, 2),
        ("ABABAB", 2, 4),
        ("ABCABC", 1, 1),  # one of three documents survives the other two
        ("ABCABC", 2, 2),
        ("ABCABC", 3, 3),
        ("ABCDABCDABCD", 2, 4),
        ("ABACADAEAF", 1, 4),  # what comes once is not kept
        ("ABBCAACC", 1, 3),  # Belady: B, then A or C
    ],
)
def test_documents_in_turn(sequence, kept, hits):
    plan = asked(sequence)
    assert best(plan, kept + 1) * 110 * len(sequence) == pytest.approx(100 * hits)


def test_kv_tokens_are_a_budget_too():
    plan = asked("ABCABC")
    # A request itself takes 110 tokens, the document it hits included: beside it one or two documents of 100.
    for kept, hits in ((0, 0), (1, 2), (2, 3)):
        assert best(plan, 10, 110 + 100 * kept) * 660 == pytest.approx(100 * hits, abs=1e-6)
    assert 200 < best(plan, 10, 110 + 150) * 660 < 300  # part of a document counts in part, here


def test_a_shared_prefix_takes_its_tokens_once():
    plan = SharedPrefix(groups=1, prompts_per_group=4, prefix_len=100, question_len=5, output_len=1).plan(1, Vocab())
    assert best(plan, 2, 105) == pytest.approx(ceiling(plan))  # it is the running request's own


@pytest.mark.parametrize(
    "workload",
    [
        SharedPrefix(groups=3, prompts_per_group=6, prefix_len=50, question_len=5, output_len=3),
        DocumentQa(documents=5, questions=3, document_len=40, question_len=4, output_len=3),
        MultiTurn(sessions=4, turns=3, first_len=20, question_len=5, output_len=4),
    ],
    ids=lambda w: w.kind,
)
def test_enough_of_everything_is_the_infinite_cache_and_less_is_less(workload):
    plan = workload.plan(1, Vocab())
    assert best(plan, 1000) == pytest.approx(ceiling(plan), abs=1e-9)
    by_slots = [best(plan, slots) for slots in (1, 2, 3, 5, 9)]
    by_tokens = [best(plan, 1000, tokens) for tokens in (60, 120, 200, 500)]
    for figures in (by_slots, by_tokens):
        assert figures == sorted(figures) and figures[0] < ceiling(plan) - 0.01


def exhaustive(plan: Plan, slots: int, kv_tokens: int) -> float:
    """The best schedule of a real cache: after each request it keeps any states that it had or that were just made."""
    prompts = []
    for number, conversation in enumerate(plan.conversations):
        ids = tuple(conversation.turns[0].new_ids)
        answer = tuple((number, i) for i in range(conversation.turns[0].output_len - 1))
        prompts.append((ids, ids + answer))
    caches: dict[frozenset, int] = {frozenset(): 0}
    for ids, sequence in prompts:
        after: dict[frozenset, int] = {}
        for kept, hits in caches.items():
            tokens = {state[:i] for state in kept for i in range(1, len(state) + 1)}
            tokens |= {sequence[:i] for i in range(1, len(sequence) + 1)}
            if len(kept) > slots - 1 or len(tokens) > kv_tokens:
                continue
            hit = max((len(s) for s in kept if len(s) < len(ids) and ids[: len(s)] == s), default=0)
            made = [sequence[:i] for i in range(1, len(sequence) + 1)]
            have = [*kept, *(s for s in made if s not in kept)]
            for size in range(min(slots - 1, len(have)) + 1):
                for chosen in itertools.combinations(have, size):
                    key = frozenset(chosen)
                    after[key] = max(after.get(key, 0), hits + hit)
        caches = after
    return max(caches.values()) / sum(len(ids) for ids, _ in prompts)


@pytest.mark.parametrize("seed", range(25))
def test_no_real_schedule_does_better(seed):
    rng = random.Random(seed)
    conversations = [
        Conversation([Turn([rng.choice((1, 2)) for _ in range(rng.randint(2, 4))], rng.randint(1, 2))])
        for _ in range(5)
    ]
    plan = Plan(conversations, 1)
    for slots, kv_tokens in ((2, 100), (3, 100), (3, 6), (2, 7)):
        real, limit = exhaustive(plan, slots, kv_tokens), best(plan, slots, kv_tokens)
        assert real <= limit + 1e-9 and limit <= ceiling(plan) + 1e-9


def test_the_order_of_a_run_counts_and_large_runs_have_no_bound():
    plan = asked("AABB")
    mixed = passages(plan, [(0, 0), (2, 0), (1, 0), (3, 0)])
    assert bound(mixed, 2, ENOUGH) * 440 == pytest.approx(100) and best(plan, 2) * 440 == pytest.approx(200)
    assert bound([], 4, 100) is None and bound(mixed * 2000, 4, 100) is None
