"""Training from end to end at a CPU's size, and its result in a real server with the plugin."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

from small_models import checkpoint, train
from tests.harness.server import Server

TINY = ("--tokens", "256", "--longest", "128", "--modules", "8", "--workers", "0")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Both checkpoints after a few steps."""
    out = tmp_path_factory.mktemp("trained")
    assert train.main(["gdn", "kda", "--seconds", "4", "--out", str(out), *TINY]) == 0
    return out


@pytest.mark.parametrize("name", train.MODELS)
def test_a_few_steps_learn_something(trained, name):
    reached = json.loads((trained / name / "training.json").read_text())
    assert reached["steps"] > 3 and reached["skipped_steps"] == 0 and reached["judged_tokens"] == 128
    assert all(perplexity < 1000 for perplexity in reached["perplexity_by_quartile"])  # 1024 tokens, untrained: more


def test_the_clock_and_the_schedule_end_together():
    rates = [train._schedule(i / 100) for i in range(101)]
    assert rates[0] < 0.1 and max(rates) == pytest.approx(1, abs=0.02) and rates[-1] == pytest.approx(0.03, abs=1e-3)
    assert sum(share for share, _ in train.LESSONS) == pytest.approx(1)
    assert [length for _, length in train.LESSONS] == sorted(length for _, length in train.LESSONS)


@pytest.mark.parametrize("options", [["--seconds", "0"], ["--tokens", "8"], ["--longest", "1"]])
def test_options_that_do_not_fit_are_one_line(options, capsys):
    assert train.main(["gdn", *options]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed here")
@pytest.mark.parametrize("name", train.MODELS)
def test_a_server_with_the_plugin_answers_as_the_trained_model(trained, name):
    """Greedy tokens over a fold of the ring, and the log-probabilities that the training code gives them."""
    module = train.MODELS[name]
    model = checkpoint.load(trained / name, module.build(json.loads((trained / name / "config.json").read_text())))
    prompt = torch.randint(4, 1000, (20,), generator=torch.Generator().manual_seed(5)).tolist()
    backend = ("--attention-backend", "triton") if name == "kda" else ()
    with Server(trained / name, ["--enable-linear-replayssm", *backend], plugin=True) as server:
        answer = server.generate(prompt, 20)
    with torch.inference_mode():
        logprobs = model(torch.tensor([[*prompt, *answer.ids[:-1]]]))[0, len(prompt) - 1 :].log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor(answer.ids)[:, None])[:, 0]
    assert torch.allclose(chosen, torch.tensor(answer.logprobs), atol=0.02)
    assert (logprobs.max(-1).values - chosen).max() < 0.02
