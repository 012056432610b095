"""At the end of a request under no_buffer: fold what is pending, in the place of a key cut to the last fold."""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from patches.edit import Edit, Statements, in_definition, in_statements, index_of, mentions, statements
from patches.fold import add_fold

TITLE = "under no_buffer the key is cut to the last fold, but the conv window stays at the request's end"
ISSUES = "none found"
_FOLD = """
# ReplaySSM (no_buffer): the conv window stands at the request's last token and
# can not go back, so the state comes forward: fold what is pending.
if is_finished:
    pool = self.cache.req_to_token_pool
    slot = req.kv.mamba_pool_idx.unsqueeze(0)
    pool.mamba_pool.fold_replayssm(pool.translate_mamba_indices(slot))
"""


def _component(module: cst.Module) -> cst.Module:
    finished = mentions("is_finished")
    cut = m.If(body=m.MatchIfTrue(lambda body: bool(m.findall(body, m.Attribute(attr=m.Name("replayssm_write_pos"))))))

    def fold(body: Statements) -> Statements | None:
        place = index_of(body, m.AllOf(finished, cut))
        # the branch of no_buffer, not the function around it
        if place is None or index_of(body, mentions("enable_mamba_extra_buffer")) is not None:
            return None
        return [*body[:place], *statements(_FOLD), *body[place + 1 :]]

    def change(node: cst.FunctionDef) -> cst.FunctionDef:
        return in_statements(node, fold, "the cut of the key")

    return in_definition(module, "MambaComponent.prepare_for_caching_req", change)


EDITS: dict[str, Edit] = {
    "sglang/srt/mem_cache/memory_pool.py": add_fold,
    "sglang/srt/mem_cache/unified_cache/components/mamba.py": _component,
}
