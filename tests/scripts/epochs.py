"""A loop for each epoch, with one ``Checkpoint``: ``epochs.py DIRECTORY``; all ranks print the weights.

Each epoch has four steps.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic_launch as el

data = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))

with el.session() as run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = el.ElasticLoader(TensorDataset(data), el.GlobalBatch(16, micro=4), seed=0)
    saving = el.Checkpoint(sys.argv[1], every=100)
    for epoch in range(1, 4):
        for step in run.steps(loader, model, optimizer, until=f"{epoch}ep", exact=True, checkpoint=saving):
            for (x,) in step:
                step.backward(model(x).square().mean())
            step.update()
    print(f"weights {el.weights_sha256(model)}", flush=True)
