"""The torch stand-ins of the CPU host against the kernels they replace, or against loops."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed here (its release needs Python 3.11 or newer)")

from replayssm_cpu_host import elementwise, hicache, sglang_hooks

GENERATOR = torch.Generator().manual_seed(0)


def randn(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [(1, 2), (2, 2), (2, 4)])
def test_split_is_the_kernels(heads: tuple[int, int], dtype: torch.dtype) -> None:
    from sglang.kernels.ops.attention.triton_gdn_fused_proj import fused_qkvzba_split_reshape_cat

    qk, v = heads
    widths = qk * 2 * 16 + v * 2 * 32, 2 * v
    arguments = randn(3, widths[0], dtype=dtype), randn(3, widths[1], dtype=dtype), qk, v, 16, 32
    for ours, theirs in zip(
        elementwise.split_qkvz_ba(*arguments), fused_qkvzba_split_reshape_cat(*arguments), strict=True
    ):
        assert ours.is_contiguous()
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gating_is_the_kernels(dtype: torch.dtype) -> None:
    from sglang.kernels.ops.attention.linear.fused_gdn_gating import fused_gdn_gating

    a, b = randn(5, 4, dtype=dtype) * 20, randn(5, 4, dtype=dtype) * 4
    arguments = randn(4, dtype=torch.float32), a, b, randn(4, dtype=torch.float32)
    g, beta = elementwise.gdn_gating(*arguments)
    their_g, their_beta = fused_gdn_gating(*arguments)
    # the kernel's log(1 + exp(x)) loses x below 2^-24, log1p does not: an absolute error of one fp32 rounding of 1
    torch.testing.assert_close(g, their_g, rtol=1e-6, atol=2e-6)
    # one rounding of exp away from a tie of the 16-bit grid
    torch.testing.assert_close(beta, their_beta, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("do_add", [False, True])
def test_shared_expert_gate_is_the_kernels(do_add: bool) -> None:
    from sglang.kernels.ops.elementwise.elementwise import _launch_fused_gate_sigmoid_mul

    hidden, gate, shared, start = randn(3, 64), randn(64), randn(3, 64), randn(3, 64)
    ours, theirs = start.clone(), start.clone()
    elementwise.gate_sigmoid_mul(hidden, gate, shared, ours, do_add=do_add)
    _launch_fused_gate_sigmoid_mul(hidden, gate, shared, theirs, do_add=do_add)
    assert not torch.equal(ours, start)
    torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)  # one step of float16 around 1 is 1e-3


def test_scatter_of_verified_states() -> None:
    dst, src = randn(2, 6, 3, 4), randn(2, 3, 5, 3, 4)
    slots = torch.tensor([4, -1, 1], dtype=torch.int32)
    steps = torch.tensor([2, 3, -1], dtype=torch.int32)
    expected = dst.clone()
    expected[:, 4] = src[:, 0, 2]  # the second has no slot, the third accepted nothing
    sglang_hooks.scatter_verified_states(dst, src, slots, steps)
    assert torch.equal(dst, expected)

    rows = torch.tensor([2, 0, 1])
    expected[:, 5] = src[:, 2, 4]
    sglang_hooks.scatter_verified_states(dst, src, torch.tensor([5, -1, -1]), torch.tensor([4, 0, 0]), rows)
    assert torch.equal(dst, expected)


def test_hicache_pages_make_the_round_trip() -> None:
    layers, page, pages = 3, 4, 5
    keys = [randn(24, 2, 8) for _ in range(layers)]
    values = [randn(24, 2, 8) for _ in range(layers)]
    host = [torch.zeros(pages, layers, page, 2, 8, dtype=torch.float16) for _ in range(2)]
    rows = torch.cat([torch.arange(8, 12), torch.arange(20, 24)])
    tokens = torch.cat([torch.arange(12, 16), torch.arange(0, 4)])  # host pages 3 and 0
    hicache.store_layers([*keys, *values], host, rows, tokens, page)
    for layer in range(layers):
        assert torch.equal(host[0][3, layer], keys[layer][8:12])
        assert torch.equal(host[1][0, layer], values[layer][20:24])
    assert host[0][[1, 2, 4]].abs().sum() == 0

    back = [torch.zeros(24, 2, 8, dtype=torch.float16) for _ in range(2)]
    elsewhere = torch.cat([torch.arange(0, 4), torch.arange(16, 20)])
    hicache.load_layer(host, back, tokens, elsewhere, 1, page)
    assert torch.equal(back[0][0:4], keys[1][8:12])
    assert torch.equal(back[1][16:20], values[1][20:24])
    assert back[0][4:16].abs().sum() == 0


def test_hicache_rows() -> None:
    source, target = randn(6, 3), torch.zeros(6, 3, dtype=torch.float16)
    hicache.copy_rows([source], [target], torch.tensor([5, 0]), torch.tensor([1, 2]))
    assert torch.equal(target[1:3], source[[5, 0]])
    assert target[[0, 3, 4, 5]].abs().sum() == 0


def test_every_hook_has_its_target() -> None:
    """A hook whose target is gone is only logged by SGLang, and the server would fail much later."""
    import pkgutil

    from sglang.srt.plugins.hook_registry import HookRegistry

    before = dict(HookRegistry._hooks)
    HookRegistry._hooks.clear()  # another test may have registered, too
    try:
        sglang_hooks.register()
        assert len(HookRegistry._hooks) == 7
        for target in HookRegistry._hooks:
            assert callable(pkgutil.resolve_name(target)), target
    finally:
        HookRegistry._hooks.clear()
        HookRegistry._hooks.update(before)


def test_device_contexts_still_reach_the_wrapped_constructors() -> None:
    """transformers builds its models on the meta device; a constructor that escapes leaves wrong buffers behind."""
    assert hasattr(torch.arange, "__wrapped__")
    with torch.device("meta"):
        made = [torch.arange(3), torch.ones(2), torch.empty(1), torch.full((2,), 1.0), torch.tensor([1.0])]
    assert {value.device.type for value in made} == {"meta"}
    assert torch.zeros(2, pin_memory=True).device.type == "cpu"
