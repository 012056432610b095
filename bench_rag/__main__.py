"""``python -m bench_rag`` and the console script ``bench-rag``."""

from __future__ import annotations

import sys

_NEEDED = ("aiohttp", "jinja2", "numpy", "scipy", "tabulate", "tqdm")


def main() -> int:
    """Run the command line; a missing dependency is one sentence, not a traceback."""
    try:
        from .cli import main as run
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] not in _NEEDED:
            raise
        print(f"bench_rag needs {e.name}: pip install 'sglang-replayssm[bench]'", file=sys.stderr)
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
