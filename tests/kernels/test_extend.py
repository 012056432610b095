"""States and conv windows inside an extend against the plain recurrence and plain slicing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from replayssm_kernels import reference
from replayssm_kernels.extend import CHUNK, Points, leave_states, leave_windows
from tests.kernels.machine import DEVICE, need_bf16

# w, u, keys and what is written are rounded to the activations' dtype, as SGLang's prefill rounds them. Measured: fp32
# activations 5e-7 (on a GPU its products are tf32), fp16 3.5e-4, bf16 3.5e-3; a bf16 state 2e-3.
BOUND = {torch.float32: 4e-6 if DEVICE.type == "cpu" else 2e-3, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Sizes:
    k_heads: int = 1
    v_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16


class Extend:
    """Sequences of the given lengths, and what a prefill computes from them per chunk (in float64, then rounded)."""

    def __init__(self, sizes: Sizes, channels: bool, lengths: list[int], dtype: torch.dtype, seed: int = 0) -> None:
        s, random = sizes, torch.Generator().manual_seed(seed)
        self.sizes, self.channels, self.lengths = sizes, channels, lengths
        tokens, heads = sum(lengths), s.v_heads if channels else s.k_heads
        self.k = reference.normalise(torch.randn(tokens, heads, s.key_dim, generator=random)).to(dtype)
        self.v = torch.randn(tokens, s.v_heads, s.value_dim, generator=random).to(dtype)
        self.g = -torch.rand(tokens, s.v_heads, s.key_dim if channels else 1, generator=random).double().pow(3)
        self.g[torch.rand(self.g.shape, generator=random) < 0.05] = 0.0
        self.beta = torch.rand(tokens, s.v_heads, generator=random).double()
        keys = self.k.double().repeat_interleave(s.v_heads // heads, 1)
        w, u, decayed = (torch.empty(tokens, s.v_heads, n) for n in (s.key_dim, s.value_dim, s.key_dim))
        gates = torch.empty(self.g.shape)
        for begin, end in self._chunks():
            inputs = (each[begin:end] for each in (keys, self.v, self.g, self.beta))
            w[begin:end], u[begin:end], sums, decayed[begin:end] = reference.prefill_chunk(*inputs)
            gates[begin:end] = sums / torch.log(torch.tensor(2.0)) if channels else sums
        self.w, self.u, self.decayed = (each.to(DEVICE, dtype) for each in (w, u, decayed))
        self.gates = gates.to(DEVICE) if channels else gates[..., 0].to(DEVICE)

    def _chunks(self) -> list[tuple[int, int]]:
        found, first = [], 0
        for length in self.lengths:
            found += [(first + at, first + min(at + CHUNK, length)) for at in range(0, length, CHUNK)]
            first += length
        return found

    def leave(self, state: torch.Tensor, sources: list[int], points: Points) -> None:
        leave_states(
            state,
            torch.tensor(sources, dtype=torch.int32, device=DEVICE),
            points,
            self.w,
            self.u,
            self.k.to(DEVICE),
            self.gates,
            self.decayed if self.channels else None,
        )

    def expected(self, state: torch.Tensor, sequence: int, at: int) -> torch.Tensor:
        """The plain recurrence over the first `at` tokens of a sequence, from [HV, V, K]."""
        first, s, found = sum(self.lengths[:sequence]), self.sizes, state.double().cpu()[None]
        for t in range(first, first + at):
            k = self.k[t].double().repeat_interleave(s.v_heads // self.k.shape[1], 0)[None]
            found = reference.step(
                found, reference.Token(k, k, self.v[t].double()[None], self.g[t][None], self.beta[t][None])
            )[1]
        return found[0]


def slots_of(*slots: int) -> torch.Tensor:
    return torch.tensor(slots, device=DEVICE)


@pytest.mark.parametrize("channels", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize(
    ("sizes", "dtype", "state_dtype"),
    [
        pytest.param(Sizes(), torch.float32, torch.float32, id="fp32"),
        pytest.param(Sizes(k_heads=2, v_heads=4, key_dim=64, value_dim=32), torch.float16, torch.float32, id="fp16"),
        pytest.param(Sizes(value_dim=64), torch.bfloat16, torch.bfloat16, id="bf16"),
        pytest.param(Sizes(key_dim=256, value_dim=128), torch.bfloat16, torch.float32, id="wide"),
    ],
)
def test_the_state_at_every_point(channels: bool, sizes: Sizes, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    """Before the first token, off and on the grid, twice in a chunk, and at the end; some sequences have none."""
    if torch.bfloat16 in (dtype, state_dtype):
        need_bf16()
    if channels and sizes.k_heads != sizes.v_heads:
        sizes = Sizes(sizes.v_heads, sizes.v_heads, sizes.key_dim, sizes.value_dim)
    extend = Extend(sizes, channels, [150, 7, 64, 90], dtype)
    chosen = {0: [0, 20, 63, 64, 65, 150], 2: [64], 3: [1, 70]}
    sources = [3, 5, 1, 7]
    state = torch.randn(24, sizes.v_heads, sizes.value_dim, sizes.key_dim, device=DEVICE).to(state_dtype)
    before = state.clone()
    starts = [0, 150, 157, 221]
    points = Points.of(
        [(starts[i], i, True, at) for i, at in chosen.items()], slots_of(*range(10, 19)), state.device
    )  # fmt: skip
    extend.leave(state, sources, points)
    bound = max(BOUND[dtype], BOUND[state_dtype])
    for slot, (sequence, at) in zip(range(10, 19), ((i, at) for i in chosen for at in chosen[i]), strict=True):
        error = reference.relative_error(state[slot].cpu(), extend.expected(before[sources[sequence]], sequence, at))
        assert error < bound, (sequence, at, error)
    untouched = [slot for slot in range(24) if slot not in range(10, 19)]
    assert torch.equal(state[untouched], before[untouched])
    assert torch.equal(state[10], before[3])  # no token: a copy


@pytest.mark.parametrize("channels", [False, True], ids=["gdn", "kda"])
def test_a_point_does_not_depend_on_what_follows(channels: bool) -> None:
    """Bit for bit: not on other points, not on the tokens behind it, not on the neighbours."""
    sizes = Sizes(v_heads=2, k_heads=2)
    extend = Extend(sizes, channels, [100, 130], torch.float16)
    start = torch.randn(9, 2, 16, 16, device=DEVICE)
    state = start.clone()
    extend.leave(state, [0, 1], Points.of([(100, 1, True, [30, 64, 90, 130])], slots_of(4, 5, 6, 7), state.device))
    for slot, at in ((4, 30), (5, 64), (6, 90), (7, 130)):
        alone = start.clone()
        extend.leave(alone, [0, 1], Points.of([(100, 1, True, [at])], slots_of(8), alone.device))
        assert torch.equal(alone[8], state[slot])
    extend.w[195:] = extend.u[195:] = 0  # nothing behind token 95 of the second sequence
    other = start.clone()
    extend.leave(other, [0, 1], Points.of([(100, 1, True, [30, 64, 90])], slots_of(4, 5, 6), other.device))
    assert torch.equal(other[4:7], state[4:7])


def test_a_padded_sequence_is_skipped() -> None:
    extend = Extend(Sizes(), False, [20], torch.float32)
    state = torch.randn(3, 2, 16, 16, device=DEVICE)
    before = state.clone()
    points = Points.of([(0, 0, True, [5])], slots_of(2), state.device)
    extend.leave(state, [-1], points)
    conv = torch.randn(3, 8, 3, device=DEVICE)
    windows = conv.clone()
    leave_windows(conv, torch.randn(20, 8, device=DEVICE), torch.tensor([-1], device=DEVICE), points)
    assert torch.equal(state, before) and torch.equal(conv, windows)


@pytest.mark.parametrize("transposed", [False, True], ids=["gdn layout", "kda layout"])
@pytest.mark.parametrize("window", [1, 3, 4])
def test_the_window_at_every_point(transposed: bool, window: int) -> None:
    """The last columns before the point: those of this extend, before them the slot's, or zeros without a prefix."""
    dim, lengths, starts = 300, [20, 2, 9], [0, 20, 22]
    pool = torch.randn(12, window, dim, device=DEVICE) if transposed else torch.randn(12, dim, window, device=DEVICE)
    conv = pool.transpose(1, 2) if transposed else pool
    inputs = torch.randn(sum(lengths), dim + 4, device=DEVICE)[:, 2:-2].contiguous()
    before, sources = conv.clone(), [2, 0, 5]
    chosen = {0: (True, [0, 1, 2, 20]), 1: (False, [1, 2]), 2: (True, [9])}
    points = Points.of(
        [(starts[i], i, prefix, at) for i, (prefix, at) in chosen.items()], slots_of(3, 4, 6, 7, 8, 9, 10), conv.device
    )
    leave_windows(conv, inputs, torch.tensor(sources, device=DEVICE), points)
    slots = iter((3, 4, 6, 7, 8, 9, 10))
    for i, (prefix, counts) in chosen.items():
        old = before[sources[i]] if prefix else torch.zeros_like(before[0])
        columns = torch.cat([old, inputs[starts[i] : starts[i] + lengths[i]].T], 1)
        for at in counts:
            assert torch.equal(conv[next(slots)], columns[:, at : at + window]), (i, at)
    assert torch.equal(conv[[0, 1, 2, 5, 11]], before[[0, 1, 2, 5, 11]])


def test_what_does_not_fit_is_refused() -> None:
    extend = Extend(Sizes(), False, [20], torch.float32)
    with pytest.raises(ValueError, match="2 points, but 1 slots"):
        Points.of([(0, 0, True, [5, 6])], slots_of(2), DEVICE)
    points = Points.of([(0, 0, True, [5])], slots_of(2), DEVICE)
    with pytest.raises(ValueError, match="of state"):
        extend.leave(torch.zeros(3, 2, 16, 32, device=DEVICE), [0], points)
    with pytest.raises(ValueError, match="contiguous"):
        extend.leave(torch.zeros(3, 2, 16, 16, device=DEVICE).transpose(-1, -2), [0], points)
    with pytest.raises(ValueError, match="do not fit windows"):
        leave_windows(torch.zeros(3, 8, 3, device=DEVICE), torch.zeros(20, 9, device=DEVICE), slots_of(0), points)
