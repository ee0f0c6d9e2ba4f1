"""Two trainings, of which the second is shorter, and fails in its fourth step: ``shorter.py DIRECTORY EVERY``.

The first one saves every two steps, and its end; the second one every EVERY steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic_launch as el

with el.session() as run:
    for name, every in ("first", 2), ("second", int(sys.argv[2])):
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = el.ElasticLoader(TensorDataset(torch.ones(160, 4)), el.GlobalBatch(16, micro=8), seed=0)
        saving = el.Checkpoint(Path(sys.argv[1]) / name, every=every)
        for done, step in enumerate(run.steps(loader, model, optimizer, until="1ep", checkpoint=saving)):
            if name == "second" and done == 3:
                raise ValueError("planned")
            for (x,) in step:
                step.backward(model(x).square().mean())
            step.update()
