"""What to import ahead for a script: the plan, the imports themselves, and which of them must not be done ahead."""

from __future__ import annotations

import gc
import importlib
import importlib.abc
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from elastic_agents.warm._import_watch import Watch, watched
from elastic_agents.warm._script_imports import Import, Reading, entry_point, read

__all__ = ["OURS", "REMEDY", "TORCH", "Loaded", "Loading", "Plan", "plan"]

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
    "elastic_launch.training.checkpoints.checkpoint",
    "elastic_launch.training.data.loader",
    "elastic_launch.training.dist",
)
"""What ``elastic_launch`` loads on first use."""

NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"

HARMLESS = frozenset({"numpy", "elastic_launch"})
"""What a script may import before torch without a difference: torch imports the one, and the other is this project."""

REMEDY = "--preload names modules to load ahead all the same"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to import.

    Attributes:
        first: what stands first on the script's ``sys.path``.
        reading: what the script says.
        asked: modules that the user adds, and insists on.
        without: modules that are left out.
    """

    first: str
    reading: Reading
    asked: tuple[str, ...]
    without: frozenset[str]

    @property
    def wanted(self) -> list[Import]:
        """Imports in the order of the script, then those that the user adds."""
        found = [item for item in self.reading.imports if not self.without & {item.top, item.module}]
        return [*found, *map(Import, self.asked)]

    @property
    def torch_comes_first(self) -> bool:
        """Whether torch may be imported before all else, as far as the script can tell."""
        return next((item.top for item in self.wanted if item.top not in HARMLESS), "") == "torch"

    def completes(self, package: str) -> bool:
        """Whether what comes with a package may be imported, too: the script's own imports of it find the same."""
        return not self.reading.stopped or package in {item.top for item in map(Import, self.asked)}

    @property
    def set_before(self) -> set[str]:
        """Variables that the script sets before an import; the name is empty for an unknown one."""
        return self.reading.set_before([*map(Import, self.asked)])

    def doubt(self, loaded: Loaded) -> str:
        """Return why what was imported may not be what the script would get; "" if it is."""
        if names := self.set_before & loaded.read:
            return f"the script sets {', '.join(sorted(names))}, which its imports read"
        if names := _meant_by_libraries(self.first, loaded.missed):
            return f"{', '.join(sorted(names))} beside the script may be what libraries import by that name"
        return ""


def plan(settings: Mapping[str, Any], search: list[str]) -> Plan | str:
    """Read the script of a server's settings.

    Args:
        search: a worker's ``sys.path``, without what stands first for its script.

    Returns:
        why workers cannot be forked, if so.
    """
    try:
        return _plan(settings, search)
    except Exception as error:  # noqa: BLE001 - whatever a script has in store, nobody else is to fail of it
        return f"the script cannot be read ahead ({type(error).__name__}: {error})"


def _plan(settings: Mapping[str, Any], search: list[str]) -> Plan | str:
    if reason := watched():
        return reason
    path, first, module = entry_point(settings["argv"][2:])
    if not path:
        return "the script is of a kind that only a process of its own can run"
    reading = read(path, first, search, module)
    if reading.decisive:
        return f"the script sets {', '.join(reading.decisive)}, which matters before its imports"
    found = Plan(first, reading, tuple(settings["preload"]), frozenset(settings["without"]))
    if "" in found.set_before:
        return "the script sets variables whose names are not literals before its imports"
    if found.wanted:
        return found
    if reading.stopped:
        return f"the script changes where imports look ({reading.stopped}) before it imports what takes long; {REMEDY}"
    return "the script imports nothing that takes long"


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


