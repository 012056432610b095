"""`sglang-replayssm-check --explain MODEL [server args]`: what the plugin would do for a launch, without launching.

Reads the model's config and SGLang's own parser, sizes and gate kinds; loads no weights and needs no GPU. Of SGLang's
resolution of arguments those steps are run that decide about the prefix cache and need no GPU: see `_resolve`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_replayssm import arguments

GIB = 1 << 30
MIB = 1 << 20
BATCHES = (1, 8, 32, 128, 256)
_MOST_WITH_DRAFTS = 48  # running requests of a server with speculative decoding whose user names no number
_SSM_DTYPE = "SGLANG_MAMBA_SSM_DTYPE"
_CONFIG = "--config"
# Numbers that SGLang takes as they come and divides by, or that leave no request to run.
_POSITIVE = ("tp_size", "page_size", "max_running_requests", "max_mamba_cache_size", "mamba_full_memory_ratio")
# By architecture: the field of the model's config that bounds the gate of its layers, None without a bound. A server
# asks the layers (memory_plan.gate_bound).
_BOUND = {"BailingMoeV3ForCausalLM": "kda_lower_bound"}


class Unexplained(ValueError):
    """Bad input: a sentence that says what to change."""


@dataclass(frozen=True)
class Launch:
    """A model and a launch of it, as far as the plugin is concerned.

    Attributes:
        name: architecture; layers: all of the model, of which `shape.layers` are linear.
        shape: the ring of one request row (its `rows` mean nothing here); row: bytes of such a row, and of the conv
            windows that drafts bring to it.
        slot: bytes of a slot; state_size: bytes of one number of the temporal state.
        strategy: the radix-cache strategy as SGLang resolves it; per_request: slots that SGLang keeps per request.
        args: the server arguments, as far as they are resolved; memory_ratio: memory of states over that of KV.
    """

    name: str
    layers: int
    shape: Any
    row: int
    slot: int
    state_size: int
    strategy: str
    per_request: int
    args: Any
    memory_ratio: float


# -- reading ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _folder(model: str) -> Iterator[str]:
    """A folder or hub name that SGLang can read the config from; a config file gets a folder of its own."""
    path = Path(model).expanduser()
    if path.is_file():
        try:
            json.loads(path.read_text())
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise Unexplained(f"{model} is no JSON: {error}. Name a model folder or its config.json.") from error
        with tempfile.TemporaryDirectory(prefix="replayssm-explain-") as made:
            shutil.copy(path, Path(made) / "config.json")
            yield made
        return
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise Unexplained(f"{model} holds no config.json. Name the folder of a model, or its config file.")
        yield str(path)
        return
    if model.count("/") != 1 or model.startswith((".", "~", "/")):
        raise Unexplained(f"{model} is neither a folder nor a file here, and no hub name (ORGANISATION/MODEL).")
    yield model


class _Parser(argparse.ArgumentParser):
    """SGLang's parser has hundreds of options: an error is one sentence, without all of them before it."""

    def error(self, message: str) -> Any:
        raise Unexplained(f"server arguments: {message}")


def _parse(model: str, server_args: Sequence[str]) -> Any:
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(add_help=False)
    ServerArgs.add_cli_args(parser)
    if any(argument.split("=")[0] in ("--model-path", "--model") for argument in server_args):
        raise Unexplained("the model is named once, behind --explain: drop --model-path.")
    if any(argument.startswith("--config=") for argument in server_args):
        raise Unexplained("SGLang reads a configuration file as `--config FILE` only: write a space for the =.")
    flag = () if {arguments.FLAG, arguments.SPEC_FLAG} & set(server_args) else (arguments.FLAG,)
    argv = ["--model-path", model, *flag, *server_args]
    try:
        if _CONFIG in argv:
            argv = _merged(parser, argv)
        parsed = parser.parse_args(argv)
        for field in _POSITIVE:
            if (value := getattr(parsed, field)) is not None and not value > 0:
                raise Unexplained(f"server arguments: --{field.replace('_', '-')} must be above 0, got {value:g}")
        return ServerArgs.from_cli_args(parsed)
    except (AssertionError, TypeError) as error:
        raise Unexplained(f"server arguments: {error}") from error


def _merged(parser: argparse.ArgumentParser, argv: list[str]) -> list[str]:
    """The command line with what its configuration file says in front, as SGLang reads it: later ones win."""
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    try:
        return ConfigArgumentMerger(parser).merge_config_with_args(argv)
    except Exception as error:  # of its own, of the file system, of YAML
        raise Unexplained(f"server arguments: {_CONFIG}: {' '.join(str(error).split())}") from error


