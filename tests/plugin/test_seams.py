"""The hook table against the installed SGLang, and against modules of another shape."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sglang_replayssm
from sglang_replayssm import arguments, seams
from sglang_replayssm.hooks import HOOKS
from sglang_replayssm.seams import SEAMS, Seam
from tests.plugin import fakes

TARGETS = {seam.target for seam in SEAMS}


def test_the_installed_sglang_matches() -> None:
    assert seams.sglang_version() in seams.TESTED_SGLANG
    assert seams.differences() == []


def test_every_override_has_a_hook_and_every_hook_an_override() -> None:
    overrides = [seam.target for seam in SEAMS if seam.use == "override"]
    assert sorted(HOOKS) == sorted(overrides)
    # GDN's and KDA's backends share their hooks: one mechanism, two gate kinds
    backends = "sglang.srt.layers.attention.linear."
    gdn, kda = (
        HOOKS[f"{backends}{b}.forward_decode"] for b in ("gdn_backend.GDNAttnBackend", "kda_backend.KDAAttnBackend")
    )
    assert gdn is kda


def test_targets_are_listed_once_per_use() -> None:
    uses = [(seam.target, seam.use) for seam in SEAMS]
    assert len(uses) == len(set(uses))


def test_every_import_from_sglang_is_in_the_table() -> None:
    """A name that the plugin imports from SGLang at run time, and that the table forgot, would break unannounced."""
    imported = set()
    for file in Path(sglang_replayssm.__file__).parent.glob("*.py"):
        tree = ast.parse(file.read_text())
        typing_only = {
            id(node)
            for block in ast.walk(tree)
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
            for node in ast.walk(block)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert not [a.name for a in node.names if a.name.split(".")[0] == "sglang"], "import names, not modules"
            if isinstance(node, ast.ImportFrom) and id(node) not in typing_only:
                imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    imported = {name for name in imported if name.startswith("sglang.")}
    assert imported, "the scan found nothing"
    modules = {"sglang.srt.arg_groups.resolution_hooks"}  # imported whole, by the check itself
    absent = [n for n in imported - modules if not any(t == n or t.startswith(n + ".") for t in TARGETS)]
    assert absent == []


def test_every_argument_that_is_read_is_in_the_table() -> None:
    fields = {field for seam in SEAMS if seam.target.endswith(".ServerArgs") for field in seam.fields}
    assert {field for field, *_ in arguments._REFUSALS} <= fields


# -- each kind of difference ------------------------------------------------------------------------------------------


class Base:
    declared: int
    default = 3

    def __init__(self) -> None:
        self.assigned = 1


class Derived(Base):
    def __init__(self) -> None:
        super().__init__()
        self.own = 2

    @property
    def computed(self) -> int:
        return 1

    def method(self, a: int, *, b: int = 0, **rest: int) -> None: ...


def function(a: int, b: int) -> None: ...


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    def builds(pool: Any) -> None:
        pool.made_here = 1

    @functools.wraps(function)
    def wrapper(*args: Any) -> None: ...

    fakes.module(
        monkeypatch, "fake_sglang", Derived=Derived, function=function, builds=builds, wrapper=wrapper, constant=3
    )


@pytest.mark.parametrize(
    "seam",
    [
        Seam("fake_sglang.function", "override", ("a", "b")),
        Seam("fake_sglang.function", "call"),  # no parameters listed: any signature will do
        Seam("fake_sglang.wrapper", "override", ("a", "b")),  # a hook that is already applied does not matter
        Seam("fake_sglang.Derived.method", "call", ("self", "a", "b", "rest")),
        Seam("fake_sglang.Derived", "read", fields=("declared", "default", "assigned", "own", "computed", "method")),
        Seam("fake_sglang.builds", "read", fields=("made_here",)),
    ],
    ids=lambda seam: f"{seam.use}-{seam.target}",
)
def test_what_fits_is_no_difference(seam: Seam, fake: None) -> None:
    assert seams.differences([seam]) == []


@pytest.mark.parametrize(
    "seam,sentence",
    [
        (Seam("fake_sglang.renamed", "override", ("a",)), "fake_sglang.renamed is not there"),
        (Seam("fake_sglang.Derived.renamed", "call"), "fake_sglang.Derived.renamed is not there"),
        (Seam("no_such_module.function", "call"), "no_such_module.function is not there"),
        (Seam("fake_sglang.function", "override", ("b", "a")), "takes (a, b), expected (b, a)"),
        (Seam("fake_sglang.function", "override", ("a",)), "takes (a, b), expected (a)"),
        (Seam("fake_sglang.function", "call", ("a", "b", "c")), "takes (a, b), expected (a, b, c)"),
        (Seam("fake_sglang.Derived.method", "override", ("self", "a", "b")), "takes (self, a, b, rest)"),
        (Seam("fake_sglang.constant", "call"), "fake_sglang.constant is not callable"),
        (Seam("fake_sglang.Derived", "read", fields=("own", "gone", "lost")), "Derived has no gone, lost"),
        (Seam("fake_sglang.builds", "read", fields=("gone",)), "fake_sglang.builds has no gone"),
    ],
    ids=lambda value: value.target if isinstance(value, Seam) else "",
)
def test_each_kind_of_difference_is_named(seam: Seam, sentence: str, fake: None) -> None:
    (difference,) = seams.differences([seam])
    assert sentence in difference


def test_a_module_that_fails_to_import_is_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_sglang.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    (difference,) = seams.differences([Seam("broken_sglang.function", "call")])
    assert "broken_sglang.function is not there" in difference and "no_such_dependency" in difference


def test_a_resolution_step_that_cannot_be_wrapped_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.arg_groups import resolution_hooks

    monkeypatch.setattr(resolution_hooks, "_OVERRIDABLE_HOOKS", frozenset({"handle_mamba_backend"}))
    (difference,) = seams.differences([])
    assert "handle_linear_attn_backend" in difference


def test_no_sglang_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise seams.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(seams.importlib.metadata, "version", missing)
    assert seams.sglang_version() is None


# -- hooks that SGLang did not apply ----------------------------------------------------------------------------------


class Rig:
    """A fake module with a hooked method and a hooked function, and an empty hook registry."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Worker:
            def run(self, x: int) -> int:
                return x

        def helper(x: int) -> int:
            return 10 * x

        def on_run(original: Callable[..., int], worker: Any, x: int) -> int:
            return original(worker, x) + 1

        def on_helper(original: Callable[..., int], x: int) -> int:
            return original(x) + 1

        self.module: Any = fakes.module(monkeypatch, "fake_sglang", Worker=Worker, helper=helper)
        self.registry = fakes.empty_registry(monkeypatch)
        self.hooks: dict[str, Callable[..., Any]] = {
            "fake_sglang.Worker.run": on_run,
            "fake_sglang.helper": on_helper,
        }

    def register(self, target: str, hook: Any, kind: str) -> None:
        from sglang.srt.plugins.hook_registry import HookType

        self.registry.register(target, hook, HookType(kind))

    def register_ours(self) -> None:
        for target, hook in self.hooks.items():
            self.register(target, hook, "around")

    def missing(self) -> list[str]:
        return seams.missing_hooks(self.hooks)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_hooks_are_live_once_applied(rig: Rig) -> None:
    assert rig.missing() == list(rig.hooks)
    rig.register_ours()
    assert rig.missing() == list(rig.hooks)
    rig.registry.apply_hooks()
    assert rig.missing() == []
    assert rig.module.Worker().run(1) == 2 and rig.module.helper(1) == 11


