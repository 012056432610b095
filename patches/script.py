"""Runs the script of a patch on one tree of SGLang, as a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from patches import outcome
from patches.catalogue import Patch
from tests.harness import host
from tests.harness.server import KILL_SWITCH, die_with_parent

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 900.0


@dataclass(frozen=True)
class Outcome:
    """What a script saw: `verdict` is "right", "defect" or "broken" (the script itself failed); `detail` one line."""

    verdict: str
    detail: str


def run(patch: Patch, tree: Path) -> Outcome:
    """Run the script of `patch` with the SGLang in folder `tree`, and without the plugin."""
    environment = {**os.environ, **host.server_env(), KILL_SWITCH: "1", "PYTHONSAFEPATH": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tree), str(ROOT)])
    process = subprocess.Popen(
        [sys.executable, "-m", f"patches.{patch.name}.shows"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env=environment,
        start_new_session=True,
        preexec_fn=die_with_parent,  # and a server that it starts dies with it
    )
    try:
        printed, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return Outcome("broken", f"no answer within {TIMEOUT:.0f} s")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [line for line in printed.splitlines() if line.strip()] or ["(nothing printed)"]
    if process.returncode in (outcome.RIGHT, outcome.DEFECT):
        return Outcome("right" if process.returncode == outcome.RIGHT else "defect", lines[-1])
    return Outcome("broken", " | ".join(lines[-3:]))
