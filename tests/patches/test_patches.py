"""Every patch applies to the pinned release, compiles, stacks with the others, and (--long) does what its page says."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("libcst")
pytest.importorskip("sglang", reason="SGLang is not installed here")

import libcst as cst
import torch

from patches import __main__ as command
from patches import edit, pristine, script
from patches.catalogue import NAMES, diff, load
from patches.fold import add_fold
from patches.host_synchronisations.shows import Waits

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", NAMES)
def test_applies_and_compiles_and_is_a_diff_that_git_takes(name: str, tmp_path: Path) -> None:
    """On a folder that holds the pristine files alone, `git apply` must give what the codemod gave."""
    changed = load(name).apply()  # compiles every file
    for path in changed:
        original = tmp_path / pristine.REPOSITORY_FOLDER / path
        original.parent.mkdir(parents=True, exist_ok=True)
        original.write_text(pristine.read(path))
    text = diff(changed)
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=text, text=True, check=True)
    for path, expected in changed.items():
        assert (tmp_path / pristine.REPOSITORY_FOLDER / path).read_text() == expected
        assert expected != pristine.read(path)


def test_all_stack() -> None:
    stacked: dict[str, str] = {}
    for name in NAMES:
        stacked |= load(name).apply(stacked)
    alone = {path for name in NAMES for path in load(name).edits}
    assert set(stacked) == alone
    assert stacked["sglang/srt/mem_cache/memory_pool.py"].count("def fold_replayssm") == 1


def test_every_patch_has_its_page_and_its_line_in_the_list() -> None:
    listed = (ROOT / "patches" / "README.md").read_text()
    for name in NAMES:
        page = (ROOT / "patches" / name / "README.md").read_text()
        patch = load(name)
        assert f"[{name}]({name}/README.md)" in listed
        for heading in ("## What goes wrong", "## How to see it", "## What the patch does"):
            assert heading in page
        assert f"./run patches {name}" in page
        assert patch.issues in page and patch.issues in listed
    folders = {path.parent.name for path in (ROOT / "patches").glob("*/codemod.py")}
    assert folders == set(NAMES)


def test_a_release_that_moved_on_is_noticed() -> None:
    module = cst.parse_module("class Other:\n    pass\n")
    with pytest.raises(edit.NoPlace, match="MambaPool: found 0 times"):
        add_fold(module)
    twice = cst.parse_module("class MambaPool:\n    pass\nclass MambaPool:\n    pass\n")
    with pytest.raises(edit.NoPlace, match="found 2 times"):
        add_fold(twice)


def test_an_edited_installation_is_not_pristine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = "sglang/srt/configs/mamba_utils.py"
    assert "class BaseLinearStateParams" in pristine.read(path)
    monkeypatch.setattr(Path, "read_bytes", lambda self: b"edited")
    with pytest.raises(pristine.NotPristine, match="not what the release shipped; install it anew: pip install"):
        pristine.read(path)
    monkeypatch.undo()
    with pytest.raises(pristine.NotPristine, match="has no sglang/nowhere.py"):
        pristine.read("sglang/nowhere.py")
    monkeypatch.setattr(pristine, "RELEASE", "0.0.1")
    with pytest.raises(pristine.NotPristine, match=r"for SGLang 0\.0\.1, this is 0\.5\."):
        pristine.read(path)


def test_a_tree_differs_in_the_changed_file_only(tmp_path: Path) -> None:
    path = "sglang/version.py"
    tree = pristine.build_tree(tmp_path, {path: "__version__ = 'patched'\n"})
    assert (tree / path).read_text() == "__version__ = 'patched'\n"
    assert pristine.read(path) != "__version__ = 'patched'\n"
    other = "sglang/srt/server_args.py"
    assert (tree / other).read_text() == pristine.read(other)
    shutil.rmtree(tree)
    assert pristine.read(path)


def outcomes(monkeypatch: pytest.MonkeyPatch, *verdicts: str) -> None:
    """The command, with scripts that say these things in turn."""
    said = iter(verdicts)
    monkeypatch.setattr(command, "build_tree", lambda folder, changed: folder)
    monkeypatch.setattr(command, "run", lambda patch, tree: script.Outcome(next(said), "seen"))


def test_the_command_wants_the_defect_before_and_none_after(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["help_text", "--diffs", str(tmp_path)]
    outcomes(monkeypatch, "defect", "right")
    assert command.main(arguments) == 0
    assert (tmp_path / "help_text.diff").read_text().startswith("--- a/python/sglang/srt/")
    for verdicts in (("right", "right"), ("defect", "defect"), ("broken", "right"), ("defect", "broken")):
        outcomes(monkeypatch, *verdicts)
        assert command.main(arguments) == 1
        assert "did not see what it should" in capsys.readouterr().out


def test_an_unknown_patch_is_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(["nonsense"])
    assert end.value.code == 2
    assert "there is no patch 'nonsense'; there are help_text, " in capsys.readouterr().err


def test_a_script_that_fails_by_itself_is_neither_right_nor_a_defect(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("raise ImportError('half a release')\n")
    seen = script.run(load("help_text"), tmp_path)
    assert seen.verdict == "broken" and "half a release" in seen.detail


@pytest.mark.parametrize(
    ("operation", "seen"),
    [
        (lambda mask: mask.to("cpu"), 1),
        (lambda mask: mask.to(device="cpu", dtype=torch.int32), 1),
        (lambda mask: mask.to(torch.device("cpu"), torch.int32), 1),
        (lambda mask: torch.tensor([1, 2], device="cpu"), 1),
        (lambda mask: mask[mask], 1),
        (lambda mask: torch.unique(mask), 1),
        (lambda mask: mask.to("cpu", non_blocking=True), 0),
        (lambda mask: mask.to(torch.int32), 0),
        (lambda mask: torch.where(mask, 1, 0), 0),
        (lambda mask: torch.zeros(3, device="cpu"), 0),
    ],
)
def test_what_counts_as_a_wait(operation: Callable[[torch.Tensor], object], seen: int) -> None:
    waits = Waits()
    mask = torch.tensor([True, False, True])
    with waits.watching():
        operation(mask)
    assert len(waits.seen) == seen


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_the_script_sees_the_defect_before_and_none_after(name: str, tmp_path: Path) -> None:
    seen = command.examine(load(name), tmp_path, scripts=True)[1]
    print(*seen, sep="\n")
    assert [outcome.verdict for outcome in seen] == ["defect", "right"]
