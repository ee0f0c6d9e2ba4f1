"""Train a model of a width by an optimizer: ``changed.py DIRECTORY WIDTH OPTIMIZER``."""

import sys

import torch
from torch import nn

import elastic_launch as el

torch.manual_seed(0)
with el.session() as run:
    model = nn.Sequential(nn.Linear(4, int(sys.argv[2])), nn.ReLU(), nn.Linear(int(sys.argv[2]), 4))
    optimizer = getattr(torch.optim, sys.argv[3])(model.parameters(), lr=0.1)
    loader = el.ElasticLoader(torch.randn(64, 4), el.GlobalBatch(16, 4))
    for step in run.steps(loader, model, optimizer, until="8ba", checkpoint=el.Checkpoint(sys.argv[1], every=4)):
        for x in step:
            step.backward(step.model(x).square().mean())
        step.update()
    print("done", run.resumed_step, flush=True)
