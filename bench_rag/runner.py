"""The order of a benchmark: which server is up when, what is sent to it, what is kept."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from . import crosscheck, measures
from .arms import REPLAY_FLAG, Arm
from .budget import MOST_REQUESTS, bound, passages
from .ceiling import ceilings, share
from .client import Client, Reply
from .driver import drive
from .errors import BenchError
from .lineup import Lineup
from .metrics import Sample, occupancy, sampled
from .progress import Progress
from .server import Server
from .settings import Settings, Visit, visits
from .workloads import Burst, Plan, Workload

# Fields of /server_info that say what a server really runs.
_FACTS = (
    "version",
    "mamba_radix_cache_strategy",
    "disable_overlap_schedule",
    "enable_linear_replayssm",
    "linear_replayssm_cache_len",
    "mamba_track_interval",
    "mamba_ssm_dtype",
    "attention_backend",
    "page_size",
    "chunked_prefill_size",
    "max_total_num_tokens",
    "max_mamba_cache_size",
    "enable_hierarchical_cache",
)
_WARMUP_SEED = 1_000_003  # warm-up prompts share nothing with measured ones


@dataclass
class Run:
    """One measured run: one arm, one workload, one seed.

    ``server``: what the server said about itself. ``cross``: the figures by the other client, if it was asked for.
    ``samples``: its pools over time (see :mod:`bench_rag.metrics`).
    """

    arm: str
    workload: str
    seed: int
    figures: dict[str, Any]
    server: dict[str, Any]
    replies: list[Reply] = field(repr=False, default_factory=list)
    samples: list[Sample] = field(repr=False, default_factory=list)
    cross: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """An arm that could not be measured, or not to the end; ``detail``: its server's last lines."""

    arm: str
    sentence: str
    detail: str = ""


