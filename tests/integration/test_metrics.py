"""SGLang's own /metrics and /server_info tell what the ring did: the counts that known requests must produce."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from sglang_replayssm import __version__
from sglang_replayssm.boundaries import EVENTS
from tests.harness.events import Events
from tests.harness.judge import ask
from tests.harness.reference import prompt
from tests.harness.server import Server

CAPACITY = 16
PREFIX = "sglang:replayssm_"


def samples(server: Server) -> dict[str, float]:
    """The plugin's samples by name and what tells them apart, summed over SGLang's own labels."""
    found: Counter[str] = Counter()
    for name, value in server.metrics().items():
        if name.startswith(PREFIX):
            base, _, labels = name.removeprefix(PREFIX).partition("{")
            assert 'model_name="' in labels and 'tp_rank="0"' in labels
            own = [part for part in labels.rstrip("}").split(",") if part.split("=")[0] in ("reason", "le", "event")]
            found[base + "".join("{" + part.replace('"', "") + "}" for part in own)] += value
    return dict(found)


def settled(server: Server, events: Events) -> dict[str, float]:
    """The samples once an idle scheduler has published everything that the ring's own record shows."""
    until = time.monotonic() + 20
    while True:
        seen, decoded = samples(server), events.decoded_tokens()
        if seen.get("pending_records_count") == decoded:
            return seen
        assert time.monotonic() < until, f"{decoded} tokens decoded, published: {seen}"
        time.sleep(0.2)


@pytest.mark.server("deep-on-metrics")
def test_counts_of_a_known_sequence(server: Server) -> None:
    events = Events()
    # From 50 tokens on 40 come out: decoding stands at 50 .. 88, folds when 16 records are full and passes boundary 64.
    first = ask(server, prompt(50, seed=70), 40)
    seen = settled(server, events)
    steps = seen["pending_records_count"]
    assert steps in (39, 40)  # overlap scheduling may run one step past the end
    assert seen["folds_total"] == 2
    assert seen["snapshots_total"] == 1
    assert seen["forced_folds_total"] == 0
    # 0 to 15 records pending in turn: twice around, then what is left
    turns, rest = divmod(int(steps), CAPACITY)
    assert seen["pending_records_bucket{le=0.0}"] == turns + 1
    assert seen[f"pending_records_bucket{{le={float(rest - 1)}}}"] == (turns + 1) * rest
    assert seen["pending_records_bucket{le=15.0}"] == seen["pending_records_bucket{le=+Inf}"] == steps
    assert seen["pending_records_sum"] == turns * sum(range(CAPACITY)) + sum(range(rest))

    # a second turn out of the saved state, and others at the same time
    ask(server, first.tokens[:-1] + prompt(5, seed=71), 45)
    server.generate_many([prompt(30 + i, seed=90 + i) for i in range(3)], [20, 35, 50])
    seen = settled(server, events)
    decodes = events.of("decode")
    folds = sum(len(event.folds) for event in decodes)
    snapshots = sum(len(event.snapshots) for event in decodes)
    assert (seen["folds_total"], seen["snapshots_total"]) == (folds, snapshots)
    assert seen["materialisations_total{reason=fold}"] == folds
    assert seen["materialisations_total{reason=snapshot}"] == snapshots
    assert seen["materialisations_total{reason=extend}"] == len(events.forced_folds("extend"))
    assert seen["materialisations_total{reason=hand_over}"] == len(events.forced_folds("hand over")) == 0
    pending = [count for event in decodes for count in event.pending if count >= 0]
    assert seen["pending_records_sum"] == sum(pending)


@pytest.mark.server("deep-on-metrics")
def test_memory_and_slots(server: Server) -> None:
    ask(server, prompt(70, seed=75), 4)
    until = time.monotonic() + 20
    while "ring_bytes" not in (seen := samples(server)):
        assert time.monotonic() < until
        time.sleep(0.2)
    layers, heads, dim = 3, 2, 32
    row = layers * CAPACITY * (heads * dim * 4 + dim * 2 + heads * 4) + 4  # u, key, gate; the checkpoint
    assert seen["ring_bytes"] == 5 * row
    assert seen["state_slots"] == 32
    assert 1 <= seen["state_slots_used"] <= 32  # the prefix cache keeps what the request left
    assert [seen[f"boundary_states_total{{event={event}}}"] for event in EVENTS] == [0, 0, 0]
    server.flush()  # and nothing runs afterwards
    until = time.monotonic() + 20
    while samples(server)["state_slots_used"]:
        assert time.monotonic() < until, "the gauge shows slots that the flush has freed"
        time.sleep(0.2)


@pytest.mark.server("deep-on-metrics")
def test_server_info_shows_what_is_on(server: Server) -> None:
    (state,) = server.server_info()["internal_states"]
    shown = state["replayssm"]
    assert shown.pop("ring_bytes") > 0
    assert shown == {
        "version": __version__,
        "buffered_decode": True,
        "verify_width": 1,
        "gate": "gdn",
        "layers": 3,
        "capacity": CAPACITY,
        "u_dtype": "float32",
        "ring_rows": 5,
        "direct_batch": 0,
        "host_tier": False,
        "states_at_boundaries": False,
        "metrics": True,
    }
