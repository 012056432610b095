"""``python -m bench_rag`` and the console script ``bench-rag``."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; a missing dependency is one sentence, not a traceback."""
    try:
        from .cli import main as run
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] not in ("aiohttp", "numpy", "tabulate", "tqdm"):
            raise
        print(f"bench_rag needs {e.name}: pip install 'sglang-replayssm[bench]'", file=sys.stderr)
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
