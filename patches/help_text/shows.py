"""Compare what the help of --enable-linear-replayssm calls the default with the parser's own default."""

from __future__ import annotations

import argparse
import re

from patches.outcome import conclude


def main() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    options = {option: action for action in parser._actions for option in action.option_strings}
    default = options["--mamba-radix-cache-strategy"].default
    help_text = options["--enable-linear-replayssm"].help
    claimed = re.search(r"--mamba-radix-cache-strategy (\w+) \(the default( is (\w+))?\)", help_text)
    if claimed is None:
        conclude(True, f"the help names no default; it is {default}")
    name = claimed[3] or claimed[1]
    conclude(name == default, f"the help says that the default is {name}, the parser that it is {default}")


if __name__ == "__main__":
    main()
