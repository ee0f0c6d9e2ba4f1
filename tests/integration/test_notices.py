"""Notices on this host make real agents leave: a file, a signal, the end of a Slurm job."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import SCRIPTS, Job, round_of, tree, wait_for

DIGITS = str(Path(__file__).parents[2] / "examples" / "digits" / "train.py")
SIGNALLED = str(SCRIPTS / "signalled.py")


def test_a_file_makes_a_node_leave_and_the_other_continues(job: Job, tmp_path: Path) -> None:
    job.node("a", "--notice", "none", nnodes="1:2").says("hosts")
    b = job.node("b", "--notice", f"file:{tmp_path}/leave", nnodes="1:2")
    number = round_of(job.world(2)[0])
    (tmp_path / "leave.new").write_text("20")
    (tmp_path / "leave.new").rename(tmp_path / "leave")
    assert b.wait() == 143
    job.world(1, after=number)
    job.finish()
    assert job.agents[0].wait() == 0
    (notice,) = job.events("notice_received")
    assert (notice["source"], notice["kind"], notice["seconds"], notice["leaves"]) == ("file", "request", 20.0, True)
    assert f"file notice: {tmp_path}/leave is there, in 20 s; this node leaves the run" in b.output
    assert f"exit code 143: stopped by file notice: {tmp_path}/leave is there" in b.output
    assert job.events("restart_charged") == []
    assert [x["kind"] for x in job.events("round_broken") if x["round"] == number] == ["preemption"]


def test_a_signal_that_is_a_notice_does_not_reach_the_workers_and_leaves_them_what_it_leaves(job: Job) -> None:
    # A worker that ignores SIGTERM is killed when the notice's seconds are over, not after --shutdown-timeout.
    agent = job.launch("--notice", "signal:USR2@3", "--shutdown-timeout", "300", script_flags=["--ignore-term"])
    job.world(1)
    agent.signal(signal.SIGUSR2)
    assert agent.wait() == 143
    assert "stopped by SIGUSR2" in agent.output
    assert "SIGUSR2 is not forwarded" not in agent.output


@pytest.mark.slow
@pytest.mark.parametrize("executed", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_signal_to_each_process_of_a_job_is_a_notice_and_ends_none(job: Job, executed: bool) -> None:
    """Slurm sends signals in this way."""
    flags = ("--notice", "signal:USR1", *(("--no-warm",) if executed else ()))
    agent = job.node("a", *flags, nproc=2, executed=executed)
    number = round_of(job.world(2)[0])
    for pid in tree(agent.process.pid):
        with contextlib.suppress(ProcessLookupError):  # the drain that the first signal begins may be over
            os.kill(pid, signal.SIGUSR1)
    assert agent.wait() == 143
    assert "stopped by SIGUSR1" in agent.output
    assert "guard" not in agent.output
    assert "ended with signal" not in agent.output
    assert [x["kind"] for x in job.events("round_broken") if x["round"] == number] == ["preemption"]


def test_within_slurm_its_end_is_watched_and_its_signal_still_reaches_the_workers(job: Job) -> None:
    end = {"SLURM_JOB_ID": "17", "SLURM_JOB_END_TIME": str(int(time.time()) + 3600)}
    command = [SIGNALLED, str(job.work)]
    agent = job.launch(command=command, env=end)
    wait_for("the worker's handlers", lambda: (job.work / "begun-0").exists())
    agent.signal(signal.SIGUSR1)
    wait_for("the signal", lambda: (job.work / "got-0").exists())
    job.finish()
    assert agent.wait() == 0
    assert "notices from Slurm: the end of job 17, found by --notice auto" in agent.output


@pytest.mark.slow
def test_a_slurm_job_that_is_about_to_end_is_left(job: Job) -> None:
    end = {"SLURM_JOB_ID": "17", "SLURM_JOB_END_TIME": str(int(time.time()) + 62)}
    agent = job.launch(env=end)
    assert agent.wait() == 143
    assert "stopped by Slurm notice: the end of job 17" in agent.output


def _snapshot(job: Job) -> bool:
    """Whether the agent itself has reported a snapshot in memory to its leader."""
    command = [sys.executable, "-m", "elastic_launch.cli.elasticctl", "status", "--log-dir", str(job.logs), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    return done.returncode == 0 and bool(json.loads(done.stdout)["snapshot"])


@pytest.mark.slow
@pytest.mark.executed
def test_a_node_alone_without_time_for_two_steps_saves_the_snapshot_that_it_has(job: Job, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    command = [DIGITS, "--step-time", "4", "--checkpoint", str(checkpoints), "--every", "100000"]
    agent = job.launch("--notice", f"file:{tmp_path}/leave", command=command)
    wait_for("a snapshot", lambda: _snapshot(job), 90)
    assert not list(checkpoints.glob("step-*"))
    (tmp_path / "leave.new").write_text("9")
    (tmp_path / "leave.new").rename(tmp_path / "leave")
    assert agent.wait() == 143
    assert "no time to stop after a step: 7.0 s are left" in agent.output
    assert job.events("round_drained") == []
    assert list(checkpoints.glob("step-*")), agent.output
