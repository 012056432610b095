"""What the codemods are made of: find a place in a module by name and structure, and change it there.

No line of SGLang is kept here. An edit that does not find its place raises `NoPlace`, so a release that has moved on is
noticed instead of half patched.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import TypeVar

import libcst as cst
import libcst.matchers as m

Statements = Sequence[cst.BaseStatement]
Edit = Callable[[cst.Module], cst.Module]
Node = TypeVar("Node", bound=cst.CSTNode)


class NoPlace(LookupError):
    """The module does not have (exactly as often as expected) what an edit is about."""


def statements(source: str) -> list[cst.BaseStatement]:
    """Parsed statements, each with the comments above it."""
    # behind a first statement: comments at the top of a module would become its header
    return list(cst.parse_module("pass\n" + textwrap.dedent(source).strip("\n") + "\n").body[1:])


def expression(source: str) -> cst.BaseExpression:
    """A parsed expression."""
    return cst.parse_expression(source)


def in_definition(module: cst.Module, path: str, change: Callable[[Node], cst.CSTNode]) -> cst.Module:
    """Change the one class or function whose dotted path within the module is `path`.

    Raises:
        NoPlace: there is none, or more than one.
    """
    finder = _Definition(path, change)
    changed = module.visit(finder)
    _once(finder.found, path)
    return changed


class _Definition(cst.CSTTransformer):
    def __init__(self, path: str, change: Callable[..., cst.CSTNode]) -> None:
        self._wanted, self._change = path.split("."), change
        self._path: list[str] = []
        self.found = 0

    def _enter(self, node: cst.ClassDef | cst.FunctionDef) -> bool:
        self._path.append(node.name.value)
        return self._wanted[: len(self._path)] == self._path

    def _leave(self, node: cst.CSTNode) -> cst.CSTNode:
        here = self._path == self._wanted
        self._path.pop()
        if not here:
            return node
        self.found += 1
        return self._change(node)

    def visit_ClassDef(self, node: cst.ClassDef) -> bool:
        return self._enter(node)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        return self._enter(node)

    def leave_ClassDef(self, original_node: cst.ClassDef, updated_node: cst.ClassDef) -> cst.CSTNode:
        return self._leave(updated_node)

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.CSTNode:
        return self._leave(updated_node)


def replace(
    node: Node, pattern: m.BaseMatcherNode, change: Callable[..., cst.CSTNode], what: str, times: int = 1
) -> Node:
    """Change every node under `node` that matches `pattern`, which must be `times` of them.

    Raises:
        NoPlace: another number of matches; `what` names the place in the message.
    """
    found = len(m.findall(node, pattern))
    _once(found, what, times)
    return m.replace(node, pattern, lambda match, _: change(match))


def in_statements(node: Node, change: Callable[[Statements], Statements | None], what: str, times: int = 1) -> Node:
    """Change statement lists (bodies of functions, ifs, ...) under `node`: `change` gets each, and returns None for
    those it leaves alone.

    Raises:
        NoPlace: another number than `times` was changed.
    """
    walker = _Bodies(change)
    changed = node.visit(walker)
    _once(walker.found, what, times)
    return changed


class _Bodies(cst.CSTTransformer):
    def __init__(self, change: Callable[[Statements], Statements | None]) -> None:
        self._change = change
        self.found = 0

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        body = self._change(updated_node.body)
        if body is None:
            return updated_node
        self.found += 1
        return updated_node.with_changes(body=body)


def add_method(module: cst.Module, class_name: str, source: str) -> cst.Module:
    """Append a method to a class, unless another patch brought it already."""
    (method,) = statements(source)

    def append(node: cst.ClassDef) -> cst.ClassDef:
        names = {s.name.value for s in node.body.body if isinstance(s, cst.FunctionDef)}
        if method.name.value in names:
            return node
        spaced = method.with_changes(leading_lines=[cst.EmptyLine(indent=False), *method.leading_lines])
        return node.with_changes(body=node.body.with_changes(body=[*node.body.body, spaced]))

    return in_definition(module, class_name, append)


def without_unused(module: cst.Module, name: str) -> cst.Module:
    """Drop the import of `name` where nothing else mentions it any more."""
    if len(m.findall(module, m.Name(name))) > 1:
        return module

    class Imports(cst.CSTTransformer):
        def leave_ImportFrom(self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom) -> cst.ImportFrom:
            if isinstance(updated_node.names, cst.ImportStar):
                return updated_node
            kept = [alias for alias in updated_node.names if alias.evaluated_name != name]
            return updated_node.with_changes(names=kept) if kept else cst.RemoveFromParent()

    return module.visit(Imports())


def index_of(body: Statements, pattern: m.BaseMatcherNode) -> int | None:
    """Position of the first statement that matches, or None."""
    return next((i for i, statement in enumerate(body) if m.matches(statement, pattern)), None)


def assigns(name: str) -> m.BaseMatcherNode:
    """Matches the statement `name = ...`."""
    target = m.AssignTarget(target=m.Name(name))
    return m.SimpleStatementLine(body=[m.Assign(targets=[target])])


def mentions(name: str) -> m.BaseMatcherNode:
    """Matches an if whose condition contains the name or attribute `name`."""
    return m.If(test=m.MatchIfTrue(lambda test: bool(m.findall(test, m.Name(name)))))


def _once(found: int, what: str, times: int = 1) -> None:
    if found != times:
        raise NoPlace(f"{what}: found {found} times, expected {times}")
