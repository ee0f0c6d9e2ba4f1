"""What a file's statements do to ``sys.path``, as far as its source tells; nothing of it is run.

What is not understood counts as unknown: a wrong guess would have a forked worker import something else than
``python script.py`` does.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Names", "Process", "changes_of", "run_at_once"]

Value = str | int | Path
"""What an expression may be worth; an index of ``parents`` is a number."""

FUNCTIONS: dict[str, Callable[..., Value]] = {
    "os.fspath": os.fspath,
    "os.getcwd": os.getcwd,
    "os.path.abspath": os.path.abspath,
    "os.path.dirname": os.path.dirname,
    "os.path.expanduser": os.path.expanduser,
    "os.path.join": os.path.join,
    "os.path.normpath": os.path.normpath,
    "os.path.realpath": os.path.realpath,
    "pathlib.Path": Path,
    "pathlib.Path.cwd": Path.cwd,
    "str": str,
}
METHODS = ("absolute", "as_posix", "expanduser", "joinpath", "resolve")
"""Of a path."""

CONSTANTS = {"os.pardir": os.pardir, "os.curdir": os.curdir, "os.sep": os.sep, "os.path.sep": os.sep}

DECISIVE = ("sys.path", "sys.modules", "sys.meta_path", "sys.path_hooks")
"""What decides where imports look, and what they find."""

READS = ("get", "copy", "index", "count", "keys", "items", "values")
"""Methods that change nothing."""

ADDS = ("append", "extend", "insert")

LOOKS = ("any", "enumerate", "isinstance", "len", "list", "print", "repr", "set", "sorted", "str", "tuple")
"""Functions that change nothing of what they are given."""

MOVES = ("os.chdir", "os.fchdir")


@dataclass(slots=True)
class Process:
    """What all files of a script have in common.

    Attributes:
        changers: names of functions that change the path, or the working directory, when they are called.
        moved: whether the working directory may be another one by now.
    """

    changers: set[str] = field(default_factory=set)
    moved: bool = False


class Names:
    """What is known of a file's names.

    Args:
        file: its full path.
    """

    def __init__(self, file: str, process: Process) -> None:
        self._values: dict[str, Value] = {"__file__": file}
        self._imported: dict[str, str] = {}  # what names stand for
        self._bound: set[str] = set()  # otherwise
        self._elsewhere: set[str] = set()  # functions bind them, too
        self._process = process

    def imports(self, statement: ast.Import | ast.ImportFrom) -> None:
        """Take note of the names that an import binds."""
        module = "" if isinstance(statement, ast.Import) or statement.level else statement.module or "."
        for alias in statement.names:
            name = alias.asname or alias.name.partition(".")[0]
            if name == "*":
                self._values = {"__file__": self._values["__file__"]} if "__file__" in self._values else {}
                continue
            self._values.pop(name, None)
            self._bound.discard(name)
            if isinstance(statement, ast.ImportFrom):
                self._imported[name] = f"{module}.{alias.name}" if module else ""
            else:
                self._imported[name] = alias.name if alias.asname else name

    def assigns(self, statement: ast.AST) -> None:
        """Take note of an assignment; whatever another statement binds is unknown from then on."""
        name, value = "", None
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=expression):
                value = self.value(expression)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as expression):
                value = self.value(expression)
        if isinstance(statement, ast.AugAssign) and self.decides(statement.target):
            return  # path += [..] is still the path
        self.forget(statement)
        if value is not None and name not in self._elsewhere:
            self._values[name] = value

    def forget(self, statement: ast.AST) -> None:
        """Know nothing any more of what a statement binds."""
        for part in run_at_once(statement):
            for name in _binds(part):
                self._bound.add(name)
                self._values.pop(name, None)
            match part:
                case ast.Import() | ast.ImportFrom():
                    self.imports(part)
                case ast.Call() if self.moves(part):
                    self._process.moved = True
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    self._function(part)

    def _function(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if _changes_when_called(function, self):
            self._process.changers.add(function.name)
        for part in ast.walk(function):
            if isinstance(part, ast.Global):
                self._elsewhere.update(part.names)
                for name in part.names:
                    self._values.pop(name, None)

    def changes_when_called(self, function: ast.expr) -> bool:
        """Whether a function changes the path, by the name that it has here or where it was made."""
        return any(
            name.rpartition(".")[2] in self._process.changers for name in (self.canonical(function), _dotted(function))
        )

    def moves(self, call: ast.Call) -> bool:
        """Whether a call changes the working directory."""
        return self.canonical(call.func) in MOVES

    def decides(self, node: ast.expr) -> str:
        """What an expression is, if it decides of imports; by its looks, too, as names may be bound in many ways."""
        for name in (self.canonical(node), _dotted(node)):
            if name in DECISIVE:
                return name
        return ""

    def canonical(self, node: ast.expr) -> str:
        """A name with its dots as its module has it; empty if it is something else, or something of the file's own."""
        first, dot, rest = _dotted(node).partition(".")
        if first in self._bound:
            return ""
        return self._imported.get(first, first) + dot + rest

    def value(self, node: ast.expr) -> Value | None:
        """Return what an expression is worth, if it is about paths and all in it is known."""
        try:
            return self._value(node)
        except (TypeError, ValueError, OSError, RuntimeError, IndexError, AttributeError):
            return None  # whatever is wrong with it, the script itself will tell

    def directory(self, node: ast.expr) -> tuple[bool, str]:
        """Return whether it is known what an entry of the path leads to, and the directory; empty if to nothing."""
        value = self.value(node)
        if isinstance(value, Path):
            return True, ""  # imports look at strings only
        if not isinstance(value, str) or not self._settled(value):
            return False, ""
        # What is not there yet may be by then, and an archive is not looked into.
        return os.path.isdir(value), os.path.abspath(value)

    def _settled(self, value: Value | None) -> bool:
        """Whether a path means the same wherever the process is."""
        return not self._process.moved or (isinstance(value, str | Path) and os.path.isabs(value))

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
                return CONSTANTS.get(self.canonical(node))
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
        name = self.canonical(function)
        if (known := FUNCTIONS.get(name)) is not None:
            asks = name.rpartition(".")[2] in ("getcwd", "cwd", "abspath", "realpath")
            return known(*values) if not asks or self._settled(values[0] if values else None) else None
        if isinstance(function, ast.Attribute) and function.attr in METHODS:
            path = self._value(function.value)
            if isinstance(path, Path) and (function.attr not in ("absolute", "resolve") or self._settled(path)):
                result: Value = getattr(path, function.attr)(*values)
                return result
        return None


