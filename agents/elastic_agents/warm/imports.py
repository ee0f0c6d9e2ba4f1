"""What a script will import, read from its source; nothing of it is run.

Followed are imports at the top level of modules (and in ``try`` there) through the user's own files, which are read
and never imported: only what is installed is to be loaded ahead. Directories that a statement adds to ``sys.path`` are
followed, too; where it is not known what later imports find, the reading ends. What is done to the environment is
noted.
"""

from __future__ import annotations

import ast
import importlib.machinery
import os
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from elastic_agents.warm.paths import Names, Process, changes_of, run_at_once

__all__ = ["IMPORT_TIME", "Import", "Reading", "differs_at_import", "matters_at_import", "read"]

MOST_FILES = 300
"""The user's files that are followed at most."""

IMPORT_TIME = (
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "OPENBLAS_",
    "BLIS_",
    "NUMEXPR_",
    "LD_",
    "PYTHON",
    "PYTORCH_",
    "TORCH",
    "TRITON_",
    "MALLOC_",
    "GLIBC_",
)
"""Variables whose names begin so are read when a module is imported or a process starts."""


def matters_at_import(name: str) -> bool:
    """Whether a variable is one that a process reads as it starts or imports."""
    return name.startswith(IMPORT_TIME) and not name.startswith("TORCHELASTIC_")


def differs_at_import(mine: Mapping[str, str], asked: Mapping[str, str], read: Collection[str] = ()) -> list[str]:
    """Return the variables that two environments have different, and that matter at import or were read then."""
    names = (name for name in mine.keys() | asked.keys() if matters_at_import(name) or name in read)
    return sorted(name for name in names if mine.get(name) != asked.get(name))


@dataclass(frozen=True, slots=True)
class Import:
    """``import module`` or, with names, ``from module import names``."""

    module: str
    names: tuple[str, ...] = ()

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


@dataclass(slots=True)
class Reading:
    """What was found.

    Attributes:
        imports: of installed modules, in the order of a run, each once.
        sets: variables that the script sets itself at its top level, with the number of imports before; the name is
            empty where it is not written out.
        directories: that the script adds to its path, where what they hold may hide what is installed.
        behind: likewise, behind what is installed.
    """

    imports: list[Import] = field(default_factory=list)
    directories: list[str] = field(default_factory=list)
    behind: list[str] = field(default_factory=list)
    sets: list[tuple[str, int]] = field(default_factory=list)

    @property
    def decisive(self) -> list[str]:
        """Variables that native code reads as it is loaded, or is configured by later."""
        # An interpreter reads its own once, at its start: to set them is for others.
        return sorted({name for name, _ in self.sets if matters_at_import(name) and not name.startswith("PYTHON")})

    @property
    def before_imports(self) -> set[str]:
        """Variables that are set before an import; empty for an unknown one."""
        return {name for name, before in self.sets if before < len(self.imports)}


def read(path: str, first: str, search: list[str], module: str = "") -> Reading:
    """Read a script and what it imports of the user's own.

    Args:
        path: the script's file.
        first: the directory that stands first on its ``sys.path``; "" if none does.
        search: the rest of ``sys.path``.
        module: the script's name if it runs as ``-m``, for its relative imports.
    """
    reader = _Reader([first, *search] if first else search)
    package = module if os.path.basename(path) in ("__init__.py", "__main__.py") else module.rpartition(".")[0]
    reader.file(path, package)
    return reader.reading


