"""The packages' docstrings list their modules, and users can import the documented names."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

import elastic_launch

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


def test_every_public_name_exists() -> None:
    assert elastic_launch.__all__ == sorted(["__version__", *elastic_launch._HOMES, *elastic_launch._MODULES])
    for name in elastic_launch.__all__:
        assert getattr(elastic_launch, name) is not None


def test_errors_that_a_training_script_may_catch_are_public() -> None:
    """Error classes defined in modules that training scripts import."""
    import elastic_launch.snapshot.errors as snapshots
    from elastic_launch.errors import ElasticLaunchError
    from elastic_launch.training import steps
    from elastic_launch.training.ranks import replicas

    internal = {"NotCommittedError", "TakenError", "TornSnapshotError"}
    for module in (snapshots, steps, replicas):
        found = {
            name
            for name, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, ElasticLaunchError) and value.__module__ == module.__name__
        }
        assert found - internal <= set(elastic_launch.__all__)


def test_all_places_name_the_same_version() -> None:
    version = elastic_launch.__version__
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == version
    assert f"ARG VERSION={version}\n" in (ROOT / "docker" / "Dockerfile").read_text()
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
