"""A script that uses the library in a way that cannot work ends the run at once, on all nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import SCRIPTS, Job

CHANGED = str(SCRIPTS / "guards" / "changed.py")

REFUSED = """
import os, time
from elastic_launch.errors import UsageError
class Refused(UsageError): ...
if os.environ["RANK"] == "2":
    raise {error}("micro=0 is no size", "Give 1 or more.")
time.sleep(100)
"""


@pytest.mark.parametrize(("error", "warm"), [("UsageError", False), ("Refused", True)], ids=["executed", "forked"])
def test_misuse_on_one_node_ends_all_nodes(job: Job, tmp_path: Path, error: str, warm: bool) -> None:
    """A class that is derived from ours is known where the worker was forked."""
    script = tmp_path / "refused.py"
    script.write_text(REFUSED.format(error=error) + ("import torch\n" if warm else ""))
    flags = [] if warm else ["--no-warm"]
    nodes = [job.node(name, *flags, nnodes="2", nproc=2, command=[str(script)]) for name in "ab"]
    assert [node.wait(60) for node in nodes] == [93, 93], nodes[0].output
    for node in nodes:
        cause = node.output.split("root cause")[-1]
        assert "rank 2 on node" in cause
        assert f"{error}: micro=0 is no size" in cause
        assert "Give 1 or more." in cause
    assert not job.events("restart_charged")
    assert len(job.events("round_formed")) == 1
    assert job.events("round_broken")[0]["kind"] == "fatal"


def test_another_optimizer_on_resume_ends_the_run_at_once(job: Job, tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    first = job.launch("--standalone", "--nproc", "2", command=[CHANGED, saved, "8", "Adam"])
    assert first.wait(60) == 0, first.output
    agent = job.launch("--standalone", "--nproc", "2", name="changed", command=[CHANGED, saved, "8", "AdamW"])
    assert agent.wait(60) == 93, agent.output
    cause = agent.output.split("root cause")[-1]
    assert "UsageError: The checkpoint of step 8 in " in cause
    assert " does not fit this script's optimizer: it was saved by Adam, and here is AdamW." in cause
    assert "Resume with the optimizer that it was made with, or start in another directory" in cause
    assert not job.events("restart_charged")
