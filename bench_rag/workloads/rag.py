"""Retrieval-augmented prompts over real text: BM25 finds the passages, questions repeat their topics by popularity."""

from __future__ import annotations

import functools
import random
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from .. import corpus as corpora
from ..corpus import Passage
from ..retrieve import Retriever
from ..tokenise import Tokeniser, tokeniser
from .base import Plan, Vocab, need, need_positive, need_rate, resize, single_turn_plan

ORDERS = ("retrieved", "canonical")

_SYSTEM = (
    "You answer questions from the passages below. Use only what they say, quote names exactly, "
    "and say so if the answer is not in them.\n\n"
)
_PHRASES = (
    "What do the passages say about {}?",
    "How do I use {}?",
    "Please explain {} briefly.",
    "When would I need {}?",
    "What should I know about {}?",
)
_WORD = re.compile(r"[A-Za-z_][A-Za-z_.]{3,}")
_WORDS_PER_QUESTION = 6


@dataclass(frozen=True)
class RetrievedRag:
    """``requests`` questions about ``topics`` passages of a corpus; topic i (from 1) has weight ``1 / i**zipf_alpha``.

    A question is a phrase around words of its topic's passage, drawn anew for every request; its prompt is the system
    text, the ``documents_per_prompt`` best passages by BM25 (``document_order``: as ``retrieved``, best first, or
    ``canonical``, in corpus order), and the question. ``corpus``: a folder, empty for Python's own documentation;
    ``document_len``: most tokens of a passage; ``tokenizer``: see :func:`~bench_rag.tokenise.tokeniser`.
    """

    kind: ClassVar[str] = "rag"

    requests: int = 256
    topics: int = 64
    document_len: int = 512
    documents_per_prompt: int = 3
    document_order: str = "retrieved"
    output_len: int = 48
    request_rate: float = 8.0
    concurrency: int = 48
    zipf_alpha: float = 1.0
    corpus: str = ""
    tokenizer: str = ""

    def __post_init__(self) -> None:
        need_positive(self, ("requests", "topics", "document_len", "documents_per_prompt", "output_len", "concurrency"))
        need_rate(self, self.request_rate)
        need(self.zipf_alpha >= 0, f"rag: zipf-alpha must be at least 0, got {self.zipf_alpha}")
        need(
            self.document_order in ORDERS,
            f"rag: document-order is {' or '.join(ORDERS)}, got {self.document_order!r}",
        )

    @property
    def label(self) -> str:
        return "rag"

    def plan(self, seed: int, vocab: Vocab) -> Plan:
        rng = random.Random(seed)
        words = tokeniser(self.tokenizer, vocab)
        passages, retriever = _indexed(self.corpus, words, self.document_len)
        # A topic needs words to ask about; which passages are popular is up to the seed.
        askable = [i for i, p in enumerate(passages) if len(set(_WORD.findall(p.body))) >= _WORDS_PER_QUESTION]
        need(len(askable) > 0, "rag: no passage of the corpus has enough words for a question")
        needed = self.documents_per_prompt
        need(needed <= len(passages), f"rag: {needed} documents per prompt need as many passages, got {len(passages)}")
        topics = rng.sample(askable, min(self.topics, len(askable)))
        weights = [1 / (i + 1) ** self.zipf_alpha for i in range(len(topics))]
        system = words.encode(_SYSTEM)
        prompts, spoken, used, found = [], [], set(), 0
        for topic in rng.choices(topics, weights, k=self.requests):
            question = _question(passages[topic], rng)
            best = retriever.best(question, needed)
            found += topic in best
            used.update(best)
            chosen = sorted(best) if self.document_order == "canonical" else best
            prompts.append([*system, *(t for i in chosen for t in passages[i].ids), *words.encode(question)])
            spoken.append("".join([_SYSTEM, *(passages[i].body for i in chosen), question]))
        plan = single_turn_plan(prompts, self.output_len, self.request_rate, self.concurrency, rng, spoken)
        sizes = sorted(len(p.ids) for p in passages)
        facts = {
            "corpus": Path(self.corpus).resolve().name if self.corpus else "Python's documentation strings",
            "texts": len({p.name for p in passages}),
            "passages": len(passages),
            "tokens": sum(sizes),
            "median passage tokens": sizes[len(sizes) // 2],
            "tokenizer": words.name,
            "topics": len(topics),
            "distinct passages in prompts": len(used),
            "topic's passage retrieved": f"{100 * found / self.requests:.0f}% of questions",
            "mean prompt tokens": round(sum(map(len, prompts)) / len(prompts)),
        }
        return replace(plan, facts=facts)

    def warmup(self) -> RetrievedRag:
        return replace(resize(self, requests=48, output_len=16), request_rate=float("inf"))


@functools.lru_cache(maxsize=2)
def _indexed(folder: str, words: Tokeniser, limit: int) -> tuple[list[Passage], Retriever]:
    """The passages of a corpus and their index; kept, since every run of a benchmark asks for the same."""
    found = corpora.passages(corpora.texts(folder), words.encode, limit)
    return found, Retriever([p.body for p in found])


def _question(topic: Passage, rng: random.Random) -> str:
    words = sorted(set(_WORD.findall(topic.body)))
    return rng.choice(_PHRASES).format(" ".join(rng.sample(words, _WORDS_PER_QUESTION)))
