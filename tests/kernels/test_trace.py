"""Random traces of a server's life against the sequential oracle: steps, folds, finishes, reuse in any order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replayssm_kernels import mark_fresh
from tests.kernels.machine import BOUNDED, GDN, KDA, PADDING, VERY_BOUNDED, Machine, make_shape

STATE_BOUND = 2e-6  # some dozens of float32 steps and folds; measured up to 5e-7
ROWS, SLOTS = 5, 9

actions = st.lists(
    st.tuples(
        st.sampled_from(
            ["step", "step", "step", "step", "direct", "track", "fold", "extend", "finish", "overshoot", "start"]
        ),
        st.integers(0, 2**16),
    ),
    min_size=5,
    max_size=22,
)
shapes = st.fixed_dictionaries(
    dict(
        layers=st.integers(1, 2),
        heads=st.sampled_from([(1, 1), (1, 2), (2, 2)]),
        key_dim=st.sampled_from([16, 32]),
        value_dim=st.sampled_from([16, 32]),
        capacity=st.sampled_from([1, 2, 3, 4, 5, 8]),
        key_dtype=st.sampled_from([torch.float32, torch.float16]),
        gate=st.sampled_from([GDN, KDA, BOUNDED, VERY_BOUNDED]),
    )
)


class Server:
    """Hands rows and slots to requests the way a server does; the machine checks every output on the way."""

    def __init__(self, drawn: dict, seed: int) -> None:
        k_heads, v_heads = drawn["heads"]
        shape = make_shape(
            layers=drawn["layers"],
            rows=ROWS,
            k_heads=k_heads,
            v_heads=v_heads,
            key_dim=drawn["key_dim"],
            value_dim=drawn["value_dim"],
            capacity=drawn["capacity"],
            key_dtype=drawn["key_dtype"],
            **drawn["gate"],
        )
        self.machine = Machine(shape, slots=SLOTS, seed=seed)
        self.running: list[int] = []
        self.next_request = 1

    def start(self, n: int) -> None:
        """A prefill of n tokens hands over a row, marked fresh as after an allocation; the slot stands at n."""
        m = self.machine
        rows = [r for r in range(1, ROWS) if r not in {m.row[q] for q in self.running}]
        slots = [s for s in range(SLOTS - 2) if s not in {m.slot[q] for q in self.running}]
        if not rows:
            return
        request, self.next_request = self.next_request, self.next_request + 1
        m.start(request, rows[n % len(rows)], slots[n % len(slots)], length=n % 300 + 1)
        if n % 2:  # a request whose first forward is a decode (restored or received), not an extend
            mark_fresh(m.ring, m.ints([m.row[request]]))
        self.running.append(request)

    def batch(self, n: int) -> list[int]:
        """A subset of the running requests in some order, with padding in it."""
        chosen = [r for i, r in enumerate(self.running) if (n >> i) & 1] or self.running[:1]
        if n % 3 == 0:
            chosen.reverse()
        if n % 5 == 0:
            chosen.insert(n % (len(chosen) + 1), PADDING)
        return chosen

    def do(self, action: str, n: int) -> None:
        m = self.machine
        if action == "start" or not self.running:
            return self.start(n)
        request = self.running[n % len(self.running)]
        m.direct = action == "direct" or (action == "track" and n % 2 == 0)
        if action in ("step", "direct"):
            m.step(self.batch(n))
        elif action == "track":
            m.step(self.batch(n) if request in self.batch(n) else [request], track={request: SLOTS - 1})
            assert m.state_error(SLOTS - 1, request) <= STATE_BOUND
        elif action == "fold":
            m.fold(self.batch(n) if PADDING not in self.batch(n) else [request])
        elif action == "extend":  # fold, then the extend writes the slot at a later position
            m.fold([request])
            assert m.state_error(m.slot[request], request) <= STATE_BOUND
            m.start(request, m.row[request], m.slot[request], m.length(request) + n % 40)
        else:
            self.finish(request, overshoot=action == "overshoot")

    def finish(self, request: int, overshoot: bool) -> None:
        """The slot must be exact at the committed count, also when one step too many has already run."""
        m = self.machine
        if overshoot:
            states = [o.states[request].clone() for o in m.oracle]
            m.step([request])
            for oracle, state in zip(m.oracle, states, strict=True):
                oracle.states[request] = state
                oracle.lens[request] -= 1
        m.fold([request])
        assert m.state_error(m.slot[request], request) <= STATE_BOUND
        self.running.remove(request)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(drawn=shapes, trace=actions, seed=st.integers(0, 2**16))
def test_random_traces(drawn: dict, trace: list[tuple[str, int]], seed: int) -> None:
    play(drawn, trace, seed)


@pytest.mark.long
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=shapes, trace=actions, seed=st.integers(0, 2**16))
def test_random_traces_at_length(drawn: dict, trace: list[tuple[str, int]], seed: int) -> None:
    play(drawn, trace, seed)


def play(drawn: dict, trace: list[tuple[str, int]], seed: int) -> None:
    server = Server(drawn, seed)
    for action, n in trace:
        server.do(action, n)
    for request in list(server.running):
        server.finish(request, overshoot=False)
    assert server.machine.ring.faults == 0
