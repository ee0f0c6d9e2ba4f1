"""Imports modules ahead of time: which of those that a worker has imported, and which must not be."""

from __future__ import annotations

import gc
import importlib
import importlib.abc
import os
import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from importlib.machinery import PathFinder

from elastic_agents.warm._import_watch import ImportWatch, matters_at_import
from elastic_agents.warm._record import WorkerImports

NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"

HARMLESS = frozenset({"numpy", "elastic_launch"})
"""Modules that a script may import before torch without a difference: torch imports numpy, and the other is ours."""


def first_of(names: Iterable[str]) -> str:
    """Return the package that is imported first of some modules; one that must not be imported after another one."""
    return next((top for top in map(_top, names) if top not in HARMLESS), "")


class Preload:
    """The modules that this process imports ahead of time.

    Args:
        asked: modules that the user adds, whatever their imports do.
        without: modules that are left out, with their submodules.

    Attributes:
        faults: modules that must not be imported ahead of time, with what their imports do; nothing if they raise.
        read: variables that imports looked up.
        error: the exception that the last import has raised.
    """

    def __init__(self, asked: Collection[str], without: Collection[str]) -> None:
        self.faults: dict[str, tuple[str, ...]] = {}
        self.read: set[str] = set()
        self.error: BaseException | None = None
        self._asked, self._without = asked, frozenset(without)
        self._started = dict(os.environ)
        self._missed: set[str] = set()  # top-level modules that were looked for and not found

    @property
    def changed(self) -> dict[str, str | None]:
        """Variables that imports have set, or removed (None)."""
        before = self._started
        names = {name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)}
        return {name: os.environ.get(name) for name in names}

    def wanted(self, imported: WorkerImports) -> list[str]:
        """Return the modules to import: those installed ones that a worker has imported, in its order.

        The user's own modules may have changed by the next start. A module that only a special finder finds (an
        editable install) may be the user's own.
        """
        places: dict[str, bool] = {}
        found = []
        for name, origin in imported.modules.items():
            top = _top(name)
            if top not in places:
                places[top] = _same_file(top, imported.modules.get(top))
            if places[top] and (_installed(origin) or top == "elastic_launch") and self._allowed(name):
                found.append(name)
        return found

    def add(
        self,
        names: Iterable[str],
        tell: Callable[[str], None] = lambda name: None,
        meanwhile: AbstractContextManager[object] | None = None,
    ) -> None:
        """Import modules, unless they are loaded.

        Args:
            tell: called with each module's name before it is imported.
            meanwhile: entered for each import: what it opens and closes again is not attributed to the module.
        """
        nvml = os.environ.get(NVML)
        os.environ[NVML] = "1"  # otherwise querying devices would break CUDA in forks
        watch, tried, missed = ImportWatch(), _Looked(), _Looked()
        sys.meta_path[:] = [tried, *sys.meta_path, missed]
        gc.disable()  # saves a third of the time: what is imported is never freed
        try:
            for name in names:
                # A worker's record has modules, too, whose imports have failed and were expected to.
                if name not in sys.modules and name not in tried.names and self._allowed(name):
                    tell(name)
                    self._add(name, watch, meanwhile)
        finally:
            gc.enable()
            watch.close()
            sys.meta_path.remove(tried)
            sys.meta_path.remove(missed)
            if nvml is None:
                del os.environ[NVML]
            else:
                os.environ[NVML] = nvml
            self.read |= watch.read
            self._missed |= {name for name in missed.names if "." not in name}
        # A collection in a worker would touch, and so copy, all pages; one here takes 0.2 s and frees next to nothing.
        gc.freeze()

    def _add(self, name: str, watch: ImportWatch, meanwhile: AbstractContextManager[object] | None) -> None:
        culprit = name if _top(name) in sys.modules else _top(name)
        watch.begin()
        with meanwhile or nullcontext():
            self.error = _import(name)
        found = watch.faults()
        if self.error is not None:
            self.faults[culprit] = ()
        elif found and name not in self._asked:
            self.faults[culprit] = found

    def _allowed(self, name: str) -> bool:
        parts = name.split(".")
        return not any(".".join(parts[:count]) in self._without for count in range(1, len(parts) + 1))

    def doubt(self, imported: WorkerImports) -> str:
        """Return why the imported modules may differ from what a worker has got; "" if they do not."""
        names = {
            name
            for name, value in imported.sets.items()
            if os.environ.get(name) != value and (name in self.read or _decisive(name))
        }
        if names:
            return f"the script sets {', '.join(sorted(names))}, which its imports read"
        names = {name for name, origin in imported.modules.items() if self._other(name, origin)}
        if names:
            return f"libraries import {', '.join(sorted(names))} by that name, and the script finds it elsewhere"
        return ""

    def _other(self, name: str, origin: str) -> bool:
        """Whether a library here finds another module by that name, or none."""
        if (module := sys.modules.get(name)) is None:
            return name in self._missed
        spec = module.__spec__
        # A module may be known by another name, too, whose spec it then has: setuptools makes its own one distutils.
        files = (
            (spec.origin if spec.has_location else "", getattr(module, "__file__", None)) if spec is not None else ()
        )
        return bool(files) and not any(_same(file, origin) for file in files)


class _Looked(importlib.abc.MetaPathFinder):
    """Finds nothing, and records the modules that it was asked for."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        self.names.add(fullname)


def _top(name: str) -> str:
    return name.partition(".")[0]


def _installed(origin: str) -> bool:
    return any(part in ("site-packages", "dist-packages") for part in origin.split(os.sep))


def _decisive(name: str) -> bool:
    """Whether native code reads a variable when it is loaded, which does not show."""
    # An interpreter reads its own variables once, at its start: a script sets them for other processes.
    return matters_at_import(name) and not name.startswith("PYTHON")


def _same_file(top: str, origin: str | None) -> bool:
    """Whether a top-level module is found here where a worker has found it; None: it had it from the start."""
    if origin is None or top in sys.modules:
        return True
    spec = PathFinder.find_spec(top)
    return spec is not None and _same(spec.origin if spec.has_location else "", origin)


def _same(one: str | None, other: str) -> bool:
    return (one or "") == other or (bool(one and other) and os.path.realpath(one or "") == os.path.realpath(other))


def _import(name: str) -> BaseException | None:
    """Import a module; return the error, unless the module merely does not exist."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        return None if error.name and f"{name}.".startswith(f"{error.name}.") else error
    except BaseException as error:  # noqa: BLE001 - a module's code may raise anything, SystemExit too
        return error
    return None
