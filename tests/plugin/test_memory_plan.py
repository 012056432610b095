"""The ring in the memory plan, through SGLang's real sizing code: rows that result never exceed rows charged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm_kernels.ring import Ring
from sglang_replayssm import arguments, memory_plan
from sglang_replayssm.memory_plan import GIB
from sglang_replayssm.request_ring import ring_of
from tests.plugin import launch

MIB = 1 << 20
STRATEGIES = {
    "extra_buffer": ("--mamba-radix-cache-strategy", "extra_buffer"),
    "extra_buffer_lazy": ("--mamba-radix-cache-strategy", "extra_buffer_lazy"),
    "no_buffer": ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"),
    "no radix cache": ("--disable-radix-cache",),
}


def planned(*argv: str, attn_dp_size: int = 1, **sizes: Any) -> Any:
    """A configurator of a published launch, with SGLang's sizes set (None: SGLang is to find them)."""
    from sglang.srt.runtime_context import get_context

    server_args = launch.publish_flag(*argv)
    get_context().override("test", **{"max_total_tokens": None, **sizes})
    return launch.configurator(server_args, attn_dp_size)


def slots_gib(configurator: Any) -> float:
    """What the slots cost, by the sizes of the tensors that MambaPool makes (its padding slot included)."""
    from sglang.srt.runtime_context import get_schedule

    params = configurator.mambaish_config.mamba2_cache_params
    per_slot = params.dtype.temporal.itemsize
    for extent in params.shape.temporal:
        per_slot *= extent
    for shape in params.shape.conv:
        elements = params.dtype.conv.itemsize
        for extent in shape:
            elements *= extent
        per_slot += elements
    return per_slot * len(params.layers) * (get_schedule().max_mamba_cache_size + 1) / GIB


def ring_gib(configurator: Any, rows: int) -> float:
    """What a ring of `rows` rows costs, by the tensors of a small one."""
    ring = Ring.allocate(memory_plan.ring_shape(configurator, rows=3), "cpu")
    tensors = (ring.u, ring.k, ring.g, ring.checkpoint)
    return sum(t.numel() * t.element_size() for t in tensors) / 3 * rows / GIB


# -- rows_for ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40), min_size=1, max_size=40))
def test_rows_for_is_the_smallest_that_covers_itself(drops: list[int]) -> None:
    """Against a plain search, for every falling function whose values stay within `most`."""
    most = len(drops) - 1
    fits = [min(most, value) for value in sorted(drops, reverse=True)]
    expected = next(rows for rows in range(most + 1) if fits[rows] <= rows)
    assert memory_plan.rows_for(most, fits.__getitem__) == expected


# -- SGLang's sizing --------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=120, derandomize=True)
@given(
    budget=st.floats(0.002, 2.0),
    strategy=st.sampled_from(sorted(STRATEGIES)),
    capacity=st.sampled_from([1, 16, 64]),
    max_running_requests=st.one_of(st.none(), st.integers(1, 300), st.just(10_000)),
    max_mamba_cache_size=st.one_of(st.none(), st.integers(1, 2000), st.just(60_000)),
    mamba_full_memory_ratio=st.sampled_from([0.05, 0.9, 4.0]),
    attn_dp_size=st.sampled_from([1, 2]),
)
def test_the_pool_never_has_more_rows_than_the_plan_was_charged_for(
    budget: float,
    strategy: str,
    capacity: int,
    max_running_requests: int | None,
    max_mamba_cache_size: int | None,
    mamba_full_memory_ratio: float,
    attn_dp_size: int,
) -> None:
    configurator = planned(
        "--linear-replayssm-cache-len",
        str(capacity),
        *STRATEGIES[strategy],
        attn_dp_size=attn_dp_size,
        max_running_requests=max_running_requests,
        max_mamba_cache_size=max_mamba_cache_size,
        mamba_full_memory_ratio=mamba_full_memory_ratio,
    )
    try:
        rest = configurator._handle_max_mamba_cache(budget)
        if rest <= 0:
            return  # as without the plugin: SGLang refuses a launch whose slots leave no memory for KV
        tokens = configurator.config_from_budget(int(rest * GIB)).max_total_num_tokens
        requests = configurator.resolve_max_num_reqs(tokens)
    except RuntimeError as refusal:
        reasons = ("Not enough GPU memory", "state cache is too small", "ReplaySSM ring:")
        assert any(reason in str(refusal) for reason in reasons)
        return
    charged = memory_plan._reserved[id(configurator)]
    assert requests + 1 <= charged
    assert rest == pytest.approx(budget - ring_gib(configurator, charged) - slots_gib(configurator), abs=1e-9)
    memory_plan.require_reserved(configurator, memory_plan.ring_shape(configurator, rows=requests + 1))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_charge_is_tight_where_slots_bound_the_requests(strategy: str) -> None:
    """Sized by memory: at most one request more is charged for than SGLang then runs (its padding slot)."""
    configurator = planned(*STRATEGIES[strategy], max_running_requests=None, max_mamba_cache_size=None)
    rest = configurator._handle_max_mamba_cache(0.25)
    requests = configurator.resolve_max_num_reqs(configurator.config_from_budget(int(rest * GIB)).max_total_num_tokens)
    assert 10 < requests + 1 <= memory_plan._reserved[id(configurator)] <= requests + 2


