"""Advance the cursors of in-tree replay by device operations whose shapes do not depend on data."""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from patches.edit import (
    Edit,
    NoPlace,
    Statements,
    assigns,
    in_definition,
    in_statements,
    index_of,
    mentions,
    replace,
    statements,
)

TITLE = "the replay metadata synchronises with the host in every step"
ISSUES = "none found"
_BACKEND = "MambaAttnBackendBase"
_STORE = """
# Padded rows share the reserved slot 0. No shape depends on data here, so
# the host does not wait.
write_pos_buf[safe_slots] = torch.where(
    slots >= 0, next_pos, torch.zeros_like(next_pos)
)
"""
_ENQUEUE = """
{name} = async_h2d(
    {mask}.tolist(), dtype=torch.int32, device=self.device
)
"""


def _advance(body: Statements) -> Statements | None:
    """Where valid slots were selected and made unique: store through the padded index instead."""
    mask, selected = index_of(body, assigns("valid_mask")), index_of(body, assigns("valid_slots"))
    if mask is None or selected is None:
        return None
    block = index_of(body, mentions("valid_slots"))
    if block is None:
        raise NoPlace("the block that advances the cursors")
    inner = body[block].body.body
    last = index_of(inner, assigns("next_pos"))
    if last is None:
        raise NoPlace("the next cursors")
    return [*body[:mask], *inner[: last + 1], *statements(_STORE), *body[block + 1 :]]


def _metadata(node: cst.FunctionDef) -> cst.FunctionDef:
    node = in_statements(node, _advance, f"the advance in {node.name.value}")
    keywords = {"device", "dtype"}
    copied = m.Call(
        func=m.Attribute(value=m.Name(), attr=m.Name("to")),
        args=m.MatchIfTrue(lambda args: {a.keyword.value for a in args if a.keyword} == keywords),
    )
    copied = m.SimpleStatementLine(body=[m.Assign(value=copied)])

    def enqueue(line: cst.SimpleStatementLine) -> cst.SimpleStatementLine:
        assign = line.body[0]
        mask = assign.value.func.value.value
        name = assign.targets[0].target.value
        (enqueued,) = statements(_ENQUEUE.format(name=name, mask=mask))
        return enqueued.with_changes(leading_lines=line.leading_lines)

    return replace(node, copied, enqueue, f"the copy of the flush mask in {node.name.value}")


def _backend(module: cst.Module) -> cst.Module:
    for name in ("_forward_metadata", "_replay_metadata"):
        module = in_definition(module, f"{_BACKEND}.{name}", _metadata)
    utilities = m.ImportFrom(
        module=m.Attribute(value=m.Attribute(value=m.Name("sglang"), attr=m.Name("srt")), attr=m.Name("utils")),
        names=m.MatchIfTrue(lambda names: any(alias.name.value == "is_pin_memory_available" for alias in names)),
    )

    def extend(line: cst.ImportFrom) -> cst.ImportFrom:
        first = cst.ImportAlias(name=cst.Name("async_h2d"), comma=cst.Comma(cst.SimpleWhitespace(""), _SPACE))
        return line.with_changes(names=[first, *line.names])

    return replace(module, utilities, extend, "the import of the utilities")


_SPACE = cst.SimpleWhitespace(" ")
EDITS: dict[str, Edit] = {"sglang/srt/layers/attention/hybrid_linear_attn_backend.py": _backend}
