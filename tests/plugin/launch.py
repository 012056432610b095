"""SGLang's own launch steps, in this process: arguments, their publication, and the pools' configurator."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sglang_replayssm.arguments import FLAG, SPEC_FLAG
from tests.harness import host, tiny

DEVICE = "cuda" if host.has_gpu() else "cpu"
DRAFTS = ("--attention-backend", "triton", "--speculative-algorithm", "NEXTN", "--speculative-eagle-topk", "1")
"""Speculative decoding, but for its length: `drafts` adds that."""


def drafts(width: int) -> tuple[str, ...]:
    """Arguments of a server whose verify steps bring `width` tokens."""
    return (*DRAFTS, "--speculative-num-steps", str(width - 1), "--speculative-num-draft-tokens", str(width))


@functools.cache
def _parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def parse(*argv: str, model: str | Path = "qwen3-next-deep") -> Any:
    """Unresolved ServerArgs of a command line, for a tiny model by name or a folder with a config."""
    from sglang.srt.server_args import ServerArgs

    folder = tiny.build(model) if isinstance(model, str) else model
    return ServerArgs.from_cli_args(_parser().parse_args(["--model-path", str(folder), *host.server_args(), *argv]))


def resolve(*argv: str, model: str | Path = "qwen3-next-deep") -> Any:
    """ServerArgs after SGLang's whole resolution pipeline, plugins included. Raises what that raises."""
    server_args = parse(*argv, model=model)
    server_args.resolve_once()
    return server_args


def resolved(server_args: Any, field: str) -> Any:
    """What SGLang resolved `field` to (the attribute of the record keeps what the user wrote)."""
    from sglang.srt.arg_groups.overrides import resolution_result

    return resolution_result(server_args, field)


def publish(server_args: Any) -> Any:
    """Publish for this process, as a scheduler does."""
    from sglang.srt import runtime_context

    runtime_context.publish(server_args, role="test", ranks=runtime_context.SpawnRanks(world_rank=0))
    return server_args


def publish_flag(*argv: str, model: str | Path = "qwen3-next-deep") -> Any:
    """Resolve and publish a launch with buffered decode on."""
    return publish(parse(FLAG, *argv, model=model))


def publish_spec_flag(width: int, *argv: str, model: str | Path = "qwen3-next-deep") -> Any:
    """Resolve and publish a launch with ring spec-verify of `width` tokens a step."""
    return publish(parse(SPEC_FLAG, *drafts(width), *argv, model=model))


def config_folder(folder: Path, **config: Any) -> Path:
    """A model folder that holds nothing but a config."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def configurator(server_args: Any, attn_dp_size: int = 1, layers: Sequence[torch.nn.Module] = ()) -> Any:
    """The real KVCacheConfigurator of a published launch; of its model it has `layers`, and no weights."""
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    model_config = model_config_of(server_args)
    count = model_config.num_hidden_layers
    return KVCacheConfigurator(
        device=DEVICE,
        gpu_id=0,
        attn_dp_size=attn_dp_size,
        pp_size=1,
        pp_group=None,
        model=torch.nn.ModuleList(layers),
        model_config=model_config,
        server_args=server_args,
        kv_cache_dtype=torch.float16,
        model_dtype=torch.float16,
        page_size=1,
        sliding_window_size=None,
        spec_algorithm=SpeculativeAlgorithm.from_string(resolved(server_args, "speculative_algorithm")),
        is_draft_worker=False,
        post_capture_kv_active=False,
        spec_aux_config=SimpleNamespace(
            dflash_draft_num_layers=None,
            eagle_draft_num_layers=None,
            draft_model_config=None,
            draft_kv_num_layers=None,
        ),
        is_hybrid_swa=False,
        is_hybrid_swa_compress=False,
        use_mla_backend=False,
        layer_info=SimpleNamespace(
            is_hybrid_swa_mtp_draft=False,
            swa_attention_layer_ids=[],
            start_layer=0,
            end_layer=count,
            num_effective_layers=count,
        ),
        forward_stream=None,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=None,
        memory_pool_config=None,
    )
