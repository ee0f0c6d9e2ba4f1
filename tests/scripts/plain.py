"""A DDP loop of its own that keeps its global batch: ``plain.py DIRECTORY STEPS PAUSE``.

It saves only when it is to stop, and notes in DIRECTORY/steps.jsonl each step, and in result.json the final weights.
"""

import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elastic_launch as el

work, steps, pause = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inner = nn.Linear(8, 1)
inputs = torch.rand(48, 8)
saved, done = work / "saved.pt", 0
if saved.exists():
    state = torch.load(saved, weights_only=True)
    inner.load_state_dict(state["model"])
    done = state["step"]
model = DistributedDataParallel(inner)
optimizer = torch.optim.SGD(inner.parameters(), lr=0.01)
batch = el.GlobalBatch(24, micro=4)
el.report_step(done)
stopped = False
while done < steps and not stopped:
    plan = batch.plan(world_size, rank)
    of_step = inputs[(done % 2) * batch.size :][: batch.size]
    optimizer.zero_grad()
    for number, (micro, weight) in enumerate(zip(plan.micro_batches, plan.weights, strict=True), 1):
        with nullcontext() if number == plan.grad_accum else model.no_sync():
            output = model(of_step[micro.start : micro.stop])
            # DDP divides the sum over the ranks by their number.
            (output.pow(2).mean() * weight * world_size).backward()
    optimizer.step()
    done += 1
    if rank == 0:
        noted = {"step": done, "world": world_size, "round": int(os.environ.get("ELASTIC_LAUNCH_ROUND", 0))}
        with (work / "steps.jsonl").open("a") as file:
            file.write(json.dumps(noted) + "\n")
    if not (work / "hurry").exists():
        time.sleep(pause)
    el.report_step(done)
    stopped = el.should_stop()
if rank == 0:
    torch.save({"model": inner.state_dict(), "step": done}, work / "saving.pt")
    os.replace(work / "saving.pt", saved)
if (work / "fail").exists():
    sys.exit(3)
if not stopped and rank == 0:
    weights = [float(x) for x in inner.weight.detach().flatten()]
    (work / "result.json").write_text(json.dumps({"weights": weights, "step": done}))
dist.destroy_process_group()
