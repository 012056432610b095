"""`sglang-replayssm-check` (or `python -m sglang_replayssm.check`): does this installation work, and what is on.

With `--explain MODEL [server args]` instead: what the plugin would do for that launch. Without it, prints the versions,
the hook table, the kernels' numeric self-test on this machine's device, and the switches in the environment. Exit
status 1 when anything is wrong; the line that is wrong says what to do.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Sequence

from sglang_replayssm import __version__, arguments, boundaries, seams

OK, BAD, NOTE = "ok", "FAIL", "note"


class Report:
    """Lines of (status, subject, detail), printed as they come; `failed` once one of them was FAIL."""

    def __init__(self) -> None:
        self.failed = False

    def add(self, status: str, subject: str, detail: str) -> None:
        self.failed |= status == BAD
        print(f"{status:>4}  {subject:<26} {detail}", flush=True)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_versions(report: Report) -> bool:
    """Python, torch, Triton and SGLang are there; SGLang's version is one that is tested. False stops the check."""
    report.add(OK, "sglang-replayssm", f"{__version__}, Python {platform.python_version()}")
    for name in ("torch", "triton", "sglang"):
        version = _version(name)
        if version is None:
            report.add(BAD, name, "not installed in this environment; install SGLang first")
        elif name == "sglang" and version not in seams.TESTED_SGLANG:
            report.add(NOTE, name, f"{version}; tested with {', '.join(seams.TESTED_SGLANG)}")
        else:
            report.add(OK, name, version)
    return not report.failed


def check_entry_point(report: Report, off: str = NOTE) -> None:
    """SGLang finds the plugin, and nothing in the environment keeps it out; `off`: status under the kill switch."""
    points = importlib.metadata.entry_points(group="sglang.srt.plugins")
    mine = [point for point in points if point.value == "sglang_replayssm.plugin:register"]
    if not mine:
        report.add(BAD, "entry point", "SGLang does not see the plugin: install the package with pip")
    elif arguments.disabled_by_environment():
        report.add(off, "entry point", f"found, but {arguments.DISABLE_ENV} switches the plugin off: unset it")
    elif (only := os.environ.get("SGLANG_PLUGINS")) and mine[0].name not in map(str.strip, only.split(",")):
        report.add(BAD, "entry point", f"SGLANG_PLUGINS={only} leaves the plugin out: add {mine[0].name!r} to it")
    else:
        report.add(OK, "entry point", f"{mine[0].name} = {mine[0].value}")


def check_seams(report: Report) -> None:
    """Every name of SGLang that the plugin touches is there with the expected shape."""
    try:
        differences = seams.differences()
    except Exception as error:
        differences = [repr(error)]
    for difference in differences:
        report.add(BAD, "hook table", difference)
    if not differences:
        overrides = sum(seam.use == "override" for seam in seams.SEAMS)
        report.add(OK, "hook table", f"{len(seams.SEAMS)} names match, {overrides} of them overridden")
    else:
        report.add(BAD, "hook table", f"install sglang=={seams.TESTED_SGLANG[0]} or a newer sglang-replayssm")


def check_kernels(report: Report) -> None:
    """The kernels compile and agree with the fp64 reference on this machine."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        report.add(NOTE, "kernels", "not checked: no GPU; TRITON_INTERPRET=1 runs them in Triton's interpreter")
        return
    from replayssm_kernels import selftest

    name = torch.cuda.get_device_name() if device == "cuda" else "CPU, Triton's interpreter"
    report.add(OK, "device", name)
    for test, error, bound, passed in selftest.run(device):
        report.add(OK if passed else BAD, "kernels", f"{test}: error {error:.1e}, bound {bound:.0e}")


def check_environment(report: Report) -> None:
    """Switches of ours, as a launch would read them."""
    direct = "small batches where that was measured to be faster"
    switches: tuple[tuple[str, str, Callable[[], object], str], ...] = (
        ("u records", arguments.U_DTYPE_ENV, arguments.u_dtype_name, ""),
        ("direct steps", arguments.DIRECT_BATCH_ENV, arguments.direct_batch, direct),
        ("states at boundaries", boundaries.ENV, boundaries.policy_from_environment, "off"),
    )
    for subject, variable, read, unset in switches:
        try:
            value = read()
            report.add(OK, subject, f"{unset if value is None else value} ({variable})")
        except ValueError as error:
            report.add(BAD, subject, str(error))
    report.add(
        NOTE,
        "on when",
        f"a server starts with {arguments.FLAG}; supported: {arguments.supported_architectures()}",
    )


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and a million")
    return value


def _batches(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(each) for each in text.split(","))
    except ValueError:
        sizes = (0,)
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no list of batch sizes such as 1,8,64")
    return sizes


def explain_launch(
    model: str, server_args: Sequence[str], memory_gib: float | None = None, batches: Sequence[int] | None = None
) -> int:
    """Print what the plugin would do for a launch; 0 when it would run, 1 when it would not, 2 for bad input.

    It would not where it is kept out of SGLang's processes, either: then the flag means SGLang's own replay.
    """
    from sglang_replayssm import explain

    report = Report()
    try:
        launch, reasons = explain.read(model, server_args)
        said = explain.lines(launch, memory_gib, batches or explain.BATCHES) if not reasons else []
    except explain.Unexplained as error:
        print(f"sglang-replayssm-check: error: {error}", file=sys.stderr)
        return 2
    check_entry_point(report, off=BAD)
    check_seams(report)
    for reason in reasons:
        report.add(BAD, "refused", reason)
    for subject, detail in () if report.failed else said:
        report.add(OK, subject, detail)
    return int(report.failed)


def main(argv: list[str] | None = None) -> int:
    """Run every check, or explain a launch; 0 when all is well, 1 when not, 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="sglang-replayssm-check", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument(
        "--explain",
        metavar="MODEL",
        help="say what the plugin would do for this model (folder, config.json or hub name) and the server arguments "
        "that follow",
    )
    parser.add_argument(
        "--memory-gib", type=_positive, metavar="GIB", help="with --explain: memory for ring, states and KV together"
    )
    parser.add_argument("--batch", type=_batches, metavar="N[,N]", help="with --explain: requests that decode together")
    options, server_args = parser.parse_known_args(argv)
    if options.explain is not None:
        return explain_launch(options.explain, server_args, options.memory_gib, options.batch)
    if server_args or options.memory_gib is not None or options.batch is not None:
        given = " ".join(server_args) or "--memory-gib and --batch"
        parser.error(f"{given}: server arguments, --memory-gib and --batch belong to --explain MODEL")
    report = Report()
    checks: tuple[Callable[[Report], None], ...] = (
        check_entry_point,
        check_seams,
        check_kernels,
        check_environment,
    )
    if check_versions(report):
        for check in checks:
            check(report)
    print("Something is wrong; see the FAIL lines above." if report.failed else "Nothing is wrong.")
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
