"""The documentation's site, and the docstrings that its API page shows."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from dataclasses import is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args, get_type_hints, is_typeddict

import pytest

import elastic_launch

ROOT = Path(__file__).parent.parent
API = (ROOT / "docs" / "reference" / "api.md").read_text()
SHOWN = set(re.findall(r"^\.\. auto(?:class|exception|function):: (\w+)", API, re.MULTILINE))

ENGINES = {
    "FunctionLoader": "indices",
    "Loader": "indices",
    "Progress": "on_checkpoint on_evaluation on_incident on_round on_step",
    "ShardedStream": "firsts",
    "Stateful": "load_state_dict state_dict",
    "StatefulLoader": "indices length",
    "Trainer": "load_state_dict state_dict",
    "Url": "absolute",
    "World": "device of",
}
"""Public methods and properties that the library itself calls; scripts do not, and the API page does not show them."""


def public_classes() -> list[str]:
    return [name for name in elastic_launch.__all__ if inspect.isclass(getattr(elastic_launch, name))]


def shown_members(name: str) -> set[str]:
    options = re.search(rf"^\.\. auto(?:class|exception):: {name}(?:\(\))?\n((?:   .*\n)*)", API, re.MULTILINE)
    assert options
    return set(re.findall(r"\w+", options[1].removeprefix("   :members:")))


def test_the_api_page_shows_every_public_name() -> None:
    modules = {"dist", "integrations", "samplers", "__version__"}
    assert SHOWN - {"Drain"} == set(elastic_launch.__all__) - modules
    for name in modules - {"__version__"}:
        assert f"elastic_launch.{name}" in API


@pytest.mark.parametrize("name", sorted(set(elastic_launch.__all__) - {"__version__"}))
def test_a_public_name_has_a_docstring(name: str) -> None:
    assert inspect.getdoc(getattr(elastic_launch, name))


@pytest.mark.parametrize("name", ["Callback", "Evaluator", "GlobalBatch", "Run", "Schedule", "Step", "Trainer"])
def test_the_members_of_a_class_have_docstrings(name: str) -> None:
    members = {key: value for key, value in vars(getattr(elastic_launch, name)).items() if not key.startswith("_")}
    assert not [
        key
        for key, value in members.items()
        if (callable(value) or isinstance(value, property)) and not inspect.getdoc(value)
    ]


@pytest.mark.parametrize("name", public_classes())
def test_the_api_page_shows_what_scripts_call_and_nothing_else(name: str) -> None:
    cls = getattr(elastic_launch, name)
    kinds = (property, staticmethod, classmethod, cached_property)
    members = {
        key
        for base in cls.__mro__
        if base.__module__.startswith("elastic_launch.")
        for key, value in vars(base).items()
        if not key.startswith("_") and (inspect.isfunction(value) or isinstance(value, kinds))
    }
    assert members - shown_members(name) == set(ENGINES.get(name, "").split())
    assert shown_members(name) <= members


def named_types(hint: Any) -> set[type]:
    """The classes of this package in an annotation, except the names of keyword arguments."""
    if isinstance(hint, list | tuple):
        return set().union(*map(named_types, hint))
    own = isinstance(hint, type) and hint.__module__.startswith("elastic_launch.") and not is_typeddict(hint)
    return ({hint} if own else set()) | named_types(get_args(hint))


@pytest.mark.parametrize("name", sorted(SHOWN - {"Drain"}))
def test_the_types_in_a_public_name_s_annotations_are_public(name: str) -> None:
    found = getattr(elastic_launch, name)
    hinted = [found] if inspect.isfunction(found) or is_dataclass(found) else []
    if inspect.isclass(found):
        made_by_scripts = f" {name}()\n" not in API and not issubclass(found, Exception)
        for key in shown_members(name) | ({"__init__"} if made_by_scripts else set()):
            member = getattr(found, key)
            hinted.append(member.fget if isinstance(member, property) else member)
    public = [getattr(elastic_launch, key) for key in SHOWN - {"Drain"}]
    public += [getattr(elastic_launch.samplers, key) for key in elastic_launch.samplers.__all__]
    types = set().union(*(named_types(hint) for one in hinted for hint in get_type_hints(one).values()))
    assert [cls.__qualname__ for cls in types if cls not in public] == []


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", ".", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert built.returncode == 0, built.stderr
    api = (tmp_path / "site" / "docs" / "reference" / "api.html").read_text()
    assert 'id="elastic_launch.Trainer.fit"' in api
    index = json.loads((tmp_path / "site" / "searchindex.js").read_text().removeprefix("Search.setIndex(").rstrip(")"))
    for text, page in (
        ("--max-restarts", "command-line"),
        ("elastic_launch_round", "environment"),
        ("parked with …, … needed", "messages"),
    ):
        first = [index["docnames"][number] for number, _, is_main in index["indexentries"][text] if is_main]
        assert first == [f"docs/reference/{page}"]
