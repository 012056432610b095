"""How a script says what it saw. Any other exit status means that the script itself did not work."""

from __future__ import annotations

import sys
from typing import NoReturn

RIGHT = 0
DEFECT = 3  # 1 and 2 are Python's own, for a traceback and for wrong usage


def conclude(right: bool, seen: str) -> NoReturn:
    """End the script with one line about what was seen."""
    print(f"{'right' if right else 'defect'}: {seen}", flush=True)
    sys.exit(RIGHT if right else DEFECT)
