"""Retrieval over real text: the corpus, BM25 against its formula, and what stands in the prompts."""

from __future__ import annotations

import math
import os
import random
import re
from collections import Counter

import pytest

from bench_rag.corpus import Text, passages, texts
from bench_rag.errors import BenchError
from bench_rag.retrieve import Retriever
from bench_rag.tokenise import tokeniser
from bench_rag.workloads import RetrievedRag, Vocab
from bench_rag.workloads import rag as rag_module

VOCAB = Vocab(100, 500)
NAMES = [
    "alder",
    "birch",
    "cedar",
    "dogwood",
    "elder",
    "hazel",
    "juniper",
    "larch",
    "maple",
    "poplar",
    "rowan",
    "spruce",
    "walnut",
    "willow",
]


@pytest.fixture
def folder(tmp_path):
    """Twelve files of one paragraph, each about words of its own and some that all share."""
    for i in range(12):
        own = " ".join(f"{NAMES[i]}{part}" for part in ("bark", "leaf", "root", "seed", "twig", "wood"))
        shared = " ".join(NAMES[(i + k) % len(NAMES)] for k in range(3))
        (tmp_path / f"tree{i:02}.md").write_text(f"{own} {shared} grows slowly\n")
    return tmp_path


def decoded(ids) -> str:
    return bytes(i - VOCAB.low for i in ids).decode()


def prompts(workload: RetrievedRag, seed: int = 1) -> list[str]:
    return [decoded(c.turns[0].new_ids) for c in workload.plan(seed, VOCAB).conversations]


def small(folder, **sizes) -> RetrievedRag:
    return RetrievedRag(**{"requests": 40, "topics": 5, "corpus": str(folder), "document_len": 200, **sizes})


def test_bm25_ranks_by_its_formula():
    """Against Lucene's formula with k1 = 1.5 and b = 0.75, spelled out."""
    rng = random.Random(4)
    documents = [[rng.choice(NAMES) for _ in range(rng.randint(3, 30))] for _ in range(25)]
    retriever = Retriever([" ".join(d) for d in documents])
    mean = sum(map(len, documents)) / len(documents)
    for _ in range(40):
        question = rng.sample(NAMES, 3)
        scores = []
        for d in documents:
            score = 0.0
            for word in question:
                holding = sum(word in other for other in documents)
                idf = math.log(1 + (len(documents) - holding + 0.5) / (holding + 0.5))
                n = d.count(word)
                score += idf * n / (n + 1.5 * (1 - 0.75 + 0.75 * len(d) / mean))
            scores.append(score)
        best = retriever.best(" ".join(question), 6)
        assert len(set(best)) == 6
        # float32 inside the library: near ties may swap, a difference of 1e-5 may not.
        assert [scores[i] for i in best] == pytest.approx(sorted(scores, reverse=True)[:6], abs=1e-5)


def test_a_question_without_a_known_word_still_gets_passages():
    assert Retriever(["one apple", "two pears", "three plums"]).best("zebra", 2) == [0, 1]


def test_texts_of_a_folder(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "x.TXT").write_bytes(b"caf\xe9")
    (tmp_path / "a.md").write_text("hello")
    (tmp_path / "empty.md").write_text(" \n")
    (tmp_path / "code.py").write_text("x = 1")
    (tmp_path / ".git" / "note.md").write_text("hidden")
    assert texts(str(tmp_path)) == (Text("a.md", "hello"), Text("b/x.TXT", "caf\ufffd"))


def test_passages_keep_every_word_and_the_limit():
    rng = random.Random(1)
    body = "\n\n".join(" ".join(rng.choice(NAMES) for _ in range(rng.randint(1, 60))) for _ in range(30))
    encode = tokeniser("", VOCAB).encode
    cut = passages((Text("a", body), Text("b", "short")), encode, 120)
    assert " ".join(" ".join(p.body for p in cut if p.name == "a").split()) == " ".join(body.split())
    assert max(len(p.ids) for p in cut) <= 120 and all(decoded(p.ids) == p.body for p in cut)
    # Paragraphs are packed: no two neighbours of one text would fit into one passage.
    joined = [len(a.ids) + len(b.ids) for a, b in zip(cut, cut[1:], strict=False) if a.name == b.name]
    assert sum(j <= 120 for j in joined) <= 0.2 * len(joined)  # a cut paragraph may leave a short end
    assert [p.body for p in passages((Text("a", "x" * 500 + " tail"),), encode, 50)] == ["tail "]


