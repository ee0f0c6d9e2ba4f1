"""Helper processes import nothing from the user's script directory, and get no secrets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_agents.helpers import helper_environment, helper_path
from elastic_launch import secret
from elastic_launch.rendezvous.stores import etcd_service

NAMES = ("secrets", "json", "types", "fsspec_driver")
HOSTILE = "import pathlib; pathlib.Path(__file__).with_suffix('.ran').touch()"
ROOTS = [str(Path(__file__).resolve().parents[2] / name) for name in ("", "agents")]

PRINT_HELPER = """
import json, subprocess
from elastic_agents.helpers import helper_command, helper_environment
code = "import json, os, secrets, types; print(json.dumps([sys.path, dict(os.environ)]))"
print(subprocess.run(helper_command(code), env=helper_environment(), capture_output=True, check=True, text=True).stdout)
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A directory with files that are named like modules."""
    directory = tmp_path / "project"
    directory.mkdir()
    for name in NAMES:
        (directory / f"{name}.py").write_text(HOSTILE)
    (directory / "main.py").write_text(PRINT_HELPER)
    return directory


def _helper(arguments: list[str], cwd: Path, **variables: str) -> tuple[list[str], dict[str, str]]:
    """The path and the environment of a helper started by a program in a directory."""
    env = {**os.environ, **variables}
    ended = subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    path, environ = json.loads(ended.stdout)
    return path, environ


def test_what_lies_in_the_working_directory_is_not_imported(here: Path) -> None:
    # The agent itself has safe imports here: the test is about its helper.
    path, _ = _helper(["-P", "main.py"], here)
    assert str(here) not in path
    path, environ = _helper(["-P", "main.py"], here, PYTHONPATH=os.pathsep.join([str(here / "lib"), *ROOTS]))
    assert path[0] == str(here / "lib")
    assert "PYTHONPATH" not in environ
    assert list(here.glob("*.ran")) == []


def test_a_directory_that_the_user_names_comes_last(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    library = os.path.dirname(os.__file__)
    monkeypatch.setattr(sys, "path", ["", str(here), library, f"{library}/site-packages", "relative"])
    assert helper_path() == [library, *reversed(ROOTS), f"{library}/site-packages", str(here)]
    monkeypatch.setattr(sys, "path", ["", library])
    assert helper_path() == [library, *reversed(ROOTS)]


def test_the_directory_of_the_program_is_left_out(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = os.path.dirname(os.__file__)
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, str(here / "main.py")])
    monkeypatch.setattr(sys, "path", [str(here), library])
    assert str(here) not in helper_path()


def test_secrets_stay_with_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (secret.ENV_TOKEN, etcd_service.ENV_USER, etcd_service.ENV_PASSWORD, "AWS_ACCESS_KEY_ID"):
        monkeypatch.setenv(name, "x")
    names = {name for name, value in helper_environment().items() if value == "x"}
    assert names == {"AWS_ACCESS_KEY_ID"}, "drivers of storage need their own"


@pytest.mark.parametrize("program", ["elastic_launch", "elastic_launch.launch"])
def test_an_agent_run_by_python_m_imports_nothing_from_the_working_directory(here: Path, program: str) -> None:
    (here / "types.py").unlink()  # the interpreter itself would import it, before any of our code
    (here / "elastic_agents.py").write_text(HOSTILE)
    command = [sys.executable, "-m", program, "--version"]
    ended = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("elastic-launch ")
    assert list(here.glob("*.ran")) == []
