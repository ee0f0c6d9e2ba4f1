"""Plain torchrun on this project's rendezvous, with either of its handlers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from etcd_servers import cluster
from forked import Process
from harness import LOOP, Job, forks, wait_for

SETTLE = "join_settle=0.5,resize_delay=0.2"


class Nodes:
    """torchrun processes of one run."""

    def __init__(self, job: Job, backend: str, endpoint: str) -> None:
        self.job = job
        self._where = ["--rdzv-backend", backend, "--rdzv-endpoint", endpoint, "--rdzv-id", "x"]
        self._processes: list[subprocess.Popen[bytes] | Process] = []

    def start(self, nnodes: str, conf: str = SETTLE, restarts: int = 2) -> subprocess.Popen[bytes] | Process:
        options = ["--nnodes", nnodes, "--nproc-per-node", "1", "--max-restarts", str(restarts), "--rdzv-conf", conf]
        command = ["-m", "torch.distributed.run", *self._where, *options, LOOP, str(self.job.work)]
        process: subprocess.Popen[bytes] | Process
        with self._output(len(self._processes)).open("wb") as output:
            if self.job.executed:
                process = subprocess.Popen([sys.executable, *command], stdout=output, stderr=output)
            else:
                process = forks().start(command, output.fileno(), os.environ, None, script=True)
        self._processes.append(process)
        return process

    def output(self, node: int) -> str:
        return self._output(node).read_text(errors="replace")

    def workers(self, size: int, after: int = 0) -> list[dict[str, Any]]:
        """Wait until all workers of a world have started, skipping the given number of earlier ones."""

        def probe() -> list[dict[str, Any]]:
            found = [worker for worker in self.job.started()[after:] if worker["env"]["WORLD_SIZE"] == str(size)]
            return found if {worker["env"]["RANK"] for worker in found} == set(map(str, range(size))) else []

        try:
            return wait_for(f"{size} workers", probe)
        except AssertionError as error:
            raise AssertionError("\n---\n".join([str(error), *map(self.output, range(len(self._processes)))])) from None

    def exit_codes(self) -> list[int]:
        return [process.wait(100) for process in self._processes]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _output(self, node: int) -> Path:
        return self.job.directory / f"torchrun{node}.out"


@pytest.fixture(params=["elastic-c10d", pytest.param("elastic-etcd", marks=pytest.mark.soak)])
def nodes(job: Job, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Nodes]:
    if request.param == "elastic-c10d":
        nodes = Nodes(job, request.param, f"127.0.0.1:{job.port}")
        try:
            yield nodes
        finally:
            nodes.close()
        return
    (tmp_path / "etcd").mkdir()
    with cluster(tmp_path / "etcd") as members:
        nodes = Nodes(job, request.param, members[0].address)
        try:
            yield nodes
        finally:
            nodes.close()


def test_two_nodes_survive_a_killed_worker(nodes: Nodes) -> None:
    nodes.start("2")
    nodes.start("2")
    first = nodes.workers(2)
    os.kill(first[0]["pid"], signal.SIGKILL)
    # torchrun counts restarts per node, and only the failed node's is raised.
    again = nodes.workers(2, after=2)
    assert sorted(worker["env"]["TORCHELASTIC_RESTART_COUNT"] for worker in again) == ["0", "1"]
    nodes.job.finish()
    assert nodes.exit_codes() == [0, 0]


@pytest.mark.slow
@pytest.mark.executed
def test_a_node_that_joins_later_is_admitted(nodes: Nodes) -> None:
    nodes.start("1:2")
    nodes.workers(1)
    nodes.start("1:2")
    grown = nodes.workers(2, after=1)
    # A change of membership does not count as a restart.
    assert {worker["env"]["TORCHELASTIC_RESTART_COUNT"] for worker in grown} == {"0"}
    nodes.job.finish()
    assert nodes.exit_codes() == [0, 0]


@pytest.mark.slow
def test_the_others_continue_when_a_node_is_killed(nodes: Nodes) -> None:
    """Not the first one: on c10d it hosts the run."""
    nodes.start("1:2")
    nodes.workers(1)
    lost = nodes.start("1:2")
    worker = next(worker for worker in nodes.workers(2, after=1) if worker["env"]["GROUP_RANK"] == "1")
    lost.kill()
    os.kill(worker["pid"], signal.SIGKILL)  # torchrun's workers outlive it
    nodes.workers(1, after=3)
    nodes.job.finish()
    assert nodes.exit_codes() == [0, -signal.SIGKILL]


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["elastic-etcd"], indirect=True)
def test_a_run_id_whose_run_has_ended_is_used_again_on_request(nodes: Nodes) -> None:
    nodes.start("1")
    nodes.workers(1)
    nodes.job.finish()
    assert nodes.exit_codes() == [0]
    nodes.start("1")
    assert nodes.exit_codes() == [0, 1]  # without a token nothing proves that the run has ended so
    assert "had ended with 0 before this node came" in nodes.output(1)
    assert len(nodes.job.started()) == 1
    nodes.start("1", conf="reuse=true")
    assert nodes.exit_codes() == [0, 1, 0]
    assert len(nodes.job.started()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["elastic-etcd"], indirect=True)
def test_a_leader_that_is_killed_is_succeeded(nodes: Nodes) -> None:
    first = nodes.start("1:2")
    nodes.workers(1)
    nodes.start("1:2")
    worker = next(worker for worker in nodes.workers(2, after=1) if worker["env"]["GROUP_RANK"] == "0")
    first.kill()
    os.kill(worker["pid"], signal.SIGKILL)
    nodes.workers(1, after=3)
    nodes.job.finish()
    assert nodes.exit_codes() == [-signal.SIGKILL, 0]


@pytest.mark.parametrize("nodes", ["elastic-etcd"], indirect=True)
def test_settings_that_etcd_needs_are_reported(nodes: Nodes) -> None:
    nodes._where[-1] = "none"
    nodes.start("1")
    assert nodes.exit_codes() == [1]
    assert "needs the addresses of the cluster and a name for the run" in nodes.output(0)
