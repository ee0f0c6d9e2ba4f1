"""A run that resumes with other options than before: it says so once, and kills change neither options nor weights."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from harness import SCRIPTS, Job, run_script

from elastic_launch.faults import FaultPlan

SCRIPT = str(SCRIPTS / "resuming.py")
OTHERS = ("--lr", "0.02", "--momentum", "0.5", "--t-max", "20")
SAYS = "replaces options that the script gives"
REPLACED = "options that the script gives replace those of the checkpoint of step 4"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    run_script(SCRIPT, str(directory), "--until", "4ba")
    return directory


def result_in(output: str) -> str:
    (result,) = re.findall(r"options (.*)", output.replace("options that", ""))
    return str(result)


@pytest.mark.parametrize(
    ("workers", "flags"),
    [
        (2, ()),
        pytest.param(2, ("--no-live",), marks=pytest.mark.slow),
        pytest.param(1, ("--no-live",), marks=pytest.mark.slow),
        pytest.param(2, ("--no-live", "--no-snapshots"), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("override", [(), ("--override", "lr", "T_max")])
def test_it_is_said_once_and_the_same_options_are_used_after_kills(
    job: Job, saved: Path, workers: int, flags: tuple[str, ...], override: tuple[str, ...]
) -> None:
    shutil.copytree(saved, job.work / "alone")
    shutil.copytree(saved, job.work / "killed")
    undisturbed = run_script(SCRIPT, str(job.work / "alone"), *OTHERS, *override)
    rates = "0.02 0.9 20 0.006910" if override else "0.1 0.9 8 0.050000"
    assert result_in(undisturbed).startswith(rates)
    plan = FaultPlan.fail_at(workers - 1, 5) + FaultPlan.fail_at(0, 9, round=2)
    command = [SCRIPT, str(job.work / "killed"), *OTHERS, *override]
    agent = job.launch("--standalone", "--nproc", str(workers), *flags, command=command, env=plan.environment())
    assert agent.wait(100) == 0, agent.output
    assert agent.output.count("planned fault") == 2
    assert result_in(agent.output) == result_in(undisturbed)
    # Without snapshots each restart resumes from that checkpoint again.
    assert agent.output.count(SAYS) == agent.output.count(" (given: 0.5)") == 1
    assert agent.output.count(REPLACED) == bool(override)
    again = run_script(SCRIPT, str(job.work / "killed"), *OTHERS, "--until", "13ba", *override)
    assert "0.02 0.9 20" in again if override else "0.1 0.9 8" in again


def test_ranks_that_give_different_options_are_refused(job: Job, saved: Path) -> None:
    shutil.copytree(saved, job.work / "saved")
    command = [SCRIPT, str(job.work / "saved"), *OTHERS, "--by-rank", "--override", "lr"]
    agent = job.launch("--standalone", "--nproc", "2", command=command)
    assert agent.wait(100) == 93, agent.output
    assert "rank 1 has optimizer 0/lr 0.04, rank 0 has 0.02" in agent.output
