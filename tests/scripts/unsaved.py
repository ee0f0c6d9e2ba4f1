"""A training that loses its only rank before others have got the buffer that is not saved: ``unsaved.py DIRECTORY``.

The buffer is another one in each process until rank 0's is sent. In the first world of three, the rank that has trained
kills itself once the others have the state and wait for the rest.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from ranks import await_ranks, come, end
from torch import nn
from torch.utils.data import TensorDataset

import elastic_launch as el
from elastic_launch.training.loop import Loop

# What is put in the place of the library's function below counts as the library's own.
__name__ = "elastic_launch.training.unsaved"

work = Path(sys.argv[1])
agree = Loop._agree


def end_before(loop: Loop, step: int) -> bool:
    world = loop.engine.world
    if world.world_size == 3 and not (work / "ended").exists():
        come(work, "agreement", world.rank)
        if loop._agreed:
            await_ranks(work, "agreement", range(3))
            end(work)
    return agree(loop, step)


Loop._agree = end_before  # type: ignore[method-assign]

with el.session() as run:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    model.register_buffer("shift", torch.tensor([float(os.getpid())]), persistent=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = torch.randn(60, 6)
    loader = el.ElasticLoader(TensorDataset(inputs, inputs[:, :3]), el.GlobalBatch(6, 2), seed=1)
    for step in run.steps(loader, model, optimizer, until="200ba"):
        for features, targets in step:
            step.backward(nn.functional.mse_loss(step.model(features), targets))
        step.update()
        time.sleep(0.1 if run.world_size < 3 else 0.0)
        line = {"step": step.number, "pid": os.getpid(), "world": run.world_size, "shift": float(model.shift)}
        with (work / "steps.jsonl").open("a") as lines:
            lines.write(json.dumps(line) + "\n")
