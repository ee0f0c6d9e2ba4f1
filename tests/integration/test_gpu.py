"""Trainings of several nodes on a GPU, with NCCL: each node has one rank, and all nodes may have the same GPU.

NCCL refuses a GPU to two ranks of a host, and takes the host from NCCL_HOSTID. Such ranks exchange data by sockets.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from changes import Changes
from harness import SLOWNESS, Agent, Job, read_lines

from elastic_launch.faults import FaultPlan

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def host(name: str) -> dict[str, str]:
    """What makes an agent's workers ranks of another host to NCCL."""
    return {"NCCL_HOSTID": name, "NCCL_SOCKET_IFNAME": "lo"}


def start(changes: Changes, name: str, *flags: str) -> Agent:
    return changes.node(name, *flags, env=host(name))


def pids(job: Job, number: int) -> dict[str, int]:
    """The processes of a round so far, by node."""
    return {
        path.stem.removeprefix("events-"): event["pid"]
        for path in job.logged("events-*.jsonl")
        for event in read_lines(path)
        if event["event"] in ("worker_started", "worker_kept") and event["round"] == number
    }


@pytest.mark.parametrize("live", [True, False], ids=["live", "no live"])
def test_a_killed_worker_costs_no_step_and_live_no_other_process(job: Job, undisturbed: str, live: bool) -> None:
    changes = Changes(job, live=live)
    a, b = start(changes, "a"), start(changes, "b")
    first = changes.trains(2, steps=10)
    os.kill(pids(job, first)["b"], signal.SIGKILL)
    last = changes.trains(2, after=first)
    result = changes.finish(a, b)
    assert changes.kinds()[-1] == ("broken", first, "crash")
    assert (pids(job, last)["a"] == pids(job, first)["a"]) == live
    if live:
        assert changes.done_again() == 0
    assert result["hash"] == undisturbed


def test_nodes_join_and_leave_and_one_is_lost(job: Job, undisturbed: str) -> None:
    changes = Changes(job, live=True, step_time=0.2)
    a = start(changes, "a")
    alone = changes.trains(1, steps=3)
    b = start(changes, "b")
    joined = changes.trains(2, after=alone, steps=3)
    b.signal(signal.SIGTERM)
    left = changes.trains(1, after=joined, steps=3)
    assert b.wait() == 143
    c, d = start(changes, "c"), start(changes, "d")
    again = changes.trains(3, after=left, steps=3)
    c.kill()
    last = changes.trains(2, after=again, steps=3)
    result = changes.finish(a, d)
    assert changes.done_again() == 0
    assert len({pids(job, number)["a"] for number in (alone, joined, left, again, last)}) == 1
    assert result["hash"] == undisturbed


def test_a_frozen_worker_is_found_and_the_others_keep_their_processes(job: Job, undisturbed: str) -> None:
    changes = Changes(job, live=True)
    a, b = start(changes, "a"), start(changes, "b")
    first = changes.trains(2, steps=20)
    os.kill(pids(job, first)["b"], signal.SIGSTOP)
    last = changes.trains(2, after=first)
    result = changes.finish(a, b)
    assert job.event("hang_found")["nodes"] == ["b"]
    assert pids(job, last)["a"] == pids(job, first)["a"]
    assert changes.done_again() == 0
    assert result["hash"] == undisturbed


@pytest.mark.parametrize("options", ["fsdp", "fsdp --exact", "fsdp --bf16", "zero", "none"])
def test_a_killed_trainer_goes_on_also_sharded(job: Job, options: str) -> None:
    result = job.directory / "result.json"
    saving = ["--checkpoint", str(job.directory / "saved"), "--every", "100", "--result", str(result)]
    command = [str(EXAMPLES / "fsdp" / "train.py"), *saving, "--steps", "40", "--shard", *options.split()]
    plan = FaultPlan.fail_at(1, 20).environment()
    flags = ["--join-settle", "300"]
    agents = [job.node(name, *flags, nnodes="2", command=command, env={**host(name), **plan}) for name in "ab"]
    for agent in agents:
        assert agent.wait(120 * SLOWNESS) == 0, "\n".join(each.output for each in agents)
    found = json.loads(result.read_text())
    assert (found["worlds"], found["restarts"], 0 < found["resumed"] <= 20) == ([2, 2], 1, True), agents[0].output


@pytest.mark.parametrize(
    "example",
    ["gpt --until 40ba --precision fp16", "gpt --until 40ba --precision bf16", "deepspeed --epochs 2 --stage 2"],
)
def test_a_killed_training_in_half_precision_goes_on(job: Job, example: str) -> None:
    name, *options = example.split()
    command = [str(EXAMPLES / name / "train.py"), *options, "--dir" if name == "deepspeed" else "--checkpoint"]
    command.append(str(job.directory / "saved"))
    plan = FaultPlan.fail_at(1, 20).environment()
    agents = [job.node(each, nnodes="2", command=command, env={**host(each), **plan}) for each in "ab"]
    for agent in agents:
        assert agent.wait(120 * SLOWNESS) == 0, "\n".join(each.output for each in agents)
    output = "\n".join(agent.output for agent in agents)
    assert '"worlds": [2, 2]' in output, output
    assert "nan" not in output.lower(), output
