"""The ring in SGLang's memory plan: keyed by request row, charged once, before slots and KV share what is left.

SGLang fixes the number of rows only after it has sized the slots, and the slots from the memory that the ring
leaves. `rows_for` solves that: the smallest number of rows whose charge still covers the rows that result.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from replayssm_kernels.ring import RingShape
from sglang_replayssm import arguments

GIB = 1 << 30
# SGLang never plans for more running requests than this without an explicit --max-running-requests.
MOST_REQUESTS = 4096
_reserved: dict[int, int] = {}


def ring_shape(configurator: Any, rows: int) -> RingShape:
    """Shape of the ring for the configurator's model shard and `rows` request rows (padding row included)."""
    return shape_for(
        configurator.mambaish_config.mamba2_cache_params,
        rows=rows,
        capacity=arguments.ring_capacity(),
        key_dtype=configurator.model_config.dtype,
        lower_bound=gate_bound(configurator.model),
        max_width=arguments.step_width(),
    )


def shape_for(
    params: Any,
    *,
    rows: int,
    capacity: int,
    key_dtype: torch.dtype,
    lower_bound: float | None = None,
    max_width: int = 1,
) -> RingShape:
    """Shape of the ring beside slots of SGLang's cache parameters `params`; not validated."""
    v_heads, value_dim, key_dim = params.shape.temporal
    return RingShape(
        layers=len(params.layers),
        rows=rows,
        k_heads=params.shape.num_k_heads_per_tp,
        v_heads=v_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        capacity=capacity,
        key_dtype=key_dtype,
        u_dtype=getattr(torch, arguments.u_dtype_name()),
        gate="kda" if params.is_kda else "gdn",
        lower_bound=lower_bound,
        max_width=max_width,
    )


def row_bytes(params: Any, shape: RingShape) -> int:
    """Device bytes that a request row costs: its ring, and with verify steps the conv windows of its drafts."""
    return shape.bytes_per_row() + window_bytes(params, shape.max_width)


def window_bytes(params: Any, width: int) -> int:
    """Device bytes of one row's conv windows, one per draft, of which SGLang takes the accepted one; without drafts 0.

    They overlap, and SGLang stores what they share once, where its kernels allow that (`windows_overlap`).
    """
    if width == 1:
        return 0
    window = params.shape.conv_kernel - 1
    elements = sum(math.prod(conv) for conv in params.shape.conv)
    elements = elements // window * (width + window - 1) if windows_overlap(params) else elements * width
    return elements * params.dtype.conv.itemsize * len(params.layers)


def windows_overlap(params: Any) -> bool:
    """Whether drafts share the storage of their conv windows, as SGLang decides it for a chain of drafts."""
    from sglang.srt.mem_cache import memory_pool

    return not params.shape.disable_conv_window_dedup and memory_pool.conv_window_dedup_enabled(
        memory_pool._is_npu, memory_pool._is_cpu, 1, params.is_kda
    )


def gate_bound(model: torch.nn.Module) -> float | None:
    """Lower bound of the log-decay (KDA's bounded gate) as the model's layers have it, None where they have none.

    The layers are asked and not the config, of which every architecture reads another field or none at all.

    Raises:
        RuntimeError: the layers differ; one ring holds one kind of records.
    """
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

    bounds = {layer.lower_bound for layer in model.modules() if isinstance(layer, RadixLinearAttention)}
    if len(bounds) > 1:
        raise RuntimeError(
            f"{arguments.FLAG} needs one gate for all linear layers, but this model has the lower bounds "
            f"{sorted(map(str, bounds))}. Drop the flag."
        )
    return bounds.pop() if bounds else None


def rows_for(most: int, rows_that_fit: Callable[[int], int]) -> int:
    """Smallest r in 0..most with rows_that_fit(r) <= r, where rows_that_fit falls as more rows are charged.

    Args:
        most: rows that can ever be asked for.
        rows_that_fit: rows that SGLang would create when r rows are charged to the plan.
    """
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if rows_that_fit(middle) <= middle:
            high = middle
        else:
            low = middle + 1
    return low