def read(model: str, server_args: Sequence[str]) -> tuple[Launch, list[str]]:
    """The launch, and the sentences with which it would be refused (none when it would run).

    Args:
        model: a model folder, its config.json, or a hub name.
        server_args: arguments of `sglang.launch_server` beside the model; the flag is understood.

    Raises:
        Unexplained: no such model, not a hybrid one, or arguments that SGLang does not take.
    """
    from sglang.srt.arg_groups.overrides import model_config_of

    with _folder(model) as folder:
        parsed = _parse(folder, server_args)
        with _state_dtype(parsed.mamba_ssm_dtype or ("float32" if parsed.enable_linear_replayssm_spec else None)):
            try:
                config = model_config_of(parsed)
            except Exception as error:  # whatever transformers and SGLang raise at a config they can not read
                first = (str(error).strip().splitlines() or [repr(error)])[0]
                raise Unexplained(f"SGLang can not read the config of {model}: {first}") from error
            return _launch(model, parsed, config)


@contextlib.contextmanager
def _state_dtype(name: str | None) -> Iterator[None]:
    """SGLang hands --mamba-ssm-dtype on by its own environment variable when it resolves arguments."""
    before = os.environ.get(_SSM_DTYPE)
    if name is not None:
        os.environ[_SSM_DTYPE] = name
    try:
        yield
    finally:
        os.environ.pop(_SSM_DTYPE, None)
        if before is not None:
            os.environ[_SSM_DTYPE] = before


def _launch(model: str, parsed: Any, config: Any) -> tuple[Launch, list[str]]:
    from sglang.srt.arg_groups.overrides import resolution_result, resolving_view
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.runtime_context import get_parallel

    from sglang_replayssm.memory_plan import row_bytes, shape_for

    architectures = list(config.hf_config.architectures or ("a model of no named architecture",))
    gate = arguments.gate_of(config)
    if gate is None:
        raise Unexplained(
            f"{model} ({architectures[0]}) has no Gated DeltaNet or Kimi Delta Attention layers: there is nothing for "
            f"{arguments.FLAG} to do. Supported: {arguments.supported_architectures()}."
        )
    args = resolving_view(parsed)
    refused = _resolve(parsed, config)
    reasons = arguments.refusals(args, architectures, gate)
    if refused is not None:
        reasons.append(f"SGLang itself refuses this launch: {refused}")
    with get_parallel().override(attn_tp_size=args.tp_size, enable_cp_tp_group_sharing=False):
        try:
            params = mambaish_config(config).mamba2_cache_params
        except AssertionError as error:
            raise Unexplained(
                f"the linear layers of {model} do not divide into --tp-size {args.tp_size} ({error}): choose another."
            ) from error
    width = arguments.planned_width(args)
    shape = shape_for(
        params,
        rows=2,
        capacity=arguments.capacity_for(max(1, args.linear_replayssm_cache_len), width),
        key_dtype=config.dtype,
        lower_bound=_bound(config.hf_config, architectures[0]),
        max_width=width,
    )
    try:  # of the heads; what is wrong with L or the drafts stands among the reasons already
        dataclasses.replace(shape, capacity=1, max_width=1).validate()
    except ValueError as error:
        reasons.append(f"{arguments.FLAG} is not tested with the linear layers of this model: {error}. Drop the flag.")
    strategy, per_request = _strategy(args)
    return (
        Launch(
            name=architectures[0],
            layers=config.num_hidden_layers,
            shape=shape,
            row=row_bytes(params, shape),
            slot=params.mamba_cache_per_req,
            state_size=params.dtype.temporal.itemsize,
            strategy=strategy,
            per_request=per_request,
            args=args,
            memory_ratio=resolution_result(parsed, "mamba_full_memory_ratio"),
        ),
        reasons,
    )


def _bound(hf_config: Any, architecture: str) -> float | None:
    """Lower bound of the gate that a model's layers will have, None without one."""
    field = _BOUND.get(architecture)
    return None if field is None else getattr(hf_config, field)


