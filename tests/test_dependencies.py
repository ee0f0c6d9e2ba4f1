"""What the code imports is what pyproject.toml declares.

The tests' environment has more packages than a user's, so that a dependency that is not declared would not be missed.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = [*(ROOT / "elastic_launch").rglob("*.py"), *(ROOT / "agents").rglob("*.py")]

PROVIDERS = {
    "etcd_client": "etcd-client-py",
    "opentelemetry": "opentelemetry-sdk",
    "prometheus_client": "prometheus-client",
    "pytorch_lightning": "lightning",
    "yaml": "pyyaml",
}
"""The distributions whose modules have another name. Instead of lightning, pytorch-lightning may be there."""

FOR_DEVELOPERS = {"dev", "docs", "test"}
"""Extras without anything that an installed package may need."""


def distributions(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!~\[; ]", requirement)[0].lower() for requirement in requirements}


DECLARED = distributions(PROJECT["dependencies"])
EXTRAS = {
    name
    for extra, requirements in PROJECT["optional-dependencies"].items()
    if extra not in FOR_DEVELOPERS
    for name in distributions(requirements)
}


def imports(body: list[ast.stmt], *, first: bool) -> Iterator[str]:
    """The top-level packages that statements import: all, or those needed as soon as the module is imported."""
    for statement in body:
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from imports(statement.orelse, first=first)
            continue
        if isinstance(statement, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and not statement.level:
            yield str(statement.module).partition(".")[0]
        if first and isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.Try):
            continue
        for part in ast.iter_child_nodes(statement):
            if isinstance(part, ast.ExceptHandler | ast.match_case):
                yield from imports(part.body, first=first)
        for _, value in ast.iter_fields(statement):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield from imports(value, first=first)


def third_party(path: Path, *, first: bool) -> set[str]:
    """The distributions from which a file imports."""
    ours = {"elastic_launch", "elastic_agents"}
    found = set(imports(ast.parse(path.read_text()).body, first=first)) - sys.stdlib_module_names - ours
    return {PROVIDERS.get(name, name) for name in found}


def test_all_that_is_imported_is_declared() -> None:
    found = {name: path for path in SOURCES for name in third_party(path, first=False)}
    assert found.keys() >= DECLARED, "a dependency that nothing imports"
    assert {name: path for name, path in found.items() if name not in DECLARED | EXTRAS} == {}


def test_extras_are_imported_only_where_they_are_used() -> None:
    """The modules of elastic_launch.integrations are imported when a script names them, with their frameworks."""
    needed = {
        str(path.relative_to(ROOT / "elastic_launch")): found
        for path in SOURCES
        if (found := third_party(path, first=True) - DECLARED)
    }
    assert needed == {f"integrations/{name}.py": {name} for name in ("accelerate", "transformers")}


@pytest.mark.parametrize(
    ("code", "everywhere", "first"),
    [
        ("import a.b as c, os", {"a", "os"}, {"a", "os"}),
        ("from a.b import c", {"a"}, {"a"}),
        ("from . import c", set(), set()),
        ("def f():\n    import a", {"a"}, set()),
        ("class C:\n    import a", {"a"}, {"a"}),
        ("try:\n    import a\nexcept ImportError:\n    import b", {"a", "b"}, set()),
        ("if TYPE_CHECKING:\n    import a\nelse:\n    import b", {"b"}, {"b"}),
        ("with x:\n    import a", {"a"}, {"a"}),
    ],
)
def test_imports_are_found(code: str, everywhere: set[str], first: set[str]) -> None:
    assert set(imports(ast.parse(code).body, first=False)) == everywhere
    assert set(imports(ast.parse(code).body, first=True)) == first
