"""Plain torchrun on this project's rendezvous."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from harness import LOOP, Job, wait_for


def _torchrun(job: Job, *flags: str) -> subprocess.Popen[bytes]:
    endpoint = ["--rdzv-backend", "elastic-c10d", "--rdzv-id", "x", "--rdzv-endpoint", f"127.0.0.1:{job.port}"]
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2"]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *endpoint, *options, *flags, LOOP, str(job.work)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _generation(job: Job, restarts: int) -> list[int]:
    """Pids of a whole generation of two workers on both nodes, or nothing yet."""
    found = [worker for worker in job.started() if int(worker["env"]["TORCHELASTIC_RESTART_COUNT"]) == restarts]
    return [worker["pid"] for worker in found] if len(found) == 2 else []


@pytest.mark.timeout(120)
def test_two_nodes_survive_a_killed_worker(job: Job) -> None:
    agents = [_torchrun(job), _torchrun(job)]
    try:
        first = wait_for("two workers", lambda: _generation(job, 0))
        os.kill(first[0], signal.SIGKILL)

        # torchrun counts restarts per node, and only the failed node's is raised: two more workers have to start.
        wait_for("two workers anew", lambda: len(job.started()) == 4)
        assert {worker["env"]["WORLD_SIZE"] for worker in job.started()} == {"2"}
        job.finish()
        assert [agent.wait(30) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
