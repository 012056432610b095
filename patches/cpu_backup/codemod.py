"""A CPU backup takes the current state of a slot, and a restored slot has nothing pending."""

from __future__ import annotations

import libcst as cst

from patches.edit import Edit, in_definition, statements
from patches.fold import add_fold

TITLE = "a CPU backup at retraction loses the pending records"
ISSUES = "sglang 38485"
_FOLD = """
# The copy holds no records: the state must not lag behind them.
self.fold_replayssm(indices)
"""
_RESET = """
if self.replayssm_write_pos is not None:
    self.replayssm_write_pos[indices] = 0
"""


def _first(source: str):
    def change(node: cst.FunctionDef) -> cst.FunctionDef:
        block = node.body
        return node.with_changes(body=block.with_changes(body=[*statements(source), *block.body]))

    return change


def _pool(module: cst.Module) -> cst.Module:
    module = in_definition(module, "MambaPool.get_cpu_copy", _first(_FOLD))
    return add_fold(in_definition(module, "MambaPool.load_cpu_copy", _first(_RESET)))


EDITS: dict[str, Edit] = {"sglang/srt/mem_cache/memory_pool.py": _pool}