def changes_of(statement: ast.AST, names: Names) -> tuple[bool, list[str], list[str]]:
    """Find what a statement of a file's top level does to the path.

    Returns:
        whether it only adds directories, all of them known; those that later imports may look at before others; and
        those behind all others, by which nothing is hidden that was found before.
    """
    known = True
    places: dict[str, list[str]] = {"insert": [], "append": []}
    changes = _Changes(names)
    for node in run_at_once(statement):
        entries: list[ast.expr] | None = None
        place = "append"
        match node:
            case ast.AugAssign(target=target, op=ast.Add(), value=value) if names.decides(target) == "sys.path":
                changes.excuse(target)
                entries = _items(value)
                known &= entries is not None
            case ast.Call(func=ast.Attribute(value=target, attr=method), args=[*_, one], keywords=[]) if (
                method in ADDS and names.decides(target) == "sys.path"
            ):
                changes.excuse(target)
                entries = _items(one) if method == "extend" else [one]
                known &= entries is not None
                place = "insert" if method == "insert" else "append"
            case ast.Call(func=function) if names.changes_when_called(function):
                known = False
            case _:
                known &= not changes.by(node)
        for entry in entries or ():
            clear, directory = names.directory(entry)
            known &= clear
            places[place] += [directory] if clear and directory else []
    return known, places["insert"], places["append"]


def _binds(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case (
            ast.ExceptHandler(name=str() as name) | ast.MatchAs(name=str() as name) | ast.MatchStar(name=str() as name)
        ):
            yield name
        case ast.MatchMapping(rest=str() as name):
            yield name


def _changes_when_called(function: ast.AST, names: Names) -> bool:
    changes = _Changes(names)
    return any(
        changes.by(part) or (isinstance(part, ast.Call) and (names.changes_when_called(part.func) or names.moves(part)))
        for part in ast.walk(function)
    )


class _Changes:
    """Finds what may change where imports look, among parts of statements that it is shown from outside in."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._fine: set[ast.AST] = set()

    def excuse(self, node: ast.AST) -> None:
        """Take it that this one was understood."""
        self._fine.add(node)

    def by(self, node: ast.AST) -> bool:
        """Whether a part does, or hands what decides to somebody who may."""
        self._fine.update(_looked_at(node, self._names))
        match node:
            case ast.Subscript(value=target, ctx=ast.Store() | ast.Del()):
                return bool(self._names.decides(target))
            case ast.Call(func=function) if _dotted(function).rpartition(".")[2] == "addsitedir":
                return True
            case ast.Name() | ast.Attribute() if node not in self._fine:
                return bool(self._names.decides(node))
        return False


def _looked_at(node: ast.AST, names: Names) -> Iterator[ast.AST]:
    """Yield the parts of a part that it does nothing to but to look at them."""
    match node:
        case ast.Subscript(value=target, ctx=ast.Load()) | ast.Starred(value=target):
            yield target
        case ast.FormattedValue(value=target) | ast.UnaryOp(operand=target):
            yield target
        case ast.BinOp(left=left, right=right):
            yield from (left, right)  # and makes something new of them
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield test
        case ast.Compare(left=left, comparators=others):
            yield from (left, *others)
        case ast.For(iter=items) | ast.AsyncFor(iter=items) | ast.comprehension(iter=items):
            yield items
        case ast.Call(func=ast.Attribute(value=target, attr=method), args=args):
            if method in READS:
                yield target
            elif method == "join":
                yield from args
        case ast.Call(func=function, args=args) if names.canonical(function) in LOOKS:
            yield from args


def _items(node: ast.expr) -> list[ast.expr] | None:
    return node.elts if isinstance(node, ast.List | ast.Tuple) else None


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
    """Yield a statement's parts, from outside in, without the bodies of functions, which are for later."""
    ahead = [node]
    while ahead:
        part = ahead.pop()
        yield part
        if not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            ahead += reversed(list(ast.iter_child_nodes(part)))
