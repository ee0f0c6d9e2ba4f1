"""An agent that is process 1, as in a container: it must reap all orphans, and no signal has a default action."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from harness import SCRIPTS, Agent, Job, alive, tree, wait_for

ORPHANS = str(SCRIPTS / "orphans.py")
UNSHARE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def _may_not() -> str:
    if os.geteuid() != 0:
        return "needs root for a namespace of processes"
    probe = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, timeout=20)
    return f"may not make a namespace of processes: {probe.stderr.strip()}" if probe.returncode else ""


pytestmark = [pytest.mark.system, pytest.mark.skipif(bool(reason := _may_not()), reason=reason or "none")]


def _launch(job: Job, *flags: str, **env: str) -> Agent:
    # Its stdin is closed: nothing of it may get that number.
    shell = (*UNSHARE, "sh", "-c", 'exec "$@" <&-', "sh")
    return job.launch("--nproc", "2", *flags, command=[ORPHANS, str(job.work)], prefix=shell, env=env)


def _process_one(agent: Agent) -> int:
    """Its pid as seen from this host."""
    return tree(agent.process.pid)[1]


def _started(job: Job, workers: int) -> list[list[str]]:
    path = job.work / "started.txt"

    def probe() -> list[list[str]]:
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.split(maxsplit=2) for line in lines] if len(lines) >= workers else []

    return wait_for(f"{workers} workers", probe)


def _pids(job: Job, place: tuple[int, int]) -> list[int]:
    """The worker that was started in a (round, local rank), once its event is written."""
    return [e["pid"] for e in job.events("worker_started") if (e["round"], e["local_rank"]) == place]


def _states(pid: int) -> list[str]:
    """States of a process's children."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            found.append(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0])
        except OSError:
            continue
    return found


def test_process_one_reaps_all_orphans_and_drains_on_sigterm(job: Job) -> None:
    agent = _launch(job)
    started = _started(job, 2)
    assert {text for _, _, text in started} == {"''"}  # their stdin is empty, not missing
    one = _process_one(agent)
    for number in (1, 2):
        (victim,) = wait_for("the event of its start", lambda at=(number, 0): _pids(job, at))  # type: ignore[misc]
        subprocess.run(["nsenter", "--target", str(one), "--pid", "kill", "-9", str(victim)], check=True)
        _started(job, 2 * number + 2)
    wait_for("all zombies to be reaped", lambda: "Z" not in _states(one), 60)
    pids = tree(one)
    os.kill(one, signal.SIGUSR1)  # has no default action here, and is for the workers, which have no handler
    agent.says("SIGUSR1")
    os.kill(one, signal.SIGTERM)
    assert agent.wait() == 143
    assert len(job.events("round_formed")) == 3
    assert not any(map(alive, pids))


def test_early_signals_end_process_one_and_a_kill_ends_all_its_processes(job: Job) -> None:
    message = job.work / "termination-log"
    message.touch()
    early = _launch(job, ELASTIC_LAUNCH_TERMINATION_LOG=str(message))
    wait_for("the launcher", lambda: len(tree(early.process.pid)) > 1 and _handles(_process_one(early), signal.SIGTERM))
    os.kill(_process_one(early), signal.SIGTERM)
    assert early.wait() == 143
    assert message.read_text() == "exit code 143: stopped by SIGTERM\n"

    agent = _launch(job)
    _started(job, 2)
    pids = tree(_process_one(agent))
    assert len(pids) > 6  # agent, guard, workers and living orphans at least
    os.kill(pids[0], signal.SIGKILL)
    assert agent.wait() != 0
    wait_for("the end of all", lambda: not any(map(alive, pids)))


def _handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal (proc_pid_status(5), SigCgt)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (caught,) = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
    return bool(caught >> (number - 1) & 1)
