"""The interpreter's fixes against torch, whose bfloat16 is an independent implementation."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

from replayssm_cpu_host import interpreter

exp = tl.exp  # bound at import, as SGLang's kernels do


@triton.jit
def _binary(x, y, out, N: tl.constexpr, OP: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(x + at), tl.load(y + at)
    if OP == "add":
        r = a + b
    elif OP == "mul":
        r = a * b
    elif OP == "sub":
        r = a - b
    elif OP == "where":
        r = tl.where(a > b, a, -b)
    elif OP == "max":
        r = tl.maximum(a, b)
    else:
        r = tl.abs(a)
    tl.store(out + at, r)


REFERENCES = {
    "add": torch.add,
    "mul": torch.mul,
    "sub": torch.sub,
    "where": lambda a, b: torch.where(a > b, a, -b),
    "max": torch.maximum,
    "abs": lambda a, b: a.abs(),
}


def numbers(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """64 values of many magnitudes, with signed zeros, infinities, a NaN and values between two bfloat16s."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(64, generator=generator) * torch.logspace(-30, 30, 64)
    values[:8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38])
    return values.to(dtype)


@pytest.mark.parametrize("operation", REFERENCES)
def test_bf16_arithmetic_is_torchs_bit_for_bit(operation: str) -> None:
    x, y = numbers(torch.bfloat16), numbers(torch.bfloat16, seed=1)
    out = torch.empty_like(x)
    _binary[(1,)](x, y, out, 64, operation)
    expected = REFERENCES[operation](x, y)
    if operation == "max":  # Triton's maximum ignores a NaN, torch's keeps it
        expected = torch.where(x.isnan() | y.isnan(), out, expected)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@triton.jit
def _copy(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float32, torch.float16])
def test_casts_round_as_torch_does(source: torch.dtype, target: torch.dtype) -> None:
    x = numbers(source)
    out = torch.empty(64, dtype=target)
    _copy[(1,)](x, out, 64)
    torch.testing.assert_close(out, x.to(target), rtol=0, atol=0, equal_nan=True)


@triton.jit
def _matmul(a, b, out, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    product = tl.dot(tl.load(a + i * N + j), tl.load(b + i * N + j), input_precision="ieee")
    tl.store(out + i * N + j, product)


def test_bf16_dot_accumulates_in_fp32() -> None:
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(16, 16, generator=generator).bfloat16() for _ in range(2))
    out = torch.empty(16, 16)
    _matmul[(1,)](a, b, out, 16)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-6, atol=1e-6)


@triton.jit
def _bits(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at).to(tl.int16, bitcast=True))


def test_bf16_bitcast_sees_the_16_bits() -> None:
    x = numbers(torch.bfloat16)[8:]
    out = torch.empty(32, dtype=torch.int16)
    _bits[(1,)](x, out, 32)
    assert torch.equal(out, x[:32].view(torch.int16))


@triton.jit
def _masked(x, out, count, N: tl.constexpr):
    at = tl.arange(0, N)
    mask = (at < count) * (at >= 1)  # a product of masks: integers in the interpreter
    tl.store(out + at, tl.load(x + at, mask=mask, other=-1.0), mask=mask)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_integer_masks(dtype: torch.dtype) -> None:
    x = torch.arange(8).to(dtype)
    out = torch.full((8,), 7.0, dtype=dtype)
    _masked[(1,)](x, out, 5, 8)
    assert out.tolist() == [7, 1, 2, 3, 4, 7, 7, 7]


@triton.jit
def _late(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, exp(tl.load(x + at)))


def test_builtins_bound_at_import_are_found() -> None:
    x = torch.linspace(-2, 2, 8)
    out = torch.empty(8)
    _late[(1,)](x, out, 8)
    torch.testing.assert_close(out, x.exp(), rtol=1e-6, atol=0)


@triton.autotune([triton.Config({"BLOCK": 4}), triton.Config({"BLOCK": 8})], key=["n"])
@triton.jit
def _tuned(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)


def test_autotuned_kernels_run() -> None:
    x = torch.arange(8.0)
    out = torch.empty(8)
    _tuned[lambda meta: (triton.cdiv(8, meta["BLOCK"]),)](x, out, 8)
    assert torch.equal(out, x + 1)


@triton.jit
def _inner(x):
    return tl.sum(x, axis=0) + 1


@triton.jit
def _outer(x, out, N: tl.constexpr):
    tl.store(out, _inner(_inner(tl.load(x + tl.arange(0, N))) + tl.zeros((N,), tl.float32)))


def test_the_language_is_whole_again_after_a_launch() -> None:
    before = {name: getattr(tl, name) for name in ("load", "sum", "exp", "reduce", "range")}
    core = tl.core.reduce
    out = torch.empty(1)
    _outer[(1,)](torch.ones(4), out, 4)
    assert out.item() == 4 * 5 + 1
    assert {name: getattr(tl, name) for name in before} == before
    assert tl.core.reduce is core


@triton.jit
def _raises(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), _inner(tl.zeros((N,), tl.float32)) + undefined_name)  # noqa: F821


def test_the_language_is_whole_again_after_a_failure() -> None:
    load = tl.load
    with pytest.raises(triton_interpreter.InterpreterError):
        _raises[(1,)](torch.zeros(4), 4)
    assert tl.load is load


def test_launches_write_into_the_callers_storage() -> None:
    pool = torch.zeros(4, 8)
    view = pool[2]
    _copy[(1,)](torch.arange(8.0), view, 8)
    assert pool[2].tolist() == list(range(8))
    assert pool[[0, 1, 3]].abs().sum() == 0


def test_install_twice_changes_nothing() -> None:
    before = triton_interpreter.InterpreterBuilder.create_masked_load
    interpreter.install()
    assert triton_interpreter.InterpreterBuilder.create_masked_load is before
