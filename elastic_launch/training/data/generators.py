"""Finds random generators in the script's data and model that the library does not seed."""

from __future__ import annotations

import random
import sys
from collections import UserDict, deque
from collections.abc import Iterator
from types import BuiltinMethodType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from elastic_launch.errors import UsageError

DEPTH = 8
"""Maximum nesting depth of attributes and elements to search."""

OBJECTS = 20_000
"""Maximum number of objects to search, those nearest to the data first."""

ELEMENTS = 64
"""Maximum size of a collection to search: larger ones hold samples, not transforms."""

DRAWING = ("__getitem__", "__getitems__", "__call__", "forward", "indices", "__len__")
"""Methods whose code may use a generator that is global in its module."""


def own_generators(value: object, name: str) -> list[str]:
    """Return the generators that a dataset, a sampler or a function holds, as ``name.attribute (type)``.

    The search covers attributes, elements and closures, and the code of functions and of methods that return samples:
    its global names, and functions of the same module that it calls. Generators further away are not found.
    """
    found: dict[int, str] = {}
    seen: set[int] = set()
    kept: list[Any] = []  # keeps objects alive, so that no id in `seen` is reused
    queue: deque[tuple[str, Any, int]] = deque([(name, value, 0)])
    while queue and len(seen) < OBJECTS:
        path, item, depth = queue.popleft()
        if id(item) in seen:
            continue
        seen.add(id(item))
        kept.append(item)
        if kind := kind_of_generator(item):
            found.setdefault(id(item), f"{path} ({kind})")
        elif depth < DEPTH:
            queue.extend((path + part, inner, depth + 1) for part, inner in _parts(item))
    return sorted(found.values())


def refuse_generators(found: list[str]) -> None:
    """Refuse data of exact mode that have generators of their own, by these names."""
    if found:
        raise UsageError(
            f"exact=True: the data have a generator of their own, which is not restored: {', '.join(found)}.",
            "Draw from the global generators of torch, random or NumPy, which the loader seeds, or make one where "
            "you draw, in a local variable: torch.Generator().manual_seed(torch.initial_seed()).",
        )


def generators_of_modules(model: nn.Module) -> list[str]:
    """Return the generators that a model's modules hold, as ``module.attribute (type)``."""
    return [
        f"{path}.{name} ({kind})" if path else f"{name} ({kind})"
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if (kind := kind_of_generator(value))
    ]


def kind_of_generator(value: object) -> str:
    """Return the type's name if a value is a generator that the library does not seed, else ``""``."""
    if isinstance(value, torch.Generator):
        shared = any(value is generator for generator in (torch.default_generator, *torch.cuda.default_generators))
        return "" if shared else "torch.Generator"
    if isinstance(value, random.Random):
        shared = value is random.random.__self__  # type: ignore[attr-defined]
        return "" if shared or isinstance(value, random.SystemRandom) else "random.Random"
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return ""
    if isinstance(value, numpy.random.RandomState):
        return "" if value is numpy.random.mtrand._rand else "numpy.random.RandomState"
    return "numpy.random.Generator" if isinstance(value, numpy.random.Generator) else ""


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a value holds, each with the suffix to append to its path."""
    if value is None or isinstance(value, str | bytes | int | float | complex | Tensor | ModuleType | type):
        return
    if isinstance(value, dict | UserDict | MappingProxyType):  # others may read a file for each item
        if len(value) <= ELEMENTS:
            yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        if len(value) <= ELEMENTS:
            yield from ((f"[{number}]", item) for number, item in enumerate(value))
    elif isinstance(value, MethodType | BuiltinMethodType):
        yield ".__self__", value.__self__
        if isinstance(value, MethodType):
            yield "", value.__func__
    elif isinstance(value, FunctionType):
        yield from _of_function(value)
    else:
        yield from ((f".{name}", item) for name, item in attributes(value).items())
        for method in DRAWING:
            function = getattr(type(value), method, None)
            if isinstance(function, FunctionType):
                yield f".{method}", function


def attributes(value: Any) -> dict[str, Any]:
    """Return an object's attributes, including those in slots and the parts of a partial function."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, slot):
                found[slot] = getattr(value, slot)
    for part in ("func", "args", "keywords"):
        if hasattr(type(value), part) and callable(value):
            found[part] = getattr(value, part)
    return found


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f": {name}", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield ": defaults", function.__defaults__
    yield ": defaults", function.__kwdefaults__
    for name in names_in(function.__code__):
        item = function.__globals__.get(name)
        beside = isinstance(item, FunctionType) and item.__module__ == function.__module__
        bound = isinstance(item, MethodType | BuiltinMethodType) and kind_of_generator(item.__self__)
        if kind_of_generator(item) or bound or beside:
            yield f": {name}", item


def names_in(code: CodeType) -> set[str]:
    """Return the global names and attributes that code uses, including in functions within it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= names_in(constant)
    return names
