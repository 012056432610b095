"""The trained checkpoints in the repository: what they are, and that they have learnt what they are for."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from bench_rag.accuracy import recall, text
from bench_rag.accuracy.recall import RecallFormat
from small_models import checkpoint, data, train

FOLDER = Path(train.__file__).parent


@pytest.fixture(params=train.MODELS)
def folder(request) -> Path:
    return FOLDER / request.param


def test_training_reached_what_the_models_are_for(folder):
    reached = json.loads((folder / "training.json").read_text())
    assert reached["judged_tokens"] == 16384 and reached["skipped_steps"] < reached["steps"] / 100
    assert max(reached["perplexity_by_quartile"]) < 20
    assert min(reached["recall_by_quartile"]) > 0.5
    assert (folder / "model.safetensors").stat().st_size < checkpoint.MOST_BYTES
    assert json.loads((folder / "config.json").read_text()) == train.MODELS[folder.name].config(data.VOCABULARY)


def test_checkpoint_knows_python_and_recalls(folder):
    """Judged anew, over 1,024 tokens: held-out text, and facts behind it."""
    module = train.MODELS[folder.name]
    model = checkpoint.load(folder, module.build(module.config(data.VOCABULARY)))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    form = RecallFormat.of(tokenizer.token_to_id)
    held_out = data.encode(tokenizer, text.sources(held_out=True)[:20])
    torch.manual_seed(0)
    reached = train.judge(model, held_out, form, 1024, "cpu")
    assert np.mean(reached["perplexity_by_quartile"]) < 25
    rng = random.Random(3)
    (fact, *others) = form.draw(rng, 4)
    ids = [t for f in (fact, *others) for t in (*form.stated(f), *held_out[:30].tolist())] + form.question(fact)
    with torch.inference_mode():
        for _ in range(recall.VALUE_LEN):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    right = sum(a == b for a, b in zip(ids[-recall.VALUE_LEN :], fact.value, strict=True))
    assert right >= recall.VALUE_LEN - 2
