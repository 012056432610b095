"""What a launch says and does: the kill switch, a refusal, a hook that is missing, a ring that does not fit."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.harness import events, tiny
from tests.harness.configs import REPLAY
from tests.harness.server import Server, ServerError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed here")

SIZES = ("--max-total-tokens", "--max-running-requests", "--max-mamba-cache-size", "--mem-fraction-static")
FIXED_MEMORY = events.environment() | {"REPLAYSSM_PROBE_MEMORY_GIB": "0.0625"}
BUDGET = (1 << 30) // 16 // 2  # bytes: half of that memory, see --mem-fraction-static


class UnsizedServer(Server):
    """A server without the sizes that test servers have: SGLang plans its pools from the memory there is."""

    @property
    def command(self) -> list[str]:
        command = super().command
        own = len(self.args)
        base, args = (command[:-own], command[-own:]) if own else (command, [])
        for size in SIZES:
            if size in base:
                at = base.index(size)
                del base[at : at + 2]
        return base + args


def refused(server: Server) -> str:
    """The log of a server that must end by itself, with a status other than 0, while it starts."""
    with pytest.raises(ServerError, match=r"ended with status -?[1-9]"), server:
        pass
    return server.log_text()


def test_kill_switch_gives_sglangs_own_refusal() -> None:
    log = refused(Server(tiny.build("qwen3-next"), REPLAY, plugin=False))
    assert "--enable-linear-replayssm requires --mamba-radix-cache-strategy" in log
    assert "ReplaySSM:" not in log


def test_refused_configuration_ends_with_one_sentence() -> None:
    log = refused(Server(tiny.build("qwen3-next"), [*REPLAY, "--enable-lmcache"], plugin=True))
    sentence = "--enable-linear-replayssm is not proven with LMCache yet: drop --enable-lmcache"
    assert log.strip().splitlines()[-1].count(sentence) == 1
    assert log.count(sentence) == 1


@pytest.mark.parametrize("where", ["everywhere", pytest.param("children", marks=pytest.mark.long)])
def test_hook_that_sglang_failed_to_apply_ends_the_launch(where: str) -> None:
    target = "GDNAttnBackend.forward_decode"
    environment = events.environment() | {"REPLAYSSM_PROBE_FAIL_HOOK": f"{where}:{target}"}
    log = refused(Server(tiny.build("qwen3-next"), REPLAY, environment, plugin=True))
    assert re.search(rf"SGLang did not apply the hook\(s\) of sglang-replayssm on \S+{re.escape(target)}\.", log)


def planned(args: list[str], plugin: bool) -> dict[str, int]:
    """Slots, tokens and requests that a server plans on the fixed memory, and the rows of its ring."""
    flags = [*(REPLAY if plugin else ()), "--mem-fraction-static", "0.5", *args]
    with UnsizedServer(tiny.build("qwen3-next-deep"), flags, FIXED_MEMORY, plugin=plugin) as server:
        assert len(server.generate(list(range(2, 40)), 4).ids) == 4
        log = server.log_text()
    plan = {
        name: int(re.findall(rf"{name}[=:] ?(\d+)", log)[-1])
        for name in ("max_mamba_cache_size", "max_total_num_tokens", "max_running_requests")
    }
    ring = re.search(r"ring of \d+ records x (\d+) request rows", log)
    return plan | {"rows": int(ring[1]) if ring else 0}


def planned_bytes(plan: dict[str, int], capacity: int) -> int:
    """What the pools of a plan take, from the model's dimensions alone."""
    layers, heads, dim, window, fp16, fp32 = 3, 2, 32, 3, 2, 4
    state = layers * (heads * dim * dim * fp32 + window * (2 * dim + heads * dim) * fp16)
    token = 2 * (2 * 16) * fp16  # keys and values of two heads in the one full-attention layer
    record = layers * (heads * dim * fp32 + dim * fp16 + heads * fp32)  # u, key, log-decay
    slots = plan["max_mamba_cache_size"] + 1  # one for padding
    return slots * state + plan["max_total_num_tokens"] * token + plan["rows"] * capacity * record


@pytest.mark.parametrize("plugin", [pytest.param(False, marks=pytest.mark.long), True])
def test_pools_and_ring_fill_the_memory_plan(plugin: bool) -> None:
    """Scenario 16: the ring is part of the plan, and rows get what their ring is charged for."""
    capacity = 64
    plan = planned(["--linear-replayssm-cache-len", str(capacity)], plugin)
    slots_per_request = 5  # three, and two track slots
    assert plan["max_running_requests"] == plan["max_mamba_cache_size"] // slots_per_request
    assert plan["rows"] == (plan["max_running_requests"] + 1 if plugin else 0)
    free = BUDGET - planned_bytes(plan, capacity)
    print(plan, "left over:", free, "bytes of", BUDGET)
    assert 0 <= free < BUDGET // 100  # no more than one state and one page fit into what is left


def test_ring_that_does_not_fit_is_refused_with_the_arithmetic() -> None:
    args = [*REPLAY, "--mem-fraction-static", "0.5", "--linear-replayssm-cache-len", "64"]
    args += ["--disable-radix-cache", "--max-running-requests", "600"]
    log = refused(UnsizedServer(tiny.build("qwen3-next-deep"), args, FIXED_MEMORY, plugin=True))
    assert re.search(r"ReplaySSM ring: 601 request rows x 0\.06 MiB = 0\.04 GiB .* only 0\.03 GiB", log)
    assert re.search(
        r"Lower --max-running-requests, --linear-replayssm-cache-len .*, or raise --mem-fraction-static", log
    )
