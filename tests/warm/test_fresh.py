"""A forked worker finds the same as an executed one: each property is compared."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from harness import SCRIPTS
from warm_processes import WAYS, Starter, both_ways, config_for

FORMS = ("script", "relative", "link", "module", "package", "directory", "archive")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the script finds, by its form on the command line and by how it is started."""
    place = tmp_path_factory.mktemp("forms")
    commands = _commands(place)
    config = config_for(tmp_path_factory.mktemp("logs"), str(SCRIPTS / "fresh.py"))
    with both_ways(config, {"PYTHONPATH": str(place)}) as starters:
        return {form: {way: _findings(starters[way], commands[form], place) for way in WAYS} for form in FORMS}


def _commands(place: Path) -> dict[str, list[str]]:
    script = SCRIPTS / "fresh.py"
    (place / "link.py").symlink_to(script)
    package = place / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(script, package / "__main__.py")
    shutil.copy(script, package / "inner.py")
    archive = shutil.make_archive(str(place / "archive"), "zip", package)
    return {
        "script": [str(script), "--flag", "two words", "ü"],
        "relative": [os.path.relpath(script)],
        "link": [str(place / "link.py")],
        "module": ["-m", "package.inner", "x"],
        "package": ["-m", "package"],
        "directory": [str(package), "y"],
        "archive": [archive],
    }


def _findings(starter: Starter, command: list[str], place: Path) -> dict[str, Any]:
    out = place / "out.json"
    ended = starter.run(*command, env={"FRESH_OUT": str(out), "LATE": "1", "RANK": "3"})
    assert ended.code == 0, ended.stderr
    found = json.loads(out.read_text())
    assert isinstance(found, dict)
    return found


PROPERTIES = (
    *("modules", "argv", "orig_argv", "path", "flags", "executable", "main", "main names", "builtins", "directory"),
    *(
        "umask",
        "environment",
        "getenv of C",
        "handlers",
        "signals",
        "mask",
        "stdin",
        "streams",
        "descriptors",
        "session",
    ),
    *(
        "parent",
        "threads",
        "native id",
        "faulthandler",
        "collector",
        "limits",
        "priority",
        "cores",
        "locale",
        "recursion",
    ),
    *("switch interval", "warnings", "warn options", "hooks", "processes", "name", "command", "user"),
    *("oom", "zone", "cpu time is small"),
)


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_forked_worker_finds_what_an_executed_one_finds(name: str, found: dict[str, dict[str, Any]]) -> None:
    warm = {form: ways["warm"][name] for form, ways in found.items()}
    cold = {form: ways["exec"][name] for form, ways in found.items()}
    assert warm == cold


def test_only_a_forked_worker_is_killed_by_the_kernel_with_its_agent(found: dict[str, dict[str, Any]]) -> None:
    for ways in found.values():
        assert {way: ways[way]["death signal"] for way in WAYS} == {"warm": signal.SIGKILL, "exec": 0}


def test_no_property_is_left_out(found: dict[str, dict[str, Any]]) -> None:
    assert set(found["script"]["warm"]) == {*PROPERTIES, "death signal"}
