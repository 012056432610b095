"""Fixes to Triton 3.8's interpreter, for SGLang's kernels and for ours.

`install()` needs Triton only. Call it before the first kernel launch, with `TRITON_INTERPRET=1` in the
environment before Triton is imported.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner

from replayssm_cpu_host import bf16

_installed = False


def install() -> None:
    """Apply every fix to this process. Safe to call twice."""
    global _installed
    if _installed:
        return
    _installed = True
    bf16.install()
    _accept_integer_masks()
    _launch_in_place()
    _autotune_without_a_device()
    _bind_builtins_late()


def _accept_integer_masks() -> None:
    """Some kernels multiply masks, which leaves integers where numpy's masked access wants booleans."""
    Builder, Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    load, store = Builder.create_masked_load, Builder.create_masked_store

    def boolean(mask: Any) -> Any:
        if isinstance(mask, Handle) and mask.data.dtype == np.bool_:
            return mask
        data = mask.data if isinstance(mask, Handle) else mask  # tensor descriptors pass a bare array
        return Handle(np.asarray(data).astype(np.bool_), tl.int1)

    Builder.create_masked_load = lambda self, ptrs, mask, *rest, **kw: load(self, ptrs, boolean(mask), *rest, **kw)
    Builder.create_masked_store = lambda self, ptrs, value, mask, *rest, **kw: store(
        self, ptrs, value, boolean(mask), *rest, **kw
    )


def _launch_in_place() -> None:
    """Skip the copies to and from the host: the tensors are on it.

    Beside their cost, the copy back rewrites whole storages, pools included, with what they held: a write
    that another thread makes in between could be lost.
    """
    executor = interpreter.GridExecutor
    to_host, restore = executor._init_args_hst, executor._restore_args_dev

    def on_host(values: Any) -> bool:
        return all(getattr(v, "is_cpu", not hasattr(v, "data_ptr")) for v in values)

    def init_args(self: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if on_host(args) and on_host(kwargs.values()):
            return args, kwargs
        return to_host(self, args, kwargs)

    def restore_args(self: Any, args: Any, host_args: Any, kwargs: Any, host_kwargs: Any) -> None:
        if host_args is not args:
            restore(self, args, host_args, kwargs, host_kwargs)

    executor._init_args_hst, executor._restore_args_dev = init_args, restore_args


def _autotune_without_a_device() -> None:
    """There is no driver to time with: all configurations tie, and the first one is taken."""
    Autotuner._bench = lambda self, *args, config, **meta: [0.0, 0.0, 0.0]


def _bind_builtins_late() -> None:
    """Patch `triton.language` once per launch, fast, and reach the builtins that escaped at import.

    A launch replaces the builtins in `triton.language` by interpreting ones and puts them back at its end. Two
    things go wrong. A module that says `exp = tl.exp` keeps the original, which fails outside a compiler: such
    names are replaced by a look-up at call time. And finding what to replace is most of a launch's time, again
    for each device function a kernel calls, whose replacements nobody restores: here the launch itself replaces
    everything, from a list made once.
    """
    both = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})  # what a kernel's module may hold of the two
    find = interpreter._patch_lang
    changes: list[tuple[Any, str, Any, Any]] = []  # object, name, original, replacement
    launch_runs = False

    class Outermost:
        """The patches of a launch."""

        def restore(self) -> None:
            nonlocal launch_runs
            launch_runs = False
            for target, name, original, _ in reversed(changes):
                if original is interpreter._MISSING:
                    delattr(target, name)
                else:
                    setattr(target, name, original)

    def patch(fn: Any) -> Outermost | None:
        nonlocal launch_runs
        _look_up_late(fn.__globals__)
        if launch_runs:  # a device function: nobody looks at what it gets
            return None
        launch_runs = True
        if changes:
            for target, name, _, replacement in changes:
                setattr(target, name, replacement)
        else:
            found = find(both)._changes
            changes.extend((target, name, before, getattr(target, name)) for target, name, before in found)
        return Outermost()

    interpreter._patch_lang = patch
    libdevice.exp = _late("exp")  # for modules that bind it later


@functools.cache
def _late(name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(tl if hasattr(tl, name) else tl.math, name)(*args, **kwargs)

    return call


def _look_up_late(module_globals: dict[str, Any]) -> None:
    name = module_globals.get("__name__", "")
    if name.startswith("triton.") or "_replayssm_late" in module_globals:
        return
    module_globals["_replayssm_late"] = True
    for key, value in list(module_globals.items()):
        if getattr(value, tl.core.TRITON_BUILTIN, False) is True:
            module_globals[key] = _late(value.__name__)
