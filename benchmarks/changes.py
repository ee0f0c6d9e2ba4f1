"""What a change of the world costs: the time in which nobody trains, and the steps that are done again.

elastic-launch with a script by this project's library, and torchrun with a plain script that saves every 10 steps, in
turn, on one machine, in one run. torchrun has its best settings for this: agents that look every 0.1 s, keep-alives
every second, a last call of one second.

    python benchmarks/changes.py --runs 5 --json changes.json
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from jobs import STEPS_BEFORE_KILL, WORKLOAD, Job, Record, free_port, program
from tables import Figures, NewJob, Scenario, main

ELASTIC = Path(__file__).resolve().parent / "elastic_workload.py"
ENOUGH = 3 * STEPS_BEFORE_KILL
"""Steps before a change, so that snapshots have found their rhythm."""

UNSHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it, torch 2.13 often hangs after a restart."""


def script(job: Job, launcher: str) -> list[str]:
    if launcher == "ours":
        return job.script(ELASTIC)
    return job.script(WORKLOAD, "--snapshot", str(job.directory / "snapshot.pt"))


def start_node(job: Job, launcher: str, name: str, port: int, *, host: bool) -> int:
    """Start one of up to two nodes with a worker each; return its launcher's pid."""
    common = ["--nnodes", "1:2", "--rdzv-id", "benchmark", "--rdzv-endpoint", f"localhost:{port}"]
    if launcher == "ours":
        conf = f"is_host={int(host)},resize_delay=0.1"
        options = ["--nproc", "1", "--node-id", name, "--rdzv-conf", conf, "--log-dir", str(job.directory / "logs")]
        return job.start([program("elastic-launch"), *common, *options, *script(job, launcher)])[0]
    conf = f"is_host={int(host)},last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    options = ["--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-conf", conf, "--local-addr", "localhost"]
    options += ["--max-restarts", "9", "--monitor-interval", "0.1"]
    return job.start([program("torchrun"), *common, *options, *script(job, launcher)], UNSHARED)[0]


def start_two_workers(job: Job, launcher: str) -> None:
    if launcher == "ours":
        options = ["--standalone", "--nproc", "2", "--log-dir", str(job.directory / "logs")]
        job.start([program("elastic-launch"), *options, *script(job, launcher)])
        return
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3", "--monitor-interval", "0.1"]
    job.start([program("torchrun"), *options, *script(job, launcher)], UNSHARED)


def cost(job: Job, world: int, pid: int) -> Figures:
    """What it cost until a world of a size trains, beside rank 0's process that trained before.

    Returns:
        seconds from the last step before to the begin of the next script, and to the next step that is new; steps that
        were done again.
    """
    first = job.step(0, world, other_than=pid)
    before = [record for record in job.steps.read() if record["pid"] == pid and record["rank"] == 0]
    last = before[-1]

    def is_new(record: Record) -> bool:
        return bool(record["rank"] == 0 and record["pid"] != pid and record["step"] > last["step"])

    began = job.step(0, world, 0, other_than=pid)["clock"]
    new = job.until("a step that is new", is_new)
    return began - last["clock"], new["clock"] - last["clock"], float(last["step"] - first["step"] + 1)


def measure_scale_up(new_job: NewJob, launcher: str) -> Figures:
    """One node trains, and a second one is started."""
    with new_job() as job:
        port = free_port()
        start_node(job, launcher, "host", port, host=True)
        pid = job.step(0, 1, ENOUGH)["pid"]
        start_node(job, launcher, "guest", port, host=False)
        return cost(job, 2, pid)


def measure_sigterm(new_job: NewJob, launcher: str) -> Figures:
    """Two nodes train, and the second one gets SIGTERM."""
    with new_job() as job:
        port = free_port()
        start_node(job, launcher, "host", port, host=True)
        guest = start_node(job, launcher, "guest", port, host=False)
        pid = job.step(0, 2, ENOUGH)["pid"]
        os.kill(guest, signal.SIGTERM)
        return cost(job, 1, pid)


def measure_worker_killed(new_job: NewJob, launcher: str) -> Figures:
    """Two workers of a node train, and one is killed."""
    with new_job() as job:
        start_two_workers(job, launcher)
        pid = job.step(0, 2, ENOUGH)["pid"]
        os.kill(job.step(1, 2, ENOUGH)["pid"], signal.SIGKILL)
        return cost(job, 2, pid)


def rows(what: str, goal: str, lost: str) -> tuple[tuple[str, str], ...]:
    return (
        (f"{what}: last step -> script begins again", goal),
        (f"{what}: last step -> next new step", ""),
        (f"{what}: steps done again, number", lost),
    )


BOTH = ("ours", "torchrun")
SCENARIOS = {
    "worker-killed": Scenario(measure_worker_killed, BOTH, rows("worker killed", "", "one snapshot interval")),
    "scale-up": Scenario(measure_scale_up, BOTH, rows("second node joins", "<= 0.5 s", "0")),
    "sigterm": Scenario(measure_sigterm, BOTH, rows("SIGTERM at a node, the other's", "<= 1 s", "0")),
}


if __name__ == "__main__":
    sys.exit(main(SCENARIOS, "Measure what changes of the world cost with elastic-launch and torchrun, in turn."))
