"""Keep no snapshot of a prefill chunk that starts within a page: no key names the tokens that it stands for."""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from patches.edit import Edit, in_definition, replace, statements

TITLE = "the state of a chunk that starts within a page is filed under the page's token count"
ISSUES = "none found"
_FUNCTION = "ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend"
_MASK = """
# Snapshots lie whole chunks after the prefix, keys end with a page: where the
# prefix ends within a page, as it may after a mixed step, no key fits one.
mask = {long_enough} and prefix_len % self.tree_cache.page_size == 0
"""


def _prepare(node: cst.FunctionDef) -> cst.FunctionDef:
    """Where a chunk's length alone decides whether it leaves a snapshot."""
    long_enough = m.Comparison(left=m.Attribute(attr=m.Name("extend_len")))
    decided = m.SimpleStatementLine(body=[m.Assign(targets=[m.AssignTarget(m.Name("mask"))], value=long_enough)])

    def also_on_a_page(line: cst.SimpleStatementLine) -> cst.SimpleStatementLine:
        value = cst.Module([]).code_for_node(line.body[0].value)
        (changed,) = statements(_MASK.format(long_enough=value))
        return changed.with_changes(leading_lines=[*line.leading_lines, *changed.leading_lines])

    return replace(node, decided, also_on_a_page, "the choice of what a chunk leaves")


def _batch(module: cst.Module) -> cst.Module:
    return in_definition(module, _FUNCTION, _prepare)


EDITS: dict[str, Edit] = {"sglang/srt/managers/schedule_batch.py": _batch}
