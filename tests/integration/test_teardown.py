"""Scripts that use DDP come to their end, however they do; see elastic_agents.warm.groups and .ending."""

from __future__ import annotations

import pytest
from harness import SCRIPTS, Job

SCRIPT = str(SCRIPTS / "ddp_trainer.py")

CODES = {"destroy": 0, "leave": 0, "exit": 3, "raise": 1}


def _ends(job: Job, ending: str, code: int, timeout: float = 30.0) -> None:
    agent = job.launch("--standalone", "--nproc", "2", "--max-restarts", "0", command=[SCRIPT, ending])
    assert agent.wait(timeout) == code, agent.output
    assert "import for themselves" not in agent.output, "the workers were not forked"


def test_groups_that_are_destroyed_before_what_uses_them_are_freed(job: Job) -> None:
    """Before, about one in five of the destructors that this comes to did not return."""
    _ends(job, "often", 0, timeout=60.0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ending", CODES)
def test_a_script_with_ddp_ends_every_time(ending: str, job: Job) -> None:
    for _ in range(5):
        _ends(job, ending, CODES[ending])


@pytest.mark.soak
@pytest.mark.timeout(10_000)
@pytest.mark.parametrize("ending", CODES)
def test_a_script_with_ddp_ends_fifty_times(ending: str, job: Job) -> None:
    for _ in range(50):
        _ends(job, ending, CODES[ending])