def _resolve(parsed: Any, config: Any) -> str | None:
    """Run those steps of SGLang's resolution that decide about the prefix cache; what they refuse, as a sentence.

    In SGLang's order, on `parsed`. Its checks of extra_buffer begin with the machine, so they are left to the launch
    on one without a GPU.
    """
    from sglang.srt.arg_groups.hicache_hook import handle_hicache, handle_hicache_ratio_default
    from sglang.srt.arg_groups.kv_cache_hook import handle_cache_compatibility
    from sglang.srt.arg_groups.mamba_hook import _platform_supports_mamba_cache_extra_buffer
    from sglang.srt.arg_groups.model_hook import handle_mamba_radix_cache
    from sglang.srt.arg_groups.overrides import _mamba_radix_cache_resolution, resolving_view, run_post_process_pass
    from sglang.srt.arg_groups.parallel_hook import handle_deprecated_dp_attention

    try:
        handle_deprecated_dp_attention(parsed)
        handle_hicache_ratio_default(parsed)
        run_post_process_pass(parsed, _mamba_radix_cache_resolution)
        without_tracks = resolving_view(parsed).mamba_radix_cache_strategy == "no_buffer"
        if without_tracks or _platform_supports_mamba_cache_extra_buffer():
            handle_mamba_radix_cache(parsed, config.hf_config)
        handle_hicache(parsed)
        handle_cache_compatibility(parsed)
    except (AssertionError, ValueError, NotImplementedError) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return " ".join(str(error).split()) or f"{frame.name} asks for something else: {frame.line}"
    return None


def _strategy(args: Any) -> tuple[str, int]:
    """Radix-cache strategy as SGLang resolved it, and slots per running request."""
    from sglang.srt.mem_cache.allocation_sizing import get_mamba_tracking_slots
    from sglang.srt.mem_cache.kv_cache_configurator import MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO

    if args.disable_radix_cache:
        return "no prefix cache", 1
    strategy, overlap = args.mamba_radix_cache_strategy, not args.disable_overlap_schedule
    tracking = get_mamba_tracking_slots(
        extra_buffer=strategy.startswith("extra_buffer"), overlap=overlap, lazy=strategy == "extra_buffer_lazy"
    )
    return strategy, MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO + tracking


# -- saying -----------------------------------------------------------------------------------------------------------


def _most_requests(launch: Launch) -> int:
    from sglang_replayssm import memory_plan

    if launch.args.max_running_requests is not None:
        return max(1, launch.args.max_running_requests)
    return memory_plan.MOST_REQUESTS if launch.shape.max_width == 1 else _MOST_WITH_DRAFTS