def reserve(configurator: Any, total_rest_memory: float) -> float:
    """GiB to take out of the plan for the ring, and remember for how many rows.

    Raises:
        RuntimeError: the ring leaves nothing for slots and KV; the message has the arithmetic.
    """
    from sglang.srt.runtime_context import get_memory, get_schedule

    params = configurator.mambaish_config.mamba2_cache_params
    per_row = row_bytes(params, ring_shape(configurator, rows=2))
    slot = params.mamba_cache_per_req
    ratio = configurator._calculate_mamba_ratio()
    schedule = get_schedule()
    most = MOST_REQUESTS
    if schedule.max_running_requests is not None:
        most = max(1, schedule.max_running_requests // configurator.attn_dp_size)
    share = schedule.mamba_full_memory_ratio / (1 + schedule.mamba_full_memory_ratio)

    def requests_that_fit(rows: int) -> int:
        # An upper bound of what SGLang sizes: its padding slot and page rounding only lower it.
        if schedule.max_mamba_cache_size is not None:
            slots = schedule.max_mamba_cache_size // configurator.attn_dp_size
        elif get_memory().disable_radix_cache and schedule.max_running_requests is not None:
            slots = most
        else:
            slots = int((total_rest_memory * GIB - (rows + 1) * per_row) * share // slot)
        return max(0, min(most, slots // ratio))

    requests = rows_for(most, requests_that_fit)
    rows = requests + 1  # the padding row
    charge = rows * per_row / GIB
    if charge >= total_rest_memory:
        raise _does_not_fit(rows, charge, total_rest_memory, states=0.0)
    _reserved[id(configurator)] = rows
    return charge


@contextlib.contextmanager
def without_snapshots(configurator: Any) -> Iterator[None]:
    """While SGLang sizes its slots: no memory for a state per draft, which nothing allocates under ring spec-verify.

    Under its own flag SGLang asks for none; that flag is off, and it reads nothing else of the algorithm there.
    """
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    algorithm = configurator.spec_algorithm
    if arguments.spec_requested():
        configurator.spec_algorithm = SpeculativeAlgorithm.NONE
    try:
        yield
    finally:
        configurator.spec_algorithm = algorithm


def require_room(configurator: Any, total_rest_memory: float, charge: float, left: float) -> None:
    """Raise RuntimeError, with the arithmetic, when it is the ring that leaves no memory for KV.

    Args: GiB before the ring, of the ring, and after ring and states. What would not fit without the ring either is
        for SGLang to refuse.
    """
    if left <= 0 < left + charge:
        rows = _reserved.pop(id(configurator))
        raise _does_not_fit(rows, charge, total_rest_memory, states=total_rest_memory - charge - left)


def _does_not_fit(rows: int, charge: float, total: float, states: float) -> RuntimeError:
    beside = f", beside {states:.2f} GiB of states," if states else ""
    return RuntimeError(
        f"ReplaySSM ring: {rows} request rows x {charge / rows * 1024:.2f} MiB = {charge:.2f} GiB{beside} leave "
        f"nothing for KV: there are only {total:.2f} GiB for ring, states and KV. Lower --max-running-requests, "
        "--linear-replayssm-cache-len or --max-mamba-cache-size, or raise --mem-fraction-static."
    )


def require_reserved(configurator: Any, shape: RingShape) -> None:
    """Raise RuntimeError when the pool came out with more rows than the plan was charged for."""
    rows = _reserved.pop(id(configurator), None)
    if rows is None or shape.rows > rows:
        raise RuntimeError(
            f"ReplaySSM ring: the memory plan was charged for {rows} request rows, but the pool has {shape.rows}. "
            "This is a bug in sglang-replayssm; --max-running-requests with a smaller number avoids it."
        )
