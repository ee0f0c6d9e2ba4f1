"""A learning-rate schedule and step-level random numbers through a kill; with ``forget`` the schedule is not saved."""

import random
import sys

import numpy as np
import torch
from torch import nn

import elastic_launch as el

with el.session() as run:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    saving = {"checkpoint": el.Checkpoint(sys.argv[1], every=5)}
    if "forget" not in sys.argv:
        saving["scheduler"] = scheduler
    loader = el.ElasticLoader(torch.randn(64, 4), el.GlobalBatch(16, 4))
    drawn = 0.0
    for step in run.steps(loader, model, optimizer, until="20ba", **saving):
        drawn = random.random() + np.random.rand() + float(torch.rand(1))
        for x in step:
            step.backward(step.model(x).square().mean())
        step.update()
        scheduler.step()
    if run.rank == 0:
        rate = optimizer.param_groups[0]["lr"]
        print(f"restarts {run.restarts} rate {rate:.4f} drawn {drawn:.6f}", flush=True)
