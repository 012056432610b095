"""Arms: what the built-in ones ask of SGLang, the kill switch, TOML files and their mistakes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench_rag.arms import BUILT_IN, DEFAULT_ARMS, KILL_SWITCH, Arm, load_config, select, split_args
from bench_rag.errors import BenchError

needs_toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is part of Python from 3.11 on")


def written(folder: Path, text: str) -> Path:
    path = folder / "arms.toml"
    path.write_text(text)
    return path


def test_kill_switch_is_set_for_all_but_the_plugin():
    inherited = {KILL_SWITCH: "1", "PATH": "/bin"}
    for arm in BUILT_IN.values():
        env = arm.environment(inherited)
        assert env["PATH"] == "/bin"
        assert env.get(KILL_SWITCH) == (None if arm.name.startswith("plugin") else "1")
    assert Arm("x", "", env={"A": "2"}).environment({"A": "1"})["A"] == "2"


def test_plugin_arm_adds_the_flag_and_nothing_else():
    assert BUILT_IN["plugin"].args == ("--enable-linear-replayssm",)
    assert DEFAULT_ARMS == ("plain", "intree", "plugin")


def test_same_arm_twice_gets_two_names():
    chosen = select(["plain", "plugin", "plain", "plain"], BUILT_IN)
    assert [a.name for a in chosen] == ["plain", "plugin", "plain#2", "plain#3"]
    assert chosen[2].args == BUILT_IN["plain"].args


def test_unknown_arm_names_the_known():
    with pytest.raises(BenchError, match="no arm is called 'plan'; there are plain, intree"):
        select(["plan"], BUILT_IN)


@needs_toml
def test_toml_adds_and_replaces_arms(tmp_path):
    config = load_config(
        written(
            tmp_path,
            """
            model = "some/model"
            [server]
            args = "--load-format dummy --json '{\\"a\\": 1}'"
            env = {HF_HUB_OFFLINE = "1"}
            [arms.plugin-32]
            about = "a longer ring"
            args = ["--enable-linear-replayssm", "--linear-replayssm-cache-len", 32]
            plugin = true
            [arms.plain]
            env = {X = "y"}
            """,
        )
    )
    assert config.model == "some/model"
    assert config.args == ("--load-format", "dummy", "--json", '{"a": 1}')
    assert config.env == {"HF_HUB_OFFLINE": "1"}
    arm = config.arms["plugin-32"]
    assert arm.plugin and arm.args[-1] == "32" and arm.about == "a longer ring"
    assert config.arms["plain"].args == () and config.arms["plain"].env == {"X": "y"}
    assert config.arms["intree"] == BUILT_IN["intree"]


@needs_toml
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[arms.a]\nargz = []", r"\[arms.a\] has no 'argz'"),
        ("[arms.a]\nargs = 3", r"\[arms.a\]: args is a list or a string"),
        ("[arms.a]\nplugin = 'yes'", "plugin is true or false"),
        ("arms = 3", r"\[arms\] must be a table"),
        ("[server]\nenv = []", "env is a table of strings"),
        ("[arms.a\n", "arms.toml"),
        ('[arms.a]\nargs = "\'open"', "cannot split"),
    ],
)
def test_toml_mistakes_name_their_place(tmp_path, text, sentence):
    with pytest.raises(BenchError, match=sentence):
        load_config(written(tmp_path, text))


@needs_toml
def test_missing_file(tmp_path):
    with pytest.raises(BenchError, match="cannot read .*none.toml"):
        load_config(tmp_path / "none.toml")


def test_no_file_gives_the_built_in_arms():
    assert load_config(None).arms == BUILT_IN


def test_arguments_keep_their_quotes():
    assert split_args("--a 'b c' --d=1") == ("--a", "b c", "--d=1")