def test_the_ring_shrinks_slots_and_kv_alike() -> None:
    """With the flag off the same budget gives more slots; the difference is what the ring takes."""
    from sglang.srt.runtime_context import get_context, get_schedule

    sizes = dict(max_running_requests=64, max_mamba_cache_size=None)
    on = planned(**sizes)
    rest_on = on._handle_max_mamba_cache(0.25)
    slots_on, charged = get_schedule().max_mamba_cache_size, memory_plan._reserved[id(on)]
    server_args = launch.publish(launch.parse())
    get_context().override("test", **sizes)
    off = launch.configurator(server_args)
    rest_off = off._handle_max_mamba_cache(0.25)
    assert slots_on < get_schedule().max_mamba_cache_size
    ring = ring_gib(on, charged)
    share = get_schedule().mamba_full_memory_ratio / (1 + get_schedule().mamba_full_memory_ratio)
    slot = slots_gib(off) / (get_schedule().max_mamba_cache_size + 1)
    assert rest_off - rest_on == pytest.approx(ring * (1 - share), abs=slot)


def test_a_real_pool_carries_a_ring_of_the_planned_size() -> None:
    configurator = planned(max_running_requests=6, max_mamba_cache_size=30)
    configurator._handle_max_mamba_cache(0.25)
    pool = configurator._build_hybrid_req_pool(max_num_reqs=6, extra_max_context_len=4)
    ring = ring_of(pool)
    assert ring is not None
    shape = ring.ring.shape
    assert (shape.layers, shape.rows, shape.capacity) == (3, 7, 16)
    assert (shape.k_heads, shape.v_heads, shape.key_dim, shape.value_dim) == (1, 2, 32, 32)
    assert ring.state.shape == (3, 31, 2, 32, 32) and ring.state is pool.mamba_pool.mamba_cache.temporal
    assert pool.mamba_pool.mamba_cache.replayssm_d is None, "the in-tree ring sleeps"


# -- speculative decoding ---------------------------------------------------------------------------------------------


def planned_spec(width: int, *argv: str, spec_flag: bool = True, **sizes: Any) -> Any:
    """As `planned`, with drafts; without the flag SGLang keeps a state per draft."""
    from sglang.srt.runtime_context import get_context

    server_args = launch.parse(*launch.drafts(width), *argv, *([arguments.SPEC_FLAG] if spec_flag else []))
    launch.publish(server_args)
    get_context().override("test", **{"max_total_tokens": None, "max_mamba_cache_size": None, **sizes})
    return launch.configurator(server_args)


def windows_gib(configurator: Any, rows: int, width: int) -> float:
    """What the drafts' conv windows cost, by the tensors of a pool that SGLang makes."""
    from sglang.srt.mem_cache.memory_pool import MambaPool

    params = configurator.mambaish_config.mamba2_cache_params
    pool = MambaPool(
        size=2,
        spec_state_size=rows - 1,
        cache_params=params,
        mamba_layer_ids=params.layers,
        device="cpu",
        speculative_num_draft_tokens=width,
        speculative_eagle_topk=1,
    )
    return sum(tensor.nbytes for tensor in pool._intermediate_conv_window_phys) / GIB


@pytest.mark.parametrize("strategy", ["extra_buffer", "no_buffer", "no radix cache"])
@pytest.mark.parametrize("width", [2, 4, 16])
def test_with_drafts_ring_and_windows_are_charged_and_no_state_per_draft(strategy: str, width: int) -> None:
    for requests in (4, 48, 300):
        configurator = planned_spec(width, *STRATEGIES[strategy], max_running_requests=requests)
        algorithm = configurator.spec_algorithm
        rest = configurator._handle_max_mamba_cache(0.25)
        assert configurator.spec_algorithm is algorithm and not algorithm.is_none()
        running = configurator.resolve_max_num_reqs(
            configurator.config_from_budget(int(rest * GIB)).max_total_num_tokens
        )
        charged = memory_plan._reserved[id(configurator)]
        assert running + 1 <= charged
        ring = ring_gib(configurator, charged) + windows_gib(configurator, charged, width)
        assert rest == pytest.approx(0.25 - ring - slots_gib(configurator), abs=1e-9)