def test_pythons_own_documentation_is_the_default():
    found = {t.name: t.body for t in texts("")}
    assert len(found) > 200 and texts("") is texts("")
    assert "textwrap.dedent\nRemove any common leading whitespace" in found["textwrap"]
    assert not any("test" in name.split(".") or "site-packages" in name for name in found)


def test_prompts_hold_the_best_passages_and_the_question(folder):
    workload = small(folder, documents_per_prompt=3)
    every = [t.body.strip() for t in texts(str(folder))]
    retriever = Retriever(every)
    for prompt in prompts(workload):
        assert prompt.startswith(rag_module._SYSTEM)
        *chosen, question = prompt.removeprefix(rag_module._SYSTEM).split("\n\n")
        assert chosen == [every[i] for i in retriever.best(question, 3)]
        topic = set(re.findall(r"[a-z]{4,}", question)) & {w for t in every for w in t.split()}
        assert any(topic <= set(text.split()) for text in every)  # a question is about one passage


def test_canonical_order_is_corpus_order_of_the_same_passages(folder):
    every = [t.body.strip() for t in texts(str(folder))]

    def chosen(order: str) -> list[list[int]]:
        parts = [
            p.removeprefix(rag_module._SYSTEM).split("\n\n")[:-1] for p in prompts(small(folder, document_order=order))
        ]
        return [[every.index(text) for text in prompt] for prompt in parts]

    retrieved, canonical = chosen("retrieved"), chosen("canonical")
    assert canonical == [sorted(c) for c in retrieved] and canonical != retrieved


def test_popular_topics_come_by_zipf(folder):
    # With 2 topics and exponent 2, four fifths of the questions are about the first: 800 of 1000, deviation 12.6.
    workload = small(folder, requests=1000, topics=2, zipf_alpha=2.0, documents_per_prompt=1)
    groups = Counter(prompt.split("\n\n")[1] for prompt in prompts(workload, seed=2))
    assert len(groups) == 2 and max(groups.values()) == pytest.approx(800, abs=5 * 12.6)


def test_plan_is_a_function_of_the_seed_and_tells_its_corpus(folder):
    workload = small(folder)
    assert workload.plan(1, VOCAB) == workload.plan(1, VOCAB) != workload.plan(2, VOCAB)
    facts = workload.plan(1, VOCAB).facts
    assert facts["corpus"] == folder.name and os.sep not in facts["corpus"]
    assert (facts["texts"], facts["passages"], facts["topics"], facts["tokenizer"]) == (12, 12, 5, "bytes")
    assert facts["tokens"] == sum(len(t.body) + 2 for t in texts(str(folder)))
    assert facts["topic's passage retrieved"] == "100% of questions"  # words of its own find it
    assert workload.warmup().plan(1, VOCAB).requests == 40


def test_a_models_tokenizer_is_used(tmp_path, folder):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"[UNK]": 7, "grows": 8, "slowly": 9}, unk_token="[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "mymodel").mkdir()
    made.save(str(tmp_path / "mymodel" / "tokenizer.json"))
    words = tokeniser(str(tmp_path / "mymodel"), VOCAB)
    assert words.name == "mymodel" and words.encode("it grows slowly") == [7, 8, 9]
    plan = small(folder, tokenizer=str(tmp_path / "mymodel")).plan(1, VOCAB)
    assert {t for c in plan.conversations for t in c.turns[0].new_ids} == {7, 8, 9}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (dict(corpus="/nowhere"), "the corpus /nowhere is not a folder"),
        (dict(documents_per_prompt=13), "13 documents per prompt need as many passages, got 12"),
        (dict(document_order="random"), "document-order is retrieved or canonical, got 'random'"),
        (dict(tokenizer="/nowhere"), "cannot read the tokenizer /nowhere"),
        (dict(topics=0), "topics must be at least 1"),
        (dict(zipf_alpha=-1), "zipf-alpha must be at least 0"),
    ],
)
def test_what_does_not_fit_says_so(folder, change, sentence):
    with pytest.raises(BenchError, match=re.escape(sentence)):
        small(folder, **change).plan(1, VOCAB)


def test_a_folder_without_text_says_so(tmp_path):
    (tmp_path / "a.py").write_text("x")
    with pytest.raises(BenchError, match="has no text in files named"):
        texts(str(tmp_path))


def test_bytes_need_room_in_the_vocabulary():
    with pytest.raises(BenchError, match="text as bytes needs 256 token ids, and 10:200 holds fewer"):
        tokeniser("", Vocab(10, 200))
