"""The installed SGLang as its release shipped it, and trees that differ from it in a few files only."""

from __future__ import annotations

import base64
import difflib
import hashlib
import importlib.metadata
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

RELEASE = "0.5.23"
# Where the package lies in SGLang's repository: the diffs apply there with `git apply`.
REPOSITORY_FOLDER = "python"


class NotPristine(RuntimeError):
    """The installed SGLang is missing, another release, or was edited."""


def read(path: str) -> str:
    """Text of one file ("sglang/srt/...") of the installed release, after comparing it with the wheel's own record.

    Raises:
        NotPristine: see there; the message says what to install.
    """
    fix = f"install it anew: pip install --force-reinstall --no-deps sglang=={RELEASE}"
    try:
        distribution = importlib.metadata.distribution("sglang")
    except importlib.metadata.PackageNotFoundError as error:
        raise NotPristine(f"SGLang is not installed here; {fix}") from error
    if distribution.version != RELEASE:
        raise NotPristine(f"the patches are for SGLang {RELEASE}, this is {distribution.version}; {fix}")
    record = {str(file): file for file in distribution.files or ()}
    if path not in record:
        raise NotPristine(f"SGLang {RELEASE} has no {path}; {fix}")
    data = Path(record[path].locate()).read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    if record[path].hash is None or record[path].hash.value != digest:
        raise NotPristine(f"{path} is not what the release shipped; {fix}")
    return data.decode()


def package_folder() -> Path:
    """Folder of the installed package, without importing it."""
    distribution = importlib.metadata.distribution("sglang")
    return Path(distribution.locate_file("sglang"))


def build_tree(folder: Path, changed: Mapping[str, str]) -> Path:
    """A copy of the package under `folder`, to be put first on PYTHONPATH: links, and real files where `changed`.

    Args:
        changed: text by path ("sglang/srt/...").
    """
    source = package_folder()
    for here, _, names in os.walk(source):
        target = folder / "sglang" / Path(here).relative_to(source)
        target.mkdir(parents=True, exist_ok=True)
        for name in names:
            if not name.endswith(".pyc"):
                (target / name).symlink_to(Path(here) / name)
        # Compiled modules are found by the time and size of their source, which a link shares with its target.
        cache = Path(here) / "__pycache__"
        if cache.is_dir() and Path(here).name != "__pycache__":
            (target / "__pycache__").mkdir()
            for compiled in cache.glob("*.pyc"):
                (target / "__pycache__" / compiled.name).symlink_to(compiled)
    for path, text in changed.items():
        file = folder / path
        file.unlink()
        file.write_text(text)
    return folder


def unified_diff(path: str, before: str, after: str) -> str:
    """The change of one file, in the form that `git apply` takes in a checkout of SGLang."""
    name = PurePosixPath(REPOSITORY_FOLDER) / path
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}"
    )
    return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)
