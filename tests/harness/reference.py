"""The independent oracle: Hugging Face transformers' own implementation of the tiny models, in float32."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.harness import tiny


@dataclass(frozen=True)
class Reference:
    """Greedy continuation: token ids, the log-probability of each, and its lead over the runner-up."""

    ids: list[int]
    logprobs: list[float]
    margins: list[float]


@functools.lru_cache(maxsize=2)
def _model(folder: Path) -> Any:
    from transformers import AutoConfig

    parsed = AutoConfig.from_pretrained(folder)
    return tiny.auto_class(parsed).from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def greedy(folder: Path, input_ids: Sequence[int], max_new_tokens: int) -> Reference:
    """Greedy decoding past end-of-sequence tokens, one full forward per token: no cache of any kind."""
    model = _model(folder)
    tokens = list(input_ids)
    result = Reference([], [], [])
    for _ in range(max_new_tokens):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].double()
        best = logits.log_softmax(-1).topk(2)
        token = int(best.indices[0])
        tokens.append(token)
        result.ids.append(token)
        result.logprobs.append(float(best.values[0]))
        result.margins.append(float(best.values[0] - best.values[1]))
    return result


@torch.inference_mode()
def score(folder: Path, input_ids: Sequence[int], output_ids: Sequence[int]) -> list[float]:
    """Log-probability of each token of a given continuation, from one forward over all of it."""
    model = _model(folder)
    tokens = [*input_ids, *output_ids]
    logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].double().log_softmax(-1)
    start = len(input_ids)
    return [float(logits[start + i - 1, token]) for i, token in enumerate(output_ids)]


def prompt(length: int, seed: int = 0) -> list[int]:
    """A reproducible prompt of byte tokens (ids 2 to 257) without periods.

    One seed at two lengths gives a prefix; two seeds share none beyond chance.
    """
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(2, 258, (length,), generator=generator).tolist()
