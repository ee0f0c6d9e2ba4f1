"""Two trainings one after another: ``twice.py DIRECTORY``; rank 0 prints the weights.

The second one is of the first one's body, with a new head and data that are drawn between them. The first one is of a
``Trainer`` that evaluates, with 4 steps; the second one is a loop with 8.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic_launch as el

x = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
y = (x.sum(1) > 0).long()
batch = el.GlobalBatch(16, micro=4)
cross_entropy = nn.functional.cross_entropy

with el.session() as run:
    directory = Path(sys.argv[1])
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1))
    first = nn.Sequential(body, nn.Linear(16, 2))
    trainer = el.Trainer(
        run,
        first,
        torch.optim.SGD(first.parameters(), lr=0.1),
        el.ElasticLoader(TensorDataset(x, y), batch, seed=0),
        loss_fn=cross_entropy,
        eval_loader=el.ElasticLoader(TensorDataset(x, y), batch, shuffle=False),
        checkpoint=el.Checkpoint(directory / "first", every=2),
        exact=True,
    )
    trainer.fit("2ep")
    model = nn.Sequential(body, nn.Linear(16, 2))
    noisy = x + random.random() + float(np.random.rand())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = el.ElasticLoader(TensorDataset(noisy, y), batch, seed=0)
    saving = el.Checkpoint(directory / "second", every=2)
    for step in run.steps(loader, model, optimizer, until="4ep", exact=True, checkpoint=saving):
        for a, b in step:
            step.backward(cross_entropy(model(a), b))
        step.update()
    if run.rank == 0:
        print(f"weights {el.weights_sha256(model)}", flush=True)
