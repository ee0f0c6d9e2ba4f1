"""Snapshots in a container's memory: a full /dev/shm takes nothing from them, and too low a limit leaves them out.

Real agents, in a mount namespace and in a memory control group.
"""

from __future__ import annotations

import re
from pathlib import Path

import memory_group
import netns
import pytest
from harness import SCRIPTS, Agent, Job, wait_for

from elastic_launch.faults import FaultPlan

NO_MOUNTS, NO_GROUPS = netns.missing(), memory_group.missing()

MIB = 96
"""The size of the state; three snapshots of it need more than a container's usual 64 MiB of shared memory."""

FULL = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && head -c 64M /dev/zero >/dev/shm/others && exec "$@"'


def train(job: Job, *prefix: str, checkpoints: Path | None = None) -> Agent:
    """Train 8 steps with one worker, which is killed behind the sixth."""
    command = [str(SCRIPTS / "large_state.py"), str(job.work), str(MIB), "8", *map(str, filter(None, [checkpoints]))]
    env = FaultPlan.fail_at(0, 6).environment()
    agent = job.launch("--standalone", "--no-live", "--nproc", "1", command=command, env=env, prefix=prefix)
    wait_for("the first step", (job.work / "waiting").exists, 60)
    return agent


@pytest.mark.system
@pytest.mark.skipif(bool(NO_MOUNTS), reason=NO_MOUNTS or "nothing is missing")
def test_others_that_have_filled_dev_shm_take_nothing_from_snapshots(job: Job) -> None:
    agent = train(job, "unshare", "--mount", "sh", "-c", FULL, "sh")
    job.tell("go")
    assert agent.wait(60) == 0, agent.output
    found = re.search(r"went on from step (\d+)", agent.output)
    assert found is not None, agent.output
    assert 1 <= int(found[1]) <= 6, "there is no checkpoint, so this was in memory"
    assert not job.events("snapshots_left_out")


@pytest.mark.system
@pytest.mark.skipif(bool(NO_GROUPS), reason=NO_GROUPS or "nothing is missing")
def test_a_limit_with_room_for_one_snapshot_of_three_leaves_them_out_and_kills_nothing(
    job: Job, tmp_path: Path
) -> None:
    with memory_group.group() as group:
        agent = train(job, *group.prefix, checkpoints=tmp_path / "saved")
        group.limit(2 * MIB * 2**20)  # the optimizer takes half of it
        job.tell("go")
        assert agent.wait(60) == 0, agent.output
        assert group.kills == 0
    figures = r"3 of 0\.09 GiB each need 0\.28 GiB more, and 0\.\d\d GiB are free within the container's limit of"
    assert re.search(rf"no snapshots in memory from now on: {figures}.*docker run --memory", agent.output)
    assert re.match(figures, job.event("snapshots_left_out")["cause"])
    assert re.search(r"went on from step [246]\b", agent.output), f"not from a checkpoint: {agent.output}"
    steps = {path.name.split(".")[0] for path in (tmp_path / "saved").glob("step-*")}
    assert {"step-2", "step-4", "step-8"} <= steps
