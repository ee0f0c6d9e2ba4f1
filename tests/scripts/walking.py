"""Trains a small model for 60 steps: ``walking.py``."""

import time

import torch

import elastic_launch as el

with el.session() as run:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    loader = el.ElasticLoader(data, el.GlobalBatch(8, micro=2), seed=0)
    for step in run.steps(loader, model, optimizer, until="60ba"):
        for inputs, targets in step:
            step.backward(((model(inputs) - targets) ** 2).mean())
        step.update()
        time.sleep(0.05)
