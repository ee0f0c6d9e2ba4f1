"""Every exit code of the documentation's table comes out of a run, and no other does."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Agent, Job, free_port

from elastic_launch.errors import ExitCode

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "command-line.md"


def _done(job: Job) -> Agent:
    job.finish()
    return job.launch("--standalone")


def _worker_exits(job: Job, code: int, *flags: str) -> Agent:
    job.tell("exit-0", str(code))
    return job.launch("--standalone", *flags)


def _killed_until_the_budget_is_spent(job: Job) -> Agent:
    agent = job.launch("--standalone", "--max-restarts", "1")
    os.kill(job.world(1)[0]["pid"], signal.SIGKILL)
    os.kill(job.world(1, after=1)[0]["pid"], signal.SIGKILL)
    return agent


def _killed_without_progress(job: Job) -> Agent:
    agent = job.launch("--standalone", "--max-idle-restarts", "1")
    os.kill(job.world(1)[0]["pid"], signal.SIGKILL)
    os.kill(job.world(1, after=1)[0]["pid"], signal.SIGKILL)
    return agent


def _cannot_run(job: Job) -> Agent:
    script = job.directory / "wrong.py"
    script.write_text("def\n")
    return job.launch("--standalone", command=[str(script)])


def _signalled(job: Job, number: int) -> Agent:
    agent = job.launch("--standalone")
    job.world(1)
    agent.signal(number)
    return agent


def _worker_signalled(job: Job) -> Agent:
    agent = job.launch("--standalone", "--max-restarts", "0")
    os.kill(job.world(1)[0]["pid"], signal.SIGSEGV)
    return agent


CASES: dict[str, Callable[[Job], Agent]] = {
    "DONE": _done,
    "TRAINING_FAILED": lambda job: _worker_exits(job, 2, "--max-restarts", "0"),
    "USAGE": lambda job: job.launch("--nproc", "0"),
    "STARTUP_FAILURE": _cannot_run,
    "BUDGET_SPENT": _killed_until_the_budget_is_spent,
    "NO_PROGRESS": _killed_without_progress,
    "DO_NOT_RETRY": lambda job: _worker_exits(job, 7, "--fatal-exit-codes", "7"),
    "TOO_FEW_NODES": lambda job: job.node("a", "--min-wait", "1", nnodes="2"),
    "RENDEZVOUS": lambda job: job.node(
        "a", "--rdzv-conf", "is_host=false,join_timeout=1", endpoint=f"127.0.0.1:{free_port()}"
    ),
    "INTERRUPTED": lambda job: _signalled(job, signal.SIGINT),
    "TERMINATED": lambda job: _signalled(job, signal.SIGTERM),
}


def _documented() -> dict[str, int]:
    rows = re.findall(r"^\| `(\d+)` \| ([A-Z_]+) \|", DOCS.read_text(), re.MULTILINE)
    return {name: int(code) for code, name in rows}


def test_the_documentation_has_all_codes() -> None:
    assert _documented() == {code.name: int(code) for code in ExitCode}
    assert CASES.keys() == _documented().keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_each_code_comes_out_of_a_run(job: Job, name: str) -> None:
    agent = CASES[name](job)
    assert agent.wait(60) == _documented()[name], agent.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "code"),
    [(lambda job: _worker_exits(job, 7, "--max-restarts", "0"), 7), (_worker_signalled, 128 + signal.SIGSEGV)],
    ids=["its own", "a signal's"],
)
def test_without_restarts_a_run_ends_with_the_workers_code(job: Job, act: Callable[[Job], Agent], code: int) -> None:
    agent = act(job)
    assert agent.wait(60) == code, agent.output


@pytest.mark.slow
def test_a_node_that_fails_its_check_joins_no_run(job: Job) -> None:
    small = ("sh", "-c", 'ulimit -f 2048; exec "$@"', "sh")  # small files only, as if the disk were full
    agent = job.launch("--standalone", "--node-check", prefix=small)
    assert agent.wait(60) == 90, agent.output
    assert re.search(r"--node-check: \S+ cannot be written: \[Errno \d+\] File too large", agent.output), agent.output
    job.finish()
    agent = job.launch("--standalone", "--node-check", name="healthy")
    assert agent.wait(60) == 0, agent.output
    assert "node check passed: CPU" in agent.output
    assert [event["devices"] for event in job.events("node_checked")]
