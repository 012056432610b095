"""Judges a server's answers: against transformers token by token, and against another server's answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.harness import reference
from tests.harness.pool import ServerPool
from tests.harness.server import Answer, Server


@dataclass(frozen=True)
class Exchange:
    """A prompt and what a server answered."""

    prompt: list[int]
    answer: Answer

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return self.prompt + self.answer.ids

    @property
    def hit(self) -> int:
        """Prompt tokens that came out of the prefix cache."""
        return self.answer.cached_tokens


FP16 = 0.15
"""Measured: float16 against float32 moves a log-probability of the deep model by up to 0.07."""
ON_OFF = 0.03
"""Measured: another order of the same float operations, the plugin's against SGLang's, moves one by up to 0.0194."""

Scenario = Callable[[Server], list[Exchange]]
"""Requests to a server, in an order that matters; returns every exchange."""

_recorded: dict[tuple[str, Scenario], list[Exchange]] = {}


def ask(server: Server, prompt: Sequence[int], max_new_tokens: int, **kwargs: object) -> Exchange:
    """One request, as an Exchange."""
    return Exchange(list(prompt), server.generate(prompt, max_new_tokens, **kwargs))


def ask_all(
    server: Server, prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int], **kwargs: object
) -> list[Exchange]:
    """Concurrent requests, in the prompts' order."""
    answers = server.generate_many(prompts, max_new_tokens, **kwargs)
    return [Exchange(list(prompt), answer) for prompt, answer in zip(prompts, answers, strict=True)]


def follow_transformers(server: Server, exchanges: Sequence[Exchange], bound: float = FP16) -> None:
    """Assert that every answer is the reference's own greedy one, with its log-probabilities within `bound`."""
    for exchange in exchanges:
        difference = distance_to_transformers(server.model, exchange, tie=bound)
        assert difference <= bound, f"{len(exchange.prompt)} prompt tokens, {exchange.hit} cached: {difference:.4f}"


def distance_to_transformers(folder: str | Path, exchange: Exchange, tie: float) -> float:
    """Largest log-probability difference of the answer's tokens, after checking that each is the greedy one.

    An answer that was asked without log-probabilities is at distance 0.0.

    Raises:
        AssertionError: a token is not the reference's first choice, and not within `tie` of it.
    """
    lead, errors = judged(folder, exchange)
    worst = int(lead.argmax())
    assert lead[worst] <= tie, (
        f"token {worst} of {len(lead)} after {len(exchange.prompt)} prompt tokens ({exchange.hit} cached): "
        f"{exchange.answer.ids[worst]} is {lead[worst]:.4f} behind the reference's choice"
    )
    return float(errors.max()) if len(errors) else 0.0


@torch.inference_mode()
def judged(folder: str | Path, exchange: Exchange) -> tuple[torch.Tensor, torch.Tensor]:
    """One forward of the float32 reference over prompt and output: each token is judged given those before it.

    Returns:
        How far the reference puts each output token behind its own first choice, and the absolute error of each
        reported log-probability; float64 [tokens].
    """
    start, ids = len(exchange.prompt), exchange.answer.ids
    assert ids, "an empty answer proves nothing"
    logits = reference._model(Path(folder))(input_ids=torch.tensor([exchange.tokens]), use_cache=False).logits[0]
    logprobs = logits[start - 1 : -1].double().log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0]
    reported = torch.tensor(exchange.answer.logprobs, dtype=torch.float64)
    return logprobs.max(-1).values - chosen, (chosen[: len(reported)] - reported).abs()


def distance(one: Answer, other: Answer) -> float:
    """Largest log-probability difference of two answers, which must have the same ids."""
    assert one.ids == other.ids
    return max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))


def same_answers(expected: Sequence[Exchange], got: Sequence[Exchange], bound: float) -> float:
    """Assert same prompts, hits and ids, and log-probabilities within `bound`; returns the largest difference."""
    largest = 0.0
    for index, (wanted, exchange) in enumerate(zip(expected, got, strict=True)):
        assert exchange.prompt == wanted.prompt, f"exchange {index}: another prompt: an earlier answer differed"
        assert exchange.hit == wanted.hit, f"exchange {index}: {exchange.hit} tokens cached, expected {wanted.hit}"
        assert exchange.answer.ids == wanted.answer.ids, f"exchange {index}"
        difference = distance(wanted.answer, exchange.answer)
        assert difference <= bound, f"exchange {index}: log-probabilities differ by {difference:.5f}"
        largest = max(largest, difference)
    return largest


def recorded(pool: ServerPool, config: str, scenario: Scenario) -> list[Exchange]:
    """What a server of `config`, starting with an empty prefix cache, answers in this scenario; run once a session."""
    key = (config, scenario)
    if key not in _recorded:
        server = pool.get(config)
        server.flush()
        _recorded[key] = scenario(server)
    return _recorded[key]
