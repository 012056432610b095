"""Plan slots for a fixed budget as a server does, allocate the pool, and weigh what was allocated."""

from __future__ import annotations

import dataclasses

import torch

from patches.outcome import conclude
from tests.plugin import launch

GIB = 1 << 30
BUDGET = 0.25  # GiB for slots and KV together; half of it is the share of the slots


def main() -> None:
    from sglang.srt.mem_cache.memory_pool import MambaPool
    from sglang.srt.runtime_context import get_context, get_schedule

    strategy = ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule")
    server_args = launch.publish_flag(*strategy, "--linear-replayssm-cache-len", "16")
    get_context().override("patches", max_total_tokens=None, max_mamba_cache_size=None, max_running_requests=None)
    configurator = launch.configurator(server_args)
    planned = BUDGET - configurator._handle_max_mamba_cache(BUDGET)
    params = configurator.mambaish_config.mamba2_cache_params
    pool = MambaPool(
        size=get_schedule().max_mamba_cache_size,
        spec_state_size=1,
        cache_params=params,
        mamba_layer_ids=params.layers,
        device="cpu",
        enable_linear_replayssm=True,
        linear_replayssm_cache_len=16,
    )
    taken = sum(weight(getattr(pool.mamba_cache, field.name)) for field in dataclasses.fields(pool.mamba_cache)) / GIB
    conclude(
        abs(taken - planned) <= 0.01 * planned,
        f"{pool.size} slots: {planned:.3f} GiB planned, {taken:.3f} GiB allocated",
    )


def weight(value: object) -> int:
    """Bytes of a tensor or of a list of them."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(weight(each) for each in value) if isinstance(value, (list, tuple)) else 0


if __name__ == "__main__":
    main()
