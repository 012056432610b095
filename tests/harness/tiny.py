"""Tiny hybrid checkpoints with random, well scaled weights: real architectures, a few hundred kilobytes.

    folder = build("qwen3-next")          # or: python tests/harness/tiny.py qwen3-next

Deterministic per name and version of this file, built once into a cache folder that git ignores. This module
stands alone (torch, transformers, safetensors, tokenizers), so that it can also be loaded by its path; only the models
that transformers does not have come from tests/harness/kimi.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

STAMP = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()  # of the code that runs, not of a later edit
DEFAULT_CACHE = Path(__file__).resolve().parents[2] / ".cache" / "tiny"
VOCABULARY = 320
"""Token ids a prompt may use are 2 to 257 (bytes); 0 and 1 are special, the rest pad the table."""

LING = ("ling-v3", "ling-v3-mtp", "ling-v3-mtp-unbounded")
KIMI = ("kimi-linear", "kimi-linear-bf16", "kimi-linear-moe", *LING)
NAMES = ("qwen3-next", "qwen3-next-deep", "qwen3-next-tp", "qwen3-next-mtp", "qwen3.5", *KIMI)
"""`deep`, `mtp` and those with Kimi Delta Attention have 3 linear layers and 1 full one, as the real models' period;
the others 1 and 1, for speed. `tp` has heads for two ranks, `mtp` a layer that drafts (multi-token prediction).
"""
DRAFT = "eagle-draft"
"""Drafts for a model with `mtp`, with the target's embedding and head (EAGLE); no model of its own."""

WEIGHT_STD, EMBEDDING_STD, CONV_STD = 0.2, 1.0, 0.5
"""Standard deviations that keep activations near 1 through the layers, so that logits differ clearly."""


