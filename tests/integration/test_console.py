"""Consoles that are not read, and file systems that hang: real agents, which continue and can be ended."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import Process
from harness import SLOWNESS, Job, forks, tree, wait_for

CHATTY = """
import itertools
for number in itertools.count():
    print(f"line {number} " + "x" * 80)
"""

CTRL_S = b"\x13"


@contextlib.contextmanager
def started(*arguments: str, output: int) -> Iterator[Process]:
    """An agent whose console the test provides."""
    process = forks().start(["--standalone", "--progress", "plain", *arguments], output, os.environ, None)
    try:
        yield process
    finally:
        for pid in tree(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize(
    "kind", [pytest.param("a pipe whose reader has stopped", marks=pytest.mark.soak), "a terminal after Ctrl-S"]
)
@pytest.mark.usefixtures("job")  # which prepares for agents that are forked
def test_a_console_that_is_not_read_delays_neither_workers_nor_the_end(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "chatty.py"
    script.write_text(CHATTY)
    ours, console = os.pipe() if kind.startswith("a pipe") else pty.openpty()
    log = tmp_path / "logs" / "r" / "round_1" / "0" / "stdout.log"
    with started("--log-dir", str(tmp_path / "logs"), "--rdzv-id", "r", str(script), output=console) as agent:
        if kind.startswith("a terminal"):
            assert b"logs in" in os.read(ours, 4096)
            os.write(ours, CTRL_S)
        # Far more than is queued for a console: the worker continues without it.
        wait_for("output in the file", lambda: log.exists() and log.stat().st_size > 4_000_000, 60)
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(30 * SLOWNESS) == 143
        lines = log.read_bytes().splitlines()
        assert all(line.startswith(b"line %d " % number) for number, line in enumerate(lines[:-1]))
    os.close(ours)
    os.close(console)


def test_a_file_system_that_hangs_keeps_neither_workers_nor_the_end(job: Job) -> None:
    """A pipe in place of the event log: opening it blocks forever."""
    (job.logs / "r").mkdir(parents=True)
    os.mkfifo(job.logs / "r" / "events-a.jsonl")
    agent = job.launch("--standalone", "--rdzv-id", "r", "--node-id", "a")
    job.world(1)
    agent.says("no logs are kept of round 1: [Errno 110] the file system does not answer")
    agent.says("events are not recorded: [Errno 110] the file system does not answer")
    agent.signal(signal.SIGTERM)
    assert agent.wait() == 143


def test_a_worker_does_not_wait_for_a_file_system_that_hangs_to_report_its_exception(job: Job) -> None:
    """Pipes in place of the event log and of the worker's exception."""
    (job.logs / "r" / "round_1" / "0").mkdir(parents=True)
    os.mkfifo(job.logs / "r" / "events-a.jsonl")
    os.mkfifo(job.logs / "r" / "round_1" / "0" / "error.json")
    script = job.directory / "fails.py"
    lines = ("import torch", "from elastic_launch.error_file import do_not_retry", "do_not_retry('the data is gone')")
    script.write_text("\n".join(lines))
    agent = job.launch("--standalone", "--rdzv-id", "r", "--node-id", "a", command=[str(script)])
    assert agent.wait() == 93
    assert "the data is gone" in agent.output


def test_output_that_is_not_kept_is_not_said_to_be_in_files(job: Job) -> None:
    (job.logs / "r" / "round_1").mkdir(parents=True)
    (job.logs / "r" / "round_1" / "0").touch()  # no directory can be made there
    failing = ["--no-python", "sh", "-c", "echo out; exit 3"]
    agent = job.launch("--standalone", "--max-restarts", "0", "--rdzv-id", "r", command=failing)
    assert agent.wait() == 3
    assert "the workers' output is not kept in files" in agent.output
    assert "exit code 3" in agent.output
    assert agent.output.count("logs in") == 1  # what the first line says
    assert "its logs" not in agent.output


def test_every_line_of_the_launcher_is_a_json_object_on_request(job: Job) -> None:
    flags = "--log-format json --node-id a --notice none --duplicate-stdout-filters x --redirects 3 --no-python"
    agent = job.launch(*flags.split(), command=["sh", "-c", "echo out; exit 3"])
    assert agent.wait() == 91
    said = [json.loads(line) for line in agent.output.splitlines()]
    always = {"time", "level", "node", "message"}
    assert {frozenset(line) for line in said} == {frozenset(always), frozenset(always | {"incident"})}
    assert said[0]["message"].startswith("--duplicate-stdout-filters has no effect")
    assert {line["node"] for line in said[1:]} == {"a"}
    assert said[-1]["level"] == "ERROR"
    assert "root cause" in said[-1]["message"]


@pytest.mark.usefixtures("job")
def test_lines_have_the_time_before_them(tmp_path: Path) -> None:
    ours, console = pty.openpty()
    with started("--log-dir", str(tmp_path), "--no-python", "sh", "-c", "exit 0", output=console) as agent:
        assert agent.wait(60 * SLOWNESS) == 0
        said = os.read(ours, 65536).decode()
    os.close(ours)
    os.close(console)
    assert all(re.match(r"\d\d:\d\d:\d\d \[elastic-launch\] ", line) for line in said.splitlines())
    assert "done: all workers finished" in said
