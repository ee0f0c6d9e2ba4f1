"""Processes beside the training, and programs that a worker starts, through kills, joins and resumes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from changes import Changes, pids
from harness import Job, alive, asked, free_port, run_script, wait_for

EXAMPLES = Path(__file__).parents[2] / "examples"

END = ["--wait-for-children", "0"]
"""The agent itself does not wait for what is left."""


def beside(job: Job, number: int) -> dict[int, int]:
    """The background process of each of a round's workers, by the worker's pid."""

    def probe() -> dict[int, int]:
        found = {x["pid"]: x["beside"] for x in job.noted("places.jsonl", number=number)}
        return found if len(found) == len(pids(job, number)) else {}

    return wait_for(f"the workers of round {number}", probe)


def waited_for(job: Job) -> set[int]:
    """The workers whose background processes have ended by themselves."""
    return {int(path.stem) for path in job.work.glob("*.waited")}


def test_the_process_of_a_killed_worker_ends_and_that_of_a_kept_one_stays(job: Job, undisturbed: str) -> None:
    changes = Changes(job, "--beside", live=True)
    agent = changes.alone("--nproc", "2", *END)
    changes.trains(2, steps=5)
    before, killed = beside(job, 1), pids(job, 1)[1]
    os.kill(killed, signal.SIGKILL)
    number = changes.trains(2, after=1, steps=2)
    after, kept = beside(job, number), pids(job, number)[0]
    assert not alive(before[killed])
    assert after[kept] == before[kept]
    assert alive(after[kept])
    result = changes.finish(agent)
    assert waited_for(job) == {*after}
    assert agent.output.count("the session's end waits for background process") == 2
    assert "left behind" not in agent.output
    assert (result["hash"], result["restarts"]) == (undisturbed, 1)


@pytest.mark.slow
def test_a_join_keeps_processes_and_those_of_a_node_that_leaves_end(job: Job, undisturbed: str) -> None:
    changes = Changes(job, "--beside", live=True, step_time=0.2)
    a = changes.node("a", *END)
    first = changes.trains(1, steps=3)
    b = changes.node("b", *END)
    joined = changes.trains(2, after=first, steps=3)
    of_a, of_both = beside(job, first), beside(job, joined)
    assert of_a.items() < of_both.items()
    b.signal(signal.SIGTERM)
    left = changes.trains(1, after=joined, steps=3)
    assert b.wait() == 143
    assert [alive(process) for process in {*of_both.values()} - {*of_a.values()}] == [False]
    assert beside(job, left) == of_a
    result = changes.finish(a)
    assert waited_for(job) == {*of_a}
    assert result["hash"] == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("live", [True, False], ids=["live", "restarts"])
def test_a_stopped_training_ends_its_processes_and_starts_others_when_it_resumes(
    job: Job, undisturbed: str, live: bool
) -> None:
    changes = Changes(job, "--beside", "--checkpoint", str(job.directory / "checkpoints"), live=live)
    agent = changes.alone("--nproc", "2", *END)
    changes.trains(2, steps=5)
    before = beside(job, 1)
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 143
    assert not [process for process in before.values() if alive(process)]
    assert not waited_for(job)
    again = changes.alone("--nproc", "1", *END, name="again")
    result = changes.finish(again)
    assert len(waited_for(job) - {*before}) == 1
    assert result["resumed"] >= 5
    assert result["hash"] == undisturbed


UPLOADS = """
import subprocess
import torch
import elastic_launch as el

with el.session() as run:
    model = torch.nn.Linear(4, 1)
    loader = el.ElasticLoader(torch.ones(64, 4), el.GlobalBatch(8, micro=2))
    for step in run.steps(loader, model, torch.optim.SGD(model.parameters(), lr=0.01), until="2ba"):
        for x in step:
            step.backward(model(x).mean())
        step.update()
    if run.rank == 0:
        run.background(subprocess.Popen("trap 'touch told; exit' TERM; sleep 1000 & echo $! > pid; wait", shell=True))
