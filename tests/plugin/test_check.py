"""`sglang-replayssm-check`: exit status, and the line that says what is wrong and what to do."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_replayssm import arguments, boundaries, check, seams
from tests.plugin import fakes


class Outcome:
    """Exit status and printed lines of one run."""

    def __init__(self, status: int, text: str) -> None:
        self.status, self.lines = status, text.splitlines()

    def of(self, status: str) -> list[str]:
        return [line for line in self.lines if line.split()[:1] == [status]]

    def line(self, subject: str) -> str:
        (line,) = [line for line in self.lines if line[4:].strip().startswith(subject)]
        return line


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the check with the kernels' self-test replaced; the first test here and the kernel tests run it."""

    def once(results: list[tuple[str, float, float, bool]] | None = None, real_kernels: bool = False) -> Outcome:
        if not real_kernels:
            passed = [("a kernel", 1e-7, 1e-5, True)] if results is None else results
            fakes.module(monkeypatch, "replayssm_kernels.selftest", run=lambda device: passed)
            monkeypatch.setattr("replayssm_kernels.selftest", SimpleNamespace(run=lambda device: passed), raising=False)
        capsys.readouterr()
        status = check.main([])
        return Outcome(status, capsys.readouterr().out)

    return once


def test_all_is_well(run: Any) -> None:
    outcome = run(real_kernels=True)
    assert outcome.status == 0, outcome.lines
    assert outcome.of("FAIL") == []
    assert outcome.lines[-1] == "Nothing is wrong."
    assert outcome.line("sglang ").split()[2] == "0.5.23"
    assert "replayssm = sglang_replayssm.plugin:register" in outcome.line("entry point")
    overrides = sum(seam.use == "override" for seam in seams.SEAMS)
    assert f"{len(seams.SEAMS)} names match, {overrides} of them overridden" in outcome.line("hook table")
    kernels = [line for line in outcome.of("ok") if line.split()[1] == "kernels"]
    assert len(kernels) >= 3 and all(": error " in line and ", bound " in line for line in kernels)
    assert "float32" in outcome.line("u records")
    assert arguments.FLAG in outcome.line("on when")


def failed(outcome: Outcome) -> str:
    """The only FAIL line of a run that must end with status 1."""
    assert outcome.status == 1
    assert outcome.lines[-1].startswith("Something is wrong")
    (line,) = outcome.of("FAIL")
    return line


def test_missing_entry_point(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package lies on the path but was never installed, so SGLang does not find it."""
    others = [SimpleNamespace(name="other", value="other:register")]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: others)
    line = failed(run())
    assert "entry point" in line and "install the package with pip" in line


def test_hook_mismatch(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    monkeypatch.delattr(ModelRunner, "forward")
    outcome = run()
    assert outcome.status == 1
    difference, fix = outcome.of("FAIL")
    assert "ModelRunner.forward is not there" in difference
    assert "install sglang==0.5.23 or a newer sglang-replayssm" in fix


def test_a_hook_table_that_cannot_be_checked(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[str]:
        raise RuntimeError("half an installation")

    monkeypatch.setattr(seams, "differences", broken)
    outcome = run()
    assert outcome.status == 1 and "half an installation" in outcome.of("FAIL")[0]


@pytest.mark.parametrize("names", ["cpu_interp", "other,another"])
def test_sglang_plugins_that_leave_us_out(names: str, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", names)
    line = failed(run())
    assert f"SGLANG_PLUGINS={names} leaves the plugin out: add 'replayssm' to it" in line


@pytest.mark.parametrize("names", ["replayssm", "cpu_interp,replayssm", "cpu_interp, replayssm ", ""])
def test_sglang_plugins_that_name_us(names: str, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SGLang reads the variable, blanks around the commas included."""
    monkeypatch.setenv("SGLANG_PLUGINS", names)
    assert run().status == 0


def test_kill_switch_is_a_note(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(arguments.DISABLE_ENV, "1")
    outcome = run()
    assert outcome.status == 0
    line = outcome.line("entry point")
    assert line.split()[0] == "note" and f"{arguments.DISABLE_ENV} switches the plugin off" in line


@pytest.mark.parametrize("package", ["torch", "triton", "sglang"])
def test_a_missing_package_ends_the_check(package: str, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    version = check._version
    monkeypatch.setattr(check, "_version", lambda name: None if name == package else version(name))
    outcome = run()
    line = failed(outcome)
    assert f"{package} " in line and "not installed in this environment" in line
    assert not any("hook table" in line for line in outcome.lines)


def test_an_untested_sglang_is_a_note(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    version = check._version
    monkeypatch.setattr(check, "_version", lambda name: "0.5.24" if name == "sglang" else version(name))
    outcome = run()
    assert outcome.status == 0
    assert "note" in outcome.line("sglang ") and "0.5.24; tested with 0.5.23" in outcome.line("sglang ")


def test_a_kernel_that_is_off(run: Any) -> None:
    line = failed(run(results=[("good", 1e-7, 1e-5, True), ("decode, fp32", 3e-3, 1e-5, False)]))
    assert "decode, fp32: error 3.0e-03, bound 1e-05" in line


def test_no_device_to_run_kernels_on(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    outcome = run(results=[("not to be run", 1.0, 0.0, False)])
    assert outcome.status == 0
    assert "TRITON_INTERPRET=1" in outcome.line("kernels")


@pytest.mark.parametrize(
    ("variable", "value", "read"),
    [
        (arguments.U_DTYPE_ENV, "fp32", arguments.u_dtype_name),
        (arguments.DIRECT_BATCH_ENV, "few", arguments.direct_batch),
        (boundaries.ENV, "tails=64", boundaries.policy_from_environment),
    ],
)
def test_a_typo_in_the_environment(
    variable: str, value: str, read: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a launch would refuse for the sake of a variable, the check names, too."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError) as refused:
        read()
    assert str(refused.value) in failed(run())


def test_the_environment_is_read_as_a_launch_reads_it(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(arguments.DIRECT_BATCH_ENV, "3")
    monkeypatch.setenv(boundaries.ENV, "off")
    outcome = run()
    assert outcome.status == 0
    assert outcome.line("direct steps").split()[3] == "3"
    assert outcome.line("states at boundaries").split()[4] == "off"


def test_help_and_unknown_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        check.main(["--help"])
    assert end.value.code == 0 and "sglang-replayssm-check" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        check.main(["--no-such-option"])
    assert end.value.code == 2


def test_the_console_script_points_here() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="sglang-replayssm-check")
    assert script.load() is check.main
