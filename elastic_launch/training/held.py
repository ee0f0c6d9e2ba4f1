"""Finds what a script's code keeps outside of the attributes of modules: in global variables, classes, other objects.

The search begins with modules, their hooks and those of their parameters, or with the code of a loop. It follows the
names that functions of the script use: global ones, those of closures, methods, and attributes of plain objects. What
is further away, or in libraries such as torch, is not found.
"""

from __future__ import annotations

import dis
import inspect
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import eq
from types import BuiltinMethodType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from elastic_launch.training.data.generators import attributes, kind_of_generator, names_in
from elastic_launch.training.live.rehearsal import is_array, unchanged

DEPTH = 6
"""Steps from where the search begins."""

PLACES = 5000
"""Places after which the search ends."""

ELEMENTS = 64
"""Items of a collection above which none is searched."""

LARGE = 2**20
"""Elements above which an array or a tensor is not copied."""

_FOREIGN = ("torch", "numpy", "elastic_launch", "logging", "threading", "builtins", "random")
"""Packages whose functions and objects are not searched."""

_OF_TORCH = frozenset(vars(nn.Module()))

Caller = tuple[int, CodeType]
"""A running function: which call, and its code. The frame itself would keep its variables alive."""

_NO_OBJECTS = (str, bytes, int, float, complex, Tensor, ModuleType, type(None))


@dataclass(frozen=True, slots=True)
class HoldingPlace:
    """Where something is kept.

    Attributes:
        name: for messages.
        read, write: return and replace it; of a random generator, its state.
        generator: what the library does not seed, if it is the state of a random generator.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    generator: Any = None

    def seed(self) -> int | None:
        """Return the generator's last seed, if it knows one."""
        return self.generator.initial_seed() if isinstance(self.generator, torch.Generator) else None


