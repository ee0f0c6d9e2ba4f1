"""A rank that is stopped as it enters the next round is found: real trainings in exact mode, one hash."""

from __future__ import annotations

import os
import re
import signal

import pytest
from changes import Changes, pids
from harness import SCRIPTS, Job, wait_for

pytestmark = pytest.mark.slow

FROZEN = str(SCRIPTS / "frozen.py")


def frozen(job: Job, where: str, who: str, *options: str) -> Changes:
    """A training of which a process is stopped in round 2."""
    changes = Changes(job, *options, live=True, script=FROZEN)
    changes.command[1:1] = [where, who]
    return changes


@pytest.mark.parametrize(
    "where", ["join", *(pytest.param(x, marks=pytest.mark.soak) for x in ("receive", "place", "restore"))]
)
def test_a_survivor_that_is_stopped_as_it_enters_a_round_is_killed(job: Job, undisturbed: str, where: str) -> None:
    changes = frozen(job, where, "survivor")
    agent = changes.alone("--nproc", "3")
    changes.trains(3, steps=5)
    first = pids(job, 1)
    os.kill(first[2], signal.SIGKILL)
    (event,) = wait_for("a verdict", lambda: job.events("hang_found"), 60)
    assert (event["round"], event["ranks"]) == (2, [1]), agent.output
    # The part named is that of the rank that came last; the others may wait for the one that restores by then.
    doing = "(restoring of its state|forming of the round)" if where == "restore" else "forming of the round"
    assert re.search(f": hangs in the {doing} on host ", event["cause"])
    assert event["places"][0]["state"] == "stopped"
    last = changes.trains(3, after=2)
    result = changes.finish(agent)
    assert changes.done_again() == 0
    assert pids(job, last)[0] == first[0], "it keeps its process"
    assert first[1] not in pids(job, last).values()
    assert [event["kind"] for event in job.events("restart_charged")] == ["crash", "hang"]
    assert result["hash"] == undisturbed


@pytest.mark.parametrize("where", ["restore", pytest.param("join", marks=pytest.mark.soak)])
@pytest.mark.parametrize("starts", ["with the round", pytest.param("ahead of it", marks=pytest.mark.soak)])
def test_a_worker_ahead_that_is_stopped_as_it_enters_a_round_is_killed(
    job: Job, undisturbed: str, where: str, starts: str
) -> None:
    ahead = starts == "ahead of it"
    changes = frozen(job, where, "new", "--start-time", "0.5")
    agent = changes.alone("--nproc", "3", "--rdzv-conf", f"start_wait={0 if ahead else 100},resize_delay=0.1")
    changes.trains(3, steps=5)
    first = pids(job, 1)
    os.kill(first[2], signal.SIGKILL)
    (event,) = wait_for("a verdict", lambda: job.events("hang_found"), 60)
    assert event["places"][0]["state"] == "stopped", agent.output
    assert event["ranks"] == [2]
    last = changes.trains(3, after=event["round"])
    result = changes.finish(agent)
    assert changes.done_again() == 0
    assert [pids(job, last)[rank] for rank in (0, 1)] == [first[0], first[1]]
    assert result["hash"] == undisturbed


def test_a_worker_ahead_that_takes_long_between_its_session_and_its_steps_is_waited_for(
    job: Job, undisturbed: str
) -> None:
    changes = Changes(job, "--later-time", "13", live=True)
    agent = changes.alone("--nproc", "2", "--rdzv-conf", "start_wait=100")
    changes.trains(2, steps=5)
    os.kill(pids(job, 1)[1], signal.SIGKILL)
    changes.trains(2, after=1)
    result = changes.finish(agent)
    assert changes.kinds() == [("broken", 1, "crash")]
    assert job.events("hang_found") == []
    assert pids(job, 2)[0] == pids(job, 1)[0]
    assert result["hash"] == undisturbed
