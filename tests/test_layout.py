"""Each package's docstring is a map of its modules."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(
    path.parent for top in ("elastic_launch", "agents/elastic_agents") for path in (ROOT / top).rglob("__init__.py")
)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_docstring_of_a_package_lists_its_modules_and_nothing_else(package: Path) -> None:
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text()))
    assert text
    stems = {path.stem for path in package.glob("*.py")}
    modules = {stem for stem in stems if not stem.startswith("_")}
    packages = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    listed = re.findall(r"^``([a-z_0-9]+/?)``  ", text, re.MULTILINE)
    mentioned = set(re.findall(r"``([a-z_0-9]+/?)``", text))
    assert modules | packages <= mentioned
    assert set(listed) <= stems | packages
