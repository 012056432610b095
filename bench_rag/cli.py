"""The command line: options, their meaning, and one-line errors."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from . import compare, demo, html, report
from .accuracy import command as accuracy
from .arms import BUILT_IN, DEFAULT_ARMS, Arm, load_config, select, split_args
from .errors import BenchError
from .hosts import host_profile, model_needs, vocab_of
from .options import Parser, joined
from .plot import plot
from .runner import Benchmark, Results
from .settings import Settings
from .workloads import WORKLOADS, Vocab, Workload

# Sizes by option name: type and meaning. A workload takes the ones it has a field for, with its own defaults.
_SIZES: dict[str, tuple[type, str]] = {
    "groups": (int, "groups of prompts that share a prefix"),
    "prompts_per_group": (int, "questions asked of each prefix"),
    "prefix_len": (int, "tokens of the shared prefix or system prompt"),
    "question_len": (int, "tokens of a question, of a task, or of what a later turn adds"),
    "output_len": (int, "tokens to generate per request"),
    "request_rate": (float, "requests per second (docqa: documents), Poisson; inf sends everything at once"),
    "concurrency": (int, "most requests in flight"),
    "requests": (int, "number of prompts"),
    "documents": (int, "documents in the corpus"),
    "document_len": (int, "tokens per document, at most so many per passage of real text"),
    "documents_per_prompt": (int, "documents in each prompt"),
    "document_order": (str, "retrieved (best first) or canonical (corpus order)"),
    "topics": (int, "passages that questions are about"),
    "zipf_alpha": (float, "exponent of the popularity, 0 for none"),
    "corpus": (str, "folder of text and Markdown (default Python's own documentation)"),
    "tokenizer": (str, "tokenizer.json or its folder (default the model's, else text as bytes)"),
    "sessions": (int, "conversations"),
    "turns": (int, "turns per conversation"),
    "first_len": (int, "tokens of the first turn"),
    "steps": (int, "answers per agent"),
    "tool_len": (int, "mean tokens of a tool's output"),
    "tool_seconds": (float, "mean seconds a tool runs"),
    "questions": (int, "questions about each document"),
    "question_gap": (float, "mean seconds between questions about a document"),
    "prompt_len": (int, "tokens per prompt"),
    "trace": (str, "file to replay: Mooncake, ShareGPT, or one of SGLang's own forms"),
    "trace_speed": (float, "recorded times run so many times as fast"),
    "trace_requests": (int, "records to replay, 0 for all"),
    "trace_output_len": (int, "most tokens of an answer, 0 for as many as recorded"),
}
_METAVARS = {"document_order": "ORDER", "corpus": "DIR", "tokenizer": "PATH", "trace": "FILE"}


def _comma(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _integers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in _comma(text)]
    except ValueError:
        numbers = []
    if not numbers or len(set(numbers)) != len(numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of different integers such as 1,2,3")
    return numbers


def _token_range(text: str) -> Vocab:
    try:
        low, high = (int(part) for part in text.split(":"))
        return Vocab(low, high)
    except (ValueError, BenchError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of token ids such as 100:30000") from None


def parser() -> argparse.ArgumentParser:
    """All options of ``python -m bench_rag``."""
    p = Parser(
        prog="python -m bench_rag",
        description="Compare prefix-cache hits, time to first token and decode speed of SGLang server configurations.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="arms:\n"
        + "\n".join(f"  {a.name:12} {a.about}" for a in BUILT_IN.values())
        + "\n\npython -m bench_rag compare A.json B.json compares two result files;"
        + "\npython -m bench_rag accuracy compares what configurations say (its --help lists its options).",
    )
    what = p.add_argument_group("what to run")
    what.add_argument(
        "--demo", action="store_true", help="a small run that a machine without a GPU finishes in minutes"
    )
    what.add_argument("--model", help="folder or name for SGLang's --model-path")
    what.add_argument("--arms", type=_comma, help=f"comma-separated, in order (default {','.join(DEFAULT_ARMS)})")
    what.add_argument("--config", type=Path, metavar="TOML", help="more arms, and arguments for every server")
    what.add_argument("--url", help="measure this running server instead of starting any")
    what.add_argument("--name", default="server", help="with --url: what to call it (default: server)")
    what.add_argument(
        "--workload", type=_comma, default=None, help=f"comma-separated from {', '.join(WORKLOADS)} (default gsp)"
    )
    what.add_argument("--seeds", "--seed", type=_integers, default=[1], help="comma-separated (default 1)")
    what.add_argument(
        "--order",
        choices=("interleaved", "grouped"),
        default="interleaved",
        help="a round of all arms per seed (default), or each arm's server once for all seeds",
    )
    sizes = p.add_argument_group("sizes (defaults: those of the public report for gsp)")
    for name, (kind, text) in _SIZES.items():
        option, metavar = f"--{name.replace('_', '-')}", _METAVARS.get(name, "N")
        takers = ", ".join(k for k, w in WORKLOADS.items() if name in {f.name for f in fields(w)})
        sizes.add_argument(option, type=kind, metavar=metavar, help=f"{takers}: {text}{_defaults(name)}")
    sizes.add_argument(
        "--batch", type=_integers, metavar="N,N", help="burst: requests at once, one run each (default 128)"
    )
    server = p.add_argument_group("servers")
    server.add_argument("--server-args", default="", help="arguments for every server, as one string")
    server.add_argument(
        "--host-profile", choices=("auto", "cpu", "gpu"), default="auto", help="base flags of servers (default auto)"
    )
    server.add_argument("--overlap-starts", action="store_true", help="the next server imports while one loads")
    server.add_argument("--start-timeout", type=float, default=900.0, metavar="S", help="seconds (default 900)")
    server.add_argument("--request-timeout", type=float, default=600.0, metavar="S", help="seconds (default 600)")
    server.add_argument(
        "--deadline", type=float, default=float("inf"), metavar="S", help="start no further server after S seconds"
    )
    how = p.add_argument_group("how to measure")
    how.add_argument(
        "--warmup",
        choices=("full", "light", "none"),
        help="a smaller run of the workload's shape, one tiny request, or nothing (default: full; light on a CPU)",
    )
    cache = how.add_mutually_exclusive_group()
    cache.add_argument("--no-flush", action="store_true", help="keep what is in the prefix cache before a run")
    cache.add_argument(
        "--prime", action="store_true", help="send a run's requests once, unmeasured, after the flush before it"
    )
    how.add_argument(
        "--ramp",
        type=float,
        default=0.0,
        metavar="S",
        help="let the requests in flight rise from 1 over S seconds; what is sent within them is not measured",
    )
    how.add_argument(
        "--cross-check",
        action="store_true",
        help="after each run send its requests again with sglang.benchmark.serving, and compare the figures",
    )
    how.add_argument(
        "--api",
        choices=("native", "openai"),
        default="native",
        help="SGLang's /generate (default), or /v1/completions of any server",
    )
    how.add_argument("--served-model", default="", metavar="NAME", help="with --api openai (default: the first listed)")
    how.add_argument(
        "--prompts", choices=("ids", "text"), default="ids", help="send token ids (default), or text to be tokenised"
    )
    how.add_argument(
        "--token-ids",
        type=_token_range,
        metavar="LOW:HIGH",
        help="range that prompts draw from (default: by the model)",
    )
    how.add_argument(
        "--out", type=Path, help="folder for JSON, Markdown, the plot and logs (default results/bench_rag)"
    )
    how.add_argument(
        "--ttft-slo", type=float, metavar="MS", help="also report goodput: requests whose first token comes in time"
    )
    how.add_argument("--quiet", action="store_true", help="no progress bars")
    return p


def _defaults(name: str) -> str:
    """The default of a size in help, per workload where they differ."""
    found = {kind: getattr(w(), name) for kind, w in WORKLOADS.items() if name in {f.name for f in fields(w)}}
    shown = {kind: value if isinstance(value, str) else f"{value:g}" for kind, value in found.items()}
    if not all(shown.values()):
        return ""  # an empty string is no value; the text says what it means
    if len(set(shown.values())) == 1:
        return f" (default {next(iter(shown.values()))})"
    return f" (default {', '.join(f'{kind} {value}' for kind, value in shown.items())})"


def workloads_of(options: argparse.Namespace, model: str = "") -> list[Workload]:
    """The workloads that the options name; BenchError for a size that none of them has.

    Those that tokenise text do it with the tokenizer of ``model`` (a folder) unless the options name another.
    """
    given = {name: value for name in _SIZES if (value := getattr(options, name)) is not None}
    if options.demo:
        extra = [*given, *(name for name in ("batch", "workload") if getattr(options, name))]
        if extra:
            raise BenchError(f"--demo has a workload of its own: leave out --{extra[0].replace('_', '-')}")
        return [demo.WORKLOAD]
    names = options.workload or ["gsp"]
    for name in names:
        if name not in WORKLOADS:
            raise BenchError(f"no workload is called {name!r}; there are {', '.join(WORKLOADS)}")
    chosen: list[Workload] = []
    used: set[str] = set()
    for name in dict.fromkeys(names):
        kind = WORKLOADS[name]
        own = {f.name for f in fields(kind)}
        sizes: dict[str, Any] = {k: v for k, v in given.items() if k in own}
        used |= sizes.keys()
        if "tokenizer" in own and "tokenizer" not in sizes and Path(model, "tokenizer.json").is_file():
            sizes["tokenizer"] = model
        if name == "burst":
            chosen += [kind(batch=b, **sizes) for b in options.batch or [kind().batch]]
        else:
            chosen.append(kind(**sizes))
    unused = sorted(given.keys() - used) + (["batch"] if options.batch and "burst" not in names else [])
    if unused:
        raise BenchError(f"--{unused[0].replace('_', '-')} has no meaning for {', '.join(dict.fromkeys(names))}")
    return chosen


def settings_of(options: argparse.Namespace) -> Settings:
    """Everything decided before the first server starts; BenchError says what does not fit."""
    config = load_config(options.config)
    model = options.model or config.model
    out = options.out or Path("results/bench_rag")
    if options.ttft_slo is not None and not options.ttft_slo > 0:
        raise BenchError(f"--ttft-slo is a time above 0 ms, got {options.ttft_slo:g}")
    if not 0 <= options.ramp < float("inf"):
        raise BenchError(f"--ramp is a time of at least 0 s, got {options.ramp:g}")
    if options.served_model and options.api != "openai":
        raise BenchError("--served-model goes with --api openai")
    common: dict[str, Any] = {
        "seeds": options.seeds,
        "out": out,
        "order": options.order,
        "cache": "keep" if options.no_flush else "prime" if options.prime else "flush",
        "api": options.api,
        "served_model": options.served_model,
        "as_text": options.prompts == "text",
        "ramp": options.ramp,
        "cross_check": options.cross_check,
        "request_timeout": options.request_timeout,
        "start_timeout": options.start_timeout,
        "deadline": options.deadline,
        "ttft_limit": None if options.ttft_slo is None else options.ttft_slo / 1e3,
        "quiet": options.quiet,
    }
    if options.url is not None:
        if options.arms or options.demo or options.server_args:
            raise BenchError("--url measures a running server: --arms, --demo and --server-args do not go with it")
        if not options.url.startswith(("http://", "https://")):
            raise BenchError(f"--url needs an address such as http://127.0.0.1:30000, got {options.url!r}")
        return Settings(
            arms=[Arm(options.name, options.url)],
            workloads=workloads_of(options, model or ""),
            vocab=options.token_ids or vocab_of(model),
            model=model or "",
            url=options.url,
            warmup=options.warmup or "full",
            **common,
        )
    profile = host_profile(options.host_profile)
    if options.demo:
        model = model or demo.tiny_model()
    if not model:
        raise BenchError("name a model with --model, a running server with --url, or try --demo")
    model = str(Path(model).resolve()) if Path(model).exists() else model
    return Settings(
        arms=select(options.arms or DEFAULT_ARMS, config.arms),
        workloads=workloads_of(options, model),
        vocab=options.token_ids or vocab_of(model),
        model=model,
        profile=model_needs(model, profile),
        overlap_starts=options.overlap_starts,
        server_args=[
            *(demo.server_args(profile) if options.demo else ()),
            *config.args,
            *split_args(options.server_args),
        ],
        server_env=config.env,
        warmup=options.warmup or ("light" if profile.name == "cpu" or options.demo else "full"),
        **common,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 if everything was measured, 1 if something failed, 2 for options that do not fit."""
    words = joined(list(sys.argv[1:] if argv is None else argv))
    if words[:1] == ["compare"]:
        return compare.main(words[1:])
    if words[:1] == ["accuracy"]:
        with _unwinding():
            return accuracy.main(words[1:])
    options = parser().parse_args(words)
    try:
        settings = settings_of(options)
        benchmark = Benchmark(settings, on_run=lambda results: report.write(settings, results))
    except BenchError as e:
        print(f"bench_rag: {e}", file=sys.stderr)
        return 2
    with _unwinding():
        try:
            benchmark.run()
        except KeyboardInterrupt:
            print("bench_rag: interrupted", file=sys.stderr)
            _finish(settings, benchmark.results, options.demo)
            return 130
    return _finish(settings, benchmark.results, options.demo)


