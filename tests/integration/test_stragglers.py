"""A rank that is slower than the others is named, with its node and what it needs longer for."""

from __future__ import annotations

import pytest
from harness import SCRIPTS, Job, wait_for

SCRIPT = str(SCRIPTS / "straggling.py")


@pytest.mark.slow
@pytest.mark.parametrize("phase", [pytest.param("data", marks=pytest.mark.soak), "compute"])
def test_a_slow_rank_is_named_with_its_node_and_phase(job: Job, phase: str) -> None:
    """Of four ranks, two of which have twice as many micro-batches as the others."""
    command = [SCRIPT, str(job.work), "2", phase]
    a = job.node("a", "--rdzv-conf", "is_host=true", "--node-rank", "0", nproc=2, nnodes="2", command=command)
    b = job.node("b", "--rdzv-conf", "is_host=false", nnodes="2", command=command)
    (found,) = wait_for("the straggler", lambda: job.events("straggler_found"), 100)
    assert (found["round"], found["rank"], found["node"], found["phase"]) == (1, 2, "b", phase)
    assert found["ratio"] > 1.5
    a.says("rank 2 on node b is slow: it ")
    job.finish()
    assert (a.wait(60), b.wait(60)) == (0, 0), a.output
