"""Tensor-parallel ranks that decide differently end with an error on every rank, and agreeing ones never wait."""

from __future__ import annotations

import multiprocessing
import socket
from multiprocessing.queues import Queue

import pytest
import torch
import torch.distributed as dist

from sglang_replayssm.agreement import EVERY, Agreement, Disagreement

RANKS = 2


def rank_main(rank: int, port: int, odd: str, results: Queue[tuple[int, int, str]]) -> None:
    """Runs forwards whose cursors move by one; `odd` says what rank 1 does differently at forward 100."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    checkpoint = torch.zeros(5, dtype=torch.int32)
    agreement = Agreement(checkpoint)
    forward, error = 0, ""
    try:
        for forward in range(1, 5 * EVERY + 1):
            checkpoint[1] += 1
            checkpoint[2] += 2
            strange = rank == 1 and forward == 100
            if strange and odd == "cursors":
                checkpoint[3] += 1
            if strange and odd == "swapped":
                checkpoint[[1, 2]] = checkpoint[[2, 1]]
            if forward % 10 == 0:
                agreement.note("leave", [(64 + (strange and odd == "decision"), "tail")])
            agreement.before_forward()
    except Disagreement as problem:
        error = str(problem)
    results.put((rank, forward, error))
    results.close()
    results.join_thread()
    dist.destroy_process_group()


def run(odd: str) -> list[tuple[int, int, str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=rank_main, args=(rank, port, odd, results)) for rank in range(RANKS)]
    try:
        for process in ranks:
            process.start()
        return sorted(results.get(timeout=120) for _ in ranks)
    finally:
        for process in ranks:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def test_ranks_that_agree_go_on() -> None:
    assert run("nothing") == [(rank, 5 * EVERY, "") for rank in range(RANKS)]


@pytest.mark.parametrize("odd", ["cursors", "swapped", "decision"])
def test_a_rank_that_disagrees_is_an_error_on_every_rank(odd: str) -> None:
    """Within four comparisons: taken at the next, gathered at the one after, judged at the third."""
    for _, forward, error in run(odd):
        assert "ranks disagree" in error
        assert forward <= 4 * EVERY
