"""The models against independent implementations of their checkpoints, and what a checkpoint folder holds."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

from bench_rag.accuracy.recall import RecallFormat
from small_models import checkpoint, data, gdn, kda
from tests.harness import kimi, tiny

MODELS = {"gdn": gdn, "kda": kda}


@pytest.fixture(scope="module")
def tokenizer():
    return data.train_tokenizer(["def f(x):\n    return x + 1  # the end\n"])


@pytest.fixture(params=MODELS)
def folder(request, tmp_path, tokenizer):
    """A checkpoint of untrained weights, a little away from their special initial values."""
    torch.manual_seed(3)
    module = MODELS[request.param]
    config = module.config(data.VOCABULARY)
    model = module.build(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    path = tmp_path / request.param
    checkpoint.save(path, config, model, tokenizer, {"seconds": 0})
    return path


def test_logits_are_those_of_another_implementation(folder):
    """transformers' Qwen3-Next, and for Kimi-Linear, which transformers lacks, this repository's reference."""
    module = MODELS[folder.name]
    model = checkpoint.load(folder, module.build(json.loads((folder / "config.json").read_text())))
    ids = torch.randint(0, data.VOCABULARY, (1, 150), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        ours = model(ids)
        if folder.name == "kda":
            theirs = kimi.Reference(folder)(ids).logits
        else:
            if importlib.util.find_spec("transformers") is None:
                pytest.skip("transformers is not installed here")
            tiny._ensure_torchvision()
            from transformers import AutoModelForCausalLM

            other, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
            assert not any(report.values())
            theirs = other.eval()(input_ids=ids, use_cache=False).logits
    assert torch.allclose(ours.double(), theirs.double(), atol=2e-4, rtol=0)
    assert theirs.std() > 0.3


def test_checkpoint_fits_the_repository(folder):
    size = (folder / "model.safetensors").stat().st_size
    assert 5e6 < size < checkpoint.MOST_BYTES
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    ]


def test_weights_that_do_not_fit_are_refused(tmp_path, tokenizer):
    model = torch.nn.Linear(2, 2)
    config = {"max_position_embeddings": 8}
    with torch.no_grad():
        model.weight[0, 0] = 1e6
    with pytest.raises(ValueError, match="weight is not finite in torch.float16"):
        checkpoint.save(tmp_path / "m", config, model, tokenizer, {})
    with pytest.raises(ValueError, match="more than the 6000000 that the repository takes"):
        checkpoint.save(tmp_path / "m", config, torch.nn.Linear(2000, 2000), tokenizer, {})
    assert not (tmp_path / "m").exists()


def test_tokenizer_gives_back_what_it_encoded_and_knows_the_recall_tokens(tokenizer):
    text = "def f(x):\n\treturn 'é→' + x  # 2026\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    form = RecallFormat.of(tokenizer.token_to_id)
    assert len(set(form.characters)) == 36 and tokenizer.get_vocab_size() <= data.VOCABULARY


@pytest.mark.parametrize("length", [256, 1024])
def test_lessons_weigh_what_can_be_learnt(tokenizer, length):
    form = RecallFormat.of(tokenizer.token_to_id)
    text = data.encode(tokenizer, ["return x + 1\n" * 2000])
    stream = iter(data.Lessons(text, form, length, seed=1))
    kinds = set()
    for _ in range(40):
        ids, weights = next(stream)
        assert ids.shape == weights.shape == (length + 1,)
        stated: dict[tuple, tuple] = {}
        for at in range(length + 1 - 25):
            key, value = tuple(ids[at + 1 : at + 4]), tuple(ids[at + 5 : at + 25])
            if ids[at] == form.fact:
                stated[key] = value
                assert not weights[at : at + 25].any()
            if ids[at] == form.ask:
                assert stated[key] == value  # every question can be answered from what stands before it
                assert not weights[at : at + 5].any() and weights[at + 5 : at + 25].all()
        kinds.add((bool(stated), bool((weights == 1).all())))
    assert kinds == {(True, False), (False, True)}