class Loading:
    """Imports, watched, between its making and its end: that by :meth:`finish` or by :meth:`abandon`.

    Args:
        asked: modules that the user insists on.
        without: modules that are left out.
    """

    def __init__(self, asked: Collection[str], without: Set[str]) -> None:
        self._asked, self._without = asked, without
        self._before = dict(os.environ)
        os.environ[NVML] = "1"  # else a question for devices would spoil CUDA for forks
        self._watch, self._missed = Watch(), _Missed()
        sys.meta_path.append(self._missed)
        self._loaded = Loaded(missed=self._missed.names)
        gc.disable()  # a third of the time for nothing: what is imported stays

        self.error: BaseException | None = None
        """What the last import has raised."""

    @property
    def faults(self) -> dict[str, str]:
        """Modules so far that may not be imported ahead, with what their imports do."""
        return self._loaded.faults

    def add(self, item: Import, meanwhile: AbstractContextManager[object] | None = None) -> None:
        """Import one module.

        Args:
            meanwhile: entered for the import itself: what it opens and closes again is not the module's.
        """
        self._watch.begin()
        with meanwhile or nullcontext():
            self.error = _import(item)
        found = self._watch.faults()
        if self.error is not None:
            name = item.top if item.module not in TORCH + OURS else item.module
            self.faults[name] = f"raises {type(self.error).__name__}"
        elif found and item.module not in self._asked:
            self.faults[item.top] = "; ".join(found)

    def finish(self, wanted: Sequence[Import], completes: Callable[[str], bool], tell: Callable[[str], None]) -> Loaded:
        """Import what is wanted, and what comes with torch and with this project's library, and return what came of it.

        Args:
            completes: whether what comes with a package may be imported.
            tell: called with each module's name before it is imported.
        """
        try:
            for item in wanted:
                tell(item.module)
                self.add(item)
            for package, companions in (("elastic_launch", OURS), ("torch", TORCH)):
                if package in sys.modules and completes(package):
                    for item in map(Import, companions):
                        if not {"torch", package, item.module} & self._without:
                            tell(item.module)
                            self.add(item)
            # What was asked for by name is not what a library would find.
            self._missed.names -= {item.top for item in wanted}
        finally:
            self.abandon()
        before = self._before
        names = {name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)}
        self._loaded.read = self._watch.read
        self._loaded.changed = {name: os.environ.get(name) for name in names}
        # A collection in a worker would touch, and so copy, all pages; one here finds next to nothing in 0.2 s.
        gc.freeze()
        return self._loaded

    def abandon(self) -> None:
        """Watch no longer."""
        gc.enable()
        self._watch.close()
        sys.meta_path.remove(self._missed)
        if NVML in self._before:
            os.environ[NVML] = self._before[NVML]
        else:
            del os.environ[NVML]


def _meant_by_libraries(directory: str, missed: Collection[str]) -> set[str]:
    """Return the names by which loaded libraries would have got modules of the script's directory.

    It comes first in the script's path, not in this process'. Libraries import each other by name.

    Args:
        missed: names that a library has asked for, and nobody has found: a directory without ``__init__.py`` has them,
            too.
    """
    own = os.path.realpath(directory) + os.sep
    try:
        entries = os.listdir(directory) if directory else []
    except OSError:
        return set()  # imports, too, find nothing there
    found = set()
    for entry in entries:
        name, path = entry.partition(".")[0], os.path.join(directory, entry)
        is_module = entry.endswith((".py", ".pyc", ".so")) or os.path.isfile(os.path.join(path, "__init__.py"))
        file = getattr(sys.modules.get(name), "__file__", None)
        hides = is_module and file and not os.path.realpath(file).startswith(own)
        if hides or (name in missed and (is_module or os.path.isdir(path))):
            found.add(name)
    return found


class _Missed(importlib.abc.MetaPathFinder):
    """Finds nothing, and notes what nobody else has found."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if "." not in fullname:
            self.names.add(fullname)


def _import(item: Import) -> BaseException | None:
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
        return None if error.name and f"{name}.".startswith(f"{error.name}.") else error
    except BaseException as error:  # noqa: BLE001 - a module's code may raise anything, SystemExit too
        return error
    return None
