"""A run that lost too many nodes waits for others; a spare takes a place without a wait."""

from __future__ import annotations

import pytest
from changes import Changes
from harness import Job, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PRELOADED = "torch,torch._dynamo,elastic_launch.training.trainer,elastic_launch.training.dist,this"
"""What the script imports, and a module that prints something when it is imported."""

PARKED = "parked with 1 node, 2 needed"


def test_below_min_the_run_waits_for_a_replacement_of_the_same_name_or_another(job: Job, undisturbed: str) -> None:
    changes = Changes(job)
    host, lost = changes.node("a", nnodes="2:2"), changes.node("b", nnodes="2:2")
    last = changes.trains(2)
    for name in ("b", "c"):
        parked = host.output.count(PARKED)  # it may have waited for the first one, too
        lost.kill()
        host.says(PARKED, times=parked + 1)
        lost = changes.node(name, nnodes="2:2")
        last = changes.trains(2, after=last)
    result = changes.finish(host, lost)
    formed = job.events("round_formed")
    assert [sorted(round["nodes"]) for round in formed] == [["a", "b"], ["a", "b"], ["a", "c"]]
    assert changes.kinds() == [("broken", 1, "node loss"), ("broken", 2, "node loss")]
    for number in (1, 2):
        changes.assert_no_more_lost_than_an_interval(number, "a")
    assert result["restarts"] == 0
    assert result["hash"] == undisturbed


def test_a_spare_that_has_imported_takes_a_lost_nodes_place_at_once(job: Job, undisturbed: str) -> None:
    changes = Changes(job, step_time=0.5)  # it lasts until the spare has come
    host, lost = changes.node("a", nnodes="2:2"), changes.node("b", nnodes="2:2")
    changes.trains(2)
    spare = changes.node("c", "--preload", PRELOADED, nnodes="2:2")
    host.says("round is full, 1 spare")
    # The last thing that its warm server imports prints something.
    wait_for("the spare's imports", lambda: any("Beautiful" in x.read_text() for x in job.logged("imports-c.log")), 100)
    parked = host.output.count(PARKED)
    lost.kill()
    changes.trains(2, after=1)
    result = changes.finish(host, spare)
    assert sorted(job.events("round_formed")[-1]["nodes"]) == ["a", "c"]
    assert host.output.count(PARKED) == parked
    assert "import for themselves" not in spare.output
    changes.assert_no_more_lost_than_an_interval(1, "a")
    assert result["hash"] == undisturbed
