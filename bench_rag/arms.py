"""Arms: the named server configurations that are compared, built in or from a TOML file."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import BenchError

# The plugin's kill switch: SGLang behaves as if the plugin were not installed.
KILL_SWITCH = "SGLANG_REPLAYSSM_DISABLE"

REPLAY_FLAG = "--enable-linear-replayssm"

_REPLAY = (REPLAY_FLAG,)
_EXTRA_BUFFER = ("--mamba-radix-cache-strategy", "extra_buffer")
_NO_BUFFER = ("--mamba-radix-cache-strategy", "no_buffer")
_NO_OVERLAP = ("--disable-overlap-schedule",)


@dataclass(frozen=True)
class Arm:
    """One server configuration.

    ``args``: SGLang arguments after those that all arms share. ``env``: environment variables for the server.
    ``plugin``: whether the sglang-replayssm plugin may register (else its kill switch is set).
    """

    name: str
    about: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    plugin: bool = False

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """``inherited`` with this arm's variables and the kill switch set or removed."""
        env = {k: v for k, v in inherited.items() if k != KILL_SWITCH}
        if not self.plugin:
            env[KILL_SWITCH] = "1"
        return env | dict(self.env)


BUILT_IN: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("plain", "SGLang's default prefix cache (extra_buffer), no replay", _EXTRA_BUFFER),
        # Without no_buffer SGLang 0.5.23 refuses its in-tree replay, and no_buffer refuses overlap scheduling.
        Arm("intree", "SGLang's own replay, which needs no_buffer", (*_REPLAY, *_NO_BUFFER, *_NO_OVERLAP)),
        Arm("plugin", "sglang-replayssm at the defaults (extra_buffer, overlap)", _REPLAY, plugin=True),
        Arm("plain-noov", "plain without overlap scheduling", (*_EXTRA_BUFFER, *_NO_OVERLAP)),
        # Without overlap scheduling SGLang's automatic strategy is no_buffer, so this arm names extra_buffer.
        Arm(
            "plugin-noov",
            "sglang-replayssm without overlap scheduling",
            (*_REPLAY, *_EXTRA_BUFFER, *_NO_OVERLAP),
            plugin=True,
        ),
        Arm("plain-nobuf", "no_buffer without replay", (*_NO_BUFFER, *_NO_OVERLAP)),
    )
}
DEFAULT_ARMS = ("plain", "intree", "plugin")


@dataclass(frozen=True)
class Config:
    """A configuration file: arms by name (built-in ones included), and what every server gets."""

    arms: dict[str, Arm]
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None


def load_config(path: Path | None) -> Config:
    """Read a TOML file; None gives the built-in arms. BenchError says what is wrong and where.

    The file may have ``model``, a table ``[server]`` (``args``, ``env``) for all arms, and tables ``[arms.NAME]``
    (``args``, ``env``, ``plugin``, ``about``); an arm of a built-in name replaces it. ``args`` is a list or one string.
    """
    if path is None:
        return Config(dict(BUILT_IN))
    try:
        import tomllib
    except ImportError:
        raise BenchError("arms from a TOML file need Python 3.11 or newer; name built-in arms instead") from None
    try:
        with open(path, "rb") as f:
            data = tomllib.load(f)
    except OSError as e:
        raise BenchError(f"cannot read {path}: {e.strerror}") from e
    except tomllib.TOMLDecodeError as e:
        raise BenchError(f"{path}: {e}") from e

    _only(path, "the file", data, ("model", "server", "arms"))
    server = _table(path, "server", data.get("server", {}))
    _only(path, "[server]", server, ("args", "env"))
    arms = dict(BUILT_IN)
    for name, value in _table(path, "arms", data.get("arms", {})).items():
        where = f"[arms.{name}]"
        arm = _table(path, f"arms.{name}", value)
        _only(path, where, arm, ("args", "env", "plugin", "about"))
        if not isinstance(arm.get("plugin", False), bool):
            raise BenchError(f"{path}: {where}: plugin is true or false")
        arms[name] = Arm(
            name,
            str(arm.get("about", "")),
            _args(path, where, arm.get("args", [])),
            _env(path, where, arm.get("env", {})),
            arm.get("plugin", False),
        )
    return Config(
        arms,
        _args(path, "[server]", server.get("args", [])),
        _env(path, "[server]", server.get("env", {})),
        data.get("model"),
    )


def select(names: Sequence[str], arms: Mapping[str, Arm]) -> list[Arm]:
    """Arms by name, in the given order. A name given again becomes ``name#2``: the same arm twice shows the noise."""
    chosen: list[Arm] = []
    for name in names:
        if name not in arms:
            raise BenchError(f"no arm is called {name!r}; there are {', '.join(arms)}")
        arm, times = arms[name], 1 + sum(a.name.partition("#")[0] == name for a in chosen)
        label = name if times == 1 else f"{name}#{times}"
        chosen.append(Arm(label, arm.about, arm.args, arm.env, arm.plugin))
    if not chosen:
        raise BenchError("name at least one arm")
    return chosen


def split_args(text: str) -> tuple[str, ...]:
    """A command-line string as arguments, quotes respected."""
    try:
        return tuple(shlex.split(text))
    except ValueError as e:
        raise BenchError(f"cannot split {text!r} into arguments: {e}") from e


def _only(path: Path, where: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
    unknown = [k for k in table if k not in known]
    if unknown:
        raise BenchError(f"{path}: {where} has no {unknown[0]!r}; it takes {', '.join(known)}")


def _table(path: Path, where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BenchError(f"{path}: [{where}] must be a table")
    return value


def _args(path: Path, where: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return split_args(value)
    if isinstance(value, list):
        return tuple(str(v) for v in value)
    raise BenchError(f"{path}: {where}: args is a list or a string")


def _env(path: Path, where: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise BenchError(f"{path}: {where}: env is a table of strings")
    return {str(k): str(v) for k, v in value.items()}
