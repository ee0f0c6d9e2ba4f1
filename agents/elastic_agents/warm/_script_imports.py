"""Determines a script's imports from its source, without running any of it.

Imports at the top level of modules, and in ``try`` there, are followed through the user's own files, which are read and
never imported: only installed modules may be imported ahead of time. Reading stops at the first statement that may
change what later imports find, such as an edit of ``sys.path``; its effect is not evaluated. The variables that a
script sets are collected to its end.
"""

from __future__ import annotations

import ast
import os
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from importlib.util import MAGIC_NUMBER

MOST_FILES = 300
"""Maximum number of the user's files that are read; reading stops there."""

DECISIVE = frozenset({"path", "modules", "meta_path", "path_hooks", "path_importer_cache", "__dict__"})
"""Attributes of ``sys`` that determine where imports look, and what they find."""

EDITORS = frozenset({"addsitedir", "addpackage", "addsitepackages", "addusersitepackages"})
"""Functions of ``site`` that edit ``sys.path``."""

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
"""Variables with these prefixes are read when a module is imported or a process starts."""


def matters_at_import(name: str) -> bool:
    """Whether a variable is one that a process reads as it starts or imports."""
    return name.startswith(IMPORT_TIME) and not name.startswith("TORCHELASTIC_")


def differs_at_import(mine: Mapping[str, str], asked: Mapping[str, str], read: Collection[str] = ()) -> list[str]:
    """Return variables that differ between two environments, and that matter at import or were read during one."""
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
    """What a script's source shows.

    Attributes:
        imports: imports of installed modules, in the order of a run, each once.
        sets: variables that the script sets at its top level, with the number of imports before; the name is empty if
            it is not a literal.
        stopped: the place that may change what later imports find, such as ``train.py, line 3``; "" if there is none.
    """

    imports: list[Import] = field(default_factory=list)
    sets: list[tuple[str, int]] = field(default_factory=list)
    stopped: str = ""

    @property
    def decisive(self) -> list[str]:
        """Variables that native code reads when it is loaded, or that configure it later."""
        # An interpreter reads its own variables once, at its start: a script sets them for other processes.
        return sorted({name for name, _ in self.sets if matters_at_import(name) and not name.startswith("PYTHON")})

    def set_before(self, asked: Collection[Import]) -> set[str]:
        """Return the variables that are set before an import; an unknown name is empty.

        Args:
            asked: additional imports; where the script imports them is unknown, unless it was read.
        """
        last = len(self.imports) + bool({item.top for item in asked} - {item.top for item in self.imports})
        return {name for name, before in self.sets if before < last}


def entry_point(argv: Sequence[str]) -> tuple[str, str, str]:
    """Find what a command runs.

    Args:
        argv: a Python worker's arguments: ``script ...`` or ``-m module ...``; after the module that stands for
            torchrun's ``--run-path``, the script that follows counts.

    Returns:
        the file with its code, the first entry of ``sys.path`` ("" if none), and with ``-m`` the module's name.
        The file is "" if it cannot be determined without running code, or is not source code.
    """
    if argv[0] == "-m" and argv[1] == "elastic_launch.run_path":
        argv = argv[2:]
    if argv[0] == "-m":
        here = "" if sys.flags.safe_path else os.getcwd()
        return _module_file(argv[1], [here, *sys.path] if here else sys.path), here, argv[1]
    path = argv[0]
    if os.path.isdir(path):
        return os.path.join(path, "__main__.py"), path, ""
    if not path.endswith((".py", ".pyw")) and _is_no_source(path):
        return "", "", ""
    return path, "" if sys.flags.safe_path else os.path.dirname(os.path.realpath(path)), ""


def _module_file(name: str, search: list[str]) -> str:
    found = ""
    for part in name.split("."):
        found, search = _locate(part, search)
    if search:
        found, _ = _locate("__main__", search)
    return found if found.endswith(".py") else ""


def _is_no_source(path: str) -> bool:
    """Whether a file is compiled or an archive; both begin with bytes that no source file contains."""
    try:
        with open(path, "rb") as file:
            start = file.read(4)
    except OSError:
        return True
    return start == MAGIC_NUMBER or start.startswith(b"PK")


def read(path: str, first: str, search: list[str], module: str = "") -> Reading:
    """Read a script and those of its imports that are the user's own files.

    Args:
        path: the script's file.
        first: the directory that is first on its ``sys.path``; "" if there is none.
        search: the rest of ``sys.path``.
        module: the script's name if it runs as ``-m``, for its relative imports.
    """
    reader = _Reader([first, *search] if first else search)
    package = module if os.path.basename(path) in ("__init__.py", "__main__.py") else module.rpartition(".")[0]
    reader.file(path, package, ahead=True)
    return reader.reading


def _locate(name: str, search: list[str]) -> tuple[str, list[str]]:
    """Return a module's file ("" if it has none) and where its submodules are, without importing its parents.

    Args:
        name: without the package's name.
        search: directories; the package's own if it is in one.
    """
    spec = PathFinder.find_spec(name, search)
    if spec is None:
        return "", []
    return (spec.origin or "") if spec.has_location else "", list(spec.submodule_search_locations or ())