def of_modules(modules: Iterable[tuple[str, nn.Module]]) -> list[HoldingPlace]:
    """Return what the code of modules keeps: of their classes and hooks, and of objects that are their attributes."""
    search = _Search()
    for name, module in modules:
        for key, value in vars(module).items():
            if key in _OF_TORCH:
                continue
            search.add(f"{name}.{key}" if name else key, value, 1)
        search.kind(type(module), {"forward"}, 1)
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        hooks += [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
        for parameter in module.parameters(recurse=False):
            hooks += (parameter._backward_hooks or {}).values()
            hooks += (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
        for hook in hooks:
            search.add("a hook", hook, 1)
    return search.done()


def callers() -> list[Caller]:
    """Return the functions of the script that run now, the outermost first."""
    return [*map(_known, _frames())]


def _known(frame: FrameType) -> Caller:
    return id(frame), frame.f_code


def of_loop(before: list[Caller]) -> tuple[list[HoldingPlace], list[nn.Module]]:
    """Return the random generators and the modules that the code of the script uses which iterates over a step.

    It may iterate over a wrapper of the step, such as a generator, whose frame has called the library. So all frames
    are searched up to the one with the loop over the steps.

    Args:
        before: the callers when that loop asked for the step.
    """
    frames, search = _frames(), _Search()
    common = [*map(eq, before, map(_known, frames)), False].index(False)
    for frame in reversed(frames[common - 1 :]):  # only the innermost, if this is another thread than that loop's
        code, variables = frame.f_code, _variables(frame)
        for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars, *sorted(names_in(code))):
            search.add(name, variables.get(name, frame.f_globals.get(name)), 0)
    return [place for place in search.done() if place.generator is not None], [*search.modules]


def _frames() -> list[FrameType]:
    """Return the frames of the script, the outermost first."""
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not str(frame.f_globals.get("__name__")).startswith(("elastic_launch.", "contextlib")):
            found.append(frame)
        frame = frame.f_back
    return found[::-1]


_OURS = 3
"""References to the dict of a frame's variables: the frame's, that of the function that reads it, and the count's."""


def _variables(frame: FrameType) -> dict[str, Any]:
    """Return the local variables of a frame; none if the script could notice."""
    shared = sys.version_info < (3, 13) and bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
    if shared and _uses_locals(frame.f_code):
        return {}
    found = frame.f_locals
    copied = dict(found)
    if shared and sys.getrefcount(found) <= _OURS:  # else a debugger, for example, has it
        found.clear()  # the frame of a function would keep it, with what the variables have now, until it returns
    return copied


def _uses_locals(code: CodeType) -> bool:
    """Whether a function may have got the dict of its variables, which is written anew when the frame's are read."""
    if {"locals", "vars", "exec", "eval"}.isdisjoint(code.co_names):
        return False
    for this, then in pairwise(dis.get_instructions(code)):
        name = this.argval if this.opname == "LOAD_GLOBAL" else None  # model.eval() is another one
        without = then.opname in ("PRECALL", "CALL") and then.arg == 0  # vars(args) is of another object
        if name in ("exec", "eval") or (name in ("locals", "vars") and without):
            return True
    return False


@contextmanager
def kept(places: list[HoldingPlace]) -> Iterator[None]:
    """On exit, restore what is in these places, and in collections and tensors there."""
    before = [(place, place.read()) for place in places]
    small = [value for _, value in before if not _is_large(value)]
    try:
        with unchanged(*small):
            yield
    finally:
        for place, value in before:
            if place.generator is not None or place.read() is not value:
                place.write(value)


class _Search:
    def __init__(self) -> None:
        self._found: dict[tuple[int, str], HoldingPlace] = {}
        self._seen: dict[int, Any] = {}  # keeps objects alive, so that no number is used again
        self._queue: deque[tuple[str, Any, int]] = deque()
        self.modules: dict[nn.Module, None] = {}  # which are not searched
        self._names: set[str] = set()  # that the code uses, so far

    def done(self) -> list[HoldingPlace]:
        while self._queue and len(self._found) < PLACES:
            name, value, depth = self._queue.popleft()
            if depth <= DEPTH:
                self._visit(name, value, depth)
        return [*self._found.values()]

    def add(self, name: str, value: Any, depth: int) -> None:
        """Search a value."""
        if isinstance(value, nn.Module):
            self.modules[value] = None
        elif not isinstance(value, _NO_OBJECTS) and id(value) not in self._seen:
            self._seen[id(value)] = value
            self._queue.append((name, value, depth))

    def kind(self, kind: type, names: Iterable[str], depth: int) -> None:
        """Search a class: what it keeps itself, and the methods of these names."""
        for base in kind.__mro__:
            if _is_foreign(base.__module__):
                continue
            for key, value in list(vars(base).items()):
                inner = getattr(value, "__func__", value.fget if isinstance(value, property) else value)
                if isinstance(inner, FunctionType):
                    if key in names and id(inner) not in self._seen:
                        self.add(f"{kind.__name__}.{key}", inner, depth)
                        self.kind(kind, names_in(inner.__code__), depth)
                elif not key.startswith("__"):
                    name = f"{kind.__name__}.{key}"
                    # As the class has it: what getattr() returns of a descriptor must not take its place.
                    self._keep(base, key, name, partial(vars(base).get, key), partial(setattr, base, key))
                    self.add(name, value, depth)

    def _keep(self, owner: object, key: str, name: str, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        self._seen.setdefault(id(owner), owner)
        self._found.setdefault((id(owner), key), HoldingPlace(name, read, write))

    def _visit(self, name: str, value: Any, depth: int) -> None:
        if kind_of_generator(value):
            self._found[id(value), ""] = HoldingPlace(
                name, partial(_state, value), partial(_set_state, value), generator=value
            )
        elif isinstance(value, FunctionType):
            self._function(value, depth)
        elif isinstance(value, MethodType | BuiltinMethodType):
            self.add(name, getattr(value, "__func__", None), depth)
            self.add(name, value.__self__, depth)
        elif isinstance(value, partial):
            for part in (value.func, value.args, value.keywords):
                self.add(name, part, depth)
        elif isinstance(value, type):
            if not _is_foreign(value.__module__):
                self.kind(value, {"forward", "backward", "__call__"}, depth + 1)
        elif isinstance(value, Mapping | list | tuple | set | frozenset | deque):
            if type(value).__module__ in ("builtins", "collections") and len(value) <= ELEMENTS:
                items = value.items() if isinstance(value, Mapping) else enumerate(value)
                for key, item in items:
                    self.add(f"{name}[{key!r}]", item, depth + 1)
        elif not _is_foreign(type(value).__module__):
            for key, item in attributes(value).items():
                self._keep(value, key, f"{name}.{key}", partial(getattr, value, key, None), partial(_put, value, key))
                self.add(f"{name}.{key}", item, depth + 1)
            self.kind(type(value), self._names | {"__call__"}, depth + 1)

    def _function(self, function: FunctionType, depth: int) -> None:
        if _is_foreign(function.__module__):
            return
        called = function.__name__
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            if not (name == "__class__" and isinstance(content, type)):
                self._keep(
                    cell, "", f"{name} of {called}()", partial(_content, cell), partial(setattr, cell, "cell_contents")
                )
                self.add(f"{name} of {called}()", content, depth + 1)
        for part in (function.__defaults__ or (), (function.__kwdefaults__ or {}).values()):
            for item in part:
                self._keep(item, "default", f"a default of {called}()", partial(_same, item), _same)
                self.add(f"a default of {called}()", item, depth + 1)
        names, variables = names_in(function.__code__), function.__globals__
        self._names |= names
        for name in names & variables.keys():
            item = variables[name]
            if isinstance(item, FunctionType | type):
                if item.__module__ == function.__module__:
                    self.add(name, item, depth + 1)
            elif not isinstance(item, ModuleType):
                self._keep(variables, name, name, partial(variables.get, name), partial(variables.__setitem__, name))
                self.add(name, item, depth + 1)


def _same(value: Any) -> Any:
    return value


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _put(owner: object, key: str, value: Any) -> None:
    object.__setattr__(owner, key, value)


def _is_foreign(module: object) -> bool:
    return str(module).partition(".")[0] in _FOREIGN


def _is_large(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() > LARGE
    if is_array(value):
        return bool(value.size > LARGE)
    return isinstance(value, nn.Module) or (isinstance(value, Mapping | list | set | deque) and len(value) > ELEMENTS)


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    own = generator if hasattr(generator, "get_state") else generator.bit_generator
    return own.get_state() if own is generator else own.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
