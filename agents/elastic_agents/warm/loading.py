"""Imports ahead what a script will import, and finds out which of it must not be."""

from __future__ import annotations

import gc
import importlib
import importlib.abc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from elastic_agents.warm.imports import Import
from elastic_agents.warm.spying import Watch

__all__ = ["OURS", "TORCH", "Loaded", "hidden_by", "load", "modules_in"]

TORCH = (
    "torch._dynamo",  # the first use of an optimizer imports it
    "torch.distributed.algorithms.join",
    "torch.distributed.tensor",
    "torch.nn.parallel",
)
"""What a training script comes to import sooner or later once it has imported torch."""

OURS = (
    "elastic_launch.training.trainer",
    "elastic_launch.training.session",
    "elastic_launch.training.checkpoint",
    "elastic_launch.training.loader",
    "elastic_launch.training.dist",
)
"""What ``elastic_launch`` loads on first use."""

NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


@dataclass(slots=True)
class Loaded:
    """What came of it.

    Attributes:
        faults: modules that may not be imported ahead, with what their imports do.
        read: variables that imports asked for.
        changed: variables that imports have set, or removed (None).
        missed: top-level modules that somebody asked for, and nobody found.
    """

    faults: dict[str, str] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    changed: dict[str, str | None] = field(default_factory=dict)
    missed: set[str] = field(default_factory=set)


def load(wanted: Sequence[Import], asked: set[str], without: set[str], tell: Callable[[str], None]) -> Loaded:
    """Import what is wanted and not left out, and what comes with torch and with this project's library.

    Args:
        asked: modules that the user insists on.
        tell: called with each module's name before it is imported.
    """
    before = dict(os.environ)
    os.environ[NVML] = "1"  # else a question for devices would spoil CUDA for forks
    watch, missed = Watch(), _Missed()
    sys.meta_path.append(missed)
    loaded = Loaded(missed=missed.names)
    gc.disable()  # a third of the time for nothing: what is imported stays
    try:
        for item in _in_order(wanted, without):
            tell(item.module)
            watch.begin()
            failure = _import(item)
            found = watch.faults()
            name = item.top if item.module in TORCH + OURS else item.module
            if failure:
                loaded.faults[name] = failure
            elif found and item.module not in asked:
                loaded.faults[item.top] = "; ".join(found)
        # What was asked for by name is not what a library would find.
        missed.names -= {item.top for item in wanted}
    finally:
        gc.enable()
        watch.close()
        sys.meta_path.remove(missed)
        if NVML in before:
            os.environ[NVML] = before[NVML]
        else:
            del os.environ[NVML]
    loaded.read = watch.read
    names = {name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)}
    loaded.changed = {name: os.environ.get(name) for name in names}
    gc.collect()
    gc.freeze()  # a collection in a worker would touch, and so copy, all pages
    return loaded


def modules_in(directory: str) -> dict[str, str]:
    """Return the modules that a directory in the path holds: their names, and the files or packages they are."""
    try:
        entries = os.listdir(directory) if directory else []
    except OSError:
        return {}  # to imports, too, it is empty then
    return {
        name.partition(".")[0]: os.path.join(directory, name)
        for name in entries
        if name.endswith((".py", ".so")) or os.path.isfile(os.path.join(directory, name, "__init__.py"))
    }


def hidden_by(directory: str) -> set[str]:
    """Return the loaded modules that a script with files of that name in its path would not have got.

    Libraries import each other by name, and the directory comes first in the script's path, not in this process'.
    """
    own = os.path.realpath(directory) + os.sep
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in modules_in(directory)}
    return {name for name, file in files.items() if file and not os.path.realpath(file).startswith(own)}


class _Missed(importlib.abc.MetaPathFinder):
    """Finds nothing, and notes what nobody else has found."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if "." not in fullname:
            self.names.add(fullname)


def _in_order(wanted: Sequence[Import], without: set[str]) -> Iterator[Import]:
    yield from wanted
    ours = [Import(name) for name in OURS] if "elastic_launch" in sys.modules and "torch" not in without else []
    yield from (item for item in ours if _kept(item, without))
    if "torch" in sys.modules:
        yield from (item for item in map(Import, TORCH) if _kept(item, without))


def _kept(item: Import, without: set[str]) -> bool:
    return item.top not in without and item.module not in without


def _import(item: Import) -> str:
    """Import as the statement would; return what went wrong, unless it only is not there."""
    name = item.module
    try:
        module = importlib.import_module(name)
        for part in item.names:
            if part != "*" and not hasattr(module, part):
                name = f"{item.module}.{part}"
                importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A name that another version has; the script, in a try, knows what to do.
        return "" if error.name and f"{name}.".startswith(f"{error.name}.") else f"raises {type(error).__name__}"
    except BaseException as error:  # noqa: BLE001 - a module's code may raise anything, SystemExit too
        return f"raises {type(error).__name__}"
    return ""
