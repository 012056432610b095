"""Replay of traces: what stands in the file is what is sent, when it was sent; a bad line is named."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from bench_rag import cli
from bench_rag.ceiling import ceiling
from bench_rag.client import Client
from bench_rag.driver import drive
from bench_rag.errors import BenchError
from bench_rag.traces import read_trace
from bench_rag.workloads import TraceReplay, Vocab
from tests.bench.fakes import FakeSglang

VOCAB = Vocab(100, 500)


def mooncake(at: int, length: int, blocks: list[int], output: int = 7) -> dict:
    return {"timestamp": at, "input_length": length, "output_length": output, "hash_ids": blocks}


@pytest.fixture
def write(tmp_path):
    def file(*records: object, text: str = "") -> str:
        path = tmp_path / "trace.jsonl"
        path.write_text(text or "".join(json.dumps(r) + "\n" for r in records))
        read_trace.cache_clear()
        return str(path)

    return file


def decoded(ids) -> str:
    return bytes(i - VOCAB.low for i in ids).decode()


def test_mooncake_lengths_times_and_shared_blocks(write):
    path = write(
        mooncake(3000, 1100, [1, 2, 3]), mooncake(1000, 1024, [1, 2], output=0), mooncake(5000, 1030, [1, 9, 3])
    )
    plan = TraceReplay(trace=path, trace_speed=2.0).plan(1, VOCAB)
    assert [c.arrival for c in plan.conversations] == [0.0, 1.0, 2.0]  # in order of time, twice as fast
    first, second, third = (c.turns[0] for c in plan.conversations)
    assert [len(t.new_ids) for t in (first, second, third)] == [1024, 1100, 1030]
    assert [t.output_len for t in (first, second, third)] == [1, 7, 7]  # a server always answers something
    assert second.new_ids[:1024] == first.new_ids and third.new_ids[:512] == first.new_ids[:512]
    assert third.new_ids[512:1024] != first.new_ids[512:] and third.new_ids[1024:] == second.new_ids[1024:1030]
    # The second finds both blocks of the first, the third one block (and a chance token of 400 values).
    assert ceiling(plan) == pytest.approx((1024 + 512) / (1024 + 1100 + 1030), abs=2 / 3154)
    assert plan.facts["arrivals"] == "recorded, over 2.0 s" and plan.facts["requests"] == 3
    assert TraceReplay(trace=path).plan(2, VOCAB).conversations[0].turns[0].new_ids != first.new_ids


SHAREGPT = [
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}] * 2},
    {"conversations": [{"from": "system", "value": "be brief"}, {"from": "human", "value": "why"}]},
    {
        "conversations": [
            {"from": "system", "value": "be brief"},
            {"from": "human", "value": "why"},
            {"from": "gpt", "value": "yes"},
        ]
    },
]


@pytest.mark.parametrize("array", [False, True], ids=["lines", "one array"])
def test_sharegpt_conversations_turn_by_turn(write, array):
    path = write(text=json.dumps(SHAREGPT, indent=1)) if array else write(*SHAREGPT)
    plan = TraceReplay(trace=path).plan(1, VOCAB)
    turns = [[(decoded(t.new_ids), t.output_len) for t in c.turns] for c in plan.conversations]
    assert turns == [[("hi", 5), ("hi", 5)], [("be brief\nwhy", 3)]]  # an answer that was never given is not asked for
    assert plan.facts["tokenizer"] == "bytes" and plan.facts["arrivals"] == "Poisson"


def test_sglangs_custom_and_openai_forms(write):
    path = write({"conversations": [{"content": "one"}, {"content": "four"}, {"content": "two"}, {"content": "no"}]})
    turns = TraceReplay(trace=path).plan(1, VOCAB).conversations[0].turns
    assert [(decoded(t.new_ids), t.output_len) for t in turns] == [("one", 4), ("two", 2)]
    ask = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    path = write({"messages": ask, "max_tokens": 9}, {"messages": ask}, {"messages": ask, "max_completion_tokens": 4})
    plan = TraceReplay(trace=path, output_len=33, trace_output_len=20).plan(1, VOCAB)
    assert [c.turns[0].output_len for c in plan.conversations] == [9, 20, 4]
    assert {decoded(c.turns[0].new_ids) for c in plan.conversations} == {"system: x\nuser: y\n"}


def test_sglangs_agentic_form(write):
    agent = [
        {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}], "prompt_tokens": 9},
        {"messages": []},
        {"messages": [{"role": "tool", "content": "z"}]},
    ]
    path = write(text=json.dumps({"metadata": {}, "conversations": [agent, agent[2:]]}, indent=1))
    plan = TraceReplay(trace=path, output_len=5).plan(1, VOCAB)
    turns = [[(decoded(t.new_ids), t.output_len) for t in c.turns] for c in plan.conversations]
    assert turns == [[("system: x\nuser: y\n", 5), ("tool: z\n", 5)], [("tool: z\n", 5)]]
    path = write(text=json.dumps({"conversations": [[{"messages": 3}]]}))
    with pytest.raises(BenchError, match="trace.jsonl: conversation 1: messages must be a list of objects"):
        read_trace(path)


def test_only_the_first_records_and_no_waits_in_warm_up(write):
    workload = TraceReplay(trace=write(*(mooncake(60_000 * i, 10, [i], output=50) for i in range(50))))
    assert workload.plan(1, VOCAB).requests == 50
    warm = workload.warmup().plan(1, VOCAB)
    assert warm.requests == 32 and warm.conversations[-1].arrival < 0.01
    assert {c.turns[0].output_len for c in warm.conversations} == {16}


def test_arrival_times_are_honoured(write):
    path = write(mooncake(0, 4, [1], 1), mooncake(900, 4, [2], 1), mooncake(1500, 4, [3], 1))
    plan = TraceReplay(trace=path, trace_speed=3.0).plan(1, VOCAB)

    async def go():
        async with FakeSglang(events=[(0.0, 1)]) as url, Client(url) as client:
            return await drive(client, plan)

    sent = [r.sent for r in asyncio.run(go())]
    # A loaded machine sends late, never early.
    assert 0.3 <= sent[1] - sent[0] + 0.05 < 1.3 and 0.5 <= sent[2] - sent[0] + 0.05 < 1.5


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (['{"input_length": 3'], "trace.jsonl:1: not JSON"),
        ([json.dumps(mooncake(0, 5, [1])), "", "[1]"], "trace.jsonl:3: a record is a JSON object"),
        ([json.dumps(mooncake(0, 5, [1])), '{"prompt": "x"}'], "trace.jsonl:2: a record needs one of input_length"),
        (['{"input_length": 5, "hash_ids": [1]}'], "trace.jsonl:1: has no 'output_length'"),
        ([json.dumps(mooncake(0, 513, [1]))], "513 prompt tokens need 2 hash_ids of 512, got 1"),
        ([json.dumps(mooncake(0, 0, []))], "input_length must be an integer of at least 1, got 0"),
        ([json.dumps({**mooncake(0, 5, [1]), "timestamp": "x"})], "trace.jsonl:1: timestamp must be a number"),
        (
            [json.dumps(mooncake(0, 5, [1])), json.dumps(SHAREGPT[0])],
            ":2: a record of the form conversations in a file",
        ),
        (['{"conversations": [{"from": "human"}]}'], ":1: message 1 has no text"),
        (['{"conversations": ["hi"]}'], ":1: conversations must be a list of objects"),
        (['{"messages": 3}'], ":1: messages must be a list of objects"),
        (['{"conversations": []}'], "no requests in this trace"),
        (["\n"], "no requests in this trace"),
    ],
)
def test_a_bad_line_is_named(write, lines, sentence):
    with pytest.raises(BenchError, match=re.escape(sentence)):
        read_trace(write(text="\n".join(lines)))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "trace: name the file to replay with --trace"),
        (["--trace", "/nowhere.jsonl"], "cannot read the trace /nowhere.jsonl: No such file"),
        (["--trace", "x", "--trace-speed", "0"], "trace-speed must be above 0"),
    ],
)
def test_options_that_do_not_fit_are_one_line(options, sentence, capsys):
    assert cli.main(["--model", "m", "--host-profile", "gpu", "--workload", "trace", *options]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