class _Reader:
    def __init__(self, search: list[str]) -> None:
        self.reading = Reading()
        self._search = search
        self._files: set[str] = set()
        self._seen: set[Import] = set()
        self._ended = False
        self._process = Process()

    def file(self, path: str, package: str) -> None:
        names = Names(os.path.abspath(path), self._process)
        path = os.path.realpath(path)
        if path in self._files or len(self._files) >= MOST_FILES:
            return
        self._files.add(path)
        try:
            with open(path, "rb") as file, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the script itself will warn
                tree = ast.parse(file.read(), path)
        except (OSError, SyntaxError, ValueError, RecursionError):
            return  # the script itself will tell
        for statement in _top_level(tree.body):
            match statement:
                case ast.Import(names=aliases):
                    names.imports(statement)
                    for alias in aliases:
                        self._import(Import(alias.name))
                case ast.ImportFrom(module=name, names=aliases, level=level):
                    names.imports(statement)
                    base = _absolute(name or "", level, package)
                    if base and base != "__future__":
                        self._import(Import(base, tuple(alias.name for alias in aliases)))
                case _:
                    before = len(self.reading.imports)
                    self.reading.sets += [(name, before) for name in _variables_set(statement)]
                    self._change_path(statement, names)

    def _change_path(self, statement: ast.stmt, names: Names) -> None:
        if isinstance(statement, ast.Try):
            # What is in its body came by itself; how far that is run, and what else, is not known.
            parts: list[ast.AST] = [*statement.handlers, *statement.orelse, *statement.finalbody]
            names.forget(statement)
        else:
            parts = [statement]
            names.assigns(statement)
        for part in parts:
            known, first, last = changes_of(part, names)
            self._ended = self._ended or not known
            if not self._ended:
                self.reading.directories += first
                self.reading.behind += last
                self._search = [*first, *self._search, *last]

    def _import(self, found: Import) -> None:
        if self._ended or found in self._seen or found.top in sys.stdlib_module_names:
            return
        self._seen.add(found)
        spec = importlib.machinery.PathFinder.find_spec(found.top, self._search)
        origin = _origin(spec)
        if origin and not _installed(origin) and found.top != "elastic_launch":
            self._follow(found, origin)
        else:
            # What has another finder than the path's (an editable install) may be the user's own: it is left alone.
            if origin:
                self.reading.imports.append(found)

    def _follow(self, found: Import, origin: str) -> None:
        """Read the user's package down to the module, and modules that names may be."""
        if not origin.endswith("__init__.py"):
            self.file(origin, "")
            return
        self.file(origin, found.top)
        directory, package = os.path.dirname(origin), found.top
        for part in found.module.split(".")[1:]:
            directory = os.path.join(directory, part)
            package = f"{package}.{part}"
            self._submodule(directory, package)
        for name in found.names:
            self._submodule(os.path.join(directory, name), f"{package}.{name}")

    def _submodule(self, path: str, name: str) -> None:
        if os.path.isfile(f"{path}.py"):
            self.file(f"{path}.py", name.rpartition(".")[0])
        elif os.path.isfile(inside := os.path.join(path, "__init__.py")):
            self.file(inside, name)


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements in their order; what is in the body of a ``try`` comes before this itself."""
    for statement in body:
        if isinstance(statement, ast.Try):
            yield from _top_level(statement.body)
        yield statement


def _absolute(name: str, level: int, package: str) -> str:
    if not level:
        return name
    parts = package.split(".") if package else []
    if level > len(parts):
        return ""
    return ".".join([*parts[: len(parts) - level + 1], *([name] if name else [])])


def _origin(spec: importlib.machinery.ModuleSpec | None) -> str:
    if spec is None:
        return ""
    if spec.origin and spec.has_location:
        return spec.origin
    # A package without __init__.py has places only.
    return next(iter(spec.submodule_search_locations or ()), "")


def _installed(origin: str) -> bool:
    return any(part in ("site-packages", "dist-packages") for part in origin.split(os.sep))


def _variables_set(statement: ast.stmt) -> Iterator[str]:
    """Names of variables that a statement gives to the environment; empty where they are not written out."""
    for node in run_at_once(statement):
        match node:
            case ast.Subscript(value=target, slice=key, ctx=ast.Store() | ast.Del()) if _is_environ(target):
                yield _text(key)
            case ast.AugAssign(target=target) if _is_environ(target):
                yield ""
            case ast.Call(func=ast.Attribute(attr="putenv" | "unsetenv"), args=[key, *_]):
                yield _text(key)
            case ast.Call(func=ast.Attribute(attr="load_dotenv") | ast.Name(id="load_dotenv")):
                yield ""
            case ast.Call(func=ast.Attribute(value=target, attr=method), args=args, keywords=given):
                if _is_environ(target) and method in ("setdefault", "pop") and args:
                    yield _text(args[0])
                elif _is_environ(target) and method == "update":
                    yield from (keyword.arg or "" for keyword in given)
                    for argument in args:
                        yield from map(_text, argument.keys) if isinstance(argument, ast.Dict) else [""]


def _is_environ(node: ast.expr) -> bool:
    match node:
        case ast.Attribute(attr="environ") | ast.Name(id="environ"):
            return True
    return False


def _text(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
