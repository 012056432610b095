"""Small stand-in modules for tests of the hook table and of what is registered."""

from __future__ import annotations

import sys
from collections import defaultdict
from types import ModuleType
from typing import Any

import pytest


def module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> ModuleType:
    """A module that can be imported by name until the end of the test."""
    fake = ModuleType(name)
    vars(fake).update(members)
    monkeypatch.setitem(sys.modules, name, fake)
    return fake


def empty_registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's hook registry and resolution hooks as in a process where no plugin has run yet."""
    from sglang.srt.arg_groups import resolution_hooks
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(resolution_hooks, "_HOOKS", {})
    return HookRegistry
