"""When boundaries are on, from the variable to the pool, and that off leaves SGLang's cache as it is."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_replayssm.arguments import FLAG
from sglang_replayssm.boundaries import ENV, BoundaryPolicy
from sglang_replayssm.prefix_states import states_of
from sglang_replayssm.request_ring import ring_of
from tests.plugin import launch

NO_BUFFER = ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule")


def pool_of(*argv: str) -> Any:
    """The request pool that a launch with the flag builds."""
    configurator = launch.configurator(launch.publish_flag(*argv))
    configurator._handle_max_mamba_cache(0.25)
    pool = configurator._build_hybrid_req_pool(max_num_reqs=4, extra_max_context_len=4)
    assert ring_of(pool) is not None
    return pool


def test_boundaries_are_on_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV, raising=False)
    states = states_of(pool_of())
    assert states is not None and states.policy == BoundaryPolicy()


def test_the_variable_sets_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, "tail=32,most=1")
    states = states_of(pool_of("--mamba-radix-cache-strategy", "extra_buffer_lazy"))
    assert states is not None and states.policy == BoundaryPolicy(tail=(32,), most=1)


@pytest.mark.parametrize("off", ["off", "0", "OFF", "false"])
def test_off_leaves_the_pool_as_without_boundaries(monkeypatch: pytest.MonkeyPatch, off: str) -> None:
    """Every hook of the prefix cache asks the pool; without states it is a pass-through (test_pass_through)."""
    monkeypatch.setenv(ENV, off)
    assert states_of(pool_of()) is None


@pytest.mark.parametrize("argv", [NO_BUFFER, ("--disable-radix-cache",)], ids=["no_buffer", "no radix cache"])
def test_boundaries_need_the_default_cache(argv: tuple[str, ...]) -> None:
    assert states_of(pool_of(*argv)) is None


@pytest.mark.parametrize("wrong", ["most=many", "speed=3", "share=2", "tail"])
def test_a_wrong_setting_ends_the_launch(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv(ENV, wrong)
    with pytest.raises(ValueError, match=ENV):
        launch.resolve(FLAG)
