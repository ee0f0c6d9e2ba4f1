"""Scripts that use DDP always terminate; see elastic_agents.warm._process_groups and .ending."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import SCRIPTS, Job

SCRIPT = str(SCRIPTS / "ddp_trainer.py")

CODES = {"destroy": 0, "leave": 0, "exit": 3, "raise": 1}


def _ends(job: Job, ending: str, code: int, timeout: float = 30.0) -> None:
    agent = job.launch("--standalone", "--nproc", "2", "--max-restarts", "0", command=[SCRIPT, ending])
    assert agent.wait(timeout) == code, agent.output
    assert "import for themselves" not in agent.output, "the workers were not forked"


def test_groups_that_are_destroyed_before_what_uses_them_are_freed(job: Job) -> None:
    """Before the fix, about one in five of the destructors invoked here did not return."""
    _ends(job, "often", 0, timeout=60.0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ending", ["destroy", "raise"])
def test_a_script_with_ddp_ends_every_time(ending: str, job: Job) -> None:
    for _ in range(5):
        _ends(job, ending, CODES[ending])


@pytest.mark.soak
@pytest.mark.executed
@pytest.mark.timeout(10_000)
@pytest.mark.parametrize("ending", CODES)
def test_a_script_with_ddp_ends_fifty_times(ending: str, job: Job) -> None:
    for _ in range(50):
        _ends(job, ending, CODES[ending])


HANGING = """
import ctypes, os, sys
import torch

class Hanging:
    def __del__(self):
        ctypes.PyDLL(None).sleep(600)  # with the GIL held, as destructors of C++ do

hanging = Hanging() if os.environ["RANK"] == "0" else None
print("last line", flush=True)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_worker_that_hangs_after_its_script_ends_with_the_scripts_code(job: Job, tmp_path: Path) -> None:
    """In parallel, as each hangs for as long as workers may: beside another worker, and as the only one."""
    script = tmp_path / "hanging.py"
    script.write_text(HANGING)
    flags = ["--standalone", "--nproc", "2", "--max-restarts", "0"]
    agents = {code: job.launch(*flags, command=[str(script), str(code)], name=f"of {code}") for code in (0, 5)}
    alone = job.launch("--standalone", "--max-restarts", "0", command=[str(script), "3"], name="alone")
    assert {agent.wait(60.0): code for code, agent in agents.items()} == {0: 0, 5: 5}, agents[0].output
    assert "was killed after its script had ended with exit code 0" in agents[0].output
    assert alone.wait(60.0) == 3, alone.output
    assert "root cause: rank 0" in alone.output, "its end is not one that the launcher has asked for"


LOCKED = """
import ctypes, os, threading, time

def wait_for_the_lock():
    while True:
        sum(range(1000))

if os.environ["RANK"] == "0":
    threading.Thread(target=wait_for_the_lock, daemon=True).start()
    time.sleep(0.2)
    ctypes.PyDLL(None).sleep(600)
"""


@pytest.mark.slow
def test_an_executed_worker_that_hangs_in_pythons_lock_is_killed_once_others_have_finished(
    job: Job, tmp_path: Path
) -> None:
    """In parallel, as each hangs for as long as workers may: one of a node's two workers, and a node's only one."""
    script = tmp_path / "locked.py"
    script.write_text(LOCKED)
    flags = ["--max-restarts", "0", "--no-warm"]
    beside = job.launch("--standalone", "--nproc", "2", *flags, command=[str(script)], name="beside")
    alone = [job.node(name, *flags, nnodes="2:2", command=[str(script)]) for name in "ab"]
    said = "hangs in its interpreter's lock, and is killed: others have finished"
    assert beside.wait(90.0) == 128 + 9, beside.output
    assert "rank 0" in beside.output
    assert said in beside.output
    assert [agent.wait(90.0) for agent in alone] == [128 + 9] * 2, alone[0].output + alone[1].output
    assert sum(said in agent.output for agent in alone) == 1
