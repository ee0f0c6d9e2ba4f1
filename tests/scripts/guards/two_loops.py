"""A GAN's two concurrent loops, each with its own model: refused."""

import sys

import torch
from torch import nn

import elastic_launch as el

with el.session() as run:
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    loader = el.ElasticLoader(torch.randn(64, 4), el.GlobalBatch(16, 4))
    checkpoint = el.Checkpoint(sys.argv[1], every=5)
    loops = [
        run.steps(loader, model, torch.optim.SGD(model.parameters(), 0.1), until="20ba", checkpoint=checkpoint)
        for model in models
    ]
    for steps in zip(*loops, strict=True):
        for step, model in zip(steps, models, strict=True):
            for x in step:
                step.backward(model(x).square().mean())
            step.update()
