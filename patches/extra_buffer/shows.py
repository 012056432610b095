"""In-tree replay beside the default prefix cache: decode across track boundaries, then reuse what was saved there.

SGLang's own debug mode is on: it refuses to copy from a slot whose cursor says that records are pending.
"""

from __future__ import annotations

import re

from patches.outcome import conclude
from tests.harness import tiny
from tests.harness.configs import LATENT, REPLAY, TRACK_64
from tests.harness.judge import ask
from tests.harness.reference import prompt
from tests.harness.server import Server, ServerError

DEBUG = {"SGLANG_DEBUG_MEMORY_POOL": "1"}
BOUND = {"qwen3-next-deep": 0.01, "kimi-linear": 0.03}  # as tests/integration bounds hits on decoded states
# Few slots, so that they are handed from request to request within this script.
SLOTS = ("--max-mamba-cache-size", "8", "--max-running-requests", "1")


def worst_distance(model: str, *args: str) -> float:
    """Largest log-probability difference between answers from the prefix cache and without one."""
    worst = 0.0
    with Server(tiny.build(model), (*args, *REPLAY, *TRACK_64, *SLOTS), DEBUG) as server:
        for seed in (70, 80, 90):
            first = ask(server, prompt(50, seed=seed), 40)
            second = ask(server, first.tokens[:-1] + prompt(5, seed=seed + 1), 45)
            third = ask(server, second.tokens[:-1] + prompt(9, seed=seed + 2), 6)
            assert [first.hit, second.hit, third.hit] == [0, 64, 128], [first.hit, second.hit, third.hit]
            for warm in (second, third):
                server.flush()
                cold = ask(server, warm.prompt, 6)
                same = warm.answer.ids[:6] == cold.answer.ids
                pairs = zip(warm.answer.logprobs, cold.answer.logprobs, strict=False)
                worst = max(worst, max(abs(a - b) for a, b in pairs) if same else float("inf"))
            print(f"{model}: log-probabilities {worst:.4f} from cold", flush=True)
    return worst


def main() -> None:
    try:
        distances = {
            "qwen3-next-deep": worst_distance("qwen3-next-deep"),
            "kimi-linear": worst_distance("kimi-linear", *LATENT),
        }
    except ServerError as error:
        raised = re.findall(r"^\w*Error: .*$", str(error), re.M)
        conclude(False, raised[-1][:200] if raised else str(error).splitlines()[0])
    shown = ", ".join(f"{model} {value:.4f}" for model, value in distances.items())
    right = all(distances[model] <= bound for model, bound in BOUND.items())
    conclude(right, f"log-probabilities of hits on decoded states, from a run without a cache: {shown}")


if __name__ == "__main__":
    main()
