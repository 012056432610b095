"""The benchmarks run at toy size, count the bytes they claim, and their competitors compute the same function."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from replayssm_kernels import DecodeConfig, RingShape, launch_shapes, traffic
from replayssm_kernels.bench import __main__ as command
from replayssm_kernels.bench import arms, verify_arms
from replayssm_kernels.workload import Workload
from tests.kernels.machine import BOUNDED, DEVICE, KDA, each_gate, make_shape


@pytest.mark.parametrize(
    "which",
    [
        ["gdn_decode"],
        pytest.param(["kda_decode"], marks=pytest.mark.long),
        pytest.param(["kda_decode", "--lower-bound", "-5"], marks=pytest.mark.long),
    ],
)
def test_decode_smoke(which: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.jsonl"
    command.main([*which, "--smoke", "--no-baselines", "--configs", "16,2,1,1", "--json", str(path)])
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(r["benchmark"] == which[0] for r in records)
    assert {(r["arm"], r["batch"]) for r in records if "direct" not in r["arm"]} == {
        (arm, batch) for arm in ("ours", "ours bv16 split2 w1 st1") for batch in (1, 3)
    }
    assert {r["arm"] for r in records if "direct bv" in r["arm"]} >= {"ours, direct bv16 w1 ch32"}
    assert sum(r["arm"] == "ours, direct" for r in records) == 2
    for r in records:
        assert r["us"] > 0 and r["error"] < 1e-3 and r["us_p10"] <= r["us"] <= r["us_p90"]
    assert "batch 3 ours" in capsys.readouterr().out


@pytest.mark.parametrize(
    "which", [pytest.param(["gdn_verify"], marks=pytest.mark.long), ["kda_verify", "--accepted", "2"]]
)
def test_verify_smoke(which: list[str], tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    command.main([*which, "--smoke", "--no-baselines", "--configs", "16,2,4,1", "--json", str(path)])
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert {(r["benchmark"], r["arm"], r["batch"]) for r in records} == {
        (which[0], arm, batch) for arm in ("ours", "ours bv16 split2 w4 st1") for batch in (1, 3)
    }
    assert all(r["us"] > 0 and r["error"] < 1e-3 and (r["width"], r["capacity"]) == (3, 7) for r in records)


def test_materialise_smoke(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    command.main(["materialise", "--smoke", "--json", str(path)])
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert {r["arm"] for r in records} == {"fold", "snapshot", "fold, 3 programs", "torch copy"}
    assert {r["requests"] for r in records} == {0, 1, 2}


def ours(shape: RingShape, batch: int, state_dtype: torch.dtype, device: torch.device, stagger: bool) -> arms.Ours:
    return arms.Ours(Workload(shape, batch, state_dtype, device, stagger=stagger))


@each_gate
def test_every_arm_computes_the_same_function(gate: dict) -> None:
    """SGLang's kernels at the same inputs stay near the fp64 reference, so the comparison is one of equals.

    Measured in the interpreter: ours and packed decode 2.1e-4 (the fp16 output's rounding), in-tree replay 2.4e-4 (GDN)
    and 2.3e-4 (KDA).
    """
    shape = make_shape(v_heads=2, key_dim=32, value_dim=32, rows=4, key_dtype=torch.float16, **gate)
    kinds, why_not = arms.available_baselines(shape)
    if not kinds or (DEVICE.type == "cpu" and "replayssm_cpu_host.interpreter" not in sys.modules):
        pytest.skip(why_not or "SGLang's kernels need the CPU test host in the interpreter")
    kinds = {"ours": ours, **kinds}
    assert len(kinds) == (3 if "lower_bound" in gate else 4)
    for name, kind in kinds.items():
        error = arms.accuracy(lambda k=kind: k(shape, 2, torch.float32, DEVICE, False), steps=5)
        print(f"{name}: {error:.1e}")
        assert error < 1e-3
    for kind in kinds.values():  # and one staggered step each, as they are timed
        arm = kind(shape, 3, torch.float32, DEVICE, True)
        assert not arm.forward().isnan().any()
        assert not int(arm.workload.ring.faults)


@each_gate
def test_every_verify_arm_computes_the_same_function(gate: dict) -> None:
    """SGLang's verify kernels with their commits, over steps that accept part of the drafts."""
    shape = make_shape(key_dim=32, value_dim=32, rows=4, key_dtype=torch.float16, capacity=9, max_width=4, **gate)
    kinds, why_not = verify_arms.available_baselines(shape)
    if not kinds or (DEVICE.type == "cpu" and "replayssm_cpu_host.interpreter" not in sys.modules):
        pytest.skip(why_not or "SGLang's kernels need the CPU test host in the interpreter")
    kinds = {"ours": arms.Ours, **kinds}
    assert len(kinds) == (4 if gate["gate"] == "gdn" else 3)
    if DEVICE.type == "cpu":
        kinds.pop("sglang fold every commit")  # its loop counter has no `.to` in the interpreter
    for name, kind in kinds.items():
        error = arms.accuracy(lambda k=kind: k(Workload(shape, 2, torch.float32, DEVICE, width=4, accepted=3)), steps=4)
        print(f"{name}: {error:.1e}")
        assert error < 2e-3


def test_verify_folds_at_its_rate() -> None:
    """Three of four drafts accepted in a ring of 13: a fold in every fourth step of each request, over any turn."""
    shape = make_shape(rows=9, capacity=13, v_heads=1, max_width=4)
    arm = arms.Ours(Workload(shape, 8, torch.float32, DEVICE, stagger=True, width=4, accepted=3))
    assert arm.workload.turn == 4
    for _ in range(4):  # the fullest rings are full only now
        arm.forward()
    folded: list[int] = []
    for _ in range(4):
        arm.forward()
        entries = arm.workload.plan.fold.to_host()
        assert len(entries) == 2 and all(upto == 12 for *_, upto in entries)
        folded += [row for row, *_ in entries]
    assert sorted(folded) == list(range(1, 9))
    assert int(arm.workload.ring.faults) == 0


def test_folds_happen_at_the_rate_of_serving() -> None:
    """A benchmark without fold cost is a wrong benchmark: over L staggered steps every row folds exactly once."""
    shape = make_shape(rows=7, capacity=3, v_heads=1)
    arm = ours(shape, 6, torch.float32, DEVICE, True)
    arm.forward()  # the fullest rings are full only now
    folded: list[int] = []
    for _ in range(3):
        arm.forward()
        entries = arm.workload.plan.fold.to_host()
        assert len(entries) == 2 and all(upto == 3 for *_, upto in entries)
        folded += [row for row, *_ in entries]
    assert sorted(folded) == [1, 2, 3, 4, 5, 6]


def test_byte_count_of_the_27b_shape() -> None:
    """Batch 256, fp32: state read in every step and read and written in every 16th; 9.5 records of each request."""
    shape = make_shape(
        k_heads=16, v_heads=48, key_dim=128, value_dim=128, capacity=16, key_dtype=torch.bfloat16, rows=257
    )
    state = 256 * 48 * 128 * 128 * 4
    record = 256 * (48 * (128 * 4 + 4) + 16 * 128 * 2)
    assert traffic.buffered_bytes(shape, 256, 4) == state * (1 + 1 / 8) + record * 9.5


def test_byte_count_of_kda_shapes() -> None:
    """A raw key and a gate of every channel per record; with scaled keys an fp32 key, and gates of one record only."""
    sizes = dict(k_heads=32, v_heads=32, key_dim=128, value_dim=128, capacity=16, key_dtype=torch.bfloat16)
    state = 32 * 128 * 128 * 4 * (1 + 1 / 8)
    raw = 32 * 128 * (4 + 2 + 4) * 9.5
    assert traffic.buffered_bytes(make_shape(**sizes, **KDA), 1, 4) == state + raw
    scaled = 32 * 128 * ((4 + 4) * 9.5 + 4 * (1 + 1 + 1 / 16))
    assert traffic.buffered_bytes(make_shape(**sizes, **BOUNDED), 1, 4) == state + scaled


def test_configs_on_the_command_line() -> None:
    assert command.configs("32,1,1,2;16,8,1,1", 128) == (DecodeConfig(32, 1, 1, 2), DecodeConfig(16, 8, 1, 1))
    every = command.configs("all", 128)
    assert len(every) > 20 and all(128 % (c.block_v * c.split) == 0 for c in every)


def test_the_sweep_covers_the_table() -> None:
    """A launch shape that no sweep tries can not be found again."""
    table = {config for gate in (0, 1, 2) for size in (2, 4) for config in launch_shapes.swept(gate, size)}
    assert table <= set(command.configs("all", 128))