def fit_with_snapshots(launch: Launch, memory: float) -> tuple[int, int] | None:
    """(slots, running requests) of the same launch where SGLang keeps a state per draft, in `memory` GiB.

    None where the user sets the number of slots, or where not even one request fits.
    """
    if launch.args.max_mamba_cache_size is not None or launch.args.disable_radix_cache:
        return None
    drafts, per_request = launch.shape.max_width, launch.per_request
    share = launch.memory_ratio / (1 + launch.memory_ratio)
    # a state per draft for each request that the slots allow, and for the padding slots of both
    slots = int((memory * GIB * share - launch.slot * (1 + drafts)) // (launch.slot * (1 + drafts / per_request)))
    requests = min(_most_requests(launch), slots // per_request)
    return (slots, requests) if requests > 0 else None


def fit(launch: Launch, memory: float) -> tuple[int, int]:
    """(slots, running requests) that fit in `memory` GiB of ring, states and KV, by the plugin's own memory plan.

    Raises:
        Unexplained: not even one request fits.
    """
    from sglang_replayssm import memory_plan

    args, per_row, most = launch.args, launch.row, _most_requests(launch)
    share = launch.memory_ratio / (1 + launch.memory_ratio)

    def slots_that_fit(rows: int) -> int:
        if args.max_mamba_cache_size is not None:
            return args.max_mamba_cache_size
        if args.disable_radix_cache and args.max_running_requests is not None:
            return most
        # SGLang keeps one slot for padding
        return max(0, int((memory * GIB - (rows + 1) * per_row) * share // launch.slot) - 1)

    requests = memory_plan.rows_for(most, lambda rows: min(most, slots_that_fit(rows) // launch.per_request))
    slots = slots_that_fit(requests)
    requests = min(requests, slots // launch.per_request)
    taken = ((requests + 1) * per_row + (slots + 1) * launch.slot) / GIB
    if requests < 1 or taken >= memory:
        least = (2 * per_row + (launch.per_request + 1) * launch.slot) / share / GIB
        raise Unexplained(
            f"{memory:g} GiB hold no running request beside {launch.slot / MIB:.1f} MiB a slot and "
            f"{per_row / MIB:.1f} MiB of ring a request: give --memory-gib at least {least:.1f}, or lower "
            "--max-mamba-cache-size, --max-running-requests or --linear-replayssm-cache-len."
        )
    return slots, requests


def _drafts(launch: Launch, memory: float | None) -> str:
    """What ring spec-verify saves."""
    drafts = launch.shape.max_width
    said = f"{drafts} tokens a verify step, their records and conv windows included in the ring; no state per draft"
    other = None if memory is None else fit_with_snapshots(launch, memory)
    if other is None:
        return said
    slots, requests = other
    return f"{said}, with which SGLang fits {requests} running requests and {slots} slots into {memory:g} GiB"


def lines(launch: Launch, memory: float | None, batches: Sequence[int]) -> list[tuple[str, str]]:
    """(subject, detail) of everything there is to say about a launch that would run."""
    from replayssm_kernels.launch_shapes import direct_batch
    from replayssm_kernels.traffic import buffered_bytes, conventional_bytes
    from sglang_replayssm import worth

    shape = launch.shape
    words = "Gated DeltaNet" if shape.gate == "gdn" else "Kimi Delta Attention"
    heads = f"{shape.k_heads} key and {shape.v_heads} value heads of {shape.key_dim} x {shape.value_dim}"
    said = [
        ("model", f"{launch.name}: {shape.layers} {words} layers of {launch.layers}; {heads}"),
        ("prefix cache", f"{launch.strategy}, {launch.per_request} slots per running request"),
        ("slot", f"{launch.slot / MIB:.2f} MiB of states per slot ({8 * launch.state_size}-bit)"),
        (
            "ring",
            f"{launch.row / MIB:.2f} MiB per running request "
            f"(L = {shape.capacity}, u in {str(shape.u_dtype).removeprefix('torch.')})",
        ),
    ]
    if shape.gate == "kda":
        bound = "no lower bound" if shape.lower_bound is None else f"a lower bound of {shape.lower_bound:g}"
        said.append(("gate", f"{bound}; records keep {'scaled' if shape.scaled_keys else 'raw'} keys"))
    running, why = launch.args.max_running_requests, "--max-running-requests"
    if memory is not None:
        slots, requests = fit(launch, memory)
        if running is None or requests < running:
            running, why = requests, f"{memory:g} GiB"
        ring = (requests + 1) * launch.row / GIB
        states = (slots + 1) * launch.slot / GIB
        said.append(
            (
                "memory",
                f"{memory:g} GiB: {requests} running requests ({ring:.2f} GiB of ring), {slots} slots "
                f"({states:.2f} GiB), {memory - ring - states:.2f} GiB left for KV",
            )
        )
    if shape.max_width > 1:
        said.append(("drafts", _drafts(launch, memory)))
        return said
    kind = worth.kind_of(shape)
    table = worth.measured()[kind]
    measured_state = table["v_heads"] * table["head_dim"] ** 2 * 4
    scale = shape.v_heads * shape.value_dim * shape.key_dim * launch.state_size / measured_state
    faster, wished = direct_batch(shape, launch.state_size, launch.args.device != "cpu"), arguments.direct_batch()
    for batch in batches:
        is_direct = batch <= (faster if wished is None else wished)
        plain = conventional_bytes(shape, batch, launch.state_size) * shape.layers
        ours = plain if is_direct else buffered_bytes(shape, batch, launch.state_size) * shape.layers
        as_measured = dataclasses.replace(shape, capacity=table["capacity"], lower_bound=table.get("lower_bound"))
        against_measured = buffered_bytes(shape, batch, launch.state_size) / buffered_bytes(
            as_measured, batch, launch.state_size
        )
        # a direct step does not know L
        reason = worth.at_batch(batch, kind, shape.layers, scale, 1.0 if is_direct else against_measured).reason
        if is_direct and batch > faster:
            reason = f"no: {arguments.DIRECT_BATCH_ENV}={wished} has the state written in every step"
        if running is not None and batch > running:
            reason = f"no: only {running} run at once ({why})"
        said.append(
            (
                f"batch {batch}",
                f"{plain / MIB:,.1f} MiB a step without, {ours / MIB:,.1f} with "
                f"({'direct' if is_direct else f'{ours / plain:.0%}'}); {reason}",
            )
        )
    said.append(
        (
            "measured",
            f"{table['what']}, {table['k_heads']}/{table['v_heads']} heads of {table['head_dim']}, L = "
            f"{table['capacity']}, fp32 state: {worth.measured()['machine']}; other shapes scaled by the bytes of "
            "their state",
        )
    )
    return said
