"""The documentation's site, and the docstrings that its API page shows."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import elastic_launch

ROOT = Path(__file__).parent.parent
API = (ROOT / "docs" / "reference" / "api.md").read_text()
SHOWN = set(re.findall(r"^\.\. auto(?:class|exception|function):: (\w+)", API, re.MULTILINE))


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
