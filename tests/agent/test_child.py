"""Children of this process: elastic_agents.child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from elastic_agents import child

SLEEP = "import ctypes, time; ctypes.CDLL(None).prctl(0x59616D61, -1, 0, 0, 0); print(flush=True); time.sleep(600)"
"""Any process may trace it (PR_SET_PTRACER)."""

TRACE = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
print(libc.ptrace(0x4206, int(sys.argv[1]), None, None), ctypes.get_errno(), flush=True)  # PTRACE_SEIZE
sys.stdin.read()
"""


def test_a_killed_process_that_cannot_be_reaped_is_left_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(child, "KILLED", 0.2)
    held = subprocess.Popen([sys.executable, "-c", SLEEP], stdout=subprocess.PIPE)
    assert held.stdout is not None
    with held, held.stdout as said:
        said.readline()
        process = child.Child(held.pid, "the agent's process")
        # A debugger learns of the process' end first, and has not waited for it yet.
        with subprocess.Popen(
            [sys.executable, "-c", TRACE, str(held.pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as tracer:
            assert tracer.stdout is not None
            assert tracer.stdout.readline() == "0 0\n"
            process.end(0)
            assert process.exit_code is None
            assert f"the agent's process, pid {held.pid}, cannot be reaped after 0.2 s" in caplog.text
            process.signal(signal.SIGTERM)  # has no effect
            process.end(0)
            tracer.communicate()
        assert os.WIFSIGNALED(os.waitpid(held.pid, 0)[1])
        held.returncode = 0  # Popen must not wait for it
