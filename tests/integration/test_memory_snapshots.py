"""A fault costs the steps since the last snapshot in memory: real agents, with the hash of the undisturbed run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from changes import STEPS, Changes, ctl
from harness import SCRIPTS, Job, alive, run_script, wait_for

DIGITS = str(Path(__file__).parents[2] / "examples" / "digits" / "train.py")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the weights after three epochs in one process."""
    result = tmp_path_factory.mktemp("undisturbed") / "result.json"
    run_script(DIGITS, "--exact", "--epochs", "3", "--result", str(result))
    return str(json.loads(result.read_text())["weights_sha256"])


def digits(job: Job, *options: str) -> list[str]:
    """A command that is slow until :func:`hurry`."""
    paced = [str(SCRIPTS / "paced.py"), str(job.directory / "hurry"), DIGITS]
    result = ["--result", str(job.directory / "result.json")]
    return [*paced, "--exact", "--epochs", "3", "--step-time", "0.1", *result, *options]


def status(job: Job) -> dict[str, Any]:
    done = ctl("status", "--json", "--log-dir", str(job.logs))
    assert done.returncode == 0, done
    return dict(json.loads(done.stdout))


def hurry(job: Job) -> None:
    (job.directory / "hurry").touch()


def result_of(job: Job) -> dict[str, Any]:
    return dict(json.loads((job.directory / "result.json").read_text()))


def printed(job: Job, number: int) -> list[int]:
    """Steps that rank 0 has printed in a round."""
    found = job.logged(f"round_{number}/0/stdout.log")
    return [int(step) for path in found for step in re.findall(r"^step (\d+)", path.read_text(), re.MULTILINE)]


@pytest.mark.slow
def test_a_killed_worker_costs_no_more_than_the_steps_since_the_last_snapshot(job: Job, undisturbed: str) -> None:
    """Without any checkpoint: the memory alone."""
    agent = job.launch("--standalone", "--no-live", "--nproc", "2", command=digits(job, "--step-time", "0.3"))
    wait_for("20 steps", lambda: 20 in printed(job, 1), 60)
    kept = wait_for("a snapshot", lambda: status(job)["snapshot"])["step"]
    os.kill(job.events("worker_started")[1]["pid"], signal.SIGKILL)
    wait_for("steps of the second round", lambda: printed(job, 2), 60)
    hurry(job)
    assert agent.wait(100) == 0, agent.output
    result = result_of(job)
    assert result["resumed_step"] >= kept > 0
    assert result["restarts"] == 1
    assert result["weights_sha256"] == undisturbed


@pytest.mark.slow
def test_a_node_that_joins_gets_the_state_from_the_others(job: Job, undisturbed: str) -> None:
    """There is no shared directory, and no checkpoint at all; the host of the only snapshot is killed later."""
    command = digits(job, "--step-time", "0.5")  # enough is left to be done for a resize to pay
    host = job.node("a", "--no-live", command=command)
    wait_for("steps", lambda: printed(job, 1), 60)
    guest = job.node("b", "--no-live", command=command)
    wait_for("several steps of both", lambda: len(printed(job, 2)) > 1, 60)
    pids = [event["pid"] for event in job.events("worker_started") if event["round"] == 2]
    os.kill(pids[0], signal.SIGKILL)
    wait_for("steps after the kill", lambda: printed(job, 3), 60)
    hurry(job)
    assert [host.wait(100), guest.wait(100)] == [0, 0], host.output
    result = result_of(job)
    assert result["worlds"] == [1, 2, 2]
    assert result["resumed_step"] >= job.event("round_drained")["step"]
    assert result["weights_sha256"] == undisturbed


@pytest.mark.slow
def test_a_run_that_fails_leaves_what_it_had_in_memory(job: Job, undisturbed: str) -> None:
    saving = ["--checkpoint", str(job.directory / "checkpoints"), "--every", "10000"]
    agent = job.launch("--standalone", "--nproc", "1", "--max-restarts", "0", command=digits(job, *saving))
    wait_for("20 steps", lambda: 20 in printed(job, 1), 60)
    os.kill(job.event("worker_started")["pid"], signal.SIGKILL)
    assert agent.wait(60) == 137
    hurry(job)
    second = job.launch("--standalone", "--nproc", "1", command=digits(job, *saving), name="second")
    assert second.wait(100) == 0, second.output
    assert result_of(job)["resumed_step"] >= 1, "it has no checkpoint but by what was in memory"
    assert result_of(job)["weights_sha256"] == undisturbed


def test_once_the_node_whose_rank_decides_has_no_room_another_one_decides(job: Job) -> None:
    """In the same round; without it, the node that still has room would take none."""
    changes = Changes(job)
    command = changes.command
    changes.command = [*command, "--room-until", "5"]
    first = changes.node("a", nnodes="2", rank=0)
    changes.command = command
    other = changes.node("b", nnodes="2", rank=1)
    number = changes.trains(2, steps=6)
    wait_for("snapshots or the end", lambda: changes.whole(number, "b") > 10 or changes.last(number) == STEPS, 60)
    changes.finish(first, other)
    assert changes.whole(number, "a") < 5
    assert changes.whole(number, "b") > 10
    assert job.event("snapshots_left_out")["cause"] == "no room in this test"


def _copiers(job: Job) -> list[int]:
    """Processes that copy to this job's storage; other tests have theirs."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{name}/cmdline").read_bytes()
        except OSError:
            continue
        if b"elastic_agents.snapshots.copying" in command and str(job.directory).encode() in command:
            found.append(int(name))
    return found


def _stopped(job: Job) -> int:
    """Stop a copying process, and return its pid; 0 if there is none."""
    for pid in _copiers(job):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            return pid if alive(pid) else 0
    return 0


@pytest.mark.slow
def test_storage_that_hangs_delays_only_the_end(job: Job, undisturbed: str) -> None:
    saving = ["--checkpoint", str(job.directory / "checkpoints"), "--every", "3"]
    agent = job.launch("--standalone", "--no-live", "--nproc", "2", command=digits(job, *saving))
    hanging = wait_for("a copying process", lambda: _stopped(job), 60)
    wait_for("60 steps", lambda: 60 in printed(job, 1), 60)
    os.kill(hanging, signal.SIGCONT)
    hurry(job)
    assert agent.wait(100) == 0, agent.output
    assert result_of(job)["weights_sha256"] == undisturbed
    newest = max(int(path.name.split("-")[1].split(".")[0]) for path in (job.directory / "checkpoints").glob("step-*"))
    assert newest == result_of(job)["steps"], "the last one is waited for"
