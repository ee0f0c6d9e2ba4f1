"""What to import ahead of time for a script: the plan, the imports, and the modules that must not be imported ahead."""

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

from elastic_agents.warm._import_watch import ImportWatch, watched
from elastic_agents.warm._script_imports import Import, Reading, entry_point, read

TORCH = (
    "torch._dynamo",  # the first use of an optimizer imports it
    "torch.distributed.algorithms.join",
    "torch.distributed.tensor",
    "torch.nn.parallel",
)
"""Modules that a training script imports sooner or later once it has imported torch."""

OURS = (
    "elastic_launch.training.trainer",
    "elastic_launch.training.session",
    "elastic_launch.training.checkpoints.manager",
    "elastic_launch.training.data.loader",
    "elastic_launch.training.dist",
)
"""What ``elastic_launch`` loads on first use."""

NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"

HARMLESS = frozenset({"numpy", "elastic_launch"})
"""Modules that a script may import before torch without a difference: torch imports numpy, and the other is ours."""

REMEDY = "--preload names modules to load ahead all the same"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to import.

    Attributes:
        first: the first entry of the script's ``sys.path``.
        reading: the result of reading the script.
        asked: modules that the user adds explicitly.
        without: modules that are left out.
    """

    first: str
    reading: Reading
    asked: tuple[str, ...]
    without: frozenset[str]

    @property
    def wanted(self) -> list[Import]:
        """The script's imports in order, then those that the user adds."""
        found = [item for item in self.reading.imports if not self.without & {item.top, item.module}]
        return [*found, *map(Import, self.asked)]

    @property
    def torch_comes_first(self) -> bool:
        """Whether torch may be imported before everything else, as far as the script shows."""
        return next((item.top for item in self.wanted if item.top not in HARMLESS), "") == "torch"

    def completes(self, package: str) -> bool:
        """Whether a package's companion modules may be imported, too: the script's own imports would find the same."""
        return not self.reading.stopped or package in {item.top for item in map(Import, self.asked)}

    @property
    def set_before(self) -> set[str]:
        """Variables that the script sets before an import; an unknown name is empty."""
        return self.reading.set_before([*map(Import, self.asked)])

    def doubt(self, loaded: Loaded) -> str:
        """Return why the imported modules may differ from what the script would get; "" if they do not."""
        if names := self.set_before & loaded.read:
            return f"the script sets {', '.join(sorted(names))}, which its imports read"
        if names := _meant_by_libraries(self.first, loaded.missed):
            return f"{', '.join(sorted(names))} beside the script may be what libraries import by that name"
        return ""


def plan(settings: Mapping[str, Any], search: list[str]) -> Plan | str:
    """Read the script of a server's settings.

    Args:
        search: a worker's ``sys.path``, without the entry that comes first for its script.

    Returns:
        the plan, or why workers cannot be forked.
    """
    try:
        return _plan(settings, search)
    except Exception as error:  # noqa: BLE001 - installed finders may raise anything; the server must not end
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
    """The result of the imports.

    Attributes:
        faults: modules that must not be imported ahead of time, with what their imports do.
        read: variables that imports looked up.
        changed: variables that imports have set, or removed (None).
        missed: top-level modules that were looked for and not found.
    """

    faults: dict[str, str] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    changed: dict[str, str | None] = field(default_factory=dict)
    missed: set[str] = field(default_factory=set)


class Loading:
    """Watched imports, from construction to :meth:`finish` or :meth:`abandon`."""

    def __init__(self, asked: Collection[str], without: Set[str]) -> None:
        self._asked, self._without = asked, without
        self._before = dict(os.environ)
        os.environ[NVML] = "1"  # otherwise querying devices would break CUDA in forks
        self._watch, self._missed = ImportWatch(), _Missed()
        sys.meta_path.append(self._missed)
        self._loaded = Loaded(missed=self._missed.names)
        gc.disable()  # saves a third of the time: what is imported is never freed

        self.error: BaseException | None = None
        """The exception that the last import has raised."""

    @property
    def faults(self) -> dict[str, str]:
        """Modules so far that must not be imported ahead of time, with what their imports do."""
        return self._loaded.faults

    def add(self, item: Import, meanwhile: AbstractContextManager[object] | None = None) -> None:
        """Import one module.

        Args:
            meanwhile: entered for the import itself: what it opens and closes again is not attributed to the module.
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
        """Import the wanted modules, and the companions of torch and of this project's library; return the result.

        Args:
            completes: whether a package's companion modules may be imported.
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
            # A module that was requested by name is not one that a library would find.
            self._missed.names -= {item.top for item in wanted}
        finally:
            self.abandon()
        before = self._before
        names = {name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)}
        self._loaded.read = self._watch.read
        self._loaded.changed = {name: os.environ.get(name) for name in names}
        # A collection in a worker would touch, and so copy, all pages; one here takes 0.2 s and frees next to nothing.
        gc.freeze()
        return self._loaded

    def abandon(self) -> None:
        """Stop watching."""
        gc.enable()
        self._watch.close()
        sys.meta_path.remove(self._missed)
        if NVML in self._before:
            os.environ[NVML] = self._before[NVML]
        else:
            del os.environ[NVML]


def _meant_by_libraries(directory: str, missed: Collection[str]) -> set[str]:
    """Return the names of modules in the script's directory that loaded libraries would have imported.

    The directory comes first in the script's path, not in this process' path. Libraries import each other by name.

    Args:
        missed: names that a library looked for in vain: a directory without ``__init__.py`` counts, too.
    """
    own = os.path.realpath(directory) + os.sep
    try:
        entries = os.listdir(directory) if directory else []
    except OSError:
        return set()  # imports find nothing there either
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
    """Finds nothing, and records the modules that no other finder has found."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if "." not in fullname:
            self.names.add(fullname)


def _import(item: Import) -> BaseException | None:
    """Import as the statement would; return the error, unless the module merely does not exist."""
    name = item.module
    try:
        module = importlib.import_module(name)
        for part in item.names:
            if part != "*" and not hasattr(module, part):
                name = f"{item.module}.{part}"
                importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The name exists in another version only; the script handles that in a try statement.
        return None if error.name and f"{name}.".startswith(f"{error.name}.") else error
    except BaseException as error:  # noqa: BLE001 - a module's code may raise anything, SystemExit too
        return error
    return None
