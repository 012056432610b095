"""Let in-tree replay run beside the default prefix cache: fold at every track boundary, hand on empty rings."""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from patches.edit import (
    Edit,
    Statements,
    assigns,
    expression,
    in_definition,
    in_statements,
    index_of,
    mentions,
    replace,
    statements,
    without_unused,
)

TITLE = "in-tree replay refuses extra_buffer; cursors of donated slots are not reset, KDA does not fold at boundaries"
ISSUES = "sglang 32845, 37834, 37837"
_GUARDS = """
# ReplaySSM buffered decode runs on Triton, or Helion for KDA. The decode kernel
# folds the ring into the state at every track boundary, so each strategy of the
# radix cache keeps current states.
pass
"""
_DONATED = """
if self.mamba_pool.replayssm_write_pos is not None:
    # The tracked state is complete; the cursor is of the slot's previous owner.
    self.mamba_pool.replayssm_write_pos[
        self.translate_mamba_indices(mamba_value_donated)
    ] = 0
"""
_FINISHED = """
if pool.mamba_pool.replayssm_write_pos is not None:
    # Likewise for the slot that a finished request leaves behind.
    pool.mamba_pool.replayssm_write_pos[
        pool.translate_mamba_indices(active_value)
    ] = 0
"""
_POOL = """
pool = self.cache.req_to_token_pool
"""
_CLEARED = """
if self.replayssm_write_pos is not None:
    # On the forward stream: an overlapped step of the previous owner may
    # advance the cursor after alloc has reset it.
    self.replayssm_write_pos[indices.to(torch.int64)] = 0
"""


def _arguments(module: cst.Module) -> cst.Module:
    """Without the refusal, and without the comment that explains it."""
    refusal = m.If(test=m.Call(func=m.Name("mamba_extra_buffer_of")))

    def allow(body: Statements) -> Statements | None:
        place = index_of(body, mentions("enable_linear_replayssm"))
        if place is None:
            return None
        guard = body[place]
        inner = guard.body.body
        at = index_of(inner, refusal)
        if at is None:
            return None  # the guards of speculative replay
        comments = statements(_GUARDS)[0].leading_lines
        kept = guard.body.with_changes(body=[*inner[:at], *inner[at + 1 :]])
        return [
            *body[:place],
            guard.with_changes(leading_lines=[cst.EmptyLine(indent=False), *comments], body=kept),
            *body[place + 1 :],
        ]

    def change(node: cst.FunctionDef) -> cst.FunctionDef:
        return in_statements(node, allow, "the guards of in-tree replay")

    return without_unused(in_definition(module, "handle_linear_attn_backend", change), "mamba_extra_buffer_of")


def _help(module: cst.Module) -> cst.Module:
    """The help no longer asks for no_buffer."""
    leaf = m.SimpleString(value=m.MatchRegex(r".*--mamba-radix-cache-strategy no_buffer.*"))
    field = m.AnnAssign(target=m.Name("enable_linear_replayssm"))
    text = cst.SimpleString('"any --mamba-radix-cache-strategy."')

    def change(node: cst.AnnAssign) -> cst.AnnAssign:
        return replace(node, leaf, lambda _: text, "the strategy in the help of enable_linear_replayssm")

    return replace(module, field, change, "the field enable_linear_replayssm")


def _backend(module: cst.Module) -> cst.Module:
    """KDA folds at track boundaries as GDN does."""
    not_kda = m.UnaryOperation(operator=m.Not(), expression=m.Name("is_kda"))

    def drop(body: Statements) -> Statements | None:
        place = index_of(body, assigns("is_kda"))
        return None if place is None else [*body[:place], *body[place + 1 :]]

    def unwrap(body: Statements) -> Statements | None:
        place = index_of(body, m.If(test=not_kda))
        return None if place is None else [*body[:place], *body[place].body.body, *body[place + 1 :]]

    def eager(node: cst.FunctionDef) -> cst.FunctionDef:
        node = in_statements(node, unwrap, "what only GDN does in eager forwards")
        return in_statements(node, drop, "is_kda in eager forwards")

    def graph(node: cst.FunctionDef) -> cst.FunctionDef:
        node = replace(node, not_kda, lambda _: expression("True"), "is_kda before a graph replay")
        both = m.BooleanOperation(left=m.Name("True"), operator=m.And())
        node = replace(node, both, lambda found: found.right, "the condition of the flush mask")
        return in_statements(node, drop, "is_kda before a graph replay")

    module = in_definition(module, "MambaAttnBackendBase._forward_metadata", eager)
    return in_definition(module, "MambaAttnBackendBase._replay_metadata", graph)


def _component(module: cst.Module) -> cst.Module:
    """A finished request hands its track slot over without `donate_mamba_ping_pong_slot`."""

    def kept(body: Statements) -> Statements | None:
        place = index_of(body, assigns("active_value"))
        if place is None or not any(m.findall(statement, m.Name("keep_idx")) for statement in body):
            return None
        return [*body[: place + 1], *statements(_POOL), *statements(_FINISHED), *body[place + 1 :]]

    def change(node: cst.FunctionDef) -> cst.FunctionDef:
        return in_statements(node, kept, "the slot that a finished request leaves")

    return in_definition(module, "MambaComponent.prepare_for_caching_req", change)


def _pool(module: cst.Module) -> cst.Module:
    def donated(body: Statements) -> Statements | None:
        place = index_of(body, assigns("mamba_value_donated"))
        return None if place is None else [*body[: place + 1], *statements(_DONATED), *body[place + 1 :]]

    def donate(node: cst.FunctionDef) -> cst.FunctionDef:
        return in_statements(node, donated, "the donated slot")

    def clear(node: cst.FunctionDef) -> cst.FunctionDef:
        block = node.body
        return node.with_changes(body=block.with_changes(body=[*block.body, *statements(_CLEARED)]))

    module = in_definition(module, "HybridReqToTokenPool.donate_mamba_ping_pong_slot", donate)
    return in_definition(module, "MambaPool.clear_slots", clear)


EDITS: dict[str, Edit] = {
    "sglang/srt/arg_groups/attention_hook.py": _arguments,
    "sglang/srt/arg_groups/fields/exec_.py": _help,
    "sglang/srt/layers/attention/hybrid_linear_attn_backend.py": _backend,
    "sglang/srt/mem_cache/memory_pool.py": _pool,
    "sglang/srt/mem_cache/unified_cache/components/mamba.py": _component,
}
