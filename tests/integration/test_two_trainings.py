"""A script with two trainings: processes that only restore the end of the first one begin the second one alike.

Or with several loops that are one training.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import SCRIPTS, Job, run_script

from elastic_launch.faults import FaultPlan

SCRIPT = str(SCRIPTS / "twice.py")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return weights_in(run_script(SCRIPT, str(tmp_path_factory.mktemp("twice"))))


def weights_in(output: str) -> list[str]:
    return re.findall(r"weights ([0-9a-f]{64})", output)


@pytest.mark.parametrize(
    ("workers", "flags"),
    [
        (2, ()),
        pytest.param(2, ("--no-live",), marks=pytest.mark.slow),
        pytest.param(1, (), marks=pytest.mark.slow),
        pytest.param(1, ("--no-live",), marks=pytest.mark.slow),
    ],
)
def test_kills_in_both_trainings_do_not_change_the_weights(
    job: Job, undisturbed: list[str], workers: int, flags: tuple[str, ...]
) -> None:
    """The first training has 4 steps: step 6 is in the second one."""
    plan = FaultPlan.fail_at(workers - 1, 2) + FaultPlan.fail_at(0, 6, round=2)
    command = [SCRIPT, str(job.work)]
    options = ("--standalone", "--nproc", str(workers), *flags)
    agent = job.launch(*options, command=command, env=plan.environment())
    assert agent.wait(100) == 0, agent.output
    assert agent.output.count("planned fault") == 2
    assert len(undisturbed) == 1
    assert weights_in(agent.output) == undisturbed


def test_the_restored_end_of_a_training_is_enough(undisturbed: list[str], tmp_path: Path) -> None:
    assert weights_in(run_script(SCRIPT, str(tmp_path))) == undisturbed
    for saved in (tmp_path / "second").glob("step-*"):
        saved.rename(tmp_path / saved.name)
    assert weights_in(run_script(SCRIPT, str(tmp_path))) == undisturbed


@pytest.mark.parametrize(
    ("every", "said"),
    [
        (100, "nothing of the script's training 2 is saved, 3 steps lost: no checkpoint was complete"),
        (2, "step 2 of the script's training 2 is saved in {}/second/step-2.*; 1 step since then lost"),
    ],
)
def test_what_is_lost_of_the_second_training_is_not_hidden_by_the_longer_first_one(
    job: Job, every: int, said: str
) -> None:
    command = [str(SCRIPTS / "shorter.py"), str(job.work), str(every)]
    agent = job.launch("--standalone", "--nproc", "2", "--max-restarts", "0", command=command)
    assert agent.wait(100) == 1, agent.output
    assert re.search(rf" {said.format(job.work)}$", agent.output, re.MULTILINE), agent.output


@pytest.mark.parametrize("flags", [(), pytest.param(("--no-live",), marks=pytest.mark.slow)])
def test_a_kill_in_the_second_training_is_an_incident_with_the_steps_lost_in_it(
    job: Job, flags: tuple[str, ...]
) -> None:
    command = [str(SCRIPTS / "shorter.py"), str(job.work), "100", str(job.directory / "killed")]
    agent = job.launch("--standalone", "--nproc", "2", *flags, command=command)
    assert agent.wait(100) == 0, agent.output
    assert agent.output.count("incident 1: crash") == 1, agent.output
    assert "has no Checkpoint" not in agent.output
    observe = [sys.executable, "-m", "elastic_launch.observe", str(job.logs), "--json"]
    ledger = json.loads(subprocess.run(observe, check=True, capture_output=True, text=True, timeout=60).stdout)
    (incident,) = ledger["incidents"]
    assert incident["recovered"]
    begun = [(event["round"], event["training"], event["step"]) for event in job.events("training_begun")]
    resumed = next(step for number, training, step in begun if (number, training) == (2, 1))
    assert begun[:2] == [(1, 0, 0), (1, 1, 0)]
    # The killed worker had done two or three steps of the second training; the first one lost nothing.
    assert 0 <= incident["lost_steps"] <= 3 - resumed
    assert ledger["lost_steps"] == incident["lost_steps"]
    assert ledger["steps"] == 20
    assert 0 < ledger["goodput"] < 1


def test_a_second_training_warns_that_a_fault_may_repeat_a_first_one_without_a_checkpoint(job: Job) -> None:
    command = [str(SCRIPTS / "shorter.py"), str(job.work), "0", str(job.directory / "killed")]
    agent = job.launch("--standalone", "--nproc", "2", command=command)
    assert agent.wait(100) == 0, agent.output
    begun = [(event["round"], event["training"]) for event in job.events("training_begun")]
    assert begun == [(1, 0), (1, 1), (2, 0), (2, 1)]
    said = r"training 2 of this script begins, and an earlier one has no Checkpoint: .* Give each run.steps\(\) and"
    assert len(re.findall(said, agent.output)) == 2, f"rank 0 says it in each round: {agent.output}"


@pytest.mark.parametrize("step", [6, pytest.param(10, marks=pytest.mark.slow)])
def test_a_kill_in_a_later_loop_of_a_training_does_not_look_like_another_run(
    job: Job, tmp_path: Path, step: int
) -> None:
    script = str(SCRIPTS / "epochs.py")
    (alone,) = weights_in(run_script(script, str(tmp_path / "alone")))
    env = FaultPlan.fail_at(1, step).environment()
    agent = job.launch("--standalone", "--nproc", "2", command=[script, str(job.work)], env=env)
    assert agent.wait(100) == 0, agent.output
    assert agent.output.count("planned fault") == 1
    assert weights_in(agent.output) == [alone] * 2
    assert "Two runs" not in agent.output
    begun = {event["training"]: event["continues"] for event in job.events("training_begun")}
    assert begun == {0: None, 1: 0, 2: 1}
    again = job.launch("--standalone", "--nproc", "2", command=[script, str(job.work)])
    assert again.wait(100) == 0, again.output
    assert re.search(r"nothing was left to train: (\d+) steps", again.output)[1] == "12", again.output
