"""Many short requests with shared prefixes, aborts and pauses: hits stay, pools come back empty, memory stays flat.

REPLAYSSM_SOAK_REQUESTS=2000 ./run test --long tests/integration/test_soak.py      # 2,000 is what it takes by itself
"""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil
import pytest

from tests.harness.judge import Exchange, follow_transformers
from tests.harness.pool import on
from tests.harness.reference import prompt
from tests.harness.server import Answer, Server

REQUESTS = int(os.environ.get("REPLAYSSM_SOAK_REQUESTS", 2000))
CLIENTS = 4
JUDGED = 40  # answers that transformers sees, spread over the whole run
# float16 against float32: plain SGLang without a cache is up to 0.163 off on the first sixty of these prompts (0.080
# without the one, seed 50)
FP16 = 0.25


@dataclass
class Sample:
    """After a part of the requests: tokens from the cache per prompt token, and the server's memory in MiB."""

    hit_rate: float
    memory: float


def memory_of(server: Server) -> float:
    assert server._process is not None
    parent = psutil.Process(server._process.pid)
    return sum(p.memory_info().rss for p in (parent, *parent.children(recursive=True))) / (1 << 20)


def exchange(server: Server, seed: int) -> Exchange:
    """One request: one or two shared documents and a question; one in ten is aborted on its way."""
    rng = random.Random(seed)
    tokens: list[int] = []
    for number in rng.choices(range(6), weights=(6, 5, 4, 3, 2, 1), k=rng.choice([1, 2])):
        tokens += prompt(40 + 7 * number, seed=2000 + number)
    tokens += prompt(rng.randrange(1, 12), seed=seed)
    rid = f"soak-{seed}"
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(server.generate, tokens, rng.randrange(1, 20), rid=rid)
        if rng.random() < 0.1:
            time.sleep(rng.random())
            server.abort(rid)
        return Exchange(tokens, future.result(timeout=300))


def whole(answer: Answer) -> bool:
    return answer.meta["finish_reason"]["type"] != "abort" and bool(answer.ids)


@pytest.mark.long
@pytest.mark.timeout(0)
@on("boundaries")
def test_many_short_requests(server: Server) -> None:
    part = max(CLIENTS, REQUESTS // 10)
    samples: list[Sample] = []
    for first in range(0, REQUESTS, part):
        with ThreadPoolExecutor(CLIENTS) as pool:
            futures = [pool.submit(exchange, server, seed) for seed in range(first, min(first + part, REQUESTS))]
            if (first // part) % 3 == 1:
                server.post("/pause_generation", {"mode": random.Random(first).choice(["in_place", "retract"])})
                time.sleep(1)
                server.post("/continue_generation", {})
            exchanges = [future.result() for future in futures]
        done = [each for each in exchanges if whole(each.answer)]
        rate = sum(each.hit for each in done) / sum(len(each.prompt) for each in done)
        samples.append(Sample(rate, memory_of(server)))
        print(f"{first + part} requests: {100 * rate:.1f}% hit, {samples[-1].memory:.0f} MiB", flush=True)
        follow_transformers(server, done[:: max(1, len(done) * 10 // JUDGED)], FP16)
    server.flush()  # SGLang refuses while anything is held, and looks for lost slots and tokens when it is idle
    assert "ERROR" not in server.log_text()
    early, late = samples[1:4], samples[-3:]
    rates = [sum(s.hit_rate for s in some) / len(some) for some in (early, late)]
    assert rates[1] >= rates[0] - 0.1, f"the hit rate fell from {rates[0]:.2f} to {rates[1]:.2f}"
    growth = late[-1].memory - early[-1].memory
    assert growth <= 0.03 * early[-1].memory + 0.05 * REQUESTS, f"{growth:.0f} MiB more than at the start"
