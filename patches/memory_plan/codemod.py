"""Charge the ring of buffered decode to the memory plan, per slot as it is allocated."""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from patches.edit import Edit, Statements, add_method, in_definition, in_statements, index_of, statements

TITLE = "the ring of buffered decode is allocated outside the memory plan"
ISSUES = "sglang 28451"
_METHOD = '''
def replayssm_decode_ring_bytes_per_slot(self, record_len: int) -> int:
    """Bytes of one slot's decode ring, all layers, as MambaPool allocates it."""
    hv, v_dim, k_dim = self.shape.temporal
    h_k = getattr(self.shape, "num_k_heads_per_tp", hv)
    gate = k_dim if self.is_kda else 1
    record = (hv * v_dim + h_k * k_dim) * self.dtype.temporal.itemsize
    return (record + hv * gate * 4) * record_len * len(self.layers)
'''
_CHARGE = """
if get_exec().mamba.enable_linear_replayssm:
    # Allocated for every slot, cached ones included.
    extra_per_slot += int(
        config.mamba2_cache_params.replayssm_decode_ring_bytes_per_slot(
            get_exec().mamba.linear_replayssm_cache_len
        )
        * pp_layer_scale
    )
"""


def _parameters(module: cst.Module) -> cst.Module:
    return add_method(module, "BaseLinearStateParams", _METHOD)


def _plan(module: cst.Module) -> cst.Module:
    computed = m.SimpleStatementLine(body=[m.Assign(targets=[m.AssignTarget(m.Name("extra_per_slot"))])])

    def charge(body: Statements) -> Statements | None:
        place = index_of(body, computed)
        return None if place is None else [*body[: place + 1], *statements(_CHARGE), *body[place + 1 :]]

    def change(node: cst.FunctionDef) -> cst.FunctionDef:
        return in_statements(node, charge, "what a slot costs beside its state")

    return in_definition(module, "KVCacheConfigurator._handle_max_mamba_cache", change)


EDITS: dict[str, Edit] = {
    "sglang/srt/configs/mamba_utils.py": _parameters,
    "sglang/srt/mem_cache/kv_cache_configurator.py": _plan,
}
