"""A training in which one rank ends a step that another has not: ``torn.py DIRECTORY BEHIND [lost]``.

In round 1 the exchange of step 10 succeeds everywhere, but fails for local rank BEHIND, as if the connection had been
lost at its very end. Local rank 2 is killed in the next step, to which the other one has come. With ``lost``, all ranks
but BEHIND are killed in round 2, before its first step and after BEHIND has got their state. Each step that a process
ends is noted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from ranks import await_end, await_ranks, come, end
from torch import nn
from torch.utils.data import TensorDataset

import elastic_launch as el
from elastic_launch.training.loop import Loop
from elastic_launch.training.ranks.world import World
from elastic_launch.training.transaction import Transaction

# What is put in the place of the library's functions below counts as the library's own.
__name__ = "elastic_launch.training.torn"

work, behind = Path(sys.argv[1]), int(sys.argv[2])
exchange = Transaction.exchange
local_rank = int(os.environ["LOCAL_RANK"])
first = os.environ["ELASTIC_LAUNCH_ROUND"] == "1"


def torn(step: Transaction) -> None:
    global first
    if first and step.number == 11:
        come(work, "step-11", local_rank)
        if local_rank == 2:
            await_ranks(work, "step-11", [1 - behind])
            end(work)
    exchange(step)
    if first and step.number == 10 and local_rank == behind:
        first = False
        await_end(work)
        raise RuntimeError("Connection closed by peer, as far as this rank knows")


new_gradients = Loop._new_gradients
lost = len(sys.argv) > 3 and local_rank != behind


def lost_in_round_2(loop: Loop, world: World, *, same: bool = False) -> Any:
    if os.environ["ELASTIC_LAUNCH_ROUND"] == "2":
        come(work, "state", local_rank)
        if lost:
            await_ranks(work, "state", [behind])
            os.kill(os.getpid(), signal.SIGKILL)
    return new_gradients(loop, world, same=same)


Transaction.exchange = torn  # type: ignore[method-assign]
Loop._new_gradients = lost_in_round_2  # type: ignore[method-assign]

with el.session() as run:
    torch.manual_seed(0)
    inputs = torch.randn(96, 6)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    loader = el.ElasticLoader(TensorDataset(inputs, inputs[:, :3].argmax(dim=1)), el.GlobalBatch(16, 4), seed=1)
    done = []
    for step in run.steps(loader, model, optimizer, until="30ba", exact=True, scheduler=scheduler):
        for features, targets in step:
            step.backward(nn.functional.cross_entropy(step.model(features), targets))
        step.update()
        scheduler.step()
        done.append((step.number, step.loss))
    result = {
        "rank": run.rank,
        "pid": os.getpid(),
        "done": done,
        "rate": scheduler.get_last_lr()[0],
        "hash": el.weights_sha256(model),
    }
    with (work / "results.jsonl").open("a") as lines:
        lines.write(json.dumps(result) + "\n")
