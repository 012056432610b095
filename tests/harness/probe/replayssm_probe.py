"""A test-only SGLang plugin: writes down what the ring does, and breaks or bends a server where a test asks for it.

This folder on PYTHONPATH is enough to load it (SGLang finds it through the dist-info beside this file), and it does
nothing without its environment variables:

    REPLAYSSM_PROBE_FILE        append one JSON line per step, extend and hand-over of a slot to this file
    REPLAYSSM_PROBE_MEMORY_GIB  size the pools as on a device with this much memory, whatever the machine has
    REPLAYSSM_PROBE_FAIL_HOOK   "everywhere:ENDING" or "children:ENDING": SGLang fails to apply the hooks on targets
                                that end so (it only logs that), in every process or all but the launcher
    REPLAYSSM_PROBE_FAIL_LAUNCH "NAME:NUMBER": a launch of the ring (materialise, decode, ...) fails the NUMBERth time

tests/harness/events.py reads the file.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

FILE_ENV = "REPLAYSSM_PROBE_FILE"
MEMORY_ENV = "REPLAYSSM_PROBE_MEMORY_GIB"
FAIL_ENV = "REPLAYSSM_PROBE_FAIL_HOOK"
LAUNCH_ENV = "REPLAYSSM_PROBE_FAIL_LAUNCH"


def register() -> None:
    """SGLang's entry point: installs what the environment asks for."""
    if FILE_ENV in os.environ:
        _record(os.environ[FILE_ENV])
    if MEMORY_ENV in os.environ:
        _fix_memory(float(os.environ[MEMORY_ENV]))
    if LAUNCH_ENV in os.environ:
        name, _, number = os.environ[LAUNCH_ENV].partition(":")
        _fail_launch(name, int(number))
    if FAIL_ENV in os.environ:
        where, _, ending = os.environ[FAIL_ENV].partition(":")
        if where == "everywhere" or multiprocessing.parent_process() is not None:
            _fail_hook(ending)


def _record(path: str) -> None:
    from sglang_replayssm.request_ring import RequestRing

    def write(**event: Any) -> None:
        with open(path, "a") as file:
            file.write(json.dumps(event) + "\n")

    def after(name: str, look: Callable[..., dict[str, Any] | None]) -> None:
        method = getattr(RequestRing, name)

        @functools.wraps(method)
        def recorded(ring: Any, *args: Any, **kwargs: Any) -> Any:
            result = method(ring, *args, **kwargs)
            event = look(ring, *args, **kwargs)
            if event is not None:
                write(**event)
            return result

        setattr(RequestRing, name, recorded)

    def decode(ring: Any, rows: Any, seq_lens: Any, *rest: Any) -> dict[str, Any]:
        plan = ring.plan
        return dict(
            kind="decode",
            rows=rows.tolist(),
            lens=seq_lens.tolist(),
            pending=plan.pending[: len(rows)].tolist(),
            folds=plan.fold.to_host(),
            snapshots=plan.snapshot.to_host(),
        )

    def verify(ring: Any, rows: Any, committed: Any, slots: Any, width: int) -> dict[str, Any]:
        return dict(
            kind="verify",
            rows=rows.tolist(),
            lens=(committed + width).tolist(),
            pending=ring.plan.pending[: len(rows)].tolist(),
            folds=ring.plan.fold.to_host(),
        )

    def verified(ring: Any, rows: Any, committed: Any, slots: Any, steps: Any, track: Any) -> dict[str, Any]:
        return dict(
            kind="verified",
            rows=rows.tolist(),
            lens=(committed + steps + 1).tolist(),
            folds=[],
            snapshots=ring.plan.snapshot.to_host(),
        )

    def extend(ring: Any, batch: Any) -> dict[str, Any] | None:
        mode = batch.logical_forward_mode
        if mode.is_decode_or_idle() or mode.is_target_verify():
            return None
        return dict(
            kind="extend",
            mode=batch.logical_forward_mode.name,
            rows=batch.req_pool_indices.tolist(),
            prefix=batch.extend_prefix_lens.tolist(),
            lens=batch.seq_lens.tolist(),
            folds=ring.plan.fold.to_host(),
        )

    def hand_over(ring: Any, row: int, slot: Any, committed: int) -> dict[str, Any]:
        return dict(kind="hand over", rows=[row], lens=[committed], folds=ring.plan.fold.to_host())

    after("plan_decode", decode)
    after("plan_verify", verify)
    after("snapshot_verified", verified)
    after("before_forward", extend)
    after("fold_row", hand_over)


def _fix_memory(gib: float) -> None:
    from sglang.srt.mem_cache import kv_cache_configurator

    profile = kv_cache_configurator.KVCacheConfigurator._profile_available_bytes

    def fixed(configurator: Any, pre_model_load_memory: float) -> int:
        return profile(configurator, pre_model_load_memory=gib)

    kv_cache_configurator.KVCacheConfigurator._profile_available_bytes = fixed
    kv_cache_configurator.get_available_gpu_memory = lambda *args, **kwargs: gib


def _fail_launch(name: str, number: int) -> None:
    from sglang_replayssm import request_ring

    launch = getattr(request_ring, name)
    calls = iter(range(1, number))

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            raise RuntimeError("the probe makes this launch fail")
        return launch(*args, **kwargs)

    setattr(request_ring, name, failing)


def _fail_hook(ending: str) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    apply = HookRegistry._apply_target

    def failing(target: str, *args: Any, **kwargs: Any) -> Any:
        if target.endswith(ending):
            raise AttributeError(f"{target}: the probe makes this hook fail")
        return apply(target, *args, **kwargs)

    HookRegistry._apply_target = staticmethod(failing)
