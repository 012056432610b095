"""Turn after turn under no_buffer: an answer from the prefix cache against the same one without a cache."""

from __future__ import annotations

from patches.outcome import conclude
from tests.harness import tiny
from tests.harness.configs import NO_BUFFER, REPLAY
from tests.harness.judge import ask, distance
from tests.harness.reference import prompt
from tests.harness.server import Server

# (prompt tokens, output tokens, seed), as in tests/integration/test_no_buffer.py: none is near a tie of the router.
CASES = ((90, 20, 1), (131, 33, 102), (117, 34, 5), (105, 26, 6), (150, 40, 68), (97, 30, 34))
BOUND = 0.006  # plain no_buffer, whose states decode token by token, was measured at 0.0004 to 0.0037


def main() -> None:
    worst = 0.0
    with Server(tiny.build("qwen3-next-deep"), (*REPLAY, *NO_BUFFER)) as server:
        for length, out, seed in CASES:
            server.flush()
            first = ask(server, prompt(length, seed=seed), out)
            question = first.tokens + prompt(5, seed=7)
            warm = ask(server, question, 6)
            assert warm.hit > 0, "the second turn was to find the first in the cache"
            server.flush()
            cold = ask(server, question, 6)
            one, other = warm.answer, cold.answer
            difference = distance(one, other) if one.ids == other.ids else float("inf")
            seen = f"log-probabilities {difference:.4f} from cold" if one.ids == other.ids else "another answer"
            print(f"{length} + {out} tokens: {warm.hit} cached, {seen}", flush=True)
            worst = max(worst, difference)
    seen = f"log-probabilities up to {worst:.4f}" if worst < float("inf") else "another answer"
    conclude(worst <= BOUND, f"{seen}, compared with a run without a cache, bound {BOUND}")


if __name__ == "__main__":
    main()
