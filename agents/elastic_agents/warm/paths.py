"""What a script's statements do to ``sys.path``, as far as their source tells; nothing of it is run."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

__all__ = ["Names", "PathChange", "changes_of", "run_at_once"]

Value = str | int | Path
"""What an expression may be worth; an index of ``parents`` is a number."""

FUNCTIONS: dict[str, Callable[..., Value]] = {
    "os.path.abspath": os.path.abspath,
    "os.path.dirname": os.path.dirname,
    "os.path.expanduser": os.path.expanduser,
    "os.path.join": os.path.join,
    "os.path.normpath": os.path.normpath,
    "os.path.realpath": os.path.realpath,
    "os.fspath": os.fspath,
    "os.getcwd": os.getcwd,
    "Path": Path,
    "Path.cwd": Path.cwd,
    "pathlib.Path": Path,
    "pathlib.Path.cwd": Path.cwd,
    "str": str,
}
METHODS = ("absolute", "as_posix", "expanduser", "joinpath", "resolve")
"""Of a path."""

CONSTANTS = {"os.pardir": os.pardir, "os.curdir": os.curdir, "os.sep": os.sep, "os.path.sep": os.sep}


class PathChange:
    """What a statement does to ``sys.path``, or to what decides of imports otherwise.

    Attributes:
        known: whether it only adds directories, and those before others are known.
        first: directories that later imports may look at before others.
        last: the known ones of those behind all others: nothing that was found before is hidden by them.
    """

    def __init__(self) -> None:
        self.known = True
        self.first: list[str] = []
        self.last: list[str] = []

    def insert(self, value: Value | None) -> None:
        self.known &= value is not None
        self.first += _directory(value)

    def append(self, values: Iterable[Value | None]) -> None:
        for value in values:
            self.last += _directory(value)


class Names:
    """What is known of the values of a file's names.

    Args:
        file: its full path.
    """

    def __init__(self, file: str) -> None:
        self._values: dict[str, Value] = {"__file__": file}

    def learn(self, statement: ast.AST) -> None:
        """Take note of an assignment; all that a compound statement assigns is unknown from then on."""
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=expression):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as expression):
                pass
            case _:
                for node in run_at_once(statement):
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
                        self._values.pop(node.id, None)
                return
        value = self.value(expression)
        self._values.pop(name, None)
        if value is not None:
            self._values[name] = value

    def value(self, node: ast.expr) -> Value | None:
        """Return what an expression is worth, if it is about paths and all in it is known."""
        try:
            return self._value(node)
        except (TypeError, ValueError, OSError, RuntimeError, IndexError, AttributeError):
            return None  # whatever is wrong with it, the script itself will tell

    def _value(self, node: ast.expr) -> Value | None:
        match node:
            case ast.Constant(value=str() | int() as value):
                return value
            case ast.Name(id=name):
                return self._values.get(name)
            case ast.BinOp(left=left, op=ast.Add() | ast.Div() as operator, right=right):
                return _combined(self._value(left), operator, self._value(right))
            case ast.Attribute(value=target, attr="parent"):
                path = self._value(target)
                return path.parent if isinstance(path, Path) else None
            case ast.Attribute():
                return CONSTANTS.get(_dotted(node))
            case ast.Subscript(value=ast.Attribute(value=target, attr="parents"), slice=index):
                path, number = self._value(target), self._value(index)
                return path.parents[number] if isinstance(path, Path) and isinstance(number, int) else None
            case ast.Call(func=function, args=args, keywords=[]):
                return self._called(function, args)
        return None

    def _called(self, function: ast.expr, args: list[ast.expr]) -> Value | None:
        values = [value for value in map(self._value, args) if value is not None]
        if len(values) < len(args):
            return None
        if (known := FUNCTIONS.get(_dotted(function))) is not None:
            return known(*values)
        if isinstance(function, ast.Attribute) and function.attr in METHODS:
            path = self._value(function.value)
            if isinstance(path, Path):
                result: Value = getattr(path, function.attr)(*values)
                return result
        return None


def changes_of(statement: ast.AST, names: Names) -> PathChange:
    """Return what a statement of a file's top level does to the path."""
    change = PathChange()
    added: set[ast.AST] = set()
    for node in run_at_once(statement):
        match node:
            case ast.AugAssign(target=target, op=ast.Add(), value=value) if _decides(target) == "path":
                added.add(target)
                change.append(map(names.value, _items(value)))
            case ast.Call(func=ast.Attribute(value=target, attr="append"), args=[one]) if _decides(target) == "path":
                change.append([names.value(one)])
            case ast.Call(func=ast.Attribute(value=target, attr="extend"), args=[some]) if _decides(target) == "path":
                change.append(map(names.value, _items(some)))
            case ast.Call(func=ast.Attribute(value=target, attr="insert"), args=[_, one]) if _decides(target) == "path":
                change.insert(names.value(one))
            case _:
                change.known &= node in added or not _is_change(node)
    return change


def _is_change(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(ctx=ast.Store() | ast.Del()):
            return bool(_decides(node))
        case ast.Subscript(value=target, ctx=ast.Store() | ast.Del()):
            return bool(_decides(target))
        case ast.Call(func=ast.Attribute(attr="addsitedir") | ast.Name(id="addsitedir")):
            return True
        case ast.Call(func=ast.Attribute(value=target, attr=method)):
            return bool(_decides(target)) and method not in ("get", "copy", "index", "count", "keys", "items")
    return False


def _decides(node: ast.expr) -> str:
    """The attribute of ``sys`` that an expression is, if imports depend on it."""
    match node:
        case ast.Attribute(value=ast.Name(id="sys"), attr="path" | "modules" | "meta_path" | "path_hooks" as name):
            return name
    return ""


def _items(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.List | ast.Tuple) else []


def _directory(value: Value | None) -> list[str]:
    """Where imports look for what was put into the path: nowhere if it is no string."""
    return [os.path.abspath(value)] if isinstance(value, str) else []


def _combined(left: Value | None, operator: ast.operator, right: Value | None) -> Value | None:
    if isinstance(left, str) and isinstance(right, str) and isinstance(operator, ast.Add):
        return left + right
    if isinstance(left, Path) and isinstance(right, str | Path) and isinstance(operator, ast.Div):
        return left / right
    return None


def _dotted(node: ast.expr) -> str:
    """A name with its dots; empty if it is something else."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name) if before := _dotted(value):
            return f"{before}.{name}"
    return ""


def run_at_once(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a statement's parts without the bodies of functions, which are for later."""
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from run_at_once(child)
