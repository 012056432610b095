"""Back a slot with pending records up to the host, restore it into another, and compare with the records applied."""

from __future__ import annotations

import torch

from patches.outcome import conclude

CAPACITY, PENDING, STALE = 8, 5, 3
BOUND = 1e-5


def pool(is_kda: bool):
    """A MambaPool with random states and full rings."""
    from sglang.srt.configs.mamba_utils import (
        KimiLinearCacheParams,
        KimiLinearStateShape,
        Mamba2CacheParams,
        Mamba2StateShape,
    )
    from sglang.srt.mem_cache.memory_pool import MambaPool

    if is_kda:
        shape = KimiLinearStateShape.create(
            tp_world_size=1, num_heads=2, head_dim=16, num_k_heads=2, head_k_dim=16, conv_kernel_size=4
        )
        params = KimiLinearCacheParams(shape=shape, layers=[0, 1])
    else:
        shape = Mamba2StateShape.create(
            tp_world_size=1, intermediate_size=64, n_groups=1, num_heads=4, head_dim=16, state_size=16, conv_kernel=4
        )
        params = Mamba2CacheParams(shape=shape, layers=[0, 1])
    made = MambaPool(
        size=4,
        spec_state_size=4,
        cache_params=params,
        mamba_layer_ids=[0, 1],
        device="cpu",
        enable_linear_replayssm=True,
        linear_replayssm_cache_len=CAPACITY,
    )
    torch.manual_seed(0)
    cache = made.mamba_cache
    for tensor in (cache.temporal, cache.replayssm_d, cache.replayssm_k):
        tensor.normal_()
    cache.replayssm_g.uniform_(-0.5, 0.0)
    return made


def current_state(made, slot: int) -> torch.Tensor:
    """State of the slot with its pending records applied one by one, in float64."""
    cache = made.mamba_cache
    state = cache.temporal[:, slot].double()
    d, k, g = (ring[:, slot].double() for ring in (cache.replayssm_d, cache.replayssm_k, cache.replayssm_g))
    k = k.repeat_interleave(d.shape[1] // k.shape[1], dim=1)
    for record in range(int(made.replayssm_write_pos[slot])):
        decay = g[:, :, record].exp()
        decay = decay[..., None, None] if decay.dim() == 2 else decay[..., None, :]
        state = state * decay + d[:, :, record, :, None] * k[:, :, record, None, :]
    return state


def error(is_kda: bool) -> float:
    """Relative distance of the restored state from the one that was backed up."""
    made = pool(is_kda)
    made.replayssm_write_pos[1], made.replayssm_write_pos[2] = PENDING, STALE
    expected = current_state(made, 1)
    made.load_cpu_copy(made.get_cpu_copy(torch.tensor([1])), torch.tensor([2]))
    return float((current_state(made, 2) - expected).norm() / expected.norm())


def main() -> None:
    errors = [error(is_kda) for is_kda in (False, True)]
    shown = ", ".join(f"{name} {value:.1e}" for name, value in zip(("GDN", "KDA"), errors, strict=True))
    conclude(max(errors) <= BOUND, f"{PENDING} pending records; relative error of the restored state: {shown}")


if __name__ == "__main__":
    main()
