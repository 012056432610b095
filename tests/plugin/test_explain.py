"""`sglang-replayssm-check --explain`: its figures are those of a launch, its advice that of the measurements."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replayssm_kernels import launch_shapes
from replayssm_kernels.ring import Ring, RingShape
from replayssm_kernels.traffic import buffered_bytes
from sglang_replayssm import arguments, check, explain, memory_plan, worth
from sglang_replayssm.arguments import FLAG
from tests.harness import host, tiny
from tests.plugin import launch
from tests.plugin.test_arguments import ACCEPTED, ALSO_REFUSED, REFUSED

ROOT = Path(__file__).resolve().parents[2]
NO_LIMIT = SimpleNamespace(max_running_requests=None)
NO_BUFFER = ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule")


def read(*server_args: str, model: str = "qwen3-next-deep") -> tuple[explain.Launch, list[str]]:
    return explain.read(str(tiny.build(model)), ["--device", "cpu", *server_args])


def real(*argv: str, memory: float) -> tuple[Any, int, int]:
    """Configurator, slots and running requests that SGLang's own sizing gives a launch in `memory` GiB."""
    from sglang.srt.runtime_context import get_context, get_schedule

    server_args = launch.publish_flag(*argv)
    sizes = dict(max_total_tokens=None, max_mamba_cache_size=None)
    if "--max-running-requests" not in argv:
        sizes["max_running_requests"] = None
    get_context().override("test", **sizes)
    configurator = launch.configurator(server_args)
    assert 0 < configurator._handle_max_mamba_cache(memory) < memory  # the plugin's hook is on
    slots = get_schedule().max_mamba_cache_size
    return configurator, slots, slots // configurator._calculate_mamba_ratio()


@pytest.mark.parametrize(
    "args", [(), NO_BUFFER, ("--linear-replayssm-cache-len", "64"), ("--mamba-full-memory-ratio", "0.3")]
)
def test_slots_and_requests_are_those_of_a_launch(args: tuple[str, ...]) -> None:
    memory = 0.2
    said, reasons = read(*args)
    assert reasons == []
    configurator, slots, requests = real(*args, memory=memory)
    most = min(requests, memory_plan.MOST_REQUESTS)
    got = explain.fit(said, memory)
    assert abs(got[0] - slots) <= 1 and abs(got[1] - most) <= 1
    params = configurator.mambaish_config.mamba2_cache_params
    assert said.slot == params.mamba_cache_per_req
    ring = Ring.allocate(memory_plan.ring_shape(configurator, rows=2), "cpu")
    tensors = (ring.u, ring.k, ring.g, ring.checkpoint)
    assert said.shape.bytes_per_row() == sum(t.numel() * t.element_size() for t in tensors) // 2


