"""One killed worker, followed by the id of its incident: what it passes until the next round's first step."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

ARCHITECTURE = TESTS.parent / "docs" / "architecture.md"

STATIONS = [
    "worker_exited",
    "round_broken",
    "restart_charged",
    "round_formed",
    "worker_started",
    "training_begun",
    "first_step",
]
"""The events of the incident that depend on each other, in order; those of other threads may come in between."""


TOOLS = tuple(f"elastic_launch.{name}" for name in ("config.", "system.", "contract", "secret", "events.types"))
"""Values and tools that all modules use; they are no stations."""


def documented() -> set[str]:
    """The modules that the page lists for the walk."""
    page = ARCHITECTURE.read_text()
    _, _, section = page.partition("## A killed worker")
    table = re.search(r"\| station \| modules \|\n\|---\|---\|\n((?:\|.*\n)+)", section)
    assert table is not None
    names = re.findall(r"`([\w.]+)`", table[1])
    packages = "agents/elastic_agents", "elastic_launch"
    found = set()
    for name in names:
        path = Path(*name.split("."))
        owner = [package for package in packages if (TESTS.parent / package / path).with_suffix(".py").exists()]
        assert len(owner) == 1, f"{name} is no module"
        found.add(f"{Path(owner[0]).name}.{name}")
    return found


@pytest.mark.slow
def test_a_killed_worker_passes_the_stations_that_the_documentation_lists(tmp_path: Path) -> None:
    plan, walk = tmp_path / "plan.json", tmp_path / "walk.json"
    plan.write_text(json.dumps({"faults": [{"rank": 0, "step": 20, "do": "kill"}]}))
    flags = ["--nproc", "1", "--no-warm", "--log-dir", str(tmp_path / "logs"), "--drill", str(plan)]
    command = [sys.executable, str(TESTS / "walk_tracer.py"), str(walk), *flags, str(TESTS / "scripts" / "walking.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr

    (directory,) = (path for path in (tmp_path / "logs").iterdir() if not path.is_symlink())
    (events_file,) = directory.glob("events-*.jsonl")
    events = [json.loads(line) for line in events_file.read_text().splitlines()]
    incident = [event["event"] for event in events if event.get("incident") == 1]
    assert {event.get("incident") for event in events} == {None, 1}
    assert [event for event in incident if event in STATIONS] == STATIONS, incident
    assert incident[0] == "worker_exited"
    assert incident[-1] == "first_step"
    lines = [line for line in done.stderr.splitlines() if "incident 1: " in line]
    first, *_, last = lines
    assert "ended with signal 9 (SIGKILL) in round 1" in first
    assert "incident 1: crash (rank 0 on node" in last

    found = json.loads(walk.read_text())
    entries = [entry for entry in found["entries"] if entry != "StartsTake"]  # on a slow machine
    assert entries[: entries.index("Ready")] == ["WorkerExit", "Break", "Form"]
    # The agent samples the host's load every few seconds, also without a fault.
    new = {name for name in found["new"] if not name.startswith((*TOOLS, "elastic_agents.host_watch"))}
    listed = documented()
    assert new - listed == set(), "the walk has a station that is not listed"
    assert listed - set(found["passed"]) == set(), "the walk does not pass what is listed"
