"""`./run serve MODEL [server flags]`: SGLang with buffered decode on whatever host this is."""

from __future__ import annotations

import os
import sys

from tests.harness import host, tiny

TINY = "tiny-"


def command(model: str, flags: list[str]) -> list[str]:
    """The launch command; a model called tiny-NAME is built on demand, and a CPU gets the flags it needs."""
    if model.startswith(TINY) and not os.path.isdir(model):
        model = str(tiny.build(model.removeprefix(TINY)))
    base = [] if host.has_gpu() else list(host.CPU_ARGS)
    launch = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
    return [*launch, *base, "--enable-linear-replayssm", *flags]


if __name__ == "__main__":
    try:
        arguments = command(sys.argv[1], sys.argv[2:])
    except ValueError as error:
        sys.exit(f"serve: {error}")
    # A GPU and a real model need nothing from here, and what the person has set wins.
    test_only = sys.argv[1].startswith(TINY) or not host.has_gpu()
    environment = {**(host.server_env() if test_only else {}), **os.environ}
    environment.pop("PYTHONPATH", None)  # was for this module only
    print(" ".join(arguments), flush=True)
    os.execve(sys.executable, arguments, environment)
