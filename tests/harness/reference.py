"""The independent oracle: Hugging Face transformers' own implementation of the tiny models, in float32.

Where transformers has none (Kimi Delta Attention), a plain PyTorch one of ours stands in: tests/harness/kimi.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.harness import kimi, tiny


@dataclass(frozen=True)
class Reference:
    """Greedy continuation: token ids, the log-probability of each, and its lead over the runner-up."""

    ids: list[int]
    logprobs: list[float]
    margins: list[float]


@functools.lru_cache(maxsize=2)
def _model(folder: Path) -> Any:
    if folder.name in tiny.KIMI:
        return kimi.Reference(folder)
    from transformers import AutoConfig

    parsed = AutoConfig.from_pretrained(folder)
    return tiny.auto_class(parsed).from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def greedy(folder: Path | str, input_ids: Sequence[int], max_new_tokens: int) -> Reference:
    """Greedy decoding past end-of-sequence tokens, one full forward per token: no cache of any kind."""
    model = _model(Path(folder))
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


@dataclass(frozen=True)
class Followed:
    """How the reference sees a given continuation, token by token.

    logprobs: its own log-probability of each token. gaps: how far below its favourite each token lies; all
    zero means that the continuation is exactly the reference's greedy one, by induction over the tokens.
    """

    logprobs: list[float]
    gaps: list[float]


@torch.inference_mode()
def follow(folder: Path | str, input_ids: Sequence[int], output_ids: Sequence[int]) -> Followed:
    """Judge a continuation with one forward over prompt and continuation."""
    tokens = torch.tensor([*input_ids, *output_ids])
    logprobs = _model(Path(folder))(input_ids=tokens[None, :-1], use_cache=False).logits[0].double().log_softmax(-1)
    steps = logprobs[len(input_ids) - 1 :]
    chosen = steps.gather(1, tokens[len(input_ids) :, None])[:, 0]
    return Followed(chosen.tolist(), (steps.max(-1).values - chosen).tolist())


# How far a float16 server strays from the float32 reference: log-probabilities by 0.0032 in the median and 0.075 at
# worst, measured over 36 generations of 24 tokens from prompts of 1 to 300 tokens on all three tiny models; greedy
# choices between candidates up to 0.02 apart fall either way.
MEDIAN_NOISE, WORST_NOISE, TIE = 0.006, 0.2, 0.04


def assert_greedy(
    folder: Path | str, input_ids: Sequence[int], output_ids: Sequence[int], logprobs: Sequence[float]
) -> None:
    """The answer of a float16 server is the reference's greedy one; ties within rounding may fall either way."""
    seen = follow(folder, input_ids, output_ids)
    noise = sorted(abs(a - b) for a, b in zip(logprobs, seen.logprobs, strict=True))
    assert noise[len(noise) // 2] < MEDIAN_NOISE
    assert noise[-1] < WORST_NOISE
    ties = [gap for gap in seen.gaps if gap > 0]
    assert max(ties, default=0.0) < TIE
    assert len(ties) <= 2


def prompt(length: int, seed: int = 0) -> list[int]:
    """A reproducible prompt of byte tokens (ids 2 to 257) without periods.

    One seed at two lengths gives a prefix; two seeds share none beyond chance.
    """
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(2, 258, (length,), generator=generator).tolist()
