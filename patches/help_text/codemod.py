"""Say what the default strategy is where the flag's help and its refusal name another one."""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from patches.edit import Edit, in_definition, replace

TITLE = "the help text names no_buffer as the default strategy"
ISSUES = "sglang 32845"
_CLAIM = "no_buffer (the default)"
_TRUTH = "no_buffer (the default is auto)"
_claim = m.SimpleString(value=m.MatchRegex(r".*no_buffer \(the default\).*"))


def _correct(node: cst.SimpleString) -> cst.SimpleString:
    return node.with_changes(value=node.value.replace(_CLAIM, _TRUTH))


def _help(module: cst.Module) -> cst.Module:
    """The annotation of the field, which holds its help text."""
    field = m.AnnAssign(target=m.Name("enable_linear_replayssm"))

    def change(node: cst.AnnAssign) -> cst.AnnAssign:
        return replace(node, _claim, _correct, "the claim in the help of enable_linear_replayssm")

    return replace(module, field, change, "the field enable_linear_replayssm")


def _refusal(module: cst.Module) -> cst.Module:
    """The error raised beside another strategy."""

    def change(node: cst.FunctionDef) -> cst.FunctionDef:
        return replace(node, _claim, _correct, "the claim in the refusal of enable_linear_replayssm")

    return in_definition(module, "handle_linear_attn_backend", change)


EDITS: dict[str, Edit] = {
    "sglang/srt/arg_groups/fields/exec_.py": _help,
    "sglang/srt/arg_groups/attention_hook.py": _refusal,
}
