"""What loading the plugin does to a process: everything or nothing, and one message that says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_replayssm import arguments, plugin
from sglang_replayssm.hooks import HOOKS
from tests.plugin import fakes

ROOT = Path(__file__).resolve().parents[2]
UPSTREAM_REFUSAL = "requires --mamba-radix-cache-strategy no_buffer"


@pytest.fixture(scope="module")
def outcomes(plugins: None) -> dict[str, dict[str, Any]]:
    """Case name -> what a fresh process found (registration_child.py), all cases from one start of SGLang."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name in ("SGLANG_PLUGINS", arguments.DISABLE_ENV, arguments.REQUIRED_ENV, arguments.WARNED_ENV):
        environment.pop(name, None)
    command = [sys.executable, "-W", "ignore", "-m", "tests.plugin.registration_child"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["case"]: line for line in lines}


def messages(outcome: dict[str, Any], *levels: str) -> list[str]:
    return [text for level, text in outcome["log"] if level in levels]


def test_a_matching_sglang_gets_everything_without_a_word(outcomes: dict[str, dict[str, Any]]) -> None:
    outcome = outcomes["matching"]
    assert outcome["registered"] == sorted(HOOKS)
    assert outcome["resolution"] == 1
    assert messages(outcome, "WARNING", "ERROR") == []
    assert outcome["off"] == outcome["on"] == "ok"


@pytest.mark.parametrize(
    "case", ["mismatch", "broken_import", "kill_switch", "kill_switch_on_a_mismatch"], ids=lambda case: case
)
def test_nothing_is_registered_and_sglang_goes_on_as_upstream(outcomes: dict[str, dict[str, Any]], case: str) -> None:
    outcome = outcomes[case]
    assert outcome["registered"] == [] and outcome["resolution"] == 0
    assert outcome["exit"] is None
    assert outcome["off"] == "ok"
    assert UPSTREAM_REFUSAL in outcome["on"]


def test_a_mismatch_is_one_error_with_version_differences_and_fix(outcomes: dict[str, dict[str, Any]]) -> None:
    (message,) = messages(outcomes["mismatch"], "WARNING", "ERROR", "CRITICAL")
    assert "does not fit SGLang 0.5.23" in message
    assert "KVCacheConfigurator._handle_max_mamba_cache is not there" in message
    assert "ModelRunner.forward takes (self, forward_batch, something_new), expected" in message
    assert "Fix: install sglang==0.5.23, or a newer sglang-replayssm." in message
    assert f"{arguments.FLAG} now behaves as in plain SGLang" in message


def test_the_kill_switch_is_silent_but_for_one_line(outcomes: dict[str, dict[str, Any]]) -> None:
    for case in ("kill_switch", "kill_switch_on_a_mismatch"):
        assert messages(outcomes[case], "WARNING", "ERROR") == []
        (line,) = messages(outcomes[case], "INFO")
        assert arguments.DISABLE_ENV in line


@pytest.mark.parametrize(
    "case,reason", [("mismatch_required", "Differences:"), ("broken_import_required", "could not be loaded")]
)
def test_a_process_that_cannot_honour_the_flag_ends(
    outcomes: dict[str, dict[str, Any]], case: str, reason: str
) -> None:
    """The launcher accepted the flag; a scheduler that cannot load the plugin must not serve without it."""
    outcome = outcomes[case]
    assert outcome["registered"] == [] and outcome["resolution"] == 0
    assert reason in outcome["exit"]
    assert f"The launch is given up, because {arguments.FLAG} asks for it." in outcome["exit"]


def test_a_failing_import_is_reported_with_its_cause(outcomes: dict[str, dict[str, Any]]) -> None:
    errors = messages(outcomes["broken_import"], "ERROR")
    assert any("could not be loaded" in text and "sglang_replayssm.hooks" in text for text in errors)


def test_an_untested_version_that_matches_is_one_warning(outcomes: dict[str, dict[str, Any]]) -> None:
    outcome = outcomes["newer_version"]
    (message,) = messages(outcome, "WARNING", "ERROR")
    assert "is tested with SGLang 0.5.23; this is 0.5.24" in message
    assert outcome["registered"] == sorted(HOOKS)
    assert outcome["on"] == "ok"
    # a launch is a launcher and its processes: they do not say it again
    assert [text for level, text in outcome["log_of_a_child"] if level == "WARNING"] == []


def test_every_process_says_that_it_does_not_fit(outcomes: dict[str, dict[str, Any]]) -> None:
    """An error is not silenced by another process having said it."""
    outcome = outcomes["mismatch"]
    assert [level for level, _ in outcome["log_of_a_child"]] == ["ERROR"]


def test_registering_touches_nothing_before_sglang_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    """`register` only fills the two registries; SGLang's functions change when SGLang applies the hooks."""
    from sglang.srt.arg_groups import resolution_hooks
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.plugins.hook_registry import HookType

    forward = ModelRunner.forward
    registry = fakes.empty_registry(monkeypatch)
    plugin.register()
    assert ModelRunner.forward is forward
    assert {t: [(kind, fn) for kind, fn, _ in h] for t, h in registry._hooks.items()} == {
        target: [(HookType.AROUND, hook)] for target, hook in HOOKS.items()
    }
    assert list(resolution_hooks._HOOKS) == ["handle_linear_attn_backend"]
    assert resolution_hooks._HOOKS["handle_linear_attn_backend"] == [arguments.resolve]


def test_the_check_of_live_hooks_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    plugin.require_live_hooks()
    monkeypatch.setattr(ModelRunner, "forward", lambda self, forward_batch: None)
    with pytest.raises(RuntimeError) as error:
        plugin.require_live_hooks()
    for part in ("ModelRunner.forward", "SGLANG_PLUGINS", "sglang-replayssm-check"):
        assert part in str(error.value)
