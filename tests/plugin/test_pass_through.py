"""Without the flag no hook changes anything: same arguments to SGLang's function, same result, no ring anywhere."""

from __future__ import annotations

import inspect
import pkgutil
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_replayssm.hooks import HOOKS
from sglang_replayssm.request_ring import ATTRIBUTE, ring_of
from tests.plugin import launch

# Constructors and metadata stages have no result that anyone reads.
WITHOUT_RESULT = ("__init__", "init_forward_metadata", "init_forward_metadata_out_graph", "_track_mamba_state_decode")


def stand_in(name: str) -> Any:
    """An argument of SGLang's function `name`: the objects that hooks look into have no ring, the rest is opaque."""
    pool = SimpleNamespace()
    backend = SimpleNamespace(
        req_to_token_pool=pool, kernel_dispatcher=SimpleNamespace(decode_kernel=object(), supports_packed_decode=False)
    )
    known = {
        "ModelRunner": SimpleNamespace(req_to_token_pool=pool, is_draft_worker=False),
        "GDNAttnBackend": backend,
        "KDAAttnBackend": backend,
        "MambaComponent": SimpleNamespace(
            cache=SimpleNamespace(req_to_token_pool=pool, enable_mamba_extra_buffer=False)
        ),
        "HybridLinearAttnBackend": SimpleNamespace(linear_attn_backend=backend),
        "UnifiedRadixCache": SimpleNamespace(req_to_token_pool=pool),
        "cache": SimpleNamespace(req_to_token_pool=pool),
        "batch": SimpleNamespace(req_to_token_pool=pool),
        "ScheduleBatch": SimpleNamespace(req_to_token_pool=pool),
        "Scheduler": SimpleNamespace(req_to_token_pool=pool),
        "SchedulerInternalStateController": SimpleNamespace(scheduler=SimpleNamespace(req_to_token_pool=pool)),
        "model_runner": SimpleNamespace(is_draft_worker=False),
        "server_args": SimpleNamespace(enable_linear_replayssm=False, enable_linear_replayssm_spec=False),
    }
    return known.get(name, object())


@pytest.mark.parametrize("published", [False, True], ids=["nothing published", "published without the flag"])
@pytest.mark.parametrize("target", HOOKS)
def test_pass_through(target: str, published: bool) -> None:
    if published:
        launch.publish(launch.parse())
    owner, name = target.rsplit(".", 2)[1:]
    function = inspect.unwrap(pkgutil.resolve_name(target))
    signature = inspect.signature(function)
    positional, keyword = [], {}
    for parameter in signature.parameters.values():
        value = stand_in(owner if parameter.name == "self" else parameter.name)
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            keyword[parameter.name] = value
        elif parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            positional.append(value)
    calls, result = [], object()

    def original(*args: Any, **kwargs: Any) -> object:
        calls.append(signature.bind(*args, **kwargs).arguments)
        return result

    before = [dict(vars(value)) for value in positional if isinstance(value, SimpleNamespace)]
    returned = HOOKS[target](original, *positional, **keyword)
    assert calls == [signature.bind(*positional, **keyword).arguments]
    assert returned is result or name in WITHOUT_RESULT
    assert [dict(vars(value)) for value in positional if isinstance(value, SimpleNamespace)] == before


def test_a_launch_without_the_flag_builds_plain_pools_and_plans() -> None:
    """The real configurator, hooks applied: budget, rows and attributes equal those of the unhooked functions."""
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    launch.publish(launch.parse())
    hooked = launch.configurator(launch.publish(launch.parse()))
    rest = hooked._handle_max_mamba_cache(0.5)
    pool = hooked._build_hybrid_req_pool(max_num_reqs=4, extra_max_context_len=4)
    assert ring_of(pool) is None and not hasattr(pool, ATTRIBUTE)
    plain = launch.configurator(launch.publish(launch.parse()))
    assert inspect.unwrap(KVCacheConfigurator._handle_max_mamba_cache)(plain, 0.5) == rest