@pytest.mark.parametrize("width", [2, 4, 16])
@pytest.mark.parametrize("cache", [(), NO_BUFFER], ids=["extra_buffer", "no_buffer"])
def test_drafts_with_and_without_a_state_of_each(width: int, cache: tuple[str, ...]) -> None:
    """Slots and running requests in the same memory are those of the two launches."""
    from sglang.srt.runtime_context import get_context, get_schedule

    memory, drafts = 0.2, (*launch.drafts(width), *cache, "--disable-overlap-schedule")
    said, reasons = read(*drafts, arguments.SPEC_FLAG)
    assert reasons == []
    assert (said.shape.max_width, said.shape.capacity) == (width, 16 + width)
    for flag, got in ((arguments.SPEC_FLAG, explain.fit(said, memory)), ("", explain.fit_with_snapshots(said, memory))):
        server_args = launch.publish(launch.parse(*drafts, *([flag] if flag else [])))
        get_context().override("test", max_total_tokens=None, max_mamba_cache_size=None, max_running_requests=48)
        configurator = launch.configurator(server_args)
        configurator._handle_max_mamba_cache(memory)
        slots = get_schedule().max_mamba_cache_size
        requests = min(48, slots // configurator._calculate_mamba_ratio())
        assert got is not None
        assert abs(got[0] - slots) <= 1 and abs(got[1] - requests) <= 1
    text = dict(explain.lines(said, memory, (1,)))["drafts"]
    assert f"{width} tokens a verify step" in text and f"{requests} running requests" in text


def test_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tiny.build("qwen3-next-deep"))
    assert check.main(["--explain", folder, "--device", "cpu", "--memory-gib", "0.25", "--batch", "1,256"]) == 0
    text = capsys.readouterr().out
    assert "3 Gated DeltaNet layers of 4; 1 key and 2 value heads of 32 x 32" in text
    assert "extra_buffer, 5 slots per running request" in text
    assert re.search(r"memory +0\.25 GiB: \d+ running requests", text)
    assert re.search(r"batch 1 .* no: ", text) and re.search(r"batch 256 .*MiB a step without", text)
    assert "FAIL" not in text


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements that stay as they are when the real ones are taken anew."""
    shape = dict(what="layers", k_heads=16, v_heads=48, head_dim=128, capacity=16)
    gdn = dict(shape, batch=[1, 8, 32, 256], ours=[5.5, 16, 42, 266], conventional=[6.5, 18, 55, 405])
    kda = dict(shape, batch=[8, 256], ours=[28, 284], conventional=[13, 285])
    bounded = dict(shape, lower_bound=-5.0, batch=[8, 256], ours=[9, 100], conventional=[13, 285])
    monkeypatch.setattr(worth, "measured", lambda: dict(machine="a GPU", gdn=gdn, kda=kda, kda_bounded=bounded))


def test_the_27b_shape_is_told_to_use_it_at_large_batches_only(tmp_path: Path, figures: None) -> None:
    config = tiny.config("qwen3-next") | dict(
        num_hidden_layers=64,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 16,
        full_attention_interval=4,
        dtype="bfloat16",
    )
    file = tmp_path / "27b.json"
    file.write_text(json.dumps(config))
    said, reasons = explain.read(str(file), ["--device", "cpu"])
    assert reasons == []
    assert said.shape.bytes_per_row() == pytest.approx(22.2e6, rel=0.005)  # docs/design.md
    assert said.slot == pytest.approx(151e6 + 48 * 3 * (2 * 16 + 48) * 128 * 2, rel=0.02)
    advice = dict(explain.lines(said, None, (1, 8, 32, 256)))
    assert "no: " in advice["batch 1"] and "no: " in advice["batch 8"]
    assert "yes: saves 0.62 ms" in advice["batch 32"] and "yes: saves 6.67 ms" in advice["batch 256"]


def test_direct_steps_are_explained_as_such(figures: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They write the state, so they move the bytes of plain decode, whatever L; the server decides alike."""
    monkeypatch.setattr(launch_shapes, "INTERPRETED", False)  # as on a GPU
    for length in ("4", "64"):
        said, _ = read("--linear-replayssm-cache-len", length)
        monkeypatch.setitem(launch_shapes._DIRECT_PAIRS, (launch_shapes.GDN, said.state_size), 64 * said.shape.v_heads)
        on_gpu = dataclasses.replace(said, args=SimpleNamespace(**vars(NO_LIMIT), device=None))
        assert launch_shapes.direct_batch(said.shape, said.state_size) == 64
        advice = dict(explain.lines(on_gpu, None, (64, 65)))
        assert "with (direct); no: saves" in advice["batch 64"] and "direct" not in advice["batch 65"]
        assert len({*re.findall(r"([0-9.,]+) (?:MiB a step without|with)", advice["batch 64"])}) == 1
        assert "direct" not in dict(explain.lines(said, None, (64,)))["batch 64"]  # --device cpu
        monkeypatch.setenv(arguments.DIRECT_BATCH_ENV, "65")
        assert (
            "no: SGLANG_REPLAYSSM_DIRECT_BATCH=65 has the state" in dict(explain.lines(on_gpu, None, (65,)))["batch 65"]
        )
        monkeypatch.setenv(arguments.DIRECT_BATCH_ENV, "0")
        assert "direct" not in dict(explain.lines(on_gpu, None, (1,)))["batch 1"]
        monkeypatch.delenv(arguments.DIRECT_BATCH_ENV)


@pytest.mark.parametrize("length", ["0", "65"])
def test_an_impossible_length_is_not_blamed_on_the_model(length: str) -> None:
    (reason,) = read("--linear-replayssm-cache-len", length)[1]
    assert "--linear-replayssm-cache-len must be 1 to 64" in reason


def test_kda_is_told_to_leave_it_off(figures: None) -> None:
    said, reasons = read("--attention-backend", "triton", model="kimi-linear")
    assert reasons == []
    advice = dict(explain.lines(said, None, (8, 256)))
    assert "slower" in advice["batch 8"] and "no: " in advice["batch 256"]


