"""Train in a loop of its own: ``own_loop.py DIRECTORY STEPS EVERY PAUSE``; checkpoints are in DIRECTORY/checkpoints.

DIRECTORY/steps.jsonl has a line for each step that is done.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import elastic_launch as el

work, steps, every, pause = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
with el.session() as run:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.register("model", model)
    run.register("optimizer", optimizer)
    step = run.resume(el.Checkpoint(work / "checkpoints", every=every))
    while step < steps:
        model(torch.ones(4, 8)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(pause)
        step += 1
        noted = {"step": step, "pid": os.getpid()}
        with (work / "steps.jsonl").open("a") as file:
            file.write(json.dumps(noted) + "\n")
        if run.boundary(step, end=step == steps):
            break
