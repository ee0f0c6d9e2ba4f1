"""Runs that must not write checkpoints while others do: two in one directory, and one whose node is cut off."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from harness import SCRIPTS, Agent, Job, alive, tree, wait_for

DIGITS = str(Path(__file__).parents[2] / "examples" / "digits" / "train.py")


def digits(job: Job, directory: str, *options: str) -> list[str]:
    """A command that is slow until :func:`hurry`."""
    paced = [str(SCRIPTS / "paced.py"), str(job.directory / "hurry"), DIGITS, "--epochs", "8", "--step-time", "0.5"]
    result = ["--result", str(job.directory / "result.json")]
    return [*paced, "--checkpoint", directory, "--every", "4", *result, *options]


def hurry(job: Job) -> None:
    (job.directory / "hurry").touch()


def saved(directory: Path) -> list[str]:
    return [path.name for path in directory.glob("step-*")]


def result_of(job: Job) -> dict[str, Any]:
    return dict(json.loads((job.directory / "result.json").read_text()))


def launch(job: Job, name: str) -> Agent:
    flags = ["--standalone", "--nproc", "1", "--max-restarts", "0", "--rdzv-id", "run"]
    return job.launch(*flags, command=digits(job, str(job.directory / "checkpoints")), name=name)


@pytest.mark.slow
def test_of_two_runs_that_save_to_one_directory_the_later_one_does(job: Job) -> None:
    directory = job.directory / "checkpoints"
    first = launch(job, "first")
    wait_for("a checkpoint", lambda: saved(directory), 60)
    second = launch(job, "second")
    first.says("Two runs write to one directory", 60)
    assert "Tried again" not in first.output
    hurry(job)
    assert [first.wait(100), second.wait(100)] == [93, 0], first.output
    assert f"{directory} was taken since by run 'run' on" in first.output
    end = first.output.partition("exit code 93: ")[2]
    assert f"The last checkpoint, of step 184, could not be saved in {directory}: Two runs write to one" in end
    assert "Two runs" not in second.output
    assert "is not saved" not in second.output


@pytest.mark.slow
def test_a_checkpoint_saved_before_another_run_took_the_directory_is_not_reported_as_saved(job: Job) -> None:
    directory = job.directory / "checkpoints"
    first = launch(job, "first")
    wait_for("a checkpoint", lambda: saved(directory), 60)
    second = launch(job, "second")
    first.says("Two runs write to one directory", 60)
    first.signal(signal.SIGTERM)
    assert first.wait(100) == 143, first.output
    assert "was the last to be saved in" in first.output
    assert " is saved in " not in first.output
    second.signal(signal.SIGTERM)
    assert second.wait(100) == 143, second.output
    assert " is saved in " in second.output


@pytest.mark.slow
def test_a_run_that_follows_another_in_its_directory_resumes_and_saves(job: Job) -> None:
    directory = job.directory / "checkpoints"
    first = launch(job, "first")
    wait_for("a checkpoint", lambda: saved(directory), 60)
    first.kill()
    hurry(job)
    second = launch(job, "second")
    assert second.wait(100) == 0, second.output
    assert result_of(job)["resumed_step"] >= 4
    assert "Two runs" not in second.output
    assert f"step-{result_of(job)['steps']}" in max(saved(directory), key=lambda name: int(name.split(".")[0][5:]))


@pytest.mark.slow
def test_a_node_that_joins_saves_to_its_own_disk_where_an_ended_run_had_saved(job: Job) -> None:
    disks = [job.directory / name for name in "ab"]
    for disk in disks:
        (disk / "checkpoints").mkdir(parents=True)
        mark = {"format": "elastic-launch owner", "run": "ended", "token": "0", "host": "x", "epoch": 0}
        (disk / "checkpoints" / "owner.json").write_text(json.dumps(mark))
    command = digits(job, "checkpoints")
    first = job.node("a", command=command, cwd=disks[0])
    wait_for("a checkpoint of the first node", lambda: saved(disks[0] / "checkpoints"), 60)
    second = job.node("b", command=command, cwd=disks[1])
    wait_for("a checkpoint of the second node", lambda: saved(disks[1] / "checkpoints"), 60)
    hurry(job)
    assert [first.wait(100), second.wait(100)] == [0, 0], first.output + second.output
    assert "Two runs" not in first.output + second.output


def _copier(agent: Agent) -> int:
    """Pid of an agent's copying process; 0 if there is none."""
    for pid in tree(agent.process.pid):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"elastic_agents.snapshots.copying" in words:
            return pid
    return 0


def _stopped(agent: Agent, directory: Path) -> int:
    """Stop a copier that has not committed yet, and return its pid; 0 if there is none."""
    before, pid = saved(directory), _copier(agent)
    if not pid:
        return 0
    try:
        os.kill(pid, signal.SIGSTOP)
    except ProcessLookupError:
        return 0
    if alive(pid) and saved(directory) == before:
        return pid
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    return 0


@pytest.mark.slow
def test_a_node_that_does_not_reach_its_leader_commits_nothing_until_it_does(job: Job) -> None:
    """The others may have continued without it: its commits would compete with theirs."""
    disks = [job.directory / name for name in "ab"]
    for disk in disks:
        disk.mkdir()
    command = digits(job, "checkpoints")
    host = job.node("a", "--node-rank", "0", nnodes="2:2", command=command, cwd=disks[0])
    host.says("hosts the run")
    member = job.node("b", "--node-rank", "1", nnodes="2:2", command=command, cwd=disks[1])
    own = disks[1] / "checkpoints"
    wait_for("a checkpoint of the second node", lambda: saved(own), 60)
    wait_for("the end of its copy", lambda: not _copier(member), 60)
    copying = wait_for("its next copy", lambda: _stopped(member, own), 60)
    frozen = host.freeze()
    wait_for("a cut", lambda: [x for x in job.events("link_changed") if "no sign of the leader" in x["cause"]], 60)
    before = saved(own)
    os.kill(copying, signal.SIGCONT)
    wait_for("the end of the copy", lambda: _copier(member) != copying, 60)
    assert saved(own) == before
    host.thaw(frozen)
    member.says("was not committed: this node is no longer a member of the run")
    wait_for("a checkpoint after that", lambda: set(saved(own)) - set(before), 60)
    hurry(job)
    assert [host.wait(100), member.wait(100)] == [0, 0], member.output
    assert job.events("round_broken") == []