@contextlib.contextmanager
def _unwinding() -> Iterator[None]:
    """SIGTERM unwinds the stack, so that servers are reaped; what was measured is on disk by then."""
    previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _finish(settings: Settings, results: Results, is_demo: bool) -> int:
    """Print and write the report; the exit status."""
    closing = demo.sentence(settings, results) if is_demo and results.runs else ""
    if results.runs:
        picture = plot(settings, results, settings.out / "report.png")
        report.write(settings, results, closing, picture.name)
        (settings.out / "report.html").write_text(html.page(settings, results, closing), encoding="utf-8")
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(report.terminal(settings, results, width))
        print(f"\nwritten to {settings.out}: report.html, report.md, report.png, results.json, requests.jsonl")
    for failure in results.failures:
        print(f"bench_rag: {failure.arm} failed: {failure.sentence}", file=sys.stderr)
        if settings.quiet and failure.detail:  # said already, otherwise
            print(failure.detail, file=sys.stderr)
    failed = sum(run.figures.get("failed", 0) for run in results.runs)
    if failed:
        first = next(run for run in results.runs if run.figures.get("failed"))
        reason = first.figures["first_error"]
        print(f"bench_rag: {failed} requests failed, the first on {first.arm}: {reason}", file=sys.stderr)
    if closing:
        print(f"\n{closing}")
    return 0 if results.complete and results.runs else 1
