"""The live view of real agents on a real pseudo-terminal."""

from __future__ import annotations

import os
import re
import signal

import pytest
from changes import Changes
from harness import LOOP, SLOWNESS, Job, wait_for
from terminals import Terminal, terminal

LEADER = ("--nnodes", "1:2", "--rdzv-conf", "is_host=true", "--node-id", "a")


def flags(job: Job) -> tuple[str, ...]:
    return (*LEADER, "--rdzv-endpoint", f"127.0.0.1:{job.port}", "--log-dir", str(job.logs))


def shows(seen: Terminal, pattern: str, seconds: float = 20.0) -> None:
    """Wait until the screen matches a pattern, in which a space is any space."""
    spaced = re.compile(pattern.replace(" ", r"\s+"), re.MULTILINE)
    try:
        wait_for(pattern, lambda: spaced.search(seen.shown), seconds)
    except AssertionError as error:
        raise AssertionError(f"{error}; the terminal shows:\n{seen.shown}") from None


@pytest.mark.slow
def test_it_tells_of_a_killed_worker_and_of_a_node_that_joins(job: Job) -> None:
    changes = Changes(job, live=True, step_time=0.3)
    with terminal(*flags(job), *changes.command, NODE="a") as seen:
        shows(seen, r"-- elastic-launch: run of changes.py, node a -+ running for \d+ s --$")
        shows(seen, r"world size 1 on 1 node: a 1 step \d+ of 200 \(\d+%\) steps/s [\d.]+ time left \d+ s loss [\d.]+")
        shows(seen, r"restarts left 3 of 3 snapshot step \d+, \d+ s ago global batch \d+, accumulation \d+")
        shows(seen, r"^ trains$")  # no incident so far
        b = changes.node("b")
        shows(seen, r"world size 2 on 2 nodes: a 1, b 1 ")
        assert any("node b joined from 127.0.0.1" in line for line in seen.scrolled)
        before = changes.trains(2)
        shows(seen, r"^ trains; incident 1, \d+ s ago, cost [\d.]+ s: membership")
        os.kill([int(x["pid"]) for x in job.started() if x["env"]["NODE"] == "b"][-1], signal.SIGKILL)
        shows(seen, r"restarts left 2 of 3 ")
        shows(seen, r"^ trains; incident \d+, \d+ s ago, cost [\d.]+ s: crash, rank")
        changes.trains(2, after=before)
        seen.resize(30, 60)
        shows(seen, r"^-- elastic-launch: run of changes.* running for \d+ s --$")
        shows(seen, r"^ trains; incident")
        assert seen.shown.count("-- elastic-launch:") == 1
        changes.hurry()
        assert seen.process.wait(60 * SLOWNESS) == 0
        assert b.wait() == 0
        wait_for("the last line", lambda: "done: all workers finished" in "".join(seen.scrolled))
        assert "-- elastic-launch:" not in seen.shown


@pytest.mark.slow
def test_the_lines_above_are_those_that_were_printed_and_ctrl_c_ends_it(job: Job) -> None:
    script = job.directory / "prints.py"
    script.write_text(
        "import sys, time\n"
        "for number in range(60):\n"
        "    sys.stdout.write(f'\\r{number:3}%|' + '#' * (number // 2)); sys.stdout.flush(); time.sleep(0.03)\n"
        "print()\n"
        "for number in range(200):\n"
        "    print('line', number)\n"
        "print('waits', flush=True)\n"
        "time.sleep(600)\n"
    )
    with terminal("--standalone", "--log-dir", str(job.logs), "--rdzv-id", "r", str(script), NO_COLOR="1") as seen:
        shows(seen, "^waits$")
        shows(seen, r"workers run; no step reported")
        seen.type(b"\x03")
        assert seen.process.wait(60 * SLOWNESS) == 130
        wait_for("the last line", lambda: "exit code 130" in "".join(seen.scrolled))
        lines = [line for line in seen.scrolled if line.startswith(("line", " 59%", "waits"))]
        assert lines == [" 59%|" + "#" * 29, *(f"line {number}" for number in range(200)), "waits"]
        assert "-- elastic-launch:" not in seen.shown
        assert not re.search(rb"\x1b\[[1-9][0-9;]*m", seen.raw)
    (log,) = job.logged("round_1/0/stdout.log")
    text = log.read_bytes()
    assert text.startswith(b"\r  0%|\r  1%|")
    assert text.endswith(b"line 199\nwaits\n")


@pytest.mark.slow
def test_a_dumb_terminal_gets_lines(job: Job) -> None:
    command = ("--standalone", "--log-dir", str(job.logs), LOOP, str(job.work))
    with terminal(*command, TERM="dumb") as seen:
        job.world(1)
        job.finish()
        assert seen.process.wait(60 * SLOWNESS) == 0
        wait_for("output", lambda: "done: all workers finished" in seen.shown)
        assert b"\x1b" not in seen.raw
