"""How programs start: early signals, ignored signals, and hosts that lack something."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import LOOP, Job, alive, wait_for

PROGRAMS = {
    "elastic-launch": ["-c", "from elastic_launch.cli.programs import launch; launch()"],
    "elastic-composer": ["-c", "from elastic_launch.cli.programs import composer; composer()"],
    "elasticctl": ["-c", "from elastic_launch.cli.programs import ctl; ctl()"],
    "-m elastic_launch": ["-m", "elastic_launch"],
    "-m elastic_launch.launch": ["-m", "elastic_launch.launch"],
    "-m elastic_launch.cli.elasticctl": ["-m", "elastic_launch.cli.elasticctl"],
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_interrupt_during_the_imports_ends_quietly(program: str, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    # A module that all of them need, which takes its time.
    (tmp_path / "textwrap.py").write_text(
        f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\nwhile True:\n    time.sleep(0.01)\n"
    )
    process = subprocess.Popen(
        [sys.executable, *PROGRAMS[program]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    try:
        wait_for("the imports", begun.exists)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[0]
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, said) == (130, b"")


@pytest.mark.slow  # the one above stands for it
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("every", [6, pytest.param(2, marks=pytest.mark.soak)])
def test_a_signal_at_any_moment_of_the_beginning_ends_quietly(number: signal.Signals, every: int, job: Job) -> None:
    """Every three tenths of a second, one signal or the other; in make soak every tenth."""
    for tenths in range(every // 2 if number == signal.SIGTERM else 0, 16, every):
        agent = job.program(["-m", "elastic_launch", "--log-dir", str(job.logs), LOOP, str(job.work)], f"a{tenths}")
        try:
            agent.process.wait(tenths / 10)
        except subprocess.TimeoutExpired:
            agent.signal(number)
        code = agent.wait()
        # Before the first line of ours it is the interpreter that is interrupted, which may end with 1.
        interpreters = "Traceback" in agent.output and "elastic_launch" not in agent.output
        assert code in ((-number, 128 + number, 1) if interpreters else (-number, 128 + number))
        assert "Traceback" not in agent.output or interpreters


@pytest.mark.slow
def test_a_signal_that_is_ignored_at_the_start_stays_ignored(job: Job) -> None:
    agent = job.launch("--standalone", prefix=["nohup"])
    worker = job.world(1)[0]["pid"]
    agent.signal(signal.SIGHUP)
    agent.signal(signal.SIGUSR1)
    agent.says("SIGUSR1 is not forwarded to rank 0")  # it has taken signals meanwhile
    assert alive(worker)
    job.finish()
    assert agent.wait() == 0
    assert "in a shell's background) stay ignored: SIGHUP" in agent.output
    assert "SIGHUP received" not in agent.output


def test_a_signal_that_is_ignored_at_the_start_is_handled_if_it_is_named(job: Job) -> None:
    agent = job.launch("--standalone", "--signals-to-handle", "HUP,TERM", prefix=["nohup"])
    job.world(1)
    agent.signal(signal.SIGHUP)
    assert agent.wait() == 128 + signal.SIGHUP
    assert "stay ignored: " not in agent.output


# Hosts that lack something.

WITHOUT_PIDFD = """
import ctypes, struct, sys, os
step = lambda code, jump, k: struct.pack("HBBI", code, 0, jump, k)
# Load the number of the call; 434, pidfd_open, fails with ENOSYS; all others are allowed (seccomp(2)).
code = step(0x20, 0, 0) + step(0x15, 1, 434) + step(0x06, 0, 0x50026) + step(0x06, 0, 0x7FFF0000)
program = ctypes.create_string_buffer(code)
filter = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 4, ctypes.addressof(program)))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, filter, 0, 0) == 0
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.parametrize("front_end", ["elastic_launch", "elastic_launch.cli.composer"])
def test_a_kernel_without_pidfds_is_reported_at_the_start(front_end: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PIDFD, sys.executable, "-m", front_end, str(script)],
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 2
    first, hint = done.stderr.splitlines()
    assert "lets no process be watched: pidfd_open(2) fails: Function not implemented" in first
    assert hint.startswith("  Linux 5.3 or newer is needed")
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]