def build(name: str, cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Folder of the tiny checkpoint `name` (one of NAMES, or DRAFT), built if it is not there yet.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in (*NAMES, DRAFT):
        raise ValueError(f"unknown tiny model {name!r}; there are {', '.join(NAMES)}")
    root = Path(cache_dir) if cache_dir is not None else DEFAULT_CACHE
    root.mkdir(parents=True, exist_ok=True)
    folder = root / name
    with _lock(root / f".{name}.lock"):
        stamp = _stamp(name)
        if _read(folder / "stamp") != stamp:
            shutil.rmtree(folder, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=root) as scratch:
                _write_checkpoint(name, Path(scratch))
                Path(scratch, "stamp").write_text(stamp)
                shutil.copytree(scratch, folder)
    return folder


def config(name: str) -> dict[str, Any]:
    """The config.json of a tiny model, as published checkpoints of that architecture write it."""
    if name in KIMI:
        from tests.harness import kimi

        return kimi.config(name, VOCABULARY)
    if name == DRAFT:
        return _draft_config()
    layers = 4 if name.endswith(("-deep", "-mtp")) else 2
    body = dict(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        hidden_act="silu",
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        partial_rotary_factor=0.5,
        tie_word_embeddings=False,
        attn_output_gate=True,
        dtype="float16",
        bos_token_id=0,
        eos_token_id=0,
        # SGLang's in-tree replay kernel takes head dims from 32 on
        linear_conv_kernel_dim=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_key_heads=2 if name.endswith("-tp") else 1,
        linear_num_value_heads=4 if name.endswith("-tp") else 2,
        full_attention_interval=layers,
        layer_types=["linear_attention"] * (layers - 1) + ["full_attention"],
    )
    if name.startswith("qwen3-next"):
        experts = dict(
            # every expert for every token: a top-k choice is a discontinuity that rounding crosses, and then
            # no comparison between two precisions means anything
            num_experts=2,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            norm_topk_prob=True,
            mlp_only_layers=[],
        )
        return dict(architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", **body, **experts)
    rope = dict(
        rope_type="default",
        rope_theta=10000.0,
        partial_rotary_factor=0.5,
        mrope_interleaved=True,
        mrope_section=[2, 1, 1],
    )
    vision = dict(
        model_type="qwen3_5",
        depth=1,
        hidden_size=32,
        intermediate_size=32,
        num_heads=2,
        in_channels=3,
        patch_size=4,
        spatial_merge_size=2,
        temporal_patch_size=2,
        out_hidden_size=64,
        num_position_embeddings=16,
        hidden_act="gelu_pytorch_tanh",
        deepstack_visual_indexes=[],
    )
    return dict(
        architectures=["Qwen3_5ForConditionalGeneration"],
        model_type="qwen3_5",
        dtype="float16",
        tie_word_embeddings=False,
        image_token_id=310,
        video_token_id=311,
        vision_start_token_id=312,
        vision_end_token_id=313,
        text_config=dict(model_type="qwen3_5_text", rope_parameters=rope, **body),
        vision_config=vision,
    )


def _write_checkpoint(name: str, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    _write_json(folder / "config.json", config(name))
    _write_tokenizer(folder)
    if name in KIMI:
        from tests.harness import kimi

        save_file(kimi.weights(config(name)), folder / "model.safetensors", metadata={"format": "pt"})
        return
    if name == DRAFT:
        save_file(_draft_weights(config(name)), folder / "model.safetensors", metadata={"format": "pt"})
        return
    if name == "qwen3.5":
        _write_processors(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = load_skeleton(folder)
        for key, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                std = CONV_STD if "conv1d" in key else EMBEDDING_STD if "embed" in key else WEIGHT_STD
                parameter.data.normal_(0, std)
    weights = dict(_published_names(model.to(torch.float16).state_dict()))
    if name.endswith("-mtp"):
        _add_drafts(weights, full_layer=config(name)["num_hidden_layers"] - 1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


FOLLOWS, EMBEDDING = 6.0, 2.0
"""How strongly the head of `mtp` prefers the successor of a token in a fixed permutation, beside its noise; and how
much larger than in the other models the embedding is, by which the head knows the token.
"""


def _add_drafts(weights: dict[str, torch.Tensor], full_layer: int) -> None:
    """Adds the layer for multi-token prediction, and makes its guesses right now and then, wrong now and then.

    The head prefers for every token one successor, which the draft layer sees in the token's embedding and nearly
    nothing else; the whole model decides by its state as well.
    """
    import torch

    random = torch.Generator().manual_seed(7)
    prefix = f"model.layers.{full_layer}."
    for key in [key for key in weights if key.startswith(prefix)]:
        value = weights[key]
        noise = torch.randn(value.shape, generator=random) * 0.1
        weights[key.replace(prefix, "mtp.layers.0.")] = noise.half() if value.dim() > 1 else value.clone()
    embedding = weights["model.embed_tokens.weight"].float()
    weights["model.embed_tokens.weight"] = (EMBEDDING * embedding).half()
    size, width = embedding.shape
    successor = embedding[torch.randperm(size, generator=random)]
    head = FOLLOWS * successor + torch.randn(size, width, generator=random)
    weights["lm_head.weight"] = (WEIGHT_STD * head).half()
    weights["mtp.norm.weight"] = weights["model.norm.weight"].clone()
    for part in ("embedding", "hidden"):
        weights[f"mtp.pre_fc_norm_{part}.weight"] = torch.zeros(width).half()
    both = torch.cat([2 * torch.eye(width), 0.1 * torch.randn(width, width, generator=random)], 1)
    weights["mtp.fc.weight"] = both.half()


def _draft_config() -> dict[str, Any]:
    return dict(
        architectures=["LlamaForCausalLMEagle"],
        model_type="llama",
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        hidden_act="silu",
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        dtype="float16",
        bos_token_id=0,
        eos_token_id=0,
    )


def _draft_weights(body: dict[str, Any]) -> dict[str, torch.Tensor]:
    """One layer that hands the token's embedding through, nearly, to the target's head."""
    import torch

    random = torch.Generator().manual_seed(8)
    width, inner = body["hidden_size"], body["intermediate_size"]
    keys = body["num_key_value_heads"] * body["head_dim"]

    def noise(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=random) * 0.1).half()

    weights = {
        "embed_tokens.weight": noise(body["vocab_size"], width),
        "fc.weight": torch.cat([torch.eye(width), torch.zeros(width, width)], 1).half() + noise(width, 2 * width) * 0.2,
        "fc.bias": torch.zeros(width).half(),
    }
    shapes = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    weights |= {f"layers.0.{name}.weight": noise(*shape) for name, shape in shapes.items()}
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(width).half()
    return weights


def load_skeleton(folder: Path) -> Any:
    """The transformers model of a checkpoint folder in float32, with the library's own initial weights."""
    import torch
    from transformers import AutoConfig

    parsed = AutoConfig.from_pretrained(folder)
    return auto_class(parsed).from_config(parsed, dtype=torch.float32)


def auto_class(parsed: Any) -> Any:
    """The transformers auto class that loads a model of this configuration."""
    _ensure_torchvision()
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if hasattr(parsed, "vision_config") else AutoModelForCausalLM


def _published_names(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Experts one by one: transformers 5 stacks them, published checkpoints (and SGLang's loader) do not."""
    for key, value in state.items():
        if key.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(value):
                gate, up = both.chunk(2, dim=0)
                yield key.replace("gate_up_proj", f"{expert}.gate_proj.weight"), gate.clone()
                yield key.replace("gate_up_proj", f"{expert}.up_proj.weight"), up.clone()
        elif key.endswith("experts.down_proj"):
            for expert, down in enumerate(value):
                yield key.replace("down_proj", f"{expert}.down_proj.weight"), down.clone()
        else:
            yield key, value.contiguous()


def _write_tokenizer(folder: Path) -> None:
    """One token per byte, after two special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|pad|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(special), special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["a b"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    settings = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        eos_token=special[0],
        pad_token=special[1],
        model_max_length=8192,
        chat_template=template,
    )
    _write_json(folder / "tokenizer_config.json", settings)


def _write_processors(folder: Path) -> None:
    """The image and video processors that a Qwen3.5 folder must have, also to serve text."""
    common = dict(processor_class="Qwen3VLProcessor", patch_size=4, merge_size=2, temporal_patch_size=2)
    image = dict(image_processor_type="Qwen2VLImageProcessor", min_pixels=64, max_pixels=4096, **common)
    image.update(image_mean=[0.5] * 3, image_std=[0.5] * 3)
    size = dict(shortest_edge=64, longest_edge=4096)
    video = dict(video_processor_type="Qwen3VLVideoProcessor", size=size, **common)
    _write_json(folder / "preprocessor_config.json", image)
    _write_json(folder / "video_preprocessor_config.json", video)


def _ensure_torchvision() -> None:
    """Qwen3.5's classes import torchvision, whose wheel wants help beside a CPU torch."""
    with contextlib.suppress(ImportError):  # on a GPU host torchvision loads as it is
        from replayssm_cpu_host import torch_gaps

        torch_gaps.ensure_torchvision()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1))


def _stamp(name: str) -> str:
    if name not in KIMI:
        return STAMP
    from tests.harness import kimi

    return STAMP + kimi.STAMP


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    for requested in sys.argv[1:] or NAMES:
        print(build(requested))
