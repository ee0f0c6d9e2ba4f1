"""Memory and CPU of all processes of an agent, except the workers and their children."""

from __future__ import annotations

import os
import time
from pathlib import Path

from jobs import Figures, Job, descendants
from launchers import start_alone

__all__ = ["helpers_cpu", "measure"]

SAMPLES = 10
SETTLED = 200
"""Steps after which startup is over: the agent prepares everything for later in the first seconds."""
TICK = 1 / os.sysconf("SC_CLK_TCK")


def measure(job: Job, who: str, seconds: float, *options: str) -> Figures:
    """Watch an agent while its two workers train.

    Returns:
        MiB of memory, with shared pages counted by their share (PSS): of all processes together, the median and the
        maximum of ten samples; with the workers and their children, the median; CPU seconds in 20 s, including those of
        short-lived children; the number of processes.
    """
    agent, _began = start_alone(job, who, 2, *options)
    for rank in (0, 1):
        job.step(rank, 2, SETTLED)
    began, before = time.monotonic(), helpers_cpu(job, agent)
    memory, whole, most = [], [], 0
    for look in range(1, SAMPLES + 1):
        job.sleep(began + seconds * look / SAMPLES)
        helpers = _helpers(job, agent)
        memory.append(sum(map(_pss, helpers)) / 2**20)
        whole.append(sum(map(_pss, [agent, *descendants(agent)])) / 2**20)
        most = max(most, len(helpers))
    after, took = helpers_cpu(job, agent), time.monotonic() - began
    spent = sum(after[pid] - before.get(pid, 0.0) for pid in after)
    return {
        "memory": sorted(memory)[SAMPLES // 2],
        "peak": max(memory),
        "whole": sorted(whole)[SAMPLES // 2],
        "cpu": spent * 20 / took,
        "processes": float(most),
    }


def _helpers(job: Job, agent: int) -> list[int]:
    workers = {record["pid"] for record in job.steps.read()}
    training = workers.union(*map(descendants, workers))
    return [agent, *(pid for pid in descendants(agent) if pid not in training)]


def _pss(pid: int) -> int:
    """Bytes; 0 if the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def helpers_cpu(job: Job, agent: int) -> dict[int, float]:
    """CPU seconds of each process of an agent but the workers and theirs, including the children that it has reaped."""
    found = {}
    for pid in _helpers(job, agent):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found[pid] = sum(map(int, fields[11:15])) * TICK
    return found
