"""Launch arguments through SGLang's own resolution: what is accepted, what is refused, and with which sentence."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from sglang_replayssm import arguments
from sglang_replayssm.arguments import FLAG, SPEC_FLAG
from tests.harness import tiny
from tests.plugin import launch

# field of the refusal table -> a command line that reaches it, and what the sentence must tell the user to change
REFUSED = {
    "hicache_host_memory_mode": (
        "--enable-hierarchical-cache --hicache-host-memory-mode buffer_only --hicache-storage-backend file "
        "--hicache-ratio 2",
        "use --hicache-host-memory-mode cache",
    ),
    "hicache_storage_backend": (
        "--enable-hierarchical-cache --hicache-storage-backend mooncake",
        "use --hicache-storage-backend file",
    ),
    "enable_lmcache": ("--enable-lmcache", "drop --enable-lmcache"),
    "enable_flexkv": ("--enable-flexkv", "drop --enable-flexkv"),
    "enable_unified_cache_external_linker": (
        "--enable-unified-cache-external-linker",
        "drop --enable-unified-cache-external-linker",
    ),
    "radix_cache_backend": ("--radix-cache-backend flexkv", "drop --radix-cache-backend"),
    "disaggregation_mode": ("--disaggregation-mode prefill", "drop --disaggregation-mode"),
    "enable_pd_role_switch": ("--enable-pd-role-switch", "drop --enable-pd-role-switch"),
    "enable_streaming_session": ("--enable-streaming-session", "drop --enable-streaming-session"),
    "enable_session_radix_cache": ("--enable-session-radix-cache", "drop --enable-session-radix-cache"),
    "enable_unified_memory": ("--enable-unified-memory", "drop --enable-unified-memory"),
    "enable_page_major_kv_layout": ("--enable-page-major-kv-layout", "drop --enable-page-major-kv-layout"),
    "enable_int8_mamba_checkpoint": ("--enable-int8-mamba-checkpoint", "drop --enable-int8-mamba-checkpoint"),
    "enable_mamba_cache_stochastic_rounding": (
        "--enable-mamba-cache-stochastic-rounding --mamba-ssm-dtype float16",
        "drop --enable-mamba-cache-stochastic-rounding",
    ),
    "pp_size": ("--pp-size 2", "use --pp-size 1"),
    "dp_size": ("--dp-size 2", "use --dp-size 1"),
    "attn_dp_size": ("--attn-dp-size 2 --tp-size 2", "use --attn-dp-size 1"),
    "dcp_size": ("--dcp-size 2 --tp-size 2", "use --dcp-size 1"),
    "attn_cp_size": ("--attn-cp-size 2 --tp-size 2", "use --attn-cp-size 1"),
    "enable_two_batch_overlap": ("--enable-two-batch-overlap", "drop --enable-two-batch-overlap"),
    "enable_pdmux": ("--enable-pdmux", "drop --enable-pdmux"),
    "enable_mis": ("--enable-mis", "drop --enable-mis"),
    "use_ray": ("--use-ray", "drop --use-ray"),
    "dllm_algorithm": ("--dllm-algorithm LowConfidence", "drop --dllm-algorithm"),
    "enable_torch_compile": ("--enable-torch-compile", "drop --enable-torch-compile"),
    "enable_memory_saver": ("--enable-memory-saver", "drop --enable-memory-saver"),
    "enable_nvidia_megakernel": ("--enable-nvidia-megakernel", "drop --enable-nvidia-megakernel"),
    "enable_deterministic_inference": (
        "--enable-deterministic-inference --attention-backend triton",
        "drop --enable-deterministic-inference",
    ),
    "rl_on_policy_target": (
        "--rl-on-policy-target fsdp --attention-backend triton",
        "drop --rl-on-policy-target",
    ),
    "enable_return_aux_hidden_states": (
        "--enable-return-aux-hidden-states --speculative-algorithm EAGLE3",
        "drop --enable-return-aux-hidden-states",
    ),
}
# Other ways to the same settings.
ALSO_REFUSED = {
    "deprecated DP attention flag": ("--enable-dp-attention --tp-size 2 --dp-size 2", "use --attn-dp-size 1"),
    "decode side of PD": ("--disaggregation-mode decode", "drop --disaggregation-mode"),
    "speculation without its flag": ("--speculative-algorithm NEXTN", "add --enable-linear-replayssm-spec, or drop"),
    "cutedsl decode": ("--linear-attn-decode-backend cutedsl", "Use --linear-attn-decode-backend triton"),
    "flashinfer everywhere": ("--linear-attn-backend flashinfer", "Use --linear-attn-decode-backend triton"),
    "capacity 0": ("--linear-replayssm-cache-len 0", "--linear-replayssm-cache-len must be 1 to 64, got 0"),
    "capacity 65": ("--linear-replayssm-cache-len 65", "--linear-replayssm-cache-len must be 1 to 64, got 65"),
    "capacity -3": ("--linear-replayssm-cache-len -3", "--linear-replayssm-cache-len must be 1 to 64, got -3"),
    "host tier on two ranks": (
        "--enable-hierarchical-cache --tp-size 2",
        "cache and several ranks yet: drop --enable-h",
    ),
    "host tier of request-end states": (
        "--enable-hierarchical-cache --mamba-radix-cache-strategy no_buffer --disable-overlap-schedule",
        "cache and no_buffer yet: drop --enable-hierarchical-cache",
    ),
    "another device": ("--device xpu", "needs an NVIDIA GPU"),
}
# The same for ring spec-verify, beside NEXTN with the usual three drafts.
SPEC_REFUSED = {
    "speculative_algorithm": ("--speculative-algorithm NGRAM", "use --speculative-algorithm NEXTN or EAGLE"),
    "speculative_eagle_topk": (
        "--speculative-num-steps 3 --speculative-eagle-topk 2 --speculative-num-draft-tokens 4",
        "use --speculative-eagle-topk 1",
    ),
    "speculative_adaptive": ("--speculative-adaptive", "drop --speculative-adaptive"),
    "enable_multi_layer_eagle": ("--enable-multi-layer-eagle", "drop --enable-multi-layer-eagle"),
    "tp_size": ("--tp-size 2", "use --tp-size 1"),
    "enable_hierarchical_cache": ("--enable-hierarchical-cache", "drop --enable-hierarchical-cache"),
    "mamba_radix_cache_strategy": (
        "--mamba-radix-cache-strategy extra_buffer_lazy",
        "use --mamba-radix-cache-strategy extra_buffer",
    ),
    "enable_mixed_chunk": ("--enable-mixed-chunk --chunked-prefill-size 128", "drop --enable-mixed-chunk"),
    "linear_attn_verify_backend": (
        "--linear-attn-verify-backend flashinfer",
        "use --linear-attn-verify-backend triton",
    ),
}
ALSO_SPEC_REFUSED = {
    **{
        name: ("--speculative-algorithm " + name, "use --speculative-algorithm NEXTN or EAGLE")
        for name in ("DFLASH", "EAGLE3")
    },
    "PD prefill": ("--disaggregation-mode prefill", "drop --disaggregation-mode"),
    "too many drafts": ("--speculative-num-steps 16 --speculative-eagle-topk 1", "use --speculative-num-steps 15"),
    "a ring that folds in every step": (
        "--linear-replayssm-cache-len 3",
        "needs --linear-replayssm-cache-len 4 to 60, got 3: use 4",
    ),
    "a ring too large": (
        "--linear-replayssm-cache-len 61",
        "needs --linear-replayssm-cache-len 4 to 60, got 61: use 60",
    ),
    "no ring": ("--linear-replayssm-cache-len 0", "must be 1 to 64, got 0"),
}
SPEC_ACCEPTED = (
    "",
    "--enable-linear-replayssm",
    "--linear-replayssm-cache-len 4",
    "--linear-replayssm-cache-len 60",
    "--speculative-num-steps 15 --speculative-eagle-topk 1 --speculative-num-draft-tokens 16",
    "--speculative-num-steps 1 --speculative-eagle-topk 1 --speculative-num-draft-tokens 2",
    "--mamba-radix-cache-strategy no_buffer --disable-overlap-schedule",
    "--mamba-radix-cache-strategy extra_buffer",
    "--disable-radix-cache",
    "--linear-attn-verify-backend triton",
    "--mamba-ssm-dtype bfloat16",
)
NEXTN = ("--attention-backend", "triton", "--speculative-algorithm", "NEXTN")
BLACKWELL = SimpleNamespace(is_sm100=True, is_cuda=True, has_flashinfer=False)
ACCEPTED = (
    "",
    "--linear-replayssm-cache-len 1",
    "--linear-replayssm-cache-len 64",
    "--mamba-radix-cache-strategy no_buffer --disable-overlap-schedule",
    "--mamba-radix-cache-strategy extra_buffer",
    "--enable-hierarchical-cache",
    "--mamba-radix-cache-strategy extra_buffer_lazy",
    "--disable-radix-cache",
    "--disable-overlap-schedule",
    "--enable-mixed-chunk --chunked-prefill-size 128 --page-size 64",
    "--linear-attn-decode-backend triton",
    "--linear-attn-backend flashinfer --linear-attn-decode-backend triton",
    "--mamba-ssm-dtype bfloat16",
)


def test_every_row_of_the_refusal_table_has_a_case() -> None:
    assert {field for field, *_ in arguments._REFUSALS} == set(REFUSED)


@pytest.mark.parametrize("argv,change", [*REFUSED.values(), *ALSO_REFUSED.values()], ids=[*REFUSED, *ALSO_REFUSED])
def test_refused_with_what_to_change(argv: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unproven configuration ends the launch in a sentence that names the flag and the way out."""
    # SGLang itself refuses stochastic rounding anywhere but on Blackwell
    monkeypatch.setattr("sglang.srt.arg_groups.mamba_hook.get_platform", lambda: BLACKWELL)
    with pytest.raises(ValueError) as error:
        launch.resolve(FLAG, *argv.split())
    message = str(error.value)
    assert change in message
    assert message.startswith("--") and message.endswith(".")
    assert arguments.REQUIRED_ENV not in arguments.os.environ