def test_a_bounded_gate_is_judged_by_its_own_measurements(figures: None) -> None:
    """The bound comes from the model's config; a ring too long for scaled keys runs the kernel of any gate."""
    said, reasons = read("--attention-backend", "triton", model="ling-v3")
    assert reasons == [] and said.shape.lower_bound == -5.0 and said.shape.scaled_keys
    advice = dict(explain.lines(said, None, (8, 256)))
    assert "slower" not in advice["batch 8"] and "a lower bound of -5" in advice["gate"]
    large = dataclasses.replace(said, shape=dataclasses.replace(said.shape, layers=40, key_dim=128, value_dim=128))
    assert "yes: " in dict(explain.lines(large, None, (256,)))["batch 256"]
    long = read("--attention-backend", "triton", "--linear-replayssm-cache-len", "64", model="ling-v3")[0]
    assert worth.kind_of(long.shape) == "kda" and "slower" in dict(explain.lines(long, None, (8,)))["batch 8"]
    # the ratio to the measured ring is that of rings of one kind
    short = read("--attention-backend", "triton", "--linear-replayssm-cache-len", "8", model="ling-v3")[0]
    assert worth.kind_of(short.shape) == "kda_bounded"
    assert "no lower bound" in dict(explain.lines(read(model="kimi-linear")[0], None, (8,)))["gate"]


HICACHE = ("--enable-hierarchical-cache", "--hicache-mem-layout", "page_first_direct")
HICACHE = (*HICACHE, "--hicache-io-backend", "direct", "--hicache-write-policy", "write_through")
LAZY = ("--mamba-radix-cache-strategy", "extra_buffer_lazy")


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("--disable-overlap-schedule",),
        ("--disable-overlap-schedule", "--page-size", "64"),
        ("--disable-radix-cache",),
        NO_BUFFER,
        NO_BUFFER[:2],
        (*NO_BUFFER, "--page-size", "64"),
        LAZY,
        ("--page-size", "64", "--mamba-track-interval", "100"),
        HICACHE,
        (*HICACHE, "--disable-overlap-schedule"),
        (*HICACHE, "--disable-overlap-schedule", "--page-size", "64"),
        (*HICACHE, *NO_BUFFER),
        (*HICACHE, *LAZY),
        (*HICACHE, "--disable-radix-cache"),
        (*HICACHE, "--hicache-write-policy", "write_back"),
        (*HICACHE, "--hicache-host-memory-mode", "buffer_only"),
        ("--enable-dp-attention", "--dp-size", "2", "--tp-size", "2"),
        ("--linear-attn-backend", "flashinfer"),
    ],
    ids=" ".join,
)
def test_the_verdict_on_the_prefix_cache_is_that_of_a_launch(args: tuple[str, ...]) -> None:
    """Whatever the arguments: refused where SGLang's whole resolution ends with an error, and only there."""
    try:
        resolved, error = launch.resolve(FLAG, *args), None
    except (AssertionError, ValueError, NotImplementedError) as raised:
        resolved, error = None, " ".join(str(raised).split())
    said, reasons = explain.read(str(tiny.build("qwen3-next-deep")), [*host.server_args(), *args])
    assert bool(reasons) == (error is not None), (reasons, error)
    if error is None:
        strategy = launch.resolved(resolved, "mamba_radix_cache_strategy")
        assert said.strategy == ("no prefix cache" if "--disable-radix-cache" in args else strategy)
    elif error:
        assert any(reason.removeprefix("SGLang itself refuses this launch: ") in error for reason in reasons)
    else:  # a bare assertion: its line says more than SGLang does
        assert "view.mamba_track_interval % view.page_size == 0" in reasons[0]


@pytest.mark.parametrize("argv,change", [*REFUSED.values(), *ALSO_REFUSED.values()], ids=[*REFUSED, *ALSO_REFUSED])
def test_whatever_a_launch_refuses_is_explained_so(argv: str, change: str) -> None:
    _, reasons = explain.read(str(tiny.build("qwen3-next-deep")), [*host.server_args(), *argv.split()])
    assert any(change in reason for reason in reasons)


@pytest.mark.parametrize("argv", ACCEPTED)
def test_whatever_a_launch_accepts_is_explained_so(argv: str) -> None:
    assert explain.read(str(tiny.build("qwen3-next-deep")), [*host.server_args(), *argv.split()])[1] == []


def test_a_machine_without_a_gpu_explains_a_launch_on_one_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's checks of extra_buffer begin with the platform; what is decided does not depend on it."""
    monkeypatch.setattr("sglang.srt.arg_groups.mamba_hook._platform_supports_mamba_cache_extra_buffer", lambda: False)
    said, reasons = read("--disable-overlap-schedule", "--page-size", "64")
    assert reasons == [] and said.strategy == "extra_buffer"
    assert "hierarchical cache and no_buffer" in read(*HICACHE, "--disable-overlap-schedule")[1][0]
    assert "no_buffer only supports page_size=1" in read(*NO_BUFFER, "--page-size", "64")[1][0]


