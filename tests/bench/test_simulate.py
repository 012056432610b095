"""The model of the prefix cache that policies are compared on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench_rag import simulate
from bench_rag.ceiling import ceiling
from bench_rag.simulate import Machine, StateCache, plain_states, replay
from bench_rag.workloads import Conversation, Plan, SharedPrefix, Turn, Vocab
from sglang_replayssm.boundaries import BoundaryPolicy

SHARED = SharedPrefix(groups=4, prompts_per_group=6, prefix_len=500, question_len=70, output_len=8, request_rate=2.0)
ENOUGH = Machine(slots=1000)


@pytest.mark.parametrize(
    ("start", "end", "branch", "states"),
    [
        (0, 2112, 0, [2112]),
        (0, 2100, 0, [2048]),
        (0, 2112, 2048, [2048]),  # the branch instead of the end
        (0, 2112, 2000, [1984]),
        (100, 150, 0, []),
        (607, 736, 700, [735]),  # off the grid, no branch is learnt
    ],
)
def test_states_of_extra_buffer(start: int, end: int, branch: int, states: list[int]) -> None:
    assert plain_states(start, end, branch) == states


def test_the_second_of_a_group_hits() -> None:
    plan = SHARED.plan(1, Vocab())
    plain, ours = replay(plan, ENOUGH, None).rate, replay(plan, ENOUGH, BoundaryPolicy()).rate
    assert plain < ours <= ceiling(plan)
    groups, each = SHARED.groups, 570
    # Every prompt but the first of its group hits at 64 + 128 tokens from the end at worst, at the branch from then on.
    assert ours >= groups * ((500 - 64 - 64 - 6) + 4 * 500) / (24 * each) * 0.99
    assert plain <= groups * 4 * 448 / (24 * each) * 1.01, "the first hit is the third prompt's, on the grid"


def test_the_next_turn_starts_where_the_last_ended() -> None:
    turns = [Turn(list(range(1000 + 100 * n, 1000 + 100 * n + 90)), 30) for n in range(4)]
    plan = Plan([Conversation(turns)], concurrency=1)
    assert replay(plan, ENOUGH, BoundaryPolicy()).rate == pytest.approx(ceiling(plan))
    assert replay(plan, ENOUGH, BoundaryPolicy(finish=False)).rate < ceiling(plan)


def test_a_prompt_right_behind_the_first_of_its_kind() -> None:
    """It is matched before the result of the one in front is looked at; `early` does not wait for that."""
    document = list(range(1000, 1600))
    prompts = [document + list(range(2000 + 100 * n, 2070 + 100 * n)) for n in range(2)]
    plan = Plan([Conversation([Turn(p, 4)], arrival=0.05 * n) for n, p in enumerate(prompts)], concurrency=2)
    guess = 600 + 70 - 192
    assert replay(plan, ENOUGH, BoundaryPolicy()).rate == pytest.approx(guess / 1340)
    assert replay(plan, ENOUGH, BoundaryPolicy(early=False)).rate == replay(plan, ENOUGH, None).rate == 0


def test_a_batch_takes_so_many_tokens() -> None:
    """Two prompts of one batch do not hit each other; one that does not fit in it comes with the next, and hits."""
    prompts = [list(range(1000, 1500)) + [n] for n in range(3)]
    plan = Plan([Conversation([Turn(p, 4)]) for p in prompts], concurrency=3)
    for tokens, hits in ((1600, 0), (1100, 500)):  # at the branch that the second left
        outcome = replay(plan, Machine(slots=1000, batch_tokens=tokens), BoundaryPolicy())
        assert outcome.rate == pytest.approx(hits / 1503)


def test_hints_name_documents() -> None:
    first, second = list(range(1000, 1300)), list(range(2000, 2400))
    prompts = [first + second, first + list(range(3000, 3300))]
    plan = Plan([Conversation([Turn(p, 4)], arrival=5.0 * n) for n, p in enumerate(prompts)], concurrency=1)
    quiet = BoundaryPolicy(tail=())
    assert replay(plan, ENOUGH, quiet).rate == 0
    assert replay(plan, ENOUGH, quiet, hints=[[300], [300]]).rate == pytest.approx(300 / 1300)


def test_kv_goes_with_the_last_state_beyond_it() -> None:
    cache = StateCache(slots=1)
    prefixes = simulate._prefixes(list(range(10)))
    cache.insert(prefixes, "end")
    assert cache.match(prefixes) == (10, 10)
    cache.insert(simulate._prefixes([7, 7]), "end")
    assert cache.match(prefixes) == (0, 0)


def test_running_requests_keep_their_slots() -> None:
    cache = StateCache(slots=4)
    for first in range(4):
        cache.insert(simulate._prefixes([first]), "end")
    cache.lock(simulate._prefixes([3])[0], 1)
    assert cache.make_room(3)
    assert not cache.make_room(4)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--set", "groups=2", "--set", "prompts_per_group=3", "--set", "prefix_len=300", "--slots", "60,30"]
    assert simulate.main(["--workload", "gsp", *small, "--policy", "most=2", "--policy", "off"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 1 + 2 * 4 + 1
    assert "budget ceiling" in rows[4] and "infinite ceiling" in rows[-1]


def test_a_recorded_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hashes of blocks of 512 tokens instead of token ids: three prompts that share the first block."""
    lines = [{"timestamp": 5000 * n, "input_length": 900, "output_length": 8, "hash_ids": [1, 2 + n]} for n in range(3)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert simulate.main(["--workload", "trace", "--set", f"trace={trace}", "--slots", "60"]) == 0
    rates = [float(row.split()[-1].rstrip("%")) for row in capsys.readouterr().out.splitlines()[1:]]
    plain, ours, budget, infinite = rates
    assert plain < ours <= budget <= infinite + 0.1


@pytest.mark.parametrize("wrong", [["--workload", "nothing"], ["--policy", "most=x"], ["--slots", "many"]])
def test_a_wrong_argument_is_one_sentence(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(wrong) == 2
    shown = capsys.readouterr()
    assert len(shown.err.strip().splitlines()) == 1
