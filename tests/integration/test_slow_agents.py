"""Agents and storage that do not respond for some time."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from harness import SCRIPTS, SLOWNESS, Agent, Job, freeze, wait_for

from elastic_launch import snapshot


def _launch(job: Job, *arguments: object, restarts: int = 3, flags: Sequence[str] = ()) -> Agent:
    command = [str(SCRIPTS / "own_loop.py"), str(job.work), *map(str, arguments)]
    return job.launch("--standalone", "--max-restarts", str(restarts), *flags, command=command)


def _durable(job: Job) -> list[int]:
    return sorted(info.step for info in snapshot.find(job.work / "checkpoints"))


def _step(job: Job) -> int:
    return max((noted["step"] for noted in job.noted_steps()), default=0)


@pytest.mark.slow
def test_a_worker_saves_nothing_durable_while_its_agent_is_stopped(job: Job) -> None:
    agent = _launch(job, 2000, 3, 0.05)
    wait_for("a checkpoint", lambda: _durable(job), 60)
    freeze(agent.process.pid)
    time.sleep(1.0)
    before, at = _durable(job), _step(job)
    wait_for("some steps without the agent", lambda: _step(job) >= at + 60, 60)
    assert _durable(job) == before
    agent.signal(signal.SIGCONT)
    wait_for("a checkpoint again", lambda: _durable(job)[-1] > at + 60, 60)
    worker = job.noted_steps()[-1]["pid"]
    reached = _step(job)
    os.kill(worker, signal.SIGKILL)
    agent.says("restart 1 of 3", 60)
    wait_for("the next worker", lambda: job.noted_steps()[-1]["pid"] != worker, 60)
    first = next(noted["step"] for noted in job.noted_steps() if noted["pid"] != worker)
    assert first > at + 60, f"resumed from what is newest, of {reached} steps"
    agent.signal(signal.SIGTERM)
    assert agent.wait(60) == 143


def _hold(agent: Agent, ended: threading.Event) -> None:
    """Stop each copier as it appears: storage that hangs."""
    while not ended.wait(0.02):
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                if (
                    parent == agent.process.pid
                    and b"elastic_agents.snapshots.copying" in (path / "cmdline").read_bytes()
                ):
                    os.kill(int(path.name), signal.SIGSTOP)
            except OSError:
                continue


def test_a_node_that_leaves_while_its_storage_hangs_ends_in_time_and_reports_what_is_lost(job: Job) -> None:
    agent = _launch(job, 100_000, 10, 0.05, flags=("--shutdown-timeout", "5"))
    ended = threading.Event()
    holding = threading.Thread(target=_hold, args=(agent, ended))
    holding.start()
    try:
        wait_for("the first checkpoint's step", lambda: _step(job) > 20, 60)
        agent.signal(signal.SIGTERM)
        assert agent.wait(30) == 143, agent.output
    finally:
        ended.set()
        holding.join(30)
    assert "nothing is saved" in agent.output
    assert _durable(job) == []


@pytest.mark.soak
@pytest.mark.timeout(int(300 * SLOWNESS))
def test_a_run_whose_storage_hangs_reports_it_at_once_and_fails_at_its_end(job: Job) -> None:
    agent = _launch(job, 40, 10, 0.05, restarts=0)
    ended = threading.Event()
    holding = threading.Thread(target=_hold, args=(agent, ended))
    holding.start()
    try:
        agent.says(f"{job.work / 'checkpoints'} does not respond: a copy has made no progress for 10 s", 60)
        assert agent.wait(280) == 93
    finally:
        ended.set()
        holding.join()
    assert "could be saved" in agent.output
    assert "does not respond: the copy made no progress for 60 s" in agent.output
    assert _durable(job) == []