@dataclass
class Results:
    """Everything a report needs.

    ``ceilings``: hit rate of an infinite cache by workload and seed; ``request_ceilings``: the same request by request,
    see :func:`bench_rag.ceiling.ceilings`. ``facts`` and ``loads``: of the first seed's plan, by workload.
    """

    runs: list[Run] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    ceilings: dict[str, dict[int, float]] = field(default_factory=dict)
    request_ceilings: dict[tuple[str, int], dict[tuple[int, int], tuple[int, int]]] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    loads: dict[str, str] = field(default_factory=dict)
    commands: dict[str, list[str]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every arm was measured and every request answered."""
        return not self.failures and all(not run.figures.get("failed") for run in self.runs)


class Benchmark:
    """Runs ``settings``; ``results`` grows run by run, and ``on_run`` sees it each time, so that it can be kept."""

    def __init__(self, settings: Settings, on_run: Callable[[Results], None] = lambda results: None) -> None:
        self.settings = settings
        self._on_run = on_run
        self.results = Results()
        first_plans: dict[str, Plan] = {}
        for workload in settings.workloads:
            limits = self.results.ceilings.setdefault(workload.label, {})
            for seed in settings.seeds:
                plan = workload.plan(seed, settings.vocab)
                by_request = ceilings(plan, settings.cache == "prime")
                limits[seed] = share(by_request.values())
                self.results.request_ceilings[workload.label, seed] = by_request
                first_plans.setdefault(workload.label, plan)
                self.results.facts.setdefault(workload.label, plan.facts)
                self.results.loads.setdefault(workload.label, plan.load)

        if settings.cross_check:
            crosscheck.check(settings, first_plans)

    def run(self) -> Results:
        """Measure every arm; an arm that fails is recorded, and the others go on."""
        s = self.settings
        left = visits(s.arms, s.seeds, s.order)
        with Progress(len(s.arms) * len(s.seeds) * len(s.workloads), s.quiet) as progress, Lineup(s) as lineup:
            self.results.commands = lineup.commands
            began = time.monotonic()
            while left:
                visit = left.pop(0)
                try:
                    if time.monotonic() - began > s.deadline:
                        raise BenchError(f"not started, the deadline of {s.deadline:g} s has passed")
                    self._visit(visit, left[0] if left else None, lineup, progress)
                except BenchError as e:
                    self.results.failures.append(Failure(visit.arm.name, str(e), e.detail))
                    left = [v for v in left if v.arm is not visit.arm]
                    progress.say(f"{visit.arm.name}: {e}\n{e.detail}".rstrip())
                    self._on_run(self.results)
        return self.results

    def _visit(self, visit: Visit, then: Visit | None, lineup: Lineup, progress: Progress) -> None:
        url = self.settings.url
        if url is not None:
            asyncio.run(self._measure(visit, url, None, lineup, progress))
            return
        with lineup.server(visit, then) as server:
            asyncio.run(self._measure(visit, server.base_url, server, lineup, progress))
            progress.phase(f"stopping {visit.arm.name}")

    async def _measure(self, visit: Visit, url: str, server: Server | None, lineup: Lineup, progress: Progress) -> None:
        s, arm = self.settings, visit.arm
        async with Client(url, s.request_timeout, s.api, s.served_model) as client:
            started = None
            if server is not None:
                started = await server.ready(
                    client, s.start_timeout, lambda sec: progress.phase(f"starting {arm.name}, {sec:.0f} s")
                )
                progress.say(f"{arm.name}: server up after {started:.0f} s")
            elif not await client.healthy():
                raise BenchError(f"no healthy server answers at {url}")
            await client.choose_model()
            facts = _facts(await client.server_info(), started)
            _check_plugin(arm, facts)
            await lineup.settle()
            for workload in s.workloads:
                _check_batch(workload, facts, arm, progress)
                await self._warm_up(client, workload, server, progress)
                for seed in visit.seeds:
                    name = f"{arm.name} {workload.label} seed {seed}"
                    replies, samples = await self._one_run(client, workload, seed, name, server, progress)
                    await _check_replies(replies, name, server)
                    if all(r.ramp for r in replies if r.ok):
                        raise BenchError(f"every request of {name} was sent within the ramp of {s.ramp:g} s")
                    figures = measures.measure(replies, steady=isinstance(workload, Burst), ttft_limit=s.ttft_limit)
                    figures |= occupancy(samples)
                    figures |= _budget(workload.plan(seed, s.vocab), replies, facts, s)
                    run = Run(arm.name, workload.label, seed, figures, facts, replies=replies, samples=samples)
                    self.results.runs.append(run)
                    self._compare_outputs()
                    self._on_run(self.results)
                    progress.end()
                    if s.cross_check:
                        progress.phase(f"cross-check of {name}")
                        run.cross = await self._cross_check(client, url, workload.plan(seed, s.vocab), name, server)
                        self._on_run(self.results)

    async def _warm_up(self, client: Client, workload: Workload, server: Server | None, progress: Progress) -> None:
        if self.settings.warmup == "none":
            return
        light = Burst(batch=1, prompt_len=8, output_len=2)
        warm = light if self.settings.warmup == "light" else workload.warmup()
        progress.phase(f"warming up {workload.label}")
        replies = await drive(client, warm.plan(_WARMUP_SEED, self.settings.vocab), as_text=self.settings.as_text)
        await _check_replies(replies, f"the warm-up of {workload.label}", server)

    async def _one_run(
        self, client: Client, workload: Workload, seed: int, name: str, server: Server | None, progress: Progress
    ) -> tuple[list[Reply], list[Sample]]:
        s = self.settings
        plan = workload.plan(seed, s.vocab)
        if s.cache != "keep":
            await client.flush()
        if s.cache == "prime":
            progress.phase(f"priming for {name}")
            at_once = replace(plan, conversations=[replace(c, arrival=0.0) for c in plan.conversations])
            await _check_replies(await drive(client, at_once, as_text=s.as_text), f"the priming of {name}", server)
        progress.phase(name)
        progress.begin(name, plan.requests)
        async with sampled(client) as samples:
            replies = await drive(client, plan, progress.reply, as_text=s.as_text, ramp=s.ramp)
        return replies, samples

    async def _cross_check(
        self, client: Client, url: str, plan: Plan, name: str, server: Server | None
    ) -> dict[str, float]:
        """The run's requests by the other client, from the same state of the prefix cache."""
        if self.settings.cache == "flush":
            await client.flush()
        try:
            return await crosscheck.send(self.settings, url, plan)
        except BenchError as e:
            if server is not None and (status := await server.ended(patience=3.0)) is not None:
                raise server.failure(f"the server ended during the cross-check of {name}, exit status {status}") from e
            raise

    def _compare_outputs(self) -> None:
        """Give every run of the later arms the share of outputs that equal the first arm's."""
        reference = {(r.workload, r.seed): r for r in self.results.runs if r.arm == self.settings.arms[0].name}
        for run in self.results.runs:
            first = reference.get((run.workload, run.seed))
            if first is not None and first is not run:
                share = measures.equal_outputs(run.replies, first.replies)
                if share is not None:
                    run.figures["equal_outputs"] = share


def _budget(plan: Plan, replies: Sequence[Reply], facts: Mapping[str, Any], settings: Settings) -> dict[str, float]:
    """The best hit rate that this server's pools allowed in this run; empty where they are not known or do not bind.

    Text has no lengths that the client knows, a cache that was not flushed holds what the client does not know, and a
    host tier holds more than the pools.
    """
    slots, tokens = facts.get("max_mamba_cache_size"), facts.get("max_total_num_tokens")
    unknown = settings.as_text or settings.cache == "keep" or facts.get("enable_hierarchical_cache")
    if unknown or not isinstance(slots, int) or not isinstance(tokens, int):
        return {}
    sent = sorted((r for r in replies if r.ok), key=lambda r: r.sent)
    order = [(r.conversation, r.turn) for r in sent]
    counted = {i for i, r in enumerate(sent) if not r.ramp}
    if settings.cache == "prime":
        counted = {len(order) + i for i in counted}
        order = order + order
    if len(order) > MOST_REQUESTS:
        return {}
    best = bound(passages(plan, order), slots, tokens, counted)
    return {} if best is None else {"budget_hit_rate": best}


def _facts(info: Mapping[str, Any], started: float | None) -> dict[str, Any]:
    """The part of /server_info worth keeping, and the seconds the server took to start."""
    facts = {k: info[k] for k in _FACTS if k in info}
    state = (info.get("internal_states") or [{}])[0]
    if isinstance(state, dict):
        # What the server was started with may leave sizes open; its scheduler knows them.
        facts |= {k: state[k] for k in ("max_mamba_cache_size", "max_total_num_tokens") if state.get(k) is not None}
        if "effective_max_running_requests_per_dp" in state:
            facts["max_running_requests"] = state["effective_max_running_requests_per_dp"]
        if "memory_usage" in state:
            facts["memory_usage_gb"] = state["memory_usage"]
    if info:
        facts["replay"] = _replay(info)
    if started is not None:
        facts["start_s"] = started
    return facts


def _replay(info: Mapping[str, Any]) -> str:
    """Whose buffered decode a server runs: ``in-tree``, ``plugin`` or ``off``.

    The plugin takes the flag over: what was asked for stays in the launch command, and SGLang's own switch is off.
    """
    if info.get("enable_linear_replayssm"):
        return "in-tree"
    return "plugin" if REPLAY_FLAG in str(info.get("launch_command")).split() else "off"


def _check_plugin(arm: Arm, facts: Mapping[str, Any]) -> None:
    """BenchError if an arm of the plugin turns out to run SGLang's own replay."""
    if arm.plugin and REPLAY_FLAG in arm.args and facts.get("replay") == "in-tree":
        raise BenchError(
            f"the server runs SGLang's own replay, not the plugin: is sglang-replayssm installed for {sys.executable}?"
        )


async def _check_replies(replies: list[Reply], name: str, server: Server | None) -> None:
    """BenchError if the server is gone or answered nothing; single failed requests are left to the figures."""
    failed = [r for r in replies if not r.ok]
    if not failed:
        return
    # A server goes down process by process: its requests fail a moment before it is gone.
    if server is not None and (status := await server.ended(patience=3.0)) is not None:
        raise server.failure(f"the server ended during {name}, exit status {status}")
    if len(failed) == len(replies):
        sentence = f"every request of {name} failed, the first with: {failed[0].error}"
        raise server.failure(sentence) if server is not None else BenchError(sentence)


def _check_batch(workload: Workload, facts: Mapping[str, Any], arm: Arm, progress: Progress) -> None:
    limit = facts.get("max_running_requests")
    if isinstance(workload, Burst) and isinstance(limit, int) and limit < workload.batch:
        progress.say(
            f"{arm.name}: the server runs at most {limit} requests at once, fewer than {workload.label} sends; "
            "its decode throughput is not that of the full batch (see --max-running-requests)"
        )
