"""Names that SGLang expects of torch and that mean nothing on a CPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

_kept_alive: list[torch.library.Library] = []
_installed = False


def install() -> None:
    """Fill the gaps in this process. Safe to call twice."""
    global _installed
    if _installed:
        return
    _installed = True

    # SGLang's kernels enter `torch.<device type>.device(index)`; torch.cpu has no such context manager.
    if not hasattr(torch.cpu, "device"):
        torch.cpu.device = lambda index=None: contextlib.nullcontext()

    # Pinned memory needs a driver. The request is harmless to ignore: every copy is host to host here.
    # `with torch.device(...)` knows the constructors by identity, in a set it collects at first use: collect it
    # now, with the originals, which the wrappers call.
    _device_constructors()
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    for name in ("tensor", "empty", "zeros", "ones", "full", "arange"):
        setattr(torch, name, _without_pin_memory(getattr(torch, name)))

    # Named by `cuda` in SGLang whatever the platform: after sharing an embedding with a draft model
    # (synchronize) and in the prefill side of disaggregation (Event, current_stream).
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.current_stream = lambda *args: torch.cpu.current_stream()
    torch.cuda.Event = _CpuEvent

    # HiCache synchronises its stream while it handles an error; without the method that error is hidden.
    torch.cpu.Stream.synchronize = lambda self: None


def ensure_torchvision() -> None:
    """Make `import torchvision` work beside a torch without CUDA.

    The published wheel is built for CUDA. Where its library cannot load, the import stops at two operators
    whose schema it then misses; nothing here runs them, so declaring them is enough.
    """
    with contextlib.suppress(ImportError):
        try:
            import torchvision  # noqa: F401
        except RuntimeError:
            library = torch.library.Library("torchvision", "FRAGMENT")
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _kept_alive.append(library)  # a collected Library takes its operators back


class _CpuEvent(torch.cpu.Event):  # type: ignore[misc]
    """torch.cpu.Event that accepts torch.cuda.Event's options."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


def _without_pin_memory(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def wrapper(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return make(*args, **kwargs)

    return wrapper