def test_a_configuration_file_counts_as_sglang_counts_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its values, unless the command line says otherwise."""
    file = tmp_path / "launch.yaml"
    file.write_text("linear-replayssm-cache-len: 8\nenable-linear-replayssm: true\ndisable-overlap-schedule: true\n")
    said, reasons = read("--config", str(file))
    assert reasons == [] and said.shape.capacity == 8 and said.strategy == "no_buffer"
    assert read("--config", str(file), "--linear-replayssm-cache-len", "4")[0].shape.capacity == 4
    file.write_text("enable-mis: true\n")
    folder = str(tiny.build("qwen3-next-deep"))
    assert check.main(["--explain", folder, "--device", "cpu", "--config", str(file)]) == 1
    assert "drop --enable-mis" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        (arguments.DISABLE_ENV, "1", "SGLANG_REPLAYSSM_DISABLE switches the plugin off: unset it"),
        ("SGLANG_PLUGINS", "other", "SGLANG_PLUGINS=other leaves the plugin out: add 'replayssm' to it"),
    ],
)
def test_a_launch_without_the_plugin_is_not_explained_as_one_with_it(
    name: str, value: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    assert check.main(["--explain", str(tiny.build("qwen3-next-deep")), "--device", "cpu"]) == 1
    text = capsys.readouterr().out
    assert text.count("FAIL") == 1 and sentence in text
    assert "yes: " not in text and "batch" not in text


def test_a_sglang_that_does_not_fit_is_not_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    monkeypatch.delattr(ModelRunner, "forward")
    assert check.main(["--explain", str(tiny.build("qwen3-next-deep")), "--device", "cpu"]) == 1
    text = capsys.readouterr().out
    assert "ModelRunner.forward" in text and "batch" not in text


def test_a_batch_that_never_runs_is_not_advised(figures: None) -> None:
    """More requests than --max-running-requests, or than the memory holds, do not decode together."""
    said = read("--max-running-requests", "16")[0]
    advice = dict(explain.lines(said, None, (16, 17)))
    assert "at once" not in advice["batch 16"]
    assert advice["batch 17"].endswith("no: only 16 run at once (--max-running-requests)")
    said = read()[0]
    requests = explain.fit(said, 0.2)[1]
    advice = dict(explain.lines(said, 0.2, (requests, requests + 1)))
    assert "at once" not in advice[f"batch {requests}"]
    assert advice[f"batch {requests + 1}"].endswith(f"no: only {requests} run at once (0.2 GiB)")


def test_the_state_dtype_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, narrow = read()[0], read("--mamba-ssm-dtype", "bfloat16")[0]
    assert (wide.state_size, narrow.state_size) == (4, 2)
    assert narrow.slot < wide.slot


def test_a_refused_launch_is_a_failure_that_says_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tiny.build("qwen3-next-deep"))
    assert check.main(["--explain", folder, "--device", "cpu", "--enable-two-batch-overlap", "--enable-mis"]) == 1
    text = capsys.readouterr().out
    assert text.count("FAIL") == 2 and "drop --enable-mis" in text and "drop --enable-two-batch-overlap" in text


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["/no/such/folder"], "is neither a folder nor a file here"),
        (["{empty}"], "holds no config.json"),
        (["{broken}"], "is no JSON"),
        (["{dense}"], "has no Gated DeltaNet or Kimi Delta Attention layers"),
        (["{unknown}"], "SGLang can not read the config"),
        (["{good}", "--no-such-argument"], "unrecognized arguments: --no-such-argument"),
        (["{good}", "--page-size", "many"], "invalid int value: 'many'"),
        (["{good}", "--model-path", "other"], "named once"),
        (["{good}", "--config"], "No config file specified"),
        (["{good}", "--config", "{broken}"], "must be YAML"),
        (["{good}", "--config", "{listed}"], "must contain a dictionary"),
        (["{good}", "--config", "/no/such.yaml"], "not found: /no/such.yaml"),
        (["{good}", "--config={listed}"], "`--config FILE` only"),
        (["{good}", "--memory-gib", "0.00001"], "give --memory-gib at least"),
        (["{good}", "--tp-size", "0"], "--tp-size must be above 0, got 0"),
        (["{good}", "--tp-size", "3"], "do not divide into --tp-size 3"),
        (["{good}", "--page-size", "0"], "--page-size must be above 0"),
        (["{good}", "--max-running-requests", "-5"], "--max-running-requests must be above 0, got -5"),
        (["{good}", "--max-mamba-cache-size", "0"], "--max-mamba-cache-size must be above 0"),
        (["{good}", "--mamba-full-memory-ratio", "-1"], "--mamba-full-memory-ratio must be above 0"),
        (["{good}", "--config", "{zero}"], "--page-size must be above 0"),
    ],
)
def test_bad_input_is_one_error(
    given: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").write_text("{")
    (tmp_path / "listed.yaml").write_text("- a\n")
    (tmp_path / "zero.yaml").write_text("page-size: 0\n")
    dense = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=64, num_attention_heads=4)
    launch.config_folder(tmp_path / "dense", **dense, num_hidden_layers=2, intermediate_size=64, vocab_size=320)
    launch.config_folder(tmp_path / "unknown", architectures=["NoSuchModel"], model_type="no-such-type")
    places = {name: tmp_path / name for name in ("empty", "broken", "dense", "unknown")}
    places |= {
        "listed": tmp_path / "listed.yaml",
        "zero": tmp_path / "zero.yaml",
        "good": tiny.build("qwen3-next-deep"),
    }
    filled = [argument.format(**places) for argument in given]
    assert check.main(["--explain", *filled]) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    (line,) = seen.err.strip().splitlines()
    assert line.startswith("sglang-replayssm-check: error: ") and sentence in line


@pytest.mark.parametrize("given", [["--memory-gib", "4"], ["--batch", "4"], ["--tp", "2"]])
def test_arguments_without_a_model_are_refused(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        check.main(given)
    assert end.value.code == 2 and "belong to --explain MODEL" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    [["--batch", "0"], ["--batch", "few"], *(["--memory-gib", text] for text in ("-1", "nan", "1e300", "much"))],
)
def test_impossible_numbers_are_refused(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        check.main(["--explain", "anything", *given])
    shown = capsys.readouterr().err
    assert end.value.code == 2 and ("is no list of batch sizes" in shown or "is not between 0 and a million" in shown)


# -- the measurements -------------------------------------------------------------------------------------------------


def test_the_data_is_what_the_document_says() -> None:
    """docs/measurements.md is where figures are kept for people; measured.json must not drift from it."""
    text = (ROOT / "docs" / "measurements.md").read_text()
    rows = [_cells(line) for line in text.splitlines()]
    for kind, of in (("gdn", ""), ("kda", ", any gate"), ("kda_bounded", ", bounded gate")):
        table = worth.measured()[kind]
        for name, values in (
            ("batch", "batch"),
            (f"ours as served{of}", "ours"),
            (f"SGLang packed decode{of}", "conventional"),
        ):
            assert [name, *map(_number, table[values])] in rows, (kind, name)
    assert f"`--lower-bound {_number(worth.measured()['kda_bounded']['lower_bound'])}`" in text
    assert worth.measured()["machine"].split(",")[0].split()[-1] in text


def _number(value: float) -> str:
    return f"{value:g}"


def _cells(line: str) -> list[str]:
    """A table row; figures as `_number` writes them, without the mark of a direct step."""
    cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
    return [re.sub(r"^([0-9.]+)( d)?$", lambda found: _number(float(found[1])), cell) for cell in cells]


def test_between_and_beyond_the_measured_batches(figures: None) -> None:
    table = worth.measured()["gdn"]
    at = [worth.at_batch(batch, "gdn", 48, 1.0) for batch in (1, 20, 512)]
    assert at[0].ours == table["ours"][0]
    assert at[1].ours == pytest.approx((table["ours"][1] + table["ours"][2]) / 2)
    assert at[2].ours == 2 * table["ours"][-1] and at[2].worth
    # few layers, or a small state: the same share, too little of a step
    assert not worth.at_batch(32, "gdn", 4, 1.0).worth and not worth.at_batch(32, "gdn", 48, 0.1).worth


def test_a_short_ring_is_judged_by_its_own_bytes(figures: None) -> None:
    """With L = 1 every step folds: more bytes than without replay, whatever was measured with L = 16."""
    shape = RingShape(48, 2, 16, 48, 128, 128, capacity=1, key_dtype=torch.bfloat16)
    ratio = buffered_bytes(shape, 256, 4) / buffered_bytes(dataclasses.replace(shape, capacity=16), 256, 4)
    assert worth.at_batch(256, "gdn", 48, 1.0).worth
    assert not worth.at_batch(256, "gdn", 48, 1.0, ratio).worth
