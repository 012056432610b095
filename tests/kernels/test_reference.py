"""The fp64 references against sums written out by hand, and against SGLang's own decode kernels."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from replayssm_kernels import reference
from replayssm_kernels.bench import arms
from replayssm_kernels.ring import RingShape
from tests.kernels.machine import BOUNDED, DEVICE, GDN, KDA, make_shape


def random_token(batch: int, heads: int, key_dim: int, value_dim: int, channels: int) -> reference.Token:
    q, k = torch.randn(2, batch, heads, key_dim, dtype=torch.float64)
    v = torch.randn(batch, heads, value_dim, dtype=torch.float64)
    return reference.Token(q, k, v, -torch.rand(batch, heads, channels).double(), torch.rand(batch, heads).double())


@pytest.mark.parametrize("channels", [1, 3])
def test_step_against_scalar_loops(channels: int) -> None:
    """Every element of the new state and the output, from the recurrence's definition."""
    torch.manual_seed(0)
    S = torch.randn(1, 1, 2, 3, dtype=torch.float64)
    t = random_token(1, 1, key_dim=3, value_dim=2, channels=channels)
    o, new, u = reference.step(S, t)
    q, k, v, beta = t.q[0, 0].tolist(), t.k[0, 0].tolist(), t.v[0, 0].tolist(), t.beta.item()
    a = [math.exp(t.g[0, 0, i if channels > 1 else 0]) for i in range(3)]
    for row in range(2):
        decayed = [a[i] * S[0, 0, row, i].item() for i in range(3)]
        correction = beta * (v[row] - sum(decayed[i] * k[i] for i in range(3)))
        state = [decayed[i] + correction * k[i] for i in range(3)]
        assert u[0, 0, row].item() == pytest.approx(correction, rel=1e-12)
        assert new[0, 0, row].tolist() == pytest.approx(state, rel=1e-12)
        assert o[0, 0, row].item() == pytest.approx(sum(state[i] * q[i] for i in range(3)), rel=1e-12)


@pytest.mark.parametrize("gate", [dict(gate="gdn"), dict(gate="kda"), dict(gate="kda", lower_bound=-5.0)])
def test_replay_of_records_equals_the_sequence(gate: dict) -> None:
    """The state from a checkpoint and the records of six tokens is the state that six steps reach."""
    shape = RingShape(1, 2, 2, 2, 16, 16, capacity=6, key_dtype=torch.float32, **gate)
    channels = 4 if shape.gate == "kda" else 1
    torch.manual_seed(1)
    checkpoint = S = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    records = []
    for _ in range(6):
        t = random_token(1, 2, key_dim=4, value_dim=5, channels=channels)
        _, S, u = reference.step(S, t)
        records.append((u[0], t.k[0], t.g[0]))
    u, k, g = (torch.stack(part, 1) for part in zip(*records, strict=True))
    for j in range(6):
        if j % shape.gate_group:
            g[:, j] += g[:, j - 1]
    if shape.scaled_keys:
        k = k * torch.exp(-g)
    ring_g = g if channels > 1 else g[..., 0]
    assert reference.relative_error(reference.replay_row(shape, checkpoint[0], u, k, ring_g, 6), S[0]) <= 1e-13


def test_gates() -> None:
    """softplus, its cut at 20, and the bounded gate, at numbers computed by hand."""
    a, zero = torch.tensor([[0.0, 30.0]]), torch.zeros(2)
    assert reference.gdn_gate(a, zero, zero)[0, :, 0].tolist() == pytest.approx([-math.log(2), -30.0], rel=1e-12)
    log_2 = torch.tensor([math.log(2)])
    expected = [-5 / (1 + math.exp(-2 * x)) for x in (0.0, 30.0)]
    assert reference.kda_gate(a, log_2, zero, -5.0)[0, 0].tolist() == pytest.approx(expected, rel=1e-6)
    expected = [-2 * math.log(2), -60.0]
    assert reference.kda_gate(a, log_2, zero)[0, 0].tolist() == pytest.approx(expected, rel=1e-6)


def test_relative_error_sees_nan() -> None:
    x = torch.tensor([1.0, float("nan")])
    assert not reference.relative_error(x, torch.ones(2)) <= 1e9


@pytest.mark.parametrize("gate", [GDN, KDA, BOUNDED], ids=["gdn", "kda", "bounded"])
def test_sglangs_packed_decode_computes_the_reference(gate: dict) -> None:
    """An implementation that is not ours, in fp32: the reference means what the models were trained with.

    Measured 1.2e-7 to 1.3e-7 in the interpreter.
    """
    shape = make_shape(k_heads=1, v_heads=2, rows=3, **gate)
    kinds, why_not = arms.available_baselines(shape)
    if not kinds or (DEVICE.type == "cpu" and "replayssm_cpu_host.interpreter" not in sys.modules):
        pytest.skip(why_not or "SGLang's kernels need the CPU test host in the interpreter")
    error = arms.accuracy(lambda: arms.Packed(shape, 2, torch.float32, DEVICE, False), steps=6)
    print(f"{error:.1e}")
    assert error <= 2e-6
