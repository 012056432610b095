"""What a user installs: sdist and wheel build, and the wheel works in an environment that already has SGLang."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import sglang_replayssm
from tests.harness import host

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Standard output of a command that must succeed, without this repository on its path."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SGLANG_PLUGINS")}
    clean.pop("SGLANG_REPLAYSSM_DISABLE", None)
    done = subprocess.run(
        [*command], cwd=cwd, env={**clean, **environment}, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from the sdist alone."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    tracked = run("git", "ls-files", "-z", cwd=ROOT)
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    backend = f"import setuptools.build_meta as backend; backend.build_sdist(r'{folder}')"
    run(sys.executable, "-c", backend, cwd=source)
    (sdist,) = folder.glob("*.tar.gz")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    run(*pip, "--wheel-dir", folder, sdist, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def python(built: Path) -> Path:
    """The interpreter of a fresh environment that sees this one's packages, with the wheel installed into it."""
    pytest.importorskip("sglang", reason="SGLang is not installed here")
    folder = built / "environment"
    venv.create(folder, with_pip=False)
    interpreter = folder / "bin" / "python"
    (own,) = (folder / "lib").glob("python*/site-packages")
    there = [path for path in sys.path if Path(path).name == "site-packages"]
    # A path file is not followed further: editable installs of this repository stay out.
    (own / "host.pth").write_text("".join(f"{path}\n" for path in there))
    (wheel,) = built.glob("*.whl")
    said = run(interpreter, "-m", "pip", "install", "--no-index", "--force-reinstall", wheel, cwd=built)
    assert [line for line in said.splitlines() if line.startswith("Successfully installed")] == [
        f"Successfully installed sglang-replayssm-{sglang_replayssm.__version__}"
    ]
    return interpreter


def test_the_sdist_is_enough_to_build_the_wheel(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getnames()
    names = {name.split("/", 1)[1] for name in members if "/" in name}
    assert {"pyproject.toml", "README.md", "LICENSE", "sglang_replayssm/measured.json"} <= names
    (wheel,) = built.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    tracked = run("git", "ls-files", "sglang_replayssm", "bench_rag", "kernels/replayssm_kernels", cwd=ROOT)
    files = {name.removeprefix("kernels/") for name in tracked.split() if (ROOT / name).is_file()}
    assert {name for name in files if not name.endswith(".md")} <= packed


def test_the_installed_wheel_checks_itself(python: Path, built: Path) -> None:
    """Versions, entry point, hook table and kernels, from the wheel and nothing else."""
    where = run(python, "-c", "import sglang_replayssm; print(sglang_replayssm.__file__)", cwd=built).strip()
    assert Path(where).is_relative_to(built / "environment")
    environment = {**host.server_env(), "PYTHONPATH": str(ROOT / "tests" / "cpu_host"), "PYTHONSAFEPATH": "1"}
    text = run(python.parent / "sglang-replayssm-check", cwd=built, **environment)
    assert "FAIL" not in text and text.splitlines()[-1] == "Nothing is wrong."
    assert re.search(rf"sglang-replayssm +{re.escape(sglang_replayssm.__version__)}", text)
    assert re.search(r"hook table +\d+ names match", text)


def test_the_installed_wheel_explains_a_launch(python: Path, built: Path) -> None:
    from tests.harness import tiny

    config = built / "config.json"
    config.write_text(json.dumps(tiny.config("qwen3-next-deep")))
    environment = {**host.server_env(), "PYTHONPATH": str(ROOT / "tests" / "cpu_host"), "PYTHONSAFEPATH": "1"}
    check = python.parent / "sglang-replayssm-check"
    device = () if host.has_gpu() else ("--device", "cpu")
    text = run(check, "--explain", config, *device, "--memory-gib", "1", cwd=built, **environment)
    assert "3 Gated DeltaNet layers of 4" in text and "running requests" in text


def test_nothing_is_pulled_in(python: Path, built: Path) -> None:
    """With dependencies resolved: the wheel asks for none, and its extra for none that would touch torch."""
    (wheel,) = built.glob("*.whl")
    arguments = ("-m", "pip", "install", "--no-index", "--dry-run", "--force-reinstall", "--no-deps")
    assert "torch" not in run(python, *arguments, wheel, cwd=built)
    said = run(python, "-m", "pip", "install", "--no-index", "--dry-run", f"{wheel}[bench]", cwd=built)
    would = [line for line in said.splitlines() if line.startswith("Would install")]
    assert all("torch" not in line and "triton" not in line and "sglang-0" not in line for line in would)
    metadata = (
        zipfile.ZipFile(wheel).read(f"sglang_replayssm-{sglang_replayssm.__version__}.dist-info/METADATA").decode()
    )
    required = re.findall(r"^Requires-Dist: (.*)$", metadata, re.M)
    assert required and all(re.search(r"extra == .(bench|dev).$", line) for line in required)


def test_the_changelog_begins_with_this_version() -> None:
    """Semantic versions, youngest first."""
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == sglang_replayssm.__version__
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in versions)
    numbers = [tuple(map(int, version.split("."))) for version in versions]
    assert numbers == sorted(numbers, reverse=True)