class _Reader:
    def __init__(self, search: list[str]) -> None:
        self.reading = Reading()
        self._search = search
        self._files: set[tuple[str, bool]] = set()
        self._seen: set[Import] = set()
        self._editors = set(EDITORS)  # names of functions that may change what imports find

    def file(self, path: str, package: str, *, ahead: bool) -> None:
        """Read one of the user's files.

        Args:
            package: the base of its relative imports.
            ahead: whether its imports are to be done ahead; otherwise only its edits count, as it may not be imported.
        """
        path = os.path.realpath(path)
        if self._files & {(path, True), (path, ahead)}:
            return
        if len(self._files) >= MOST_FILES:
            self.reading.stopped = f"after {MOST_FILES} files"
            return
        self._files.add((path, ahead))
        try:
            with open(path, "rb") as file, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the script itself will show the warning
                tree = ast.parse(file.read(), path)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return  # the script itself will report the error
        for statement in _top_level(tree.body):
            certain = ahead and isinstance(statement, ast.Import | ast.ImportFrom)
            for part in _run_at_once(statement):
                for item in _imports_of(part, package):
                    self._import(item, ahead=certain)
            before = len(self.reading.imports)
            self.reading.sets += [(name, before) for name in _variables_set(statement)]
            if not self.reading.stopped and self._edits(statement):
                self.reading.stopped = f"{os.path.basename(path)}, line {statement.lineno}"

    def _edits(self, statement: ast.stmt) -> bool:
        """Whether a statement may change what later imports find, directly or through a function that it mentions."""
        for part in _run_at_once(statement):
            match part:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    if _mentions_editor(ast.walk(part), self._editors):
                        self._editors.add(name)
                case ast.ImportFrom(names=aliases):
                    self._editors.update(x.asname for x in aliases if x.asname and x.name in self._editors)
        return _mentions_editor(_run_at_once(statement), self._editors)

    def _import(self, found: Import, *, ahead: bool) -> None:
        if self.reading.stopped or found in self._seen:
            return
        if ahead:
            self._seen.add(found)
        origin, inside = _locate(found.top, self._search)
        places = [origin] if origin else inside
        installed = [place for place in places if _installed(place) or found.top == "elastic_launch"]
        # A module found only by a special finder (an editable install) may be the user's own: it is not imported.
        if any(place not in installed and not place.startswith(_STANDARD) for place in places):
            self._follow(found, ahead=ahead)
        elif installed and ahead:
            self.reading.imports.append(found)

    def _follow(self, found: Import, *, ahead: bool) -> None:
        """Read the user's package down to the module, and names that may be modules."""
        search, package = self._search, ""
        for part in found.module.split("."):
            search = self._module(part, search, package, ahead=ahead)
            package = f"{package}.{part}".lstrip(".")
        for name in found.names:
            self._module(name, search, package, ahead=ahead)

    def _module(self, name: str, search: list[str], package: str, *, ahead: bool) -> list[str]:
        """Read a module of a package; return the location of its submodules."""
        origin, inside = _locate(name, search)
        if origin:
            self.file(origin, f"{package}.{name}".lstrip(".") if inside else package, ahead=ahead)
        return inside


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements in order; the body of a ``try`` comes before the statement itself."""
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


_STANDARD = os.path.dirname(os.__file__) + os.sep


def _installed(place: str) -> bool:
    return any(part in ("site-packages", "dist-packages") for part in place.split(os.sep))


def _run_at_once(statement: ast.AST) -> Iterator[ast.AST]:
    """Yield a statement's parts, parents first, except those in functions, which run later."""
    ahead = [statement]
    while ahead:
        part = ahead.pop()
        yield part
        if not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            ahead += reversed(list(ast.iter_child_nodes(part)))


def _imports_of(part: ast.AST, package: str) -> Iterator[Import]:
    match part:
        case ast.Import(names=aliases):
            yield from (Import(alias.name) for alias in aliases)
        case ast.ImportFrom(module=name, names=aliases, level=level):
            base = _absolute(name or "", level, package)
            if base and base != "__future__":
                yield Import(base, tuple(alias.name for alias in aliases))


def _mentions_editor(parts: Iterator[ast.AST], editors: Collection[str]) -> bool:
    """Whether code may change what imports find: it names an editor, or does more than read a decisive attribute.

    Names are taken literally: one that is bound to something else only makes the reading stop too early.

    Args:
        parts: parts of the code, parents first.
    """
    harmless: set[ast.AST] = set()
    for part in parts:
        match part:
            case ast.Subscript(value=target, ctx=ast.Load()) | ast.Call(func=ast.Attribute(value=target, attr="get")):
                harmless.add(target)
            case ast.Compare(left=left, comparators=others):
                harmless.update((left, *others))
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                if any(alias.name == "sys" and alias.asname not in (None, "sys") for alias in aliases):
                    return True
                from_sys = isinstance(part, ast.ImportFrom) and part.module == "sys" and not part.level
                if from_sys and not {"*", *DECISIVE}.isdisjoint(alias.name for alias in aliases):
                    return True
            case ast.Attribute(value=ast.Name(id="sys") as module, attr=name):
                harmless.add(module)
                if name in DECISIVE and part not in harmless:
                    return True
            case ast.Attribute(attr=name) | ast.Name(id=name):
                if name in editors or (name == "sys" and part not in harmless):
                    return True
    return False


def _variables_set(statement: ast.stmt) -> Iterator[str]:
    """Names of environment variables that a statement sets; empty if they are not literals."""
    for node in _run_at_once(statement):
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
