"""Workloads: exact sizes, one plan per seed, arrivals of the asked rate, and the ceiling by brute force."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path

import pytest

from bench_rag.ceiling import ceiling, ceilings
from bench_rag.errors import BenchError
from bench_rag.workloads import (
    WORKLOADS,
    AgentLoop,
    Burst,
    Conversation,
    DocumentQa,
    MultiTurn,
    Plan,
    SharedPrefix,
    Turn,
    Vocab,
    ZipfRag,
    describe,
)

VOCAB = Vocab(10, 200)
SMALL = [
    SharedPrefix(groups=3, prompts_per_group=4, prefix_len=20, question_len=5, output_len=6, concurrency=2),
    ZipfRag(requests=12, documents=6, document_len=7, documents_per_prompt=2, prefix_len=4, question_len=3),
    MultiTurn(sessions=3, turns=3, first_len=9, question_len=4, output_len=5, concurrency=2),
    Burst(batch=5, prompt_len=6, output_len=7),
    AgentLoop(sessions=3, steps=3, prefix_len=11, question_len=4, tool_len=6, output_len=5),
    DocumentQa(documents=4, questions=3, document_len=20, question_len=4, output_len=3),
]


@pytest.mark.parametrize("workload", SMALL, ids=lambda w: w.kind)
def test_plan_is_a_function_of_the_seed(workload):
    assert workload.plan(1, VOCAB) == workload.plan(1, VOCAB)
    assert workload.plan(1, VOCAB) != workload.plan(2, VOCAB)
    ids = [t for c in workload.plan(1, VOCAB).conversations for turn in c.turns for t in turn.new_ids]
    assert VOCAB.low <= min(ids) and max(ids) < VOCAB.high


def test_shared_prefix_has_the_sizes_of_the_public_report_by_default():
    plan = SharedPrefix().plan(1, Vocab())
    prompts = [c.turns[0].new_ids for c in plan.conversations]
    assert (plan.requests, plan.concurrency) == (256, 48)
    assert {len(p) for p in prompts} == {2048 + 64} and {c.turns[0].output_len for c in plan.conversations} == {64}
    assert sorted(Counter(tuple(p[:2048]) for p in prompts).values()) == [32] * 8
    assert len({tuple(p[2048:]) for p in prompts}) == 256
    # 2048 of 2112 tokens are shared, by 31 of 32 prompts; the first to come computes them.
    assert ceiling(plan) == pytest.approx(2048 / 2112 * 31 / 32, abs=1e-4)


def test_groups_are_shuffled_together():
    prompts = [c.turns[0].new_ids for c in SharedPrefix().plan(1, Vocab()).conversations]
    groups = [tuple(p[:2048]) for p in prompts]
    changes = sum(a != b for a, b in zip(groups, groups[1:], strict=False))
    assert changes > 128  # 7 if they came one group after another; 223 expected of a shuffle


def test_zipf_puts_distinct_documents_in_corpus_order_by_popularity():
    workload = ZipfRag(requests=400, documents=8, document_len=3, documents_per_prompt=2, prefix_len=2, question_len=1)
    prompts = [c.turns[0].new_ids for c in workload.plan(3, Vocab()).conversations]
    assert {len(p) for p in prompts} == {2 + 2 * 3 + 1} and len({tuple(p[:2]) for p in prompts}) == 1
    pairs = [(tuple(p[2:5]), tuple(p[5:8])) for p in prompts]
    seen = Counter(d for pair in pairs for d in pair)
    assert all(a != b for a, b in pairs)
    assert len(seen) == 8
    # Corpus order: no document stands on both sides of another.
    assert not {(a, b) for a, b in pairs} & {(b, a) for a, b in pairs}
    # With weights 1/i the most popular of 8 is in well over half of all prompts, the least in about a tenth.
    counts = [n for _, n in seen.most_common()]
    assert counts[0] > 0.55 * 400 and counts[-1] < 0.2 * 400


def test_multi_turn_plans_only_what_is_new():
    plan = SMALL[2].plan(1, VOCAB)
    assert [[len(t.new_ids) for t in c.turns] for c in plan.conversations] == [[9, 4, 4]] * 3
    # Turn prompts are 9, 9+5+4 and 18+5+4 tokens; all but the new ones and the last answer token can be cached.
    assert ceiling(plan) == pytest.approx((9 + 4 + 18 + 4) / (9 + 18 + 27))


def test_agents_share_their_tools_and_append_outputs():
    workload = AgentLoop(sessions=40, steps=4, prefix_len=30, question_len=5, tool_len=10, output_len=6)
    conversations = workload.plan(3, Vocab()).conversations
    assert len({tuple(c.turns[0].new_ids[:30]) for c in conversations}) == 1
    assert {len(c.turns[0].new_ids) for c in conversations} == {35} and {len(c.turns) for c in conversations} == {4}
    tools = [len(t.new_ids) for c in conversations for t in c.turns[1:]]
    assert min(tools) == 5 and max(tools) == 15 and len(set(tools)) == 11
    pauses = [t.pause for c in conversations for t in c.turns[1:]]
    # 120 exponential pauses of mean 0.2 s; nobody waits before the first turn.
    assert sum(pauses) / 120 == pytest.approx(0.2, rel=5 / 120**0.5) and {c.turns[0].pause for c in conversations} == {
        0
    }


def test_agents_ceiling_by_hand():
    # Tool outputs of 2 tokens would vary from 1 to 3; of 1 token they are 1. First turns: 8 + 2, later + 3 + 1 each.
    plan = AgentLoop(sessions=5, steps=3, prefix_len=8, question_len=2, tool_len=1, output_len=3).plan(1, Vocab())
    # The first agent computes the tools. A later turn computes its tool output and the last token of the answer before.
    cached = 4 * 8 + 5 * (14 - 2) + 5 * (18 - 2)
    assert ceiling(plan) == pytest.approx(cached / (5 * (10 + 14 + 18)))


def test_documents_are_asked_again_among_others():
    workload = DocumentQa(documents=12, questions=3, document_len=40, question_len=5, question_gap=6.0, request_rate=1)
    conversations = workload.plan(2, Vocab()).conversations
    documents = [tuple(c.turns[0].new_ids[:40]) for c in conversations]
    assert sorted(Counter(documents).values()) == [3] * 12 and {len(c.turns[0].new_ids) for c in conversations} == {45}
    times = [c.arrival for c in conversations]
    assert times == sorted(times) and times[0] == 0
    # Whoever comes first computes the document; questions share nothing.
    assert ceiling(workload.plan(2, Vocab())) == pytest.approx(40 / 45 * 2 / 3, abs=1e-3)
    returns = sum(a == b for a, b in zip(documents, documents[1:], strict=False))
    assert returns < 12  # 24 if nothing came in between
    gaps = [
        b - a
        for d in set(documents)
        for a, b in _neighbours([t for x, t in zip(documents, times, strict=True) if x == d])
    ]
    assert sum(gaps) / 24 == pytest.approx(6.0, rel=5 / 24**0.5)


def _neighbours(values: list[float]) -> list[tuple[float, float]]:
    return list(zip(values, values[1:], strict=False))


def test_arrivals_are_poisson():
    plan = SharedPrefix(groups=50, prompts_per_group=80, prefix_len=1, question_len=1, request_rate=8.0).plan(5, VOCAB)
    times = [c.arrival for c in plan.conversations]
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert times[0] == 0 and min(gaps) >= 0
    # 3,999 exponential gaps of mean 1/8 s: mean and standard deviation within 5 of their standard errors.
    mean = sum(gaps) / len(gaps)
    deviation = (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.125, rel=5 / 3999**0.5)
    assert deviation == pytest.approx(0.125, rel=5 * 2**0.5 / 3999**0.5)
    assert {c.arrival for c in Burst(batch=5).plan(1, VOCAB).conversations} == {0.0}


def brute_force_ceiling(plan: Plan) -> float:
    """The definition, spelled out: compare each prompt with every earlier prompt and answer, token by token."""
    kept: list[list[tuple]] = []
    history: dict[int, list[tuple]] = {i: [] for i in range(len(plan.conversations))}
    cached = total = 0
    for turn_number in range(max(len(c.turns) for c in plan.conversations)):
        for i, conversation in enumerate(plan.conversations):
            if turn_number >= len(conversation.turns):
                continue
            turn = conversation.turns[turn_number]
            prompt = history[i] + [("token", t) for t in turn.new_ids]
            best = 0
            for other in kept:
                n = 0
                while n < min(len(prompt), len(other)) and prompt[n] == other[n]:
                    n += 1
                best = max(best, n)
            cached += min(best, len(prompt) - 1)
            total += len(prompt)
            answer = [("answer", i, turn_number, k) for k in range(turn.output_len)]
            kept.append(prompt + answer[:-1])
            history[i] = prompt + answer
    return cached / total


@pytest.mark.parametrize("seed", range(30))
def test_ceiling_equals_brute_force(seed):
    rng = random.Random(seed)
    # Two token values make prompts share prefixes of every length, whole prompts included.
    conversations = [
        Conversation(
            [
                Turn([rng.choice((1, 2)) for _ in range(rng.randint(1, 6))], rng.randint(1, 3))
                for _ in range(rng.randint(1, 3))
            ]
        )
        for _ in range(rng.randint(1, 8))
    ]
    plan = Plan(conversations, 1)
    assert ceiling(plan) == pytest.approx(brute_force_ceiling(plan), abs=1e-12)


@pytest.mark.parametrize("workload", SMALL, ids=lambda w: w.kind)
def test_a_primed_cache_has_everything_but_last_tokens(workload):
    found = ceilings(workload.plan(1, VOCAB), primed=True)
    turns = [(key, tokens) for key, tokens in found.items() if key[1] == 0]
    assert turns and all(cached == total - 1 for _, (cached, total) in turns)


@pytest.mark.parametrize("workload", SMALL, ids=lambda w: w.kind)
def test_warmup_is_never_larger(workload):
    assert workload.warmup().plan(1, VOCAB).requests <= workload.plan(1, VOCAB).requests
    assert {c.arrival for c in workload.warmup().plan(1, VOCAB).conversations} == {0.0}
    big = type(workload)().warmup()
    assert big.plan(1, VOCAB).requests < type(workload)().plan(1, VOCAB).requests or workload.kind == "burst"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: SharedPrefix(request_rate=0), "request-rate must be above 0"),
        (lambda: SharedPrefix(groups=0), "groups must be at least 1"),
        (lambda: ZipfRag(documents=2, documents_per_prompt=3), "need a corpus of at least as many"),
        (lambda: Burst(batch=-1), "batch must be at least 1"),
        (lambda: Vocab(5, 5), "low < high"),
        (lambda: AgentLoop(tool_seconds=-1), "tool-seconds must be at least 0"),
        (lambda: DocumentQa(question_gap=-1), "question-gap must be at least 0"),
        (lambda: DocumentQa(request_rate=0), "request-rate must be above 0"),
    ],
)
def test_bad_sizes_say_so(make, sentence):
    with pytest.raises(BenchError, match=sentence):
        make()


def test_every_workload_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "bench_rag.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", text, re.M) == list(WORKLOADS)


def test_description_survives_json():
    assert describe(SharedPrefix(request_rate=float("inf")))["request_rate"] == "inf"
