"""Which models a launch accepts, and the sentence for every other one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_replayssm.arguments import FLAG
from tests.harness import tiny
from tests.plugin import launch

LATENT = ("--attention-backend", "triton")  # what latent attention has on the CPU
ARGUMENTS = {name: LATENT if name in tiny.KIMI else () for name in tiny.NAMES}
_OTHER = dict(
    vocab_size=320,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
    intermediate_size=128,
    hidden_act="silu",
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    dtype="float16",
    bos_token_id=0,
    eos_token_id=0,
)
OTHER_MODELS: dict[str, dict[str, Any]] = {
    "NemotronHForCausalLM": dict(
        _OTHER,
        model_type="nemotron_h",
        hybrid_override_pattern="M*",
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=1,
        conv_kernel=4,
        chunk_size=64,
    ),
    "LlamaForCausalLM": dict(_OTHER, model_type="llama"),
    # Kimi-K3's text model, whose config is Kimi-Linear's: the same layers, in a model that nothing here has run
    "KimiK3LinearForCausalLM": tiny.config("kimi-linear"),
}


def refusal(folder: Path, *argv: str, **config: Any) -> str:
    """The sentence with which a launch of a model of this config is refused."""
    launch.config_folder(folder, **config)
    with pytest.raises(ValueError) as error:
        launch.resolve(FLAG, *LATENT, "--skip-tokenizer-init", *argv, model=folder)
    return str(error.value)


@pytest.mark.parametrize("model", tiny.NAMES)
def test_supported(model: str) -> None:
    server_args = launch.resolve(FLAG, *ARGUMENTS[model], model=model)
    assert launch.resolved(server_args, "enable_linear_replayssm") is False
    assert launch.resolved(server_args, "linear_attn_decode_backend") == "triton"


@pytest.mark.parametrize("architecture", OTHER_MODELS)
def test_any_other_is_refused(architecture: str, tmp_path: Path) -> None:
    """Mamba-2, no linear attention, or one that no test has run: the sentence lists what is supported."""
    message = refusal(tmp_path / "m", **OTHER_MODELS[architecture] | dict(architectures=[architecture]))
    assert f"this model is {architecture}. Drop the flag." in message
    for supported in ("Qwen3NextForCausalLM", "KimiLinearForCausalLM", "BailingMoeV3ForCausalLM"):
        assert supported in message


@pytest.mark.parametrize("backend", ["helion", "cutedsl", "flashinfer"])
@pytest.mark.parametrize("option", ["--linear-attn-decode-backend", "--linear-attn-backend"])
def test_kda_under_another_decode_backend_is_refused(option: str, backend: str) -> None:
    with pytest.raises(ValueError) as error:
        launch.resolve(FLAG, *LATENT, option, backend, model="kimi-linear")
    assert f"decode backend is {backend!r}. Use --linear-attn-decode-backend triton." in str(error.value)


def _heads(model: str, dim: int) -> dict[str, Any]:
    """A model's config with linear layers of other head dims."""
    config = tiny.config(model)
    if model == "qwen3-next":
        return config | dict(linear_key_head_dim=dim, linear_value_head_dim=dim)
    if model == "ling-v3":
        return config | dict(head_dim=dim)
    return config | dict(linear_attn_config=config["linear_attn_config"] | dict(head_dim=dim))


@pytest.mark.parametrize("model", ["qwen3-next", "kimi-linear", "ling-v3"])
@pytest.mark.parametrize("dim", [48, 512])
def test_untested_head_dims_are_refused_before_anything_is_loaded(model: str, dim: int, tmp_path: Path) -> None:
    message = refusal(tmp_path / "m", **_heads(model, dim))
    assert f"key_dim must be one of (16, 32, 64, 128, 256), got {dim}. Drop the flag." in message
    launch.resolve(*LATENT, "--skip-tokenizer-init", model=tmp_path / "m")  # without the flag it is not our affair


@pytest.mark.parametrize("model", ["kimi-linear", "ling-v3"])
def test_tested_head_dims_are_accepted(model: str, tmp_path: Path) -> None:
    folder = launch.config_folder(tmp_path / "m", **_heads(model, 128))
    launch.resolve(FLAG, *LATENT, "--skip-tokenizer-init", model=folder)
