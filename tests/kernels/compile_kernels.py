"""Compile the kernels for an NVIDIA GPU on a machine without one; prints one JSON line per variant.

Run in a process of its own without TRITON_INTERPRET (test_compile.py does): what the interpreter accepts, the compiler
may not. Triton's wheel brings ptxas and cuobjdump.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import replayssm_kernels  # noqa: F401  (fills sys.modules: the functions shadow their modules' names)
from replayssm_kernels import DecodeConfig
from replayssm_kernels.gates import GDN, KDA, SCALED
from replayssm_kernels.launch_shapes import choose_config, choose_direct_config, choose_verify_config, swept

TARGET = GPUTarget("cuda", 90, 32)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
DECODE = sys.modules["replayssm_kernels.decode"]
MATERIALISE = sys.modules["replayssm_kernels.materialise"]
CURSORS = sys.modules["replayssm_kernels.cursors"]
VERIFY = sys.modules["replayssm_kernels.verify"]
EXTEND = sys.modules["replayssm_kernels.extend"]


def compile_one(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int) -> dict[str, int]:
    """Registers, spilled bytes and shared memory of one variant. Pointers and strides are 16-byte aligned."""
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        if signature[name].startswith("*") or name.startswith(("s_", "l_")):
            attributes[(i,)] = [["tt.divisibility", 16]]
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    compiled = triton.compile(source, target=TARGET, options=dict(num_warps=warps, num_stages=1))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return dict(registers=int(registers), spilled=int(stack), shared=compiled.metadata.shared)


def layer_types(key: str, state: str, u: str, gate: int) -> dict[str, str]:
    names = dict.fromkeys(("mixed_qkv", "a", "b", "out", "ring_k"), "*" + key)
    names |= dict.fromkeys(("A_log", "dt_bias", "ring_g"), "*fp32")
    names |= dict.fromkeys(("slots", "pending", "count", "entries", "starts", "widths"), "*i32")
    names |= dict(state="*" + state, ring_u="*" + u, rows="*i64", scale="fp32", lower_bound="fp32")
    return names | (dict(ring_k="*fp32") if gate == SCALED else {})


def shape_of(c: DecodeConfig) -> dict[str, int]:
    return dict(CH=c.chunk, BV=c.block_v, SPLIT=c.split, STAGES=c.stages)


def variants(everything: bool) -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any], int]]:
    """(name, kernel, types, constants, warps) of what servers launch, and the corners of the supported shapes."""
    sizes = dict(H=16, HV=48, K=128, V=128, L=16)
    for gate, state in itertools.product((GDN, KDA, SCALED), ("fp32", "bf16")):
        for c in swept(gate, 4 if state == "fp32" else 2):
            constants = dict(sizes, GATE=gate, BOUNDED=gate == SCALED, IS_DIRECT=False, RB=16, **shape_of(c))
            types = layer_types("bf16", state, "fp32", gate)
            yield f"decode gate {gate} {state} {tuple(c)}", DECODE._decode_kernel, types, constants, c.warps
        for pairs in (32, 256):
            c = choose_direct_config(pairs, gate, 4 if state == "fp32" else 2, 128, 128, 16)
            constants = dict(constants, IS_DIRECT=True, **shape_of(c))
            yield f"decode gate {gate} {state} direct {tuple(c)}", DECODE._decode_kernel, types, constants, c.warps
    corners = ((GDN, 256, 64, "bf16"), (GDN, 16, 1, "fp16"), (KDA, 64, 7, "fp32"), (KDA, 128, 64, "bf16"))
    for (gate, dim, capacity, key), pairs in itertools.product(corners, (1, 10_000)):
        c = choose_config(pairs, gate, 4, dim, dim, capacity)
        constants = dict(H=2, HV=4, K=dim, V=dim, L=capacity, GATE=gate, BOUNDED=gate == KDA, IS_DIRECT=False)
        constants |= dict(RB=min(16, max(4, triton.next_power_of_2(capacity))), **shape_of(c))
        constants["CH"] = min(c.chunk, dim)
        types = layer_types(key, "fp32", "bf16", gate)
        yield (
            f"decode gate {gate} dim {dim} L {capacity} {key} {tuple(c)}",
            DECODE._decode_kernel,
            types,
            constants,
            c.warps,
        )
    served = itertools.product((GDN, KDA, SCALED), (128,), ("bf16",), ("fp32",), (8,))
    corners = ((GDN, 128, "bf16", "bf16", 8), (KDA, 64, "fp32", "fp32", 4))
    if everything:  # wide verify shapes take the compiler a minute each
        corners += ((KDA, 128, "bf16", "bf16", 8), (SCALED, 128, "bf16", "bf16", 8), (GDN, 128, "fp16", "fp32", 8))
        corners += ((GDN, 128, "bf16", "fp32", 16), (KDA, 128, "bf16", "fp32", 16))
        corners += ((GDN, 256, "bf16", "fp32", 4), (KDA, 256, "bf16", "fp32", 4))
    for gate, dim, key, state, width in (*served, *corners):
        c = choose_verify_config(10_000, gate, 4 if state == "fp32" else 2, dim, dim, width)
        constants = dict(H=16, HV=48, K=dim, V=dim, L=16 if gate == SCALED else 32 + width, GATE=gate)
        constants |= dict(BOUNDED=gate == SCALED, TP=8 if width <= 8 else 16, MAX_WIDTH=width, RB=16, CH=min(32, dim))
        constants |= dict(BV=c.block_v, SPLIT=c.split, STAGES=c.stages)
        name = f"verify gate {gate} dim {dim} {key} {state} T {width} {tuple(c)}"
        yield name, VERIFY._verify_kernel, layer_types(key, state, "fp32", gate), constants, c.warps
    folds = [(gate, "bf16", state) for gate in (GDN, KDA, SCALED) for state in ("fp32", "bf16")]
    for gate, key, state in (*folds, (GDN, "fp16", "fp32")):
        constants = dict(sizes, GATE=gate, RB=16, BV=32, STAGES=3)
        types = layer_types(key, state, "fp32", gate)
        yield f"materialise gate {gate} {key} {state}", MATERIALISE._materialise_kernel, types, constants, 4
    served = itertools.product((False, True), (128,), ("bf16",), ("fp32", "bf16"))
    for channels, dim, key, state in (*served, (False, 64, "fp16", "fp32"), (False, 256, "bf16", "fp32")):
        types = dict.fromkeys(("rows", "points", "slots"), "*i64")
        types |= dict(sources="*i32", gates="*fp32", state="*" + state)
        types |= dict.fromkeys(("w", "u", "k", "decayed", "conv", "inputs"), "*" + key)
        constants = dict(H=48 if channels else 16, HV=48, K=dim, V=dim, BT=64, BV=32, CHANNELS=channels)
        yield f"leave_states channels {channels} {key} {state}", EXTEND._leave_states_kernel, types, constants, 4
    yield "leave_windows", EXTEND._leave_windows_kernel, types, dict(WINDOW=3, BW=4, BD=256), 4
    plan = dict.fromkeys(("checkpoint", "faults", "slots", "track_slots", "pending", "fold_count", "fold"), "*i32")
    plan |= dict.fromkeys(("snapshot_count", "snapshot", "count_out", "entries"), "*i32")
    plan |= dict(
        positions="*i64", widths="*i32", rows="*i64", seq_lens="*i64", lens="*i64", new_lens="*i64", track_mask="*i1"
    )
    for count, capacity in ((False, 16), (True, 16), (True, 64)):
        plan["totals"] = "*i64"
        constants = dict(L=capacity, BLOCK=1024, COUNT=count, BINS=max(32, 2 * capacity), MAX_WIDTH=8)
        for wide in (False, True):
            kind = dict(constants, WIDE=wide, IS_DIRECT=False, TRACK=not wide)
            yield f"plan_step count {count} wide {wide}", CURSORS._plan_step_kernel, plan, kind, 4
        kind = dict(constants, WIDE=False, IS_DIRECT=True, TRACK=True)
        yield f"plan_step count {count} direct", CURSORS._plan_step_kernel, plan, kind, 4
        constants = dict(L=capacity, BLOCK=64, COUNT=count)
        yield f"plan_snapshot count {count}", CURSORS._plan_snapshot_kernel, plan, constants, 4
        constants = dict(L=capacity, BLOCK=64, COUNT=count)
        yield f"plan_forced_fold count {count}", CURSORS._plan_forced_fold_kernel, plan, constants, 4
    yield "set_checkpoint", CURSORS._set_checkpoint_kernel, plan, dict(BLOCK=64), 4


if __name__ == "__main__":
    step = 6 if "--some" in sys.argv else 1
    for name, kernel, types, constants, warps in itertools.islice(variants("--all" in sys.argv), 0, None, step):
        print(json.dumps(dict(name=name, **compile_one(kernel, types, constants, warps))), flush=True)
