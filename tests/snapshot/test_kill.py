"""A writer killed at any moment leaves valid checkpoints, and nothing that the next writer does not clean up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DRIVER = str(Path(__file__).parent / "kill_driver.py")
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


def drive(directory: Path, method: str, *more: str) -> dict[str, Any] | None:
    """Return the driver's figures; None where the kernel allows no tracing."""
    command = [*in_memory(directory), sys.executable, DRIVER, method, str(directory / "run"), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    if done.returncode == 77:
        return None
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout)
    print(figures)
    return figures


def test_a_kill_at_each_system_call_of_a_write(tmp_path: Path) -> None:
    """At every system call; where tracing is forbidden, at every call of this code that changes files."""
    figures = drive(tmp_path, "ptrace") or drive(tmp_path, "calls")
    assert figures is not None
    assert figures["points"] >= 50
    assert figures["older"] > 10
    assert figures["newer"] > 10


def test_a_kill_halfway_through_each_write(tmp_path: Path) -> None:
    figures = drive(tmp_path, "torn")
    assert figures is not None
    assert figures["points"] >= 5
    assert figures["newer"] == 1, "only the one that was not killed"


@pytest.mark.parametrize("killed", ["first", "other"])
def test_a_kill_at_each_call_of_one_of_several_nodes_that_write_together(tmp_path: Path, killed: str) -> None:
    """Whichever is killed: the first node alone publishes the checkpoint, with or without the other's share."""
    figures = drive(tmp_path, killed)
    assert figures is not None
    assert figures["points"] >= 10
    assert figures["newer"] == figures["points"] + 1 if killed == "other" else 0 < figures["newer"] < figures["points"]


def test_kills_at_random_moments(tmp_path: Path) -> None:
    figures = drive(tmp_path, "random", "20")
    assert figures is not None
    assert figures["kills"] == 20
    assert figures["written"] > 0
