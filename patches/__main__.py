"""`./run patches`: make every patch of a pristine copy of the release, and run its script on both.

For each patch: the diff is written (--diffs), the script must see the defect on the release (before) and not on the
patched copy (after). Exit status 1 unless all do.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tabulate import tabulate
from tqdm import tqdm

from patches.catalogue import NAMES, Patch, diff, load
from patches.edit import NoPlace
from patches.pristine import RELEASE, NotPristine, build_tree
from patches.script import Outcome, run

ROOT = Path(__file__).resolve().parents[1]


def examine(patch: Patch, folder: Path, scripts: bool) -> tuple[dict[str, str], list[Outcome]]:
    """Apply one patch and run its script before and after.

    Args:
        folder: where the diff goes.
        scripts: False applies and compiles only.

    Returns:
        The changed files, and the outcomes before and after (none without scripts).
    """
    changed = patch.apply()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{patch.name}.diff").write_text(diff(changed))
    outcomes = []
    for files in ({}, changed) if scripts else ():
        with tempfile.TemporaryDirectory(prefix="replayssm-patches-") as tree:
            outcomes.append(run(patch, build_tree(Path(tree), files)))
    return changed, outcomes


def main(argv: list[str] | None = None) -> int:
    """Command line; 0 when every patch does what it says."""
    parser = argparse.ArgumentParser(prog="./run patches", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"patches to take (default: all): {', '.join(NAMES)}")
    parser.add_argument("--diffs", type=Path, default=ROOT / ".cache" / "patches", help="folder for the diffs")
    parser.add_argument("--no-scripts", action="store_true", help="apply and compile only (seconds)")
    arguments = parser.parse_args(argv)
    try:
        patches = [load(name) for name in arguments.names or NAMES]
    except ValueError as error:
        parser.error(str(error))
    rows, bad = [], False
    with tqdm(patches, unit="patch", disable=not sys.stderr.isatty()) as progress:
        for patch in progress:
            progress.set_description(patch.name)
            try:
                changed, outcomes = examine(patch, arguments.diffs, not arguments.no_scripts)
            except (NoPlace, NotPristine) as error:
                rows.append([patch.name, "does not apply", "", "", str(error)])
                bad = True
                continue
            lines = diff(changed).splitlines()
            size = f"{len(changed)} files, +{_count(lines, '+')} -{_count(lines, '-')}"
            good = not outcomes or ([o.verdict for o in outcomes] == ["defect", "right"])
            bad |= not good
            before, after = [o.verdict for o in outcomes] or ["not run", "not run"]
            rows.append([patch.name, size, before, after, "" if good else "the script did not see what it should"])
            for name, outcome in zip(("before", "after"), outcomes, strict=False):
                tqdm.write(f"{patch.name}, {name}: {outcome.detail}")
    print(f"SGLang {RELEASE}; diffs in {arguments.diffs}")
    print(tabulate(rows, headers=["patch", "change", "before", "after", "remark"]))
    return int(bad)


def _count(lines: list[str], sign: str) -> int:
    return sum(line.startswith(sign) and not line.startswith(sign * 3) for line in lines)


if __name__ == "__main__":
    sys.exit(main())
