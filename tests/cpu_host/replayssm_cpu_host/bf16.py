"""bfloat16 in Triton's interpreter.

Triton 3.8 keeps bfloat16 as raw uint16 and computes on those integers: silent garbage. Here a bfloat16 value
is a float32 that holds an exactly representable bfloat16: loads unpack, stores pack, and each operation
rounds its result to nearest even, as the hardware's bfloat16 instructions do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

BF16 = tl.bfloat16
Handle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder


def pack(values: np.ndarray) -> np.ndarray:
    """float -> raw uint16, rounding to nearest even; every NaN becomes the quiet one."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def unpack(raw: np.ndarray) -> np.ndarray:
    """raw uint16 -> float32, exact."""
    return (np.asarray(raw).astype(np.uint32) << 16).view(np.float32)


def round_to_bf16(values: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 of each value, as float32."""
    return unpack(pack(values))


def install() -> None:
    """Replace the methods of the interpreter that meet bfloat16."""
    _install_representation()
    _install_memory()
    _install_casts()
    _install_arithmetic()


def _is_bf16(dtype: Any) -> bool:
    if isinstance(dtype, tl.pointer_type):
        return False
    return (dtype.element_ty if isinstance(dtype, tl.block_type) else dtype) == BF16


_numpy_dtype = interpreter._get_np_dtype


def _install_representation() -> None:
    fits = interpreter._validate_np_data_size
    interpreter._get_np_dtype = lambda t: np.dtype(np.float32) if _is_bf16(t) else _numpy_dtype(t)
    # a handle refuses data wider than its type: 32 bits in a bfloat16 are right here
    interpreter._validate_np_data_size = lambda data, t: _is_bf16(t) or fits(data, t)
    Builder.get_bf16 = lambda self, value: Handle(round_to_bf16(np.array([value], np.float32)), BF16)


def _install_memory() -> None:
    load, store, atomic = Builder.create_masked_load, Builder.create_masked_store, Builder.create_atomic_rmw
    raw_load, raw_store = interpreter._interpreter.load, interpreter._interpreter.store

    def masked_load(self: Builder, ptrs: Handle, mask: Handle, other: Handle | None, *rest: Any) -> Handle:
        if ptrs.get_element_ty() != BF16:
            return load(self, ptrs, mask, other, *rest)
        fill = np.zeros(ptrs.data.shape, np.uint16) if other is None else pack(other.data)
        return Handle(unpack(raw_load(ptrs.data, mask.data, fill, np.dtype(np.uint16))), BF16)

    def masked_store(self: Builder, ptrs: Handle, value: Handle, mask: Handle, *rest: Any) -> Any:
        if ptrs.get_element_ty() != BF16:
            return store(self, ptrs, value, mask, *rest)
        return raw_store(ptrs.data, pack(value.data), mask.data)

    def atomic_rmw(self: Builder, op: Any, ptr: Handle, value: Handle, *rest: Any) -> Handle:
        if ptr.get_element_ty() == BF16:
            raise NotImplementedError("bfloat16 atomics in the interpreter")
        return atomic(self, op, ptr, value, *rest)

    Builder.create_masked_load = masked_load
    Builder.create_masked_store = masked_store
    Builder.create_atomic_rmw = atomic_rmw


def _install_casts() -> None:
    cast, fp_to_fp, bitcast = Builder.cast_impl, Builder.create_fp_to_fp, Builder.create_bitcast

    def cast_impl(self: Builder, src: Handle, dst_type: Any) -> Handle:
        target = dst_type.scalar
        if target == BF16:
            return Handle(round_to_bf16(src.data), BF16)
        if src.dtype.scalar == BF16:
            return Handle(src.data.astype(_numpy_dtype(target)), target)
        return cast(self, src, dst_type)

    def create_fp_to_fp(self: Builder, src: Handle, dst_type: Any, rounding: Any) -> Handle:
        if BF16 not in (src.dtype.scalar, dst_type.scalar):
            return fp_to_fp(self, src, dst_type, rounding)
        if rounding not in (None, interpreter._ir.ROUNDING_MODE.RTNE):
            raise NotImplementedError(f"bfloat16 conversion with rounding {rounding} in the interpreter")
        return cast_impl(self, src, dst_type)

    def create_bitcast(self: Builder, src: Handle, dst_type: Any) -> Handle:
        target = dst_type.scalar
        if src.dtype.scalar == BF16:
            return Handle(pack(src.data).view(_numpy_dtype(target)), target)
        if target == BF16:
            return Handle(unpack(src.data.view(np.uint16)), BF16)
        return bitcast(self, src, dst_type)

    Builder.cast_impl = cast_impl
    Builder.create_fp_to_fp = create_fp_to_fp
    Builder.create_bitcast = create_bitcast
    for name in ("create_si_to_fp", "create_ui_to_fp", "create_fp_to_si", "create_fp_to_ui"):
        setattr(Builder, name, lambda self, src, dst_type: cast_impl(self, src, dst_type))


def _install_arithmetic() -> None:
    def rounding(operation: Callable[..., Handle]) -> Callable[..., Handle]:
        def wrapper(self: Builder, *args: Any) -> Handle:
            result = operation(self, *args)
            # a comparison carries its operands' type with boolean data: leave it
            if result.dtype == BF16 and result.data.dtype == np.float32:
                result.data = round_to_bf16(result.data)
            return result

        return wrapper

    for name in ("unary_op", "binary_op", "ternary_op", "create_fma", "create_rsqrt", "create_dot"):
        setattr(Builder, name, rounding(getattr(Builder, name)))

    fabs = Builder.create_fabs

    def create_fabs(self: Builder, arg: Handle) -> Handle:
        # the original masks the sign bit of the 16-bit representation
        return Handle(np.abs(arg.data), BF16) if arg.dtype.scalar == BF16 else fabs(self, arg)

    Builder.create_fabs = create_fabs