def test_a_hook_that_failed_to_apply_is_missing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang logs the failure and goes on."""
    rig.register_ours()
    apply = rig.registry._apply_target

    def failing(target: str, hooks: Any) -> None:
        if target == "fake_sglang.helper":
            raise RuntimeError("no")
        apply(target, hooks)

    monkeypatch.setattr(rig.registry, "_apply_target", failing)
    rig.registry.apply_hooks()
    assert rig.missing() == ["fake_sglang.helper"]


@pytest.mark.parametrize("kind", ["before", "after", "around", "replace"])
@pytest.mark.parametrize("first", [True, False], ids=["before-us", "after-us"])
def test_other_plugins_hooks_on_the_same_target_do_not_hide_ours(rig: Rig, kind: str, first: bool) -> None:
    others = {
        "before": lambda worker, x: None,
        "after": lambda result, worker, x: None,
        "around": lambda original, worker, x: original(worker, x),
        "replace": lambda worker, x: x,
    }
    if not first:
        rig.register_ours()
    rig.register("fake_sglang.Worker.run", others[kind], kind)
    if first:
        rig.register_ours()
    rig.registry.apply_hooks()
    assert rig.missing() == []
    assert rig.module.Worker().run(1) == 2


def test_a_replaced_class_that_the_registry_knows_gets_our_hook(rig: Rig) -> None:
    class Other:
        def run(self, x: int) -> int:
            return 5 * x

    rig.register_ours()
    rig.register("fake_sglang.Worker", Other, "replace")
    rig.registry.apply_hooks()
    assert rig.missing() == []
    assert rig.module.Worker().run(1) == 6


def test_a_class_or_function_replaced_afterwards_is_missing(rig: Rig) -> None:
    rig.register_ours()
    rig.registry.apply_hooks()
    hooked = rig.module.helper

    class Other:
        def run(self, x: int) -> int:
            return x

    del rig.module.helper
    assert rig.missing() == ["fake_sglang.helper"]
    rig.module.Worker = Other
    rig.module.helper = lambda x: x
    assert rig.missing() == list(rig.hooks)

    @functools.wraps(hooked)  # says that it wraps ours, and does not call it
    def pretender(x: int) -> int:
        return x

    rig.module.helper = pretender
    assert "fake_sglang.helper" in rig.missing()


def test_replaced_through_another_name_is_missing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A re-export is a target of its own for the registry: a REPLACE of it takes our method along."""
    fakes.module(monkeypatch, "z_reexport", Worker=rig.module.Worker)
    rig.register_ours()
    rig.register("z_reexport.Worker.run", lambda worker, x: x, "replace")
    rig.registry.apply_hooks()
    assert rig.module.Worker().run(1) == 1  # ours does not run any more
    assert rig.missing() == ["fake_sglang.Worker.run"]


def test_wrapped_afterwards_by_a_wrapper_that_calls_ours_is_live(rig: Rig) -> None:
    rig.register_ours()
    rig.registry.apply_hooks()
    hooked = rig.module.helper

    @functools.wraps(hooked)
    def timed(x: int) -> int:
        return hooked(x)

    rig.module.helper = timed
    assert rig.missing() == []
    rig.module.helper = functools.partial(hooked)
    assert rig.missing() == []

    class Timer:
        """A wrapper that is an object, as some tracing libraries make them."""

        def __init__(self, fn: Callable[..., int]) -> None:
            functools.update_wrapper(self, fn)

        def __call__(self, x: int) -> int:
            return self.__wrapped__(x)  # type: ignore[attr-defined]

    rig.module.helper = Timer(hooked)
    assert rig.missing() == []


def test_empty_cells_are_no_trouble(rig: Rig) -> None:
    def outer() -> Callable[..., Any]:
        def inner(x: int) -> Any:
            return later

        if rig is None:  # never: the cell stays empty
            later = 1
        return inner

    rig.module.helper = outer()
    assert "fake_sglang.helper" in rig.missing()
