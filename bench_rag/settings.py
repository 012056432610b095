"""What a benchmark is asked to do, and the order in which it does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .arms import Arm
from .hosts import HostProfile
from .workloads import Vocab, Workload


@dataclass(frozen=True)
class Settings:
    """``out``: folder for reports and server logs. Times are in seconds.

    ``order`` is ``interleaved`` or ``grouped`` (see :func:`visits`), ``warmup`` is ``full``, ``light`` or ``none``.
    ``deadline``: seconds from the beginning after which no further server is started. ``ttft_limit``: seconds within
    which a first token is in time, None for no goodput. ``api``, ``served_model``: see :class:`.client.Client`.
    ``as_text``, ``ramp``: see :func:`.driver.drive`. ``cross_check``: see :mod:`.crosscheck`. ``cache``: what happens
    to the prefix cache before a measured run: ``flush``, ``keep``, or ``prime`` (flush, then send the run's requests
    once, unmeasured).
    With ``url`` a running server is measured, and ``model``, ``profile``, ``server_args``, ``server_env``,
    ``overlap_starts`` and ``start_timeout`` play no part.
    """

    arms: Sequence[Arm]
    workloads: Sequence[Workload]
    seeds: Sequence[int]
    out: Path
    vocab: Vocab
    model: str = ""
    url: str | None = None
    profile: HostProfile = HostProfile("gpu")
    server_args: Sequence[str] = ()
    server_env: Mapping[str, str] = field(default_factory=dict)
    order: str = "interleaved"
    warmup: str = "full"
    cache: str = "flush"
    api: str = "native"
    served_model: str = ""
    as_text: bool = False
    ramp: float = 0.0
    cross_check: bool = False
    overlap_starts: bool = False
    start_timeout: float = 900.0
    request_timeout: float = 600.0
    deadline: float = float("inf")
    ttft_limit: float | None = None
    quiet: bool = False


@dataclass(frozen=True)
class Visit:
    """One server start, and the seeds measured on it."""

    arm: Arm
    seeds: tuple[int, ...]


def visits(arms: Sequence[Arm], seeds: Sequence[int], order: str) -> list[Visit]:
    """Which arm's server is up in turn, for which seeds.

    ``grouped``: each arm once, for all seeds. ``interleaved``: a round of all arms for each seed, each round starting
    one arm later, so that a machine that drifts does not favour one arm.
    """
    if order == "grouped":
        return [Visit(arm, tuple(seeds)) for arm in arms]
    rounds = []
    for number, seed in enumerate(seeds):
        shift = number % len(arms)
        rounds += [Visit(arm, (seed,)) for arm in [*arms[shift:], *arms[:shift]]]
    return rounds
