"""The folder that SGLang loads: configuration, weights under their published names, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn

MOST_BYTES = 6_000_000
_KEPT_WHOLE = ("A_log", "dt_bias")  # decays: their rounding would compound over a text


def save(folder: Path, config: dict[str, Any], model: nn.Module, tokenizer: Tokenizer, facts: dict[str, Any]) -> None:
    """Write the checkpoint in float16; ``facts``: how it was trained and what it reached, for training.json.

    Raises:
        ValueError: a weight does not fit into float16, or the file is too large for the repository.
    """
    weights = {}
    for name, weight in model.state_dict().items():
        weight = weight.detach().float().cpu().contiguous()
        if not name.endswith(_KEPT_WHOLE):
            weight = weight.half()
        if not weight.isfinite().all():
            raise ValueError(f"{name} is not finite in {weight.dtype}")
        weights[name] = weight
    size = sum(w.numel() * w.element_size() for w in weights.values())
    if size > MOST_BYTES:
        raise ValueError(f"{size} bytes of weights, more than the {MOST_BYTES} that the repository takes")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # the library writes it for its owner alone
    _write(folder / "config.json", config)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token=None,
        eos_token=tokenizer.id_to_token(0),
        pad_token=tokenizer.id_to_token(1),
        model_max_length=config["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )
    _write(folder / "tokenizer_config.json", settings)
    _write(folder / "training.json", facts)


def load(folder: Path, model: nn.Module, device: str = "cpu") -> nn.Module:
    """``model`` with the weights of a checkpoint folder, in float32."""
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return model.to(torch.device(device)).eval()


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
