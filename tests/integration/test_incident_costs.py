"""What an incident is said to cost is the time for which the script itself has done no step, for each kind."""

from __future__ import annotations

import os
import signal

import pytest
from changes import Changes
from harness import Job, wait_for

from elastic_launch.observe.ledger import PARTS

pytestmark = pytest.mark.slow

CLOSE = 1.0
"""Seconds by which they may differ: a step's own time, and what it takes to notice an end."""


def pid(changes: Changes, rank: int) -> int:
    return next(int(event["pid"]) for event in changes.job.events("worker_started") if event["rank"] == rank)


@pytest.mark.parametrize("kind", ["crash", "hang", "node loss", "membership", "preemption"])
def test_the_parts_of_an_incident_are_the_time_without_a_step(job: Job, kind: str) -> None:
    changes = Changes(job, live=True)
    host = changes.node("a", "--nproc", "2" if kind in ("crash", "hang") else "1", "--hang-timeout", "5")
    if kind in ("node loss", "preemption"):
        guest = changes.node("b")
    first = changes.trains(1 if kind == "membership" else 2, steps=8)
    match kind:
        case "crash":
            os.kill(pid(changes, 1), signal.SIGKILL)
        case "hang":
            os.kill(pid(changes, 1), signal.SIGSTOP)
        case "node loss":
            guest.kill()
        case "membership":
            changes.node("b")
        case "preemption":
            guest.signal(signal.SIGTERM)
    changes.trains(1 if kind in ("node loss", "preemption") else 2, after=first, steps=3)
    wait_for("the incident's line", lambda: f"incident {first}: {kind}" in host.output, 30)
    changes.finish(host)
    before, after = ([x["clock"] for x in changes.steps() if (x["round"] > first) == later] for later in (False, True))
    still = min(after) - max(before)
    incident = next(each for each in changes.ledger()["incidents"] if each["round"] == first)
    assert incident["kind"] == kind, incident
    assert incident["still_s"] == pytest.approx(sum(incident[part] or 0.0 for part in PARTS), abs=1e-4)
    assert incident["still_s"] == pytest.approx(still, abs=CLOSE), incident
    assert kind != "hang" or still > 3, "it takes a while to find"
