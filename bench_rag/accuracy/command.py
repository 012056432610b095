"""The command line of the accuracy check: servers one after another, the same tasks for each, one report."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from ..arms import load_config, select, split_args
from ..client import Client
from ..errors import BenchError
from ..hosts import host_profile, model_needs, vocab_of
from ..lineup import Lineup
from ..options import Parser
from ..server import Server
from ..settings import Settings, visits
from ..tokenise import tokeniser
from . import report, text
from .recall import RecallFormat
from .score import Answers, Sizes, ask
from .tasks import QUARTILES, Opening, openings

DEFAULT_ARMS = ("plain", "plain", "plugin")


def parser() -> argparse.ArgumentParser:
    """All options of ``python -m bench_rag accuracy``."""
    p = Parser(
        prog="python -m bench_rag accuracy",
        description="Compare what server configurations say: perplexity, recall and greedy agreement by position.",
        epilog="The first arm is the reference; naming it twice shows what two servers of one configuration differ by.",
    )
    p.add_argument(
        "--model", required=True, help="folder of a checkpoint with its tokenizer.json, such as small_models/gdn"
    )
    p.add_argument("--arms", default=",".join(DEFAULT_ARMS), help="comma-separated (default %(default)s)")
    p.add_argument("--config", type=Path, metavar="TOML", help="more arms, and arguments for every server")
    p.add_argument("--context", type=int, default=16384, metavar="N", help="tokens each text grows by (default 16384)")
    p.add_argument("--texts", type=int, default=4, metavar="N", help="texts (default 4)")
    p.add_argument("--opening", type=int, default=1536, metavar="N", help="tokens of a text's beginning (default 1536)")
    p.add_argument(
        "--facts", type=int, default=16, metavar="N", help="facts in each beginning, 0 for no recall (default 16)"
    )
    p.add_argument("--questions", type=int, default=16, metavar="N", help="per text and quartile (default 16)")
    p.add_argument(
        "--cuts", type=int, default=8, metavar="N", help="greedy continuations per text and quartile (default 8)"
    )
    p.add_argument("--continued", type=int, default=64, metavar="N", help="tokens of a continuation (default 64)")
    p.add_argument("--concurrency", type=int, default=16, metavar="N", help="most requests in flight (default 16)")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--server-args", default="", help="arguments for every server, as one string")
    p.add_argument("--host-profile", choices=("auto", "cpu", "gpu"), default="auto")
    p.add_argument("--start-timeout", type=float, default=900.0, metavar="S")
    p.add_argument(
        "--request-timeout", type=float, default=1800.0, metavar="S", help="seconds for one request (default 1800)"
    )
    p.add_argument("--out", type=Path, default=Path("results/accuracy"), help="folder (default results/accuracy)")
    p.add_argument("--quiet", action="store_true", help="no progress")
    return p


def main(argv: Sequence[str]) -> int:
    """Exit status 0 if every arm was asked, 1 if one failed, 2 for options that do not fit."""
    options = parser().parse_args(argv)
    try:
        settings, sizes, texts, form = _prepare(options)
    except BenchError as e:
        print(f"bench_rag: {e}", file=sys.stderr)
        return 2
    found: dict[str, Answers] = {}
    failures: list[str] = []
    facts = {name: getattr(options, name) for name in ("context", "texts", "opening", "facts", "seed")}
    with Lineup(settings) as lineup:
        for visit in visits(settings.arms, settings.seeds, "grouped"):
            name = visit.arm.name
            try:
                with lineup.server(visit, None) as server, _Bar(name, options.quiet) as bar:
                    reference = found.get(settings.arms[0].name)
                    found[name] = asyncio.run(_visit(server, settings, texts, form, sizes, reference, bar))
            except BenchError as e:
                failures.append(f"{name} failed: {e}")
                print(f"bench_rag: {name} failed: {e}\n{e.detail}".rstrip(), file=sys.stderr)
                if not found:
                    break  # nothing to compare the others with
            report.write(settings, facts, found, failures)
    if found:
        print(report.table(found))
        print(f"\nwritten to {settings.out}: accuracy.json, accuracy.md")
    return 1 if failures else 0


def _prepare(options: argparse.Namespace) -> tuple[Settings, Sizes, list[Opening], RecallFormat | None]:
    """Everything that can be wrong before a server starts."""
    model = Path(options.model)
    if not (model / "tokenizer.json").is_file():
        raise BenchError(f"accuracy needs a checkpoint folder with a tokenizer.json, got {options.model!r}")
    positive = ("context", "texts", "opening", "questions", "cuts", "continued", "concurrency")
    for name in positive:
        if getattr(options, name) < 1:
            raise BenchError(f"accuracy: --{name} must be at least 1, got {getattr(options, name)}")
    if options.context < QUARTILES or options.facts < 0:
        raise BenchError(f"accuracy: --context is at least {QUARTILES} and --facts at least 0")
    config = load_config(options.config)
    arms = select([a.strip() for a in options.arms.split(",") if a.strip()], config.arms)
    server_args = [*config.args, *split_args(options.server_args)]
    words = tokeniser(str(model), vocab_of(str(model)))
    form = RecallFormat.of(words.token_id) if options.facts else None
    unseen = words.encode("".join(text.sources(held_out=True)))
    settings = Settings(
        arms=arms,
        workloads=[],
        seeds=[options.seed],
        out=options.out,
        vocab=vocab_of(str(model)),
        model=str(model.resolve()),
        profile=model_needs(str(model), host_profile(options.host_profile)),
        server_args=server_args,
        server_env=config.env,
        start_timeout=options.start_timeout,
        request_timeout=options.request_timeout,
    )
    texts = openings(unseen, form, options.texts, options.opening, options.facts, options.seed)
    sizes = Sizes(options.context, options.questions, options.cuts, options.continued, options.concurrency)
    return settings, sizes, texts, form


async def _visit(
    server: Server,
    settings: Settings,
    texts: list[Opening],
    form: RecallFormat | None,
    sizes: Sizes,
    reference: Answers | None,
    bar: _Bar,
) -> Answers:
    async with Client(server.base_url, settings.request_timeout) as client:
        await server.ready(client, settings.start_timeout, lambda s: bar.phase(f"starting, {s:.0f} s"))
        needed = len(texts) * (len(texts[0].ids) + sizes.context) + sizes.continued
        room = (await client.server_info()).get("max_total_num_tokens")
        if isinstance(room, int) and room < needed:
            raise BenchError(
                f"its KV pool holds {room} tokens and the texts take {needed}: lower --context or --texts, or raise "
                "--max-total-tokens in --server-args"
            )
        try:
            return await ask(client, texts, form, sizes, reference, settings.seeds[0], bar.tick)
        except BenchError as e:
            status = await server.ended(patience=3.0)
            raise server.failure(str(e) if status is None else f"the server ended, exit status {status}") from e


class _Bar:
    """What one server is doing, on stderr; nothing without a terminal but a line per phase."""

    def __init__(self, arm: str, quiet: bool) -> None:
        self._arm, self._quiet, self._last = arm, quiet, ""
        self._bar = tqdm(desc=arm, file=sys.stderr, disable=quiet or not sys.stderr.isatty(), leave=False)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.close()

    def phase(self, text: str) -> None:
        """Say what is going on."""
        self._bar.set_postfix_str(text)

    def tick(self, phase: str, done: int, total: int) -> None:
        """``done`` of ``total`` requests of a phase have ended."""
        if phase != self._last:
            self._last = phase
            if self._bar.disable and not self._quiet:
                print(f"{self._arm}: {phase}, {total} requests", file=sys.stderr, flush=True)
            self._bar.reset(total=total)
            self._bar.set_description(f"{self._arm}: {phase}")
        self._bar.n = done
        self._bar.refresh()