@pytest.mark.parametrize("width,more_slots", [(4, 1.2), (8, 1.6), (16, 2.3)])
def test_states_per_draft_cost_slots_and_requests(width: int, more_slots: float) -> None:
    """The same budget with and without them, by SGLang's own sizing: the figures that --explain reports."""
    from sglang.srt.runtime_context import get_schedule

    fitting = {}
    for spec_flag in (True, False):
        configurator = planned_spec(width, spec_flag=spec_flag, max_running_requests=4096)
        configurator._handle_max_mamba_cache(0.25)
        slots = get_schedule().max_mamba_cache_size
        fitting[spec_flag] = slots, slots // configurator._calculate_mamba_ratio()
    assert fitting[True][0] >= more_slots * fitting[False][0]
    assert fitting[True][1] >= more_slots * fitting[False][1]


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_a_ring_larger_than_the_memory_is_refused_with_the_arithmetic() -> None:
    configurator = planned("--linear-replayssm-cache-len", "64", max_running_requests=400, max_mamba_cache_size=2005)
    per_row = memory_plan.ring_shape(configurator, rows=2).bytes_per_row()
    with pytest.raises(RuntimeError) as error:
        configurator._handle_max_mamba_cache(0.01)
    message = str(error.value)
    assert f"401 request rows x {per_row / MIB:.2f} MiB = {401 * per_row / GIB:.2f} GiB" in message
    assert "only 0.01 GiB" in message
    for flag in ("--max-running-requests", "--linear-replayssm-cache-len", "--mem-fraction-static"):
        assert flag in message


def test_slots_that_fit_only_without_the_ring_are_refused_with_the_arithmetic() -> None:
    """SGLang's own message would blame the weights."""
    sizes = dict(max_running_requests=100, max_mamba_cache_size=500)
    configurator = planned("--linear-replayssm-cache-len", "64", **sizes)
    ring = ring_gib(configurator, 101)
    slots = slots_gib(configurator)
    with pytest.raises(RuntimeError) as error:
        configurator._handle_max_mamba_cache(slots + ring / 2)
    message = str(error.value)
    assert "ReplaySSM ring: 101 request rows" in message and f"{ring:.2f} GiB" in message
    assert "--max-mamba-cache-size" in message


def test_without_room_even_for_the_slots_sglang_speaks() -> None:
    """What does not fit without the ring either is not our refusal."""
    configurator = planned(max_running_requests=2, max_mamba_cache_size=500)
    assert configurator._handle_max_mamba_cache(slots_gib(configurator) / 2) <= 0


def test_a_pool_larger_than_the_plan_is_refused() -> None:
    configurator = planned(max_running_requests=4, max_mamba_cache_size=30)
    configurator._handle_max_mamba_cache(0.25)
    with pytest.raises(RuntimeError, match="charged for 5 request rows, but the pool has 8"):
        configurator._build_hybrid_req_pool(max_num_reqs=7, extra_max_context_len=4)


def test_a_pool_without_a_plan_is_refused() -> None:
    """A process in which the sizing hook was not reached must not serve with an unplanned ring."""
    configurator = planned(max_running_requests=4, max_mamba_cache_size=30)
    with pytest.raises(RuntimeError, match="charged for None request rows"):
        configurator._build_hybrid_req_pool(max_num_reqs=4, extra_max_context_len=4)


def test_a_reservation_is_used_once() -> None:
    configurator = planned(max_running_requests=4, max_mamba_cache_size=30)
    configurator._handle_max_mamba_cache(0.25)
    shape = memory_plan.ring_shape(configurator, rows=5)
    memory_plan.require_reserved(configurator, shape)
    with pytest.raises(RuntimeError):
        memory_plan.require_reserved(configurator, shape)


# -- the gate ---------------------------------------------------------------------------------------------------------


def layer(lower_bound: float | None) -> torch.nn.Module:
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

    return RadixLinearAttention(0, 2, 2, 2, 32, 32, 32, lower_bound=lower_bound)


def test_the_ring_has_the_bound_of_the_models_layers() -> None:
    """And is charged for it: with a bounded gate records hold scaled fp32 keys."""
    latent = ("--attention-backend", "triton")
    server_args = launch.publish_flag(*latent, model="kimi-linear")
    shapes = {}
    for bound in (None, -5.0):
        configurator = launch.configurator(server_args, layers=[torch.nn.Linear(1, 1), layer(bound), layer(bound)])
        shapes[bound] = memory_plan.ring_shape(configurator, rows=5)
        assert shapes[bound].gate == "kda" and shapes[bound].lower_bound == bound
        left = configurator._handle_max_mamba_cache(0.25)
        expected = 0.25 - 5 * shapes[bound].bytes_per_row() / GIB - slots_gib(configurator)
        assert left == pytest.approx(expected, abs=1e-6)
    assert shapes[-5.0].scaled_keys and not shapes[None].scaled_keys
    assert shapes[-5.0].bytes_per_row() > shapes[None].bytes_per_row()


def test_layers_with_different_gates_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"one gate for all linear layers.*'-5.0', 'None'"):
        memory_plan.gate_bound(torch.nn.ModuleList([layer(None), layer(-5.0)]))
