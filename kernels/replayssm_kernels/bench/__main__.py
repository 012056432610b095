"""Command line of the benchmarks.

python -m replayssm_kernels.bench gdn_decode --heads 16/48 --batch 1,8,32,64,128,256,512 --state fp32 --json out.jsonl
python -m replayssm_kernels.bench gdn_verify --width 4,8 --batch 1,8,64,256 --json out.jsonl
python -m replayssm_kernels.bench materialise --requests 1,8,32
"""

from __future__ import annotations

import argparse

import torch

from ..gates import INTERPRETED
from ..launch_shapes import DecodeConfig
from ..ring import RingShape
from . import decode, materialise, report

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def configs(text: str, value_dim: int, verify: bool = False) -> tuple[DecodeConfig, ...]:
    """ "all", or "32,1,1,2;16,8,1,1": tiles, programs per head, warps, stages. "all" is what a sweep tries."""
    if text != "all":
        return tuple(DecodeConfig(*integers(part)) for part in text.split(";") if part)
    if verify:  # a loop over tiles is pipelined; a single tile has none
        tiles = [(32, 2), (32, 4), (64, 4), (128, 4), (128, 8)]
        every = [(bv, split, warps, 1 if bv * split == value_dim else 3) for bv, warps in tiles for split in (1, 2, 4)]
    else:
        loops = [(16, 1), (16, 2), (32, 1), (32, 2), (32, 4), (64, 2), (64, 4)]
        halves = [(16, 1), (16, 2), (32, 1), (32, 2)]
        single = [(8, 16, 1), (16, 8, 1), (16, 8, 2), (32, 4, 1), (32, 4, 2), (32, 4, 4), (64, 2, 2), (64, 2, 4)]
        every = [(bv, 1, warps, st) for bv, warps in loops for st in (1, 2, 3)]
        every += [(bv, 2, warps, st) for bv, warps in halves for st in (1, 2)]
        every += [(8, 8, 1, st) for st in (1, 2)] + [(16, 4, warps, st) for warps in (1, 2) for st in (1, 2)]
        every += [(*shape, 1) for shape in single]
        wide = [(16, 2, 64), (32, 2, 64), (64, 4, 64), (32, 4, 128)]
        every += [(bv, 1, warps, st, chunk) for bv, warps, chunk in wide for st in (2, 3)]
    return tuple(DecodeConfig(*c) for c in every if c[0] * c[1] <= value_dim)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m replayssm_kernels.bench", description=__doc__.splitlines()[0])
    p.add_argument("benchmark", choices=["gdn_decode", "kda_decode", "gdn_verify", "kda_verify", "materialise"])
    p.add_argument("--heads", help="key heads / value heads (default 16/48; KDA 32/32)")
    p.add_argument("--lower-bound", type=float, help="KDA: a bounded gate, for example -5")
    p.add_argument("--gate", choices=["gdn", "kda"], help="materialise: kind of records (default gdn)")
    p.add_argument("--head-dim", type=int, default=128, help="K = V (default 128)")
    p.add_argument("--batch", type=integers, default=(1, 8, 32, 64, 128, 256, 512), help="comma-separated batch sizes")
    p.add_argument("--requests", type=integers, default=(1, 8, 32), help="materialise: requests per launch")
    p.add_argument("--capacity", type=int, help="ring capacity (default 16; verify 32 + width)")
    p.add_argument("--width", type=integers, default=(4, 8), help="verify: tokens per request and step (default 4,8)")
    p.add_argument("--accepted", type=int, help="verify: how many of them are committed (default three quarters)")
    p.add_argument("--act", choices=DTYPES, default="bf16", help="activations (default bf16)")
    p.add_argument("--state", choices=DTYPES, default="fp32", help="state (default fp32)")
    p.add_argument("--u", choices=["fp32", "bf16"], default="fp32", help="u records (default fp32)")
    p.add_argument("--layers", type=int, default=0, help="layers per forward (default 48, or 12 above batch 32)")
    p.add_argument("--rounds", type=int, default=15, help="samples per arm, interleaved (default 15)")
    p.add_argument("--no-graph", action="store_true", help="plain launches instead of a CUDA graph")
    p.add_argument(
        "--no-baselines", action="store_true", help="leave SGLang's kernels out (always so in the interpreter)"
    )
    p.add_argument("--configs", default="", help='extra launch shapes of ours: "all" or "bv,split,warps,stages;..."')
    p.add_argument("--programs", type=integers, default=(), help="materialise: extra sizes of the persistent grid")
    p.add_argument("--json", help="append one JSON line per figure to this file")
    p.add_argument("--smoke", action="store_true", help="toy sizes, for a check that everything runs")
    return p


def main(argv: list[str] | None = None) -> list[dict[str, object]]:
    """Run one benchmark; returns its records (also printed, and written with --json)."""
    args = parser().parse_args(argv)
    device = torch.device("cpu" if INTERPRETED else "cuda")
    if args.smoke:
        args.heads, args.head_dim, args.batch, args.requests = "1/2", 32, (1, 3), (1, 2)
        args.layers, args.rounds = 2, 1
        args.capacity, args.width = (7, (3,)) if args.benchmark.endswith("verify") else (2, args.width)
        args.act = "fp16" if INTERPRETED else args.act
        args.programs = args.programs or (3,)
    if args.benchmark.startswith(("gdn_", "kda_")):
        args.gate = args.benchmark[:3]
    heads = args.heads or ("32/32" if args.gate == "kda" else "16/48")
    k_heads, v_heads = (int(n) for n in heads.split("/"))
    sizes = dict(
        k_heads=k_heads,
        v_heads=v_heads,
        u_dtype=DTYPES[args.u],
        gate=args.gate or "gdn",
        lower_bound=args.lower_bound,
    )
    state_dtype, graph = DTYPES[args.state], not args.no_graph
    if args.benchmark == "materialise":
        shape = RingShape(
            layers=args.layers or 48,
            rows=2 * max(args.requests) + 1,
            key_dim=args.head_dim,
            value_dim=args.head_dim,
            key_dtype=DTYPES[args.act],
            capacity=args.capacity or 16,
            **sizes,
        )
        records = materialise.run(shape, args.requests, state_dtype, device, args.rounds, graph, args.programs)
    else:
        verify = args.benchmark.endswith("verify")
        records = []
        for width in args.width if verify else (1,):
            capacity = args.capacity or (32 + width if verify else 16)
            options = decode.Options(
                **sizes,
                capacity=capacity,
                head_dim=args.head_dim,
                batches=args.batch,
                act_dtype=DTYPES[args.act],
                state_dtype=state_dtype,
                layers=args.layers,
                rounds=args.rounds,
                graph=graph,
                baselines=not args.no_baselines and not INTERPRETED,
                configs=configs(args.configs, args.head_dim, verify),
                device=device,
                width=width,
                accepted=min(width, args.accepted or (3 * width + 3) // 4),
            )
            options.shape(1, 1).validate()
            records += decode.run(options)
    report.write_json(args.json, records)
    return records


if __name__ == "__main__":
    main()
