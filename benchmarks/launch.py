"""How long launches and restarts take: elastic-launch and torchrun in turn, on one machine, in one run.

Prints medians and ratios as a Markdown table; asserts no figure.

    python benchmarks/launch.py --runs 5 --json launch.json
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

from jobs import STEPS_BEFORE_KILL, Job, free_port, kill, program
from tables import Figures, NewJob, Scenario, main


def start_ours(job: Job) -> float:
    options = ["--standalone", "--nproc", "2", "--log-dir", str(job.directory / "logs")]
    return job.start([program("elastic-launch"), *options, *job.script()])[1]


def start_torchrun(job: Job) -> float:
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3", "--monitor-interval", "0.1"]
    # Without it, torch 2.13 often hangs after a restart.
    environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return job.start([program("torchrun"), *options, *job.script()], environ)[1]


def start_node(job: Job, node: str, nnodes: str, port: int, *, host: bool, nproc: int = 1) -> tuple[int, float]:
    """Start one node of ours; return the agent's pid and the moment just before."""
    options = ["--nnodes", nnodes, "--nproc", str(nproc), "--node-id", node, "--rdzv-id", "benchmark"]
    options += ["--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf", f"is_host={int(host)}"]
    options += ["--log-dir", str(job.directory / "logs")]
    return job.start([program("elastic-launch"), *options, *job.script()])


LAUNCHERS: dict[str, Callable[[Job], float]] = {"ours": start_ours, "torchrun": start_torchrun}


def measure_launch(new_job: NewJob, launcher: str) -> Figures:
    """From just before the launcher's start to the begin of rank 0's script, and to its first step."""
    with new_job() as job:
        began = LAUNCHERS[launcher](job)
        return job.step(0, 2, 0)["clock"] - began, job.step(0, 2)["clock"] - began


def measure_worker_killed(new_job: NewJob, launcher: str) -> Figures:
    """From the SIGKILL of rank 1 to the begin of the next rank 0's script, and to its first step."""
    with new_job() as job:
        LAUNCHERS[launcher](job)
        survivor = job.step(0, 2, STEPS_BEFORE_KILL)["pid"]
        victim = job.step(1, 2, STEPS_BEFORE_KILL)["pid"]
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        began = job.step(0, 2, 0, other_than=survivor)["clock"]
        return began - killed, job.step(0, 2, other_than=survivor)["clock"] - killed


def measure_node_killed(new_job: NewJob, _: str) -> Figures:
    """From the SIGKILL of an agent and its worker to the survivor's new round, and to its next step."""
    with new_job() as job:
        port = free_port()
        start_node(job, "host", "1:2", port, host=True)
        agent, _began = start_node(job, "other", "1:2", port, host=False)
        for rank in (0, 1):
            job.step(rank, 2, STEPS_BEFORE_KILL)
        worker = job.event("other", "worker_started")["pid"]
        killed = time.monotonic()
        kill(agent)
        kill(worker)
        formed = job.event("host", "round_formed", after=killed)["clock"]
        return formed - killed, job.step(0, 1)["clock"] - killed


def launch_one_node(new_job: NewJob, nproc: int) -> float:
    """From just before the start of one node of 1:1 to the first step."""
    with new_job() as job:
        _pid, began = start_node(job, "host", "1:1", free_port(), host=True, nproc=nproc)
        return float(job.step(0, nproc)["clock"]) - began


def measure_two_nodes(new_job: NewJob, _: str) -> Figures:
    """What two nodes of 1:4 with a worker each need more than one of 1:1, with one worker and with as many workers."""
    one_worker, two_workers = launch_one_node(new_job, 1), launch_one_node(new_job, 2)
    with new_job() as job:
        port = free_port()
        _pid, began = start_node(job, "host", "1:4", port, host=True)
        start_node(job, "other", "1:4", port, host=False)
        two_nodes = job.step(0, 2)["clock"] - began
        joined = job.event("host", "node_joined", node="other")["clock"]
        formed = job.event("host", "round_formed", world_size=2)["clock"]
    return one_worker, two_workers, two_nodes, two_nodes - one_worker, two_nodes - two_workers, formed - joined


SCENARIOS = {
    "launch": Scenario(
        measure_launch,
        ("ours", "torchrun"),
        (
            ("launch -> script begins (1 node, 2 workers)", ""),
            ("launch -> first step (1 node, 2 workers)", "no slower than torchrun"),
        ),
    ),
    "worker-killed": Scenario(
        measure_worker_killed,
        ("ours", "torchrun"),
        (
            ("worker killed -> script begins again (1 node, 2 workers)", ""),
            ("worker killed -> next step (1 node, 2 workers)", "no slower than torchrun"),
        ),
    ),
    "node-killed": Scenario(
        measure_node_killed,
        ("ours",),
        (
            ("node killed -> survivor's new round formed (2 nodes of 1:2)", "< 0.3 s"),
            ("node killed -> survivor's next step", ""),
        ),
    ),
    "two-nodes": Scenario(
        measure_two_nodes,
        ("ours",),
        (
            ("launch -> first step: one node of 1:1, 1 worker", ""),
            ("launch -> first step: one node of 1:1, 2 workers", ""),
            ("launch -> first step: two nodes of 1:4, 1 worker each", ""),
            ("two nodes need more than one with 1 worker", "<= 2.5 s"),
            ("two nodes need more than one with 2 workers", ""),
            ("second node joined -> first round formed", ""),
        ),
    ),
}


if __name__ == "__main__":
    sys.exit(main(SCENARIOS, "Time launches and restarts of elastic-launch and torchrun in turn."))
