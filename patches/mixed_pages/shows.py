"""A prompt prefilled in mixed steps, with pages of 64 tokens: its next turn out of the cache and without a cache."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from patches.outcome import conclude
from tests.harness import tiny
from tests.harness.configs import LATENT, MIXED
from tests.harness.judge import ask, distance
from tests.harness.reference import prompt
from tests.harness.server import Server

# Plain SGLang's chunks move log-probabilities of these models by up to 0.0122 (tests/integration/test_kda.py).
BOUND = 0.03


def main() -> None:
    with Server(tiny.build("kimi-linear"), (*LATENT, *MIXED)) as server, ThreadPoolExecutor(1) as pool:
        # SGLang mixes only batches in which nobody asks for log-probabilities.
        decoding = pool.submit(ask, server, prompt(50, seed=381), 30, logprobs=False)
        time.sleep(2)  # it decodes by then: a chunk of the prompt has 127 tokens, and the next one starts there
        first = ask(server, prompt(280, seed=380), 3, logprobs=False)
        decoding.result()
        question = first.tokens + prompt(5, seed=7)
        warm = ask(server, question, 6)
        server.flush()
        cold = ask(server, question, 6)
    assert warm.hit > 0, "the next turn was to start from a state"
    one, other = warm.answer, cold.answer
    seen = f"log-probabilities up to {distance(one, other):.4f}" if one.ids == other.ids else "another answer"
    right = one.ids == other.ids and distance(one, other) <= BOUND
    conclude(right, f"{seen} after a hit of {warm.hit} tokens, compared with a run without a cache, bound {BOUND}")


if __name__ == "__main__":
    main()
