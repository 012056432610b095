"""The wheel, the requirement lists and the `run` script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
SUPPORTED = ("3.10", "3.11", "3.12", "3.13")


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements(name: str) -> list[Requirement]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    texts = [line.split("#")[0].strip() for line in lines if not line.startswith("-r")]
    return [Requirement(text) for text in texts if text]


def chosen(name: str, python: str) -> dict[str, str]:
    """Package -> version that a requirement list installs on Linux with this Python."""
    environment = {"python_version": python, "python_full_version": f"{python}.5", "sys_platform": "linux"}
    kept = [r for r in requirements(name) if r.marker is None or r.marker.evaluate(environment)]
    names = [canonical(r.name) for r in kept]
    assert len(names) == len(set(names)), "a package is listed twice"
    return {canonical(r.name): str(r.specifier) for r in kept}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "run", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        timeout=120,
    )


def test_nothing_is_a_hard_dependency() -> None:
    assert project()["dependencies"] == []


@pytest.mark.parametrize("python", SUPPORTED)
def test_every_pin_is_exact_and_single(python: str) -> None:
    pins = chosen("cpu.txt", python)
    assert all(re.fullmatch(r"==[\w.]+", version) for version in pins.values())
    assert pins["torch"] == "==2.13.0"
    assert pins["triton"] == "==3.8.0"
    assert ("sglang" in pins) == (python != "3.10")  # the release has no build for 3.10
    assert chosen("gpu.txt", python).items() <= pins.items()


@pytest.mark.parametrize("python", SUPPORTED)
def test_direct_requirements_and_extras_are_pinned(python: str) -> None:
    pins = chosen("cpu.txt", python)
    direct = {canonical(r.name) for name in ("cpu.in", "tools.in") for r in requirements(name)}
    assert direct <= set(pins)
    extras = project()["optional-dependencies"]
    assert {canonical(name) for extra in extras.values() for name in extra} <= set(pins)


def test_the_script_follows_the_lists() -> None:
    script = (ROOT / "run").read_text()
    assert f"SGLANG={chosen('cpu.txt', '3.11')['sglang'][2:]}\n" in script
    assert re.search(r"^TORCH=(\S+)", script, re.M).group(1) == chosen("cpu.txt", "3.11")["torch"][2:]


def test_help_lists_every_command_and_wrong_use_fails() -> None:
    text = run("help").stdout
    for command in ("demo", "test", "setup", "serve", "check", "patches", "help"):
        assert re.search(rf"^  {command}\b", text, re.M)
        assert re.search(rf"^  {command}\b.*\)", (ROOT / "run").read_text(), re.M)
    assert run().stdout == text
    wrong = run("fly")
    assert wrong.returncode == 1
    assert "unknown command: fly" in wrong.stderr
    assert "serve needs a model" in run("serve").stderr
    assert "neither an environment nor" in run("setup", "/nonexistent").stderr


def test_without_a_python_the_script_says_what_to_install() -> None:
    outcome = run("check", PYTHON="no-such-python", REPLAYSSM_PYTHON="")
    assert outcome.returncode == 1
    assert "no Python 3.10 to 3.13 found" in outcome.stderr
    assert "apt-get install" in outcome.stderr


def test_a_given_environment_is_used_as_it_is(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$SGLANG_PLATFORM" "$@"\n')
    fake.chmod(0o755)
    outcome = run("check", "--quick", REPLAYSSM_PYTHON=str(fake), REPLAYSSM_TEST_CPU="1")
    assert outcome.stdout == "cpu_interp -m sglang_replayssm.check --quick\n"


def test_wheel_holds_the_packages_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, tracked.decode().split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*build, "--wheel-dir", tmp_path, source], check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    info = {top for top in tops if top.endswith(".dist-info")}
    assert tops - info == {"sglang_replayssm", "replayssm_kernels", "bench_rag"}
    for package in ("sglang_replayssm", "replayssm_kernels", "bench_rag"):
        folder = (source / "kernels" if package == "replayssm_kernels" else source) / package
        modules = {f"{package}/{path.relative_to(folder)}" for path in folder.rglob("*.py")}
        assert modules <= set(names)
        assert f"{package}/py.typed" in names
    entry_points = zipfile.ZipFile(wheel).read(f"{info.pop()}/entry_points.txt").decode()
    assert "replayssm = sglang_replayssm.plugin:register" in entry_points
    assert "sglang-replayssm-check = sglang_replayssm.check:main" in entry_points
    assert "cpu_interp" not in entry_points
