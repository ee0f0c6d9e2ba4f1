"""A script that misuses the library ends the run at once, on all nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import SCRIPTS, Job

CHANGED = str(SCRIPTS / "guards" / "changed.py")

REFUSED = """
import os, time
from elastic_launch.errors import UsageError
class Refused(UsageError):
    def __init__(self, *words): self.words = words
    def __str__(self): return "\\n  ".join(self.words)
if os.environ["RANK"] == "2":
    raise Refused("micro=0 is no size", "Give 1 or more.")
time.sleep(100)
"""

NOT_FINITE = """
import torch
from torch import nn
import elastic_launch as el

with el.session() as run:
    model = nn.Linear(4, 1)
    loader = el.ElasticLoader(torch.ones(64, 4), el.GlobalBatch(8, micro=2))
    for step in run.steps(loader, model, torch.optim.SGD(model.parameters(), lr=0.01), until=8, exact=True):
        for x in step:
            step.backward(model(x).mean() * (float("nan") if step.number == 6 else 1.0))
        step.update()
"""


CHILDREN = """
import multiprocessing, os, subprocess, sys
from pathlib import Path
import torch
from torch import nn
import elastic_launch as el

os.chdir(Path(__file__).parent)

def evaluate(name):
    with el.session() as run:
        Path(name).write_text(f"{run.rank} of {run.world_size}")

if sys.argv[1:]:
    evaluate(sys.argv[1])
    sys.exit()

def forked():
    pid = os.fork()
    if pid == 0:
        try:
            evaluate("forked")
        except el.UsageError:
            os._exit(3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

with el.session() as run:
    model = nn.Linear(4, 1)
    loader = el.ElasticLoader(torch.ones(64, 4), el.GlobalBatch(8, micro=2))
    for step in run.steps(loader, model, torch.optim.SGD(model.parameters(), lr=0.01), until=8):
        for x in step:
            step.backward(model(x).mean())
        step.update()
        if step.number == 4 and run.rank == 1:
            program = [sys.executable, __file__]
            spawned = multiprocessing.get_context("spawn").Process(target=print)  # runs this script, too
            spawned.start()
            spawned.join()
            codes = [
                subprocess.run([*program, "alone"], env=el.clean_environment()).returncode,
                subprocess.run([*program, "inherited"], start_new_session=True).returncode,
                forked(),
                spawned.exitcode,
            ]
            Path("codes").write_text(repr(codes))
"""


@pytest.mark.parametrize(
    "flags", [pytest.param([], id="forked"), pytest.param(["--no-warm"], id="executed", marks=pytest.mark.slow)]
)
def test_a_session_in_a_child_of_a_worker_is_refused_and_disturbs_nothing(
    job: Job, tmp_path: Path, flags: list[str]
) -> None:
    script = tmp_path / "children.py"
    script.write_text(CHILDREN)
    agent = job.launch("--standalone", "--nproc", "2", "--hang-timeout", "off", *flags, command=[str(script)])
    assert agent.wait(100) == 0, agent.output
    assert (tmp_path / "codes").read_text() == "[0, 1, 3, 1]"
    assert (tmp_path / "alone").read_text() == "0 of 1"
    # Of the program and of the process that was spawned; the forked one catches it.
    assert agent.output.count("has the environment of rank 1, which belongs to the running process ") == 2
    assert len(job.events("round_formed")) == 1
    assert not job.events("restart_charged")


LEFT = """
import os, sys
import torch
from torch import nn
import elastic_launch as el

with el.session() as run:
    model = nn.Linear(4, 1)
    loader = el.ElasticLoader(torch.ones(640, 4), el.GlobalBatch(8, micro=2))
    checkpoint = el.Checkpoint(sys.argv[1], every=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in run.steps(loader, model, optimizer, until="30ba", checkpoint=checkpoint):
        for x in step:
            step.backward(model(x).mean())
        step.update()
        if step.number == 12 and sys.argv[2] == "exits":
            sys.exit()
        if step.number == 12 and run.rank == 0:
            if os.fork() == 0:
                sys.exit()
            os.wait()
"""


@pytest.mark.parametrize(("how", "last"), [("exits", 10), ("forks", 30)])
def test_an_exit_within_the_loop_costs_no_checkpoint_that_was_due(
    job: Job, tmp_path: Path, how: str, last: int
) -> None:
    """Neither that of all workers, nor that of a process that one of them has forked."""
    script, directory = tmp_path / "left.py", tmp_path / "saved"
    script.write_text(LEFT)
    agent = job.launch("--standalone", "--nproc", "2", command=[str(script), str(directory), how])
    assert agent.wait(100) == 0, agent.output
    assert len(job.events("round_formed")) == 1
    found = [int(path.name.split(".")[0].removeprefix("step-")) for path in directory.glob("step-*")]
    assert max(found, default=0) >= last


@pytest.mark.parametrize("warm", [False, True], ids=["executed", "forked"])
def test_misuse_on_one_node_ends_all_nodes(job: Job, tmp_path: Path, warm: bool) -> None:
    """Also with an exception class derived from the library's."""
    script = tmp_path / "refused.py"
    script.write_text(REFUSED + ("import torch\n" if warm else ""))
    flags = [] if warm else ["--no-warm"]
    nodes = [job.node(name, *flags, nnodes="2", nproc=2, command=[str(script)]) for name in "ab"]
    assert [node.wait(60) for node in nodes] == [93, 93], nodes[0].output
    for node in nodes:
        cause = node.output.split("root cause")[-1]
        assert "rank 2 on node" in cause
        assert "Refused: micro=0 is no size" in cause
        assert "Give 1 or more." in cause
    assert not job.events("restart_charged")
    assert len(job.events("round_formed")) == 1
    assert job.event("round_broken")["kind"] == "fatal"


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


@pytest.mark.slow
def test_a_step_that_fails_in_the_same_way_again_ends_the_run(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(NOT_FINITE)
    agent = job.launch("--standalone", "--nproc", "2", "--max-restarts", "9", command=[str(script)])
    assert agent.wait(120) == 93, agent.output
    assert "a restart would fail again (the same step has failed in the same way twice)" in agent.output
    cause = agent.output.split("root cause")[-1]
    assert "NonFiniteLossError: The loss is nan in step 6, micro-batch 0, on rank 0." in cause
    assert "The micro-batch has the dataset's items" in cause
    assert len(job.events("restart_charged")) == 1
