"""What the models learn from: Python's own sources, with facts stated in them and asked for later."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, IterableDataset

from bench_rag.accuracy import recall
from bench_rag.accuracy.recall import RecallFormat

END = "<|endoftext|>"
VOCABULARY = 1024
"""Size of the embedding; the tokenizer has no more tokens than that."""


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-pair encoding over ``texts`` with one token for every byte, so that it can encode anything."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, "<|pad|>", recall.FACT, recall.ASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts as one row of token ids (int32), the end token after each."""
    end = tokenizer.token_to_id(END)
    return np.concatenate([np.array([*e.ids, end], np.int32) for e in tokenizer.encode_batch(texts)])


class Lessons(IterableDataset):
    """Endless training sequences of ``length`` + 1 tokens and as many weights: (ids int64, weights float32).

    The weight of a token says whether it can be learnt: 1 in text and in the answer to a question, 0 for what is random
    (keys, values where they are first stated, where a fact or a question begins). A third of the sequences is text
    only, a third text with facts and questions, a third nothing but facts and questions.
    """

    def __init__(self, text: np.ndarray, form: RecallFormat, length: int, seed: int) -> None:
        self.text, self.form, self.length, self.seed = text, form, length, seed

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        worker = torch.utils.data.get_worker_info()
        rng = random.Random(f"{self.seed}/{worker.id if worker else 0}")
        while True:
            yield self._sequence(rng)

    def _sequence(self, rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
        size = self.length + 1
        kind = rng.choice(("text", "facts in text", "facts"))
        if kind == "text":
            return self._window(rng, size), np.ones(size, np.float32)
        ids, weights = [], []
        count = 0
        # Facts of one sequence; a long one has more of them, further apart.
        facts = self.form.draw(rng, rng.randint(4, max(5, min(96, self.length // 80))))
        stated = 0
        while count < size:
            if kind == "facts in text":
                span = rng.randint(8, max(16, self.length // 24))
                ids.append(self._window(rng, span))
                weights.append(np.ones(span, np.float32))
                count += span
            for _ in range(rng.randint(1, 4)):
                state = stated == 0 or (stated < len(facts) and rng.random() < 0.6)
                fact = facts[stated] if state else facts[rng.randrange(stated)]
                stated += state
                part = self.form.stated(fact) if state else [*self.form.question(fact), *fact.value]
                ids.append(np.array(part, np.int32))
                weights.append(np.zeros(len(part), np.float32))
                weights[-1][-recall.VALUE_LEN :] = 0.0 if state else 1.0
                count += len(part)
        return np.concatenate(ids)[:size].astype(np.int64), np.concatenate(weights)[:size]

    def _window(self, rng: random.Random, size: int) -> np.ndarray:
        at = rng.randrange(len(self.text) - size)
        return self.text[at : at + size].astype(np.int64)


def batches(lessons: Lessons, size: int, workers: int) -> Iterator[Any]:
    """Batches (ids [size, length + 1], weights) made by ``workers`` processes ahead of time, by none in this one."""
    return iter(DataLoader(lessons, size, num_workers=workers, pin_memory=torch.cuda.is_available()))