"""


def test_a_stop_ends_what_a_worker_waits_for_at_its_end(job: Job) -> None:
    """At once: not after the time for a drain."""
    (job.work / "uploads.py").write_text(UPLOADS)
    command = [str(job.work / "uploads.py")]
    agent = job.launch(
        "--standalone", "--nproc", "2", "--shutdown-timeout", "1000", *END, command=command, cwd=job.work
    )
    agent.says("the session's end waits", 60)
    wait_for("the upload", (job.work / "pid").exists)
    agent.signal(signal.SIGTERM)
    assert agent.wait(60) == 143, agent.output
    assert (job.work / "told").exists()
    assert not alive(int((job.work / "pid").read_text()))
    assert "the run is stopped before the end of background process" in agent.output
    assert not job.events("restart_charged")
    assert not job.events("worker_failed")
    assert "node loss" not in [event["kind"] for event in job.events("round_broken")]


def test_a_users_stop_during_a_drain_ends_what_a_worker_waits_for(job: Job) -> None:
    """A resize that is on its way does not end the wait, and has no time limit."""
    (job.work / "uploads.py").write_text(UPLOADS)
    command = [str(job.work / "uploads.py")]
    a = job.node("a", *END, nnodes="1:2", command=command, cwd=job.work)
    a.says("the session's end waits", 60)
    wait_for("the upload", (job.work / "pid").exists)
    job.node("b", *END, nnodes="1:2", command=command, cwd=job.work)
    a.says("drains: resize", 60)
    stop = [sys.executable, "-m", "elastic_launch.cli.elasticctl", "drain", "--log-dir", str(job.logs)]
    stopped = subprocess.run(stop, capture_output=True, text=True, timeout=60)
    assert a.wait(60) == 143, a.output
    assert (job.work / "told").exists(), stopped.stdout + stopped.stderr
    assert not alive(int((job.work / "pid").read_text()))


PROGRAMS = """
import json, os, subprocess, sys
from pathlib import Path
import torch
from torch import nn
import elastic_launch as el

os.chdir(Path(__file__).parent)

def evaluate(name):
    with el.session() as run:
        run.background(subprocess.Popen(["touch", f"{name}.touched"]))
        Path(f"{name}-{run.rank}").write_text(f"{run.rank} of {run.world_size} {os.environ.get('MINE')}")

if sys.argv[1:]:
    evaluate(sys.argv[1])
    sys.exit()

with el.session() as run:
    model = nn.Linear(4, 1)
    loader = el.ElasticLoader(torch.ones(64, 4), el.GlobalBatch(8, micro=2))
    for step in run.steps(loader, model, torch.optim.SGD(model.parameters(), lr=0.01), until=8):
        for x in step:
            step.backward(model(x).mean())
        step.update()
        if step.number == 4 and run.rank == 1:
            programs = {
                "alone": [sys.executable],
                "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
                "elastic": ["-m", "elastic_launch", "--standalone", "--nproc", "2", "--log-dir", "inner"],
            }
            codes = []
            for name, command in programs.items():
                command = command if name == "alone" else [sys.executable, *command]
                with run.expect(name, "2min"):
                    command = [*command, __file__, name]
                    codes.append(subprocess.run(command, env=el.clean_environment()).returncode)
            Path("codes").write_text(json.dumps(codes))
"""


@pytest.mark.slow
def test_a_worker_starts_programs_and_launchers_that_do_not_disturb_the_training(job: Job, tmp_path: Path) -> None:
    """With variables of the launch, which would have the launchers wait for a second node."""
    script = tmp_path / "programs.py"
    script.write_text(PROGRAMS)
    env = {"PET_NNODES": "2", "PET_MAX_RESTARTS": "1", "PET_RDZV_ID": "run", "MINE": "stays"}
    env |= {"ELASTIC_LAUNCH_FAULTS": "[]", "TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
    agent = job.launch("--nnodes", "1", "--nproc", "2", command=[str(script)], env=env)
    assert agent.wait(200) == 0, agent.output
    assert (tmp_path / "codes").read_text() == "[0, 0, 0]", agent.output
    found = {path.name: path.read_text() for path in tmp_path.glob("*-[01]")}
    several = {f"{name}-{rank}": f"{rank} of 2 stays" for name in ("torchrun", "elastic") for rank in (0, 1)}
    assert found == {"alone-0": "0 of 1 stays", **several}
    assert len(job.events("round_formed")) == 1
    assert not job.events("restart_charged")


@pytest.mark.slow
def test_the_example_evaluates_and_serves_although_its_first_worker_is_killed(job: Job) -> None:
    results, port = job.directory / "results", free_port()
    command = [str(EXAMPLES / "background" / "train.py"), "--results", str(results), "--port", str(port)]
    alone = run_script(*command, "--checkpoint", str(job.directory / "alone"))
    plan = {"ELASTIC_LAUNCH_FAULTS": '[{"rank": 0, "step": 60, "do": "kill"}]'}
    command = [*command, "--checkpoint", str(job.directory / "checkpoints")]
    last = results / "step-138.json"
    last.unlink()
    agent = job.launch("--standalone", "--nproc", "2", *END, command=command, env=plan)
    assert agent.wait(100) == 0, agent.output
    assert json.loads(last.read_text())["world_size"] == 1
    assert json.loads(last.read_text())["accuracy"] > 0.9
    found = [set(re.findall("^weights ([0-9a-f]+)$", output, re.MULTILINE)) for output in (alone, agent.output)]
    assert found[0] == found[1] != set()
    assert "left behind" not in agent.output
    with pytest.raises(OSError, match="refused"):
        asked(f"http://127.0.0.1:{port}/")