@pytest.mark.parametrize("policy", ["write_through", "write_back", "write_through_selective"])
@pytest.mark.parametrize("model", ["qwen3-next-deep", "kimi-linear"])
def test_the_host_tier_takes_every_write_policy_and_gate(policy: str, model: str) -> None:
    argv = ("--enable-hierarchical-cache", "--hicache-write-policy", policy, "--attention-backend", "triton")
    launch.resolve(FLAG, *argv, model=model)


def test_every_row_of_the_spec_refusal_table_has_a_case() -> None:
    assert {field for field, *_ in arguments._SPEC_REFUSALS} == set(SPEC_REFUSED)


@pytest.mark.parametrize(
    "argv,change",
    [*SPEC_REFUSED.values(), *ALSO_SPEC_REFUSED.values()],
    ids=[*SPEC_REFUSED, *ALSO_SPEC_REFUSED],
)
def test_spec_refused_with_what_to_change(argv: str, change: str) -> None:
    with pytest.raises(ValueError) as error:
        launch.resolve(SPEC_FLAG, *NEXTN, *argv.split())
    message = str(error.value)
    assert change in message
    assert message.startswith("--") and message.endswith(".")
    assert arguments.REQUIRED_ENV not in arguments.os.environ


@pytest.mark.parametrize(
    "variable,value,proven",
    [
        ("SGLANG_RAGGED_VERIFY_MODE", "compact", "static"),
        ("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "true", "0"),
        ("SGLANG_ENABLE_PP_SPEC", "1", "0"),
    ],
)
def test_spec_refuses_variables_of_unproven_ways(
    variable: str, value: str, proven: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {name for name, *_ in arguments._SPEC_ENVIRONMENT} >= {variable}
    view = launch.parse(SPEC_FLAG, *NEXTN)
    monkeypatch.setenv(variable, value)
    (sentence,) = arguments._spec_refusals(view, ["Qwen3NextForCausalLM"])
    assert f"set {variable}={proven}" in sentence
    monkeypatch.setenv(variable, proven)
    assert not arguments._spec_refusals(view, ["Qwen3NextForCausalLM"])


def test_spec_without_speculation_is_refused() -> None:
    with pytest.raises(ValueError, match="add --speculative-algorithm NEXTN, or use --enable-linear-replayssm without"):
        launch.resolve(SPEC_FLAG)


@pytest.mark.parametrize("algorithm", ["NEXTN", "EAGLE"])
def test_spec_is_refused_where_no_draft_works(algorithm: str) -> None:
    """The reason is SGLang's: once its class has what is named, or another draft is proven, the refusal goes."""
    from sglang.srt.models.kimi_linear import KimiLinearForCausalLM

    with pytest.raises(ValueError, match=r"nothing to verify with KimiLinearForCausalLM: .* Drop --enable-linear-rep"):
        launch.resolve(
            *(SPEC_FLAG, "--attention-backend", "triton", "--speculative-algorithm", algorithm),
            *("--linear-attn-verify-backend", "triton"),
            model="kimi-linear",
        )
    assert not hasattr(KimiLinearForCausalLM, "get_embed_and_head")


@pytest.mark.parametrize("model", [name for name in tiny.LING if "mtp" in name])
def test_spec_takes_kda_of_either_gate(model: str) -> None:
    """Of models that draft for themselves; T is the one that SGLang then takes."""
    server_args = launch.publish(launch.parse(SPEC_FLAG, *NEXTN, model=model))
    assert launch.resolved(server_args, "enable_linear_replayssm_spec") is False
    assert launch.resolved(server_args, "mamba_ssm_dtype") == "float32"
    assert arguments.step_width() == launch.resolved(server_args, "speculative_num_draft_tokens")
    assert arguments.planned_width(server_args) == arguments.step_width()


@pytest.mark.parametrize("argv", SPEC_ACCEPTED)
def test_spec_accepted_puts_the_in_tree_code_to_sleep(argv: str) -> None:
    """Alone or with the decode flag; the width that was planned for is the one that SGLang then serves with."""
    server_args = launch.resolve(SPEC_FLAG, *NEXTN, *argv.split())
    for flag in ("enable_linear_replayssm", "enable_linear_replayssm_spec"):
        assert launch.resolved(server_args, flag) is False
    assert server_args.enable_linear_replayssm_spec is True
    assert launch.resolved(server_args, "linear_attn_decode_backend") == "triton"
    # SGLang's own default under the flag: what it declares for a state in which nothing is named
    state = argv.split()[-1] if "--mamba-ssm-dtype" in argv else "float32"
    assert launch.resolved(server_args, "mamba_ssm_dtype") == state
    launch.publish(server_args)
    assert arguments.requested() and arguments.spec_requested()
    width = launch.resolved(server_args, "speculative_num_draft_tokens")
    assert arguments.step_width() == width == arguments.planned_width(server_args)
    assert arguments.ring_capacity() == server_args.linear_replayssm_cache_len + width


def test_all_reasons_come_at_once() -> None:
    with pytest.raises(ValueError) as error:
        launch.resolve(FLAG, "--enable-pdmux", "--pp-size", "2", "--linear-replayssm-cache-len", "99")
    for part in ("--enable-pdmux", "--pp-size 1", "got 99"):
        assert part in str(error.value)


@pytest.mark.parametrize("argv", ACCEPTED)
def test_accepted_puts_the_in_tree_code_to_sleep(argv: str) -> None:
    """The resolved in-tree flag is False, the raw record keeps the wish, and the server's processes inherit it."""
    server_args = launch.resolve(FLAG, *argv.split())
    assert launch.resolved(server_args, "enable_linear_replayssm") is False
    assert server_args.enable_linear_replayssm is True
    assert arguments.os.environ[arguments.REQUIRED_ENV] == "1"
    words = argv.split()
    if "--linear-replayssm-cache-len" in words:
        assert server_args.linear_replayssm_cache_len == int(words[-1])


def test_published_views_in_a_child_process() -> None:
    """A scheduler gets the pickled record and resolves nothing again: it reads the wish from the raw record."""
    assert not arguments.requested()  # nothing published yet
    child = pickle.loads(pickle.dumps(launch.resolve(FLAG)))
    launch.publish(child)
    from sglang.srt.runtime_context import get_exec

    assert arguments.requested()
    assert get_exec().mamba.enable_linear_replayssm is False


def test_flag_off_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the flag the whole resolved record equals that of a SGLang without the plugin."""
    from sglang.srt.arg_groups import resolution_hooks

    argv = ("--random-seed", "7", "--port", "30123")
    with_plugin = launch.resolve(*argv)
    assert arguments.REQUIRED_ENV not in arguments.os.environ
    monkeypatch.setattr(resolution_hooks, "_HOOKS", {})
    plain = launch.resolve(*argv)
    assert with_plugin.resolved_dict() == plain.resolved_dict()
    launch.publish(with_plugin)
    assert not arguments.requested()


def test_without_the_plugin_the_flag_behaves_as_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.arg_groups import resolution_hooks

    monkeypatch.setattr(resolution_hooks, "_HOOKS", {})
    with pytest.raises(ValueError, match="requires --mamba-radix-cache-strategy no_buffer"):
        launch.resolve(FLAG)
    plain = launch.resolve(FLAG, "--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule")
    assert launch.resolved(plain, "enable_linear_replayssm") is True


@pytest.mark.parametrize("flag", [(), (FLAG,)], ids=["off", "on"])
def test_the_previous_step_runs_once_and_sees_the_flag_off(flag: tuple[str, ...]) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view

    server_args = launch.resolve(*flag)  # every step before ours has run; ours runs again below
    server_args._resolved_overrides = [
        entry for entry in server_args._resolved_overrides if entry[0] != "sglang_replayssm"
    ]
    seen = []
    arguments.resolve(server_args, lambda args: seen.append(resolving_view(args).enable_linear_replayssm))
    assert seen == [False]


def test_a_launch_without_the_flag_takes_the_demand_back() -> None:
    """REQUIRED_ENV of an earlier launch in the same process does not outlive it, refused launches included."""
    launch.resolve(FLAG)
    assert arguments.REQUIRED_ENV in arguments.os.environ
    launch.resolve()
    assert arguments.REQUIRED_ENV not in arguments.os.environ
    launch.resolve(FLAG)
    with pytest.raises(ValueError):
        launch.resolve(FLAG, "--pp-size", "2")
    assert arguments.REQUIRED_ENV not in arguments.os.environ


def test_dead_hooks_end_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang only logs a hook that it could not apply; with the flag on that must not pass."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    monkeypatch.setattr(ModelRunner, "forward", ModelRunner.forward.__wrapped__)
    with pytest.raises(RuntimeError, match=r"did not apply .*ModelRunner\.forward"):
        launch.resolve(FLAG)
    assert arguments.REQUIRED_ENV not in arguments.os.environ
    launch.resolve()  # and without the flag nobody cares


def test_publish_checks_the_hooks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler resolves nothing: there, publication is what finds a dead hook."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    on, off = launch.resolve(FLAG), launch.resolve()
    monkeypatch.setattr(ModelRunner, "forward", ModelRunner.forward.__wrapped__)
    with pytest.raises(RuntimeError, match=r"did not apply .*ModelRunner\.forward"):
        launch.publish(on)
    launch.publish(off)


def test_our_kernel_keeps_the_triton_place_on_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's default there is FlashInfer decode for a bf16 state, chosen in the very step that we wrap."""
    from sglang.srt.arg_groups import attention_hook

    monkeypatch.setattr(attention_hook, "get_platform", lambda: SimpleNamespace(is_sm100=True, is_cuda=False))
    bf16 = ("--mamba-ssm-dtype", "bfloat16")
    assert launch.resolved(launch.resolve(*bf16), "linear_attn_decode_backend") == "flashinfer"
    assert launch.resolved(launch.resolve(FLAG, *bf16), "linear_attn_decode_backend") == "triton"


# -- the device, the records' dtype and the kill switch ---------------------------------------------------------------


@pytest.mark.parametrize(
    "device,interpreted,refused",
    [
        ("cuda", False, None),
        (None, False, None),
        ("cpu", True, None),
        ("cpu", False, "--device cpu"),
        ("npu", True, "--device npu"),
        ("xpu", False, "--device xpu"),
    ],
)
def test_devices(device: str | None, interpreted: bool, refused: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", str(int(interpreted)))
    found = arguments._device_refusals(device)
    assert len(found) == (refused is not None)
    assert all(refused in sentence for sentence in found if refused)


def test_amd_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    (sentence,) = arguments._device_refusals("cuda")
    assert "this is an AMD GPU" in sentence


@pytest.mark.parametrize("value,on", [("", False), ("0", False), ("false", False), ("False", False), ("1", True)])
def test_kill_switch_values(value: str, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(arguments.DISABLE_ENV, value)
    assert arguments.disabled_by_environment() is on


def test_u_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 unless asked otherwise; a typo is refused at launch, not taken for the default."""
    monkeypatch.delenv(arguments.U_DTYPE_ENV, raising=False)
    assert arguments.u_dtype_name() == "float32"
    monkeypatch.setenv(arguments.U_DTYPE_ENV, "bfloat16")
    assert arguments.u_dtype_name() == "bfloat16"
    monkeypatch.setenv(arguments.U_DTYPE_ENV, "float16")
    with pytest.raises(ValueError, match="set it to float32"):
        launch.resolve(FLAG)


def test_refusals_of_a_supported_view_are_empty() -> None:
    """`refusals` reads a field for every row: a field that SGLang renamed would raise here."""
    from sglang.srt.arg_groups.overrides import resolving_view

    view = resolving_view(launch.resolve())
    reasons: Callable[..., list[str]] = arguments.refusals
    assert reasons(view, ["Qwen3NextForCausalLM"], "gdn") == []
    assert len(reasons(view, ["Qwen3NextForCausalLM"], None)) == 1
    assert len(reasons(view, ["SomeOtherForCausalLM"], "gdn")) == 1


def test_several_ranks_are_for_gated_deltanet_only() -> None:
    """Two ranks are proven with Gated DeltaNet; with Kimi Delta Attention they are refused in a sentence."""
    view = launch.parse("--tp-size", "2", "--enable-linear-replayssm")
    architectures = [arguments.ARCHITECTURES[gate][0] for gate in ("gdn", "kda")]
    assert not [reason for reason in arguments.refusals(view, architectures[:1], "gdn") if "--tp-size" in reason]
    (reason,) = [reason for reason in arguments.refusals(view, architectures[1:], "kda") if "--tp-size" in reason]
    assert "use --tp-size 1" in reason
