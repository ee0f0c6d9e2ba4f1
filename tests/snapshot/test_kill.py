"""A writer killed at any moment leaves valid checkpoints, and nothing that the next writer does not clean up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DRIVER = str(Path(__file__).parent / "kill_driver.py")
METHODS = ("ptrace", "torn", "first", "other", "random", "dcp")
# Memory that is mounted for this process alone, and goes with it: a kill loses nothing there, and syncing is free.
IN_MEMORY = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"']


def in_memory(directory: Path) -> list[str]:
    """Return what comes before a command whose directory is to be in memory; nothing where that is not allowed."""
    prefix = [*IN_MEMORY, str(directory)]
    try:
        allowed = subprocess.run([*prefix, "true"], capture_output=True, timeout=30).returncode == 0
    except FileNotFoundError:
        return []
    return prefix if allowed else []


@pytest.fixture(scope="module")
def driven(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The driver's figures of each method; one process has all of them, since it imports torch."""
    directory = tmp_path_factory.mktemp("kill")
    command = [*in_memory(directory), sys.executable, DRIVER, str(directory), *METHODS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    return {found["method"]: found for found in map(json.loads, done.stdout.splitlines())}


def figures_of(driven: dict[str, dict[str, Any]], method: str) -> dict[str, Any]:
    figures = driven[method]
    print(figures)
    assert "error" not in figures, figures["error"]
    return figures


def test_a_kill_at_each_system_call_of_a_write(driven: dict[str, dict[str, Any]]) -> None:
    """At every system call; where tracing is forbidden, at every call of this code that changes files."""
    figures = figures_of(driven, "ptrace")
    assert figures["points"] >= 50
    assert figures["older"] > 10
    assert figures["newer"] > 10


def test_a_kill_halfway_through_each_write(driven: dict[str, dict[str, Any]]) -> None:
    figures = figures_of(driven, "torn")
    assert figures["points"] >= 5
    assert figures["newer"] == 1, "only the one that was not killed"


def test_a_kill_at_each_call_of_a_write_in_the_format_of_torch(driven: dict[str, dict[str, Any]]) -> None:
    figures = figures_of(driven, "dcp")
    assert figures["older"] > 10
    assert figures["newer"] > 5


@pytest.mark.parametrize("killed", ["first", "other"])
def test_a_kill_at_each_call_of_one_of_several_nodes_that_write_together(
    driven: dict[str, dict[str, Any]], killed: str
) -> None:
    """Whichever is killed: the first node alone publishes the checkpoint, with or without the other's share."""
    figures = figures_of(driven, killed)
    assert figures["points"] >= 10
    assert figures["newer"] == figures["points"] + 1 if killed == "other" else 0 < figures["newer"] < figures["points"]


def test_kills_at_random_moments(driven: dict[str, dict[str, Any]]) -> None:
    figures = figures_of(driven, "random")
    assert figures["kills"] == 20
    assert figures["written"] > 0
