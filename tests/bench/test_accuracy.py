"""The accuracy check: tasks, figures on a stand-in for a server that can be wrong on purpose, and real small models."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import random
import statistics
from pathlib import Path

import pytest

from bench_rag import cli
from bench_rag.accuracy import text
from bench_rag.accuracy.recall import KEY_LEN, VALUE_LEN, RecallFormat
from bench_rag.accuracy.score import Answers, Sizes, ask, figures
from bench_rag.accuracy.tasks import cuts, openings, questions
from bench_rag.client import Client, Completion
from bench_rag.errors import BenchError
from tests.bench.fakes import FakeSglang
from tests.harness import tiny

FORM = RecallFormat(fact=900, ask=901, equals=902, characters=tuple(range(800, 836)))
TEXT = list(range(700)) * 5


def test_split_is_by_name_and_covers_the_library():
    seen, unseen = text.sources(held_out=False), text.sources(held_out=True)
    assert len(seen) > 10 * len(unseen) > 0 and not set(seen) & set(unseen)
    assert text.is_held_out("json/decoder.py") == text.is_held_out("json/decoder.py")
    assert any("import json" in source for source in seen)


def test_openings_state_their_facts_once_among_text():
    first, second = openings(TEXT, FORM, 2, 300, 4, seed=1)
    assert len(first.ids) == len(second.ids) == 300 and first.ids != second.ids
    assert openings(TEXT, FORM, 2, 300, 4, seed=1)[0] == first
    for opening in (first, second):
        places = [i for i, token in enumerate(opening.ids) if token == FORM.fact]
        assert len(places) == 4 and min(b - a for a, b in zip(places, places[1:], strict=False)) > 25
        for at, fact in zip(places, opening.facts, strict=True):
            assert opening.ids[at : at + 25] == FORM.stated(fact)
            assert len(fact.key) == KEY_LEN and len(fact.value) == VALUE_LEN
    assert openings(TEXT, None, 1, 50, 0, seed=1)[0].facts == []
    with pytest.raises(BenchError, match="8 facts do not fit into an opening of 200 tokens"):
        openings(TEXT, FORM, 1, 200, 8, seed=1)
    with pytest.raises(BenchError, match="the text has 10 tokens"):
        openings(list(range(10)), None, 1, 50, 0, seed=1)


def test_questions_stand_in_their_quartile_and_in_order():
    (opening,) = openings(TEXT, FORM, 1, 100, 2, seed=1)
    written = list(range(400))
    found = questions(opening, written, FORM, 3, random.Random(1))
    assert [q.quartile for q in found] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    ends = [len(q.ids) - 100 - 1 - KEY_LEN - 1 for q in found]
    assert ends == sorted(ends) and [-(-at // 100) - 1 for at in ends] == [q.quartile for q in found]
    facts = {fact.key: fact.value for fact in opening.facts}
    assert all(q.answer == facts[tuple(q.ids[-KEY_LEN - 1 : -1])] for q in found)
    for question, at in zip(found, ends, strict=True):
        assert question.ids[: 100 + at] == [*opening.ids, *written[:at]]
    assert [quartile for _, quartile in cuts(opening, written, 2, random.Random(1))] == [0, 0, 1, 1, 2, 2, 3, 3]


class Model:
    """A server that knows every fact, writes random tokens, and may go wrong with the length of its context.

    ``drift``: nats per token of context that decoding adds to a log-probability; ``forgets``: context length from which
    on answers and continuations are wrong.
    """

    def __init__(self, drift: float = 0.0, forgets: float = math.inf) -> None:
        self.drift, self.forgets, self.flushes = drift, forgets, 0

    async def flush(self) -> None:
        self.flushes += 1

    async def complete(self, ids, count, *, temperature=0.0, logprobs=False, score_from=None) -> Completion:
        if score_from is not None:
            return Completion([0], 0, [], [self._logprob(t) for t in ids[score_from:]])
        if temperature:
            rng = random.Random(str(ids))
            made = [rng.randrange(700) for _ in range(count)]
            return Completion(made, 0, [self._logprob(t) - self.drift * (len(ids) + i) for i, t in enumerate(made)], [])
        wrong = len(ids) >= self.forgets
        if ids[-1] == FORM.equals:
            key = ids[-1 - KEY_LEN : -1]
            at = next(i for i, t in enumerate(ids) if t == FORM.fact and ids[i + 1 : i + 1 + KEY_LEN] == key)
            made = ids[at + 2 + KEY_LEN :][:count]
        else:
            made = [(ids[-1] + i) % 700 for i in range(count)]
        return Completion([*made[:-1], 0] if wrong else made, len(ids) // 2, [], [])

    @staticmethod
    def _logprob(token: int) -> float:
        return -1.0 - token / 700


SIZES = Sizes(context=400, questions=5, cuts=3, continued=10, concurrency=4)


def answers(model: Model, reference: Answers | None = None, form: RecallFormat | None = FORM) -> Answers:
    found = openings(TEXT, form, 2, 100, 2 if form else 0, seed=1)
    return asyncio.run(ask(model, found, form, SIZES, reference, 1))


def test_a_right_server_has_no_drift_and_recalls_everything():
    model = Model()
    first = answers(model)
    assert model.flushes == 3 and first.recall_cached == pytest.approx(0.5, abs=0.01)
    second = answers(Model(), first)
    for quartile in figures(second, first):
        assert quartile["tokens"] == 200 and quartile["drift"] == quartile["noise"] == 0
        assert quartile["perplexity"] == quartile["perplexity_prefilled"] == pytest.approx(math.exp(1.5), rel=0.1)
        assert quartile["recall"] == quartile["agreement"] == quartile["agreement_tokens"] == 1
        assert (quartile["questions"], quartile["continuations"]) == (10, 6)
    assert "agreement" not in figures(first, None)[0]


def test_a_wrong_server_shows_where_it_went_wrong():
    first = answers(Model())
    found = figures(answers(Model(drift=1e-4, forgets=330), first), first)
    drifts = [quartile["drift"] for quartile in found]
    assert drifts == pytest.approx([-1e-4 * (150 + 100 * i) for i in range(4)], rel=1e-2)
    assert [q["noise"] for q in found] == pytest.approx([-d for d in drifts])
    assert [q["recall"] for q in found[:2]] == [1, 1] and found[3]["recall"] == 0
    assert found[3]["recall_tokens"] == pytest.approx(1 - 1 / VALUE_LEN)  # the last token of an answer is wrong
    assert (
        found[0]["agreement"] == 1 and found[3]["agreement"] == 0 and found[3]["agreement_tokens"] == pytest.approx(0.9)
    )


def test_without_facts_there_is_no_recall():
    found = figures(answers(Model(), form=None), None)
    assert all("recall" not in quartile and quartile["tokens"] == 200 for quartile in found)


def test_a_vocabulary_that_lacks_a_token_is_refused():
    with pytest.raises(BenchError, match=r"no token '<\|fact\|>'; see small_models/"):
        RecallFormat.of({"=": 3}.get)


def test_completions_come_with_what_was_asked_for():
    async def go(reply: dict, **options) -> Completion:
        async with FakeSglang(events=[], whole=reply) as url, Client(url) as client:
            return await client.complete([1, 2, 3], 2, **options)

    meta = {"cached_tokens": 2, "output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None]]}
    meta["input_token_logprobs"] = [[None, 2, None], [-1.5, 3, None]]
    whole = {"output_ids": [7, 8], "meta_info": meta}
    assert asyncio.run(go(whole, logprobs=True)) == Completion([7, 8], 2, [-0.5, -0.25], [])
    assert asyncio.run(go(whole, score_from=2)) == Completion([7, 8], 2, [-0.5, -0.25], [-1.5])
    with pytest.raises(BenchError, match="scored 1 tokens of the prompt instead of 2"):
        asyncio.run(go(whole, score_from=1))
    with pytest.raises(BenchError, match="answered 1 tokens instead of 2"):
        asyncio.run(go({"output_ids": [7], "meta_info": meta}))
    with pytest.raises(BenchError, match="answered something else than expected"):
        asyncio.run(go({"text": "hello"}))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--model", "nowhere"], "accuracy needs a checkpoint folder with a tokenizer.json, got 'nowhere'"),
        (["--arms", "best"], "no arm is called 'best'"),
        (["--context", "0"], "--context must be at least 1, got 0"),
        (["--facts", "-1"], "--facts at least 0"),
        (["--facts", "0", "--opening", "9999999"], "an opening takes 9999999"),
        (["--server-args", "--unclosed '"], "cannot split"),
        ([], "recall needs a tokenizer that was trained for it: no token '<|fact|>'"),
    ],
)
def test_options_that_do_not_fit_are_one_line(options, sentence, capsys):
    model = [] if "--model" in options else ["--model", str(tiny.build("qwen3-next"))]
    assert cli.main(["accuracy", *model, "--host-profile", "gpu", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench_rag: ") and sentence in error and error.count("\n") == 1


SMALL = Path(__file__).parents[2] / "small_models"
real = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed here")


@real
@pytest.mark.long
@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_small_models_on_real_servers(tmp_path, name):
    """Plugin on against off, at a CPU's size: no drift beyond plain SGLang's, facts recalled, the same answers."""
    # as small as can be in Triton's interpreter: texts of one chunk, written past a fold of the ring
    sizes = ["--context=20", "--texts=1", "--opening=40", "--facts=1", "--questions=1", "--cuts=1", "--continued=17"]
    options = ["--model", str(SMALL / name), "--arms", "plain,plugin", "--quiet", "--out", str(tmp_path)]
    assert cli.main(["accuracy", *options, *sizes]) == 0
    data = json.loads((tmp_path / "accuracy.json").read_text())
    # Plain SGLang itself: noise of a quarter up to 0.003 with GDN, 0.12 with KDA (float16)
    noise = max(quarter["noise"] for quarter in data["quartiles"]["plain"])
    for plain, plugin in zip(data["quartiles"]["plain"], data["quartiles"]["plugin"], strict=True):
        assert plugin["noise"] < 0.02 + 2 * noise and abs(plugin["drift"]) < 0.01 + 2 * noise
        assert plugin["recall_tokens"] >= plain["recall_tokens"]
        assert plugin["agreement_tokens"] > 0.8
    for quarters in data["quartiles"].values():  # five sampled tokens each: only together do they say something
        assert statistics.geometric_mean(quarter["perplexity"] for quarter in quarters) < 60
    assert "| quartile" in (tmp_path / "accuracy.md").read_text()
