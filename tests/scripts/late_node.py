"""A training whose steps wait as long as a file is there: ``late_node.py EPOCHS FORMAT FILE``, 10 steps an epoch.

It saves every two steps to the directory ``saved`` in the current one, and prints from which step it goes on.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic_launch as el

epochs, form, gate = sys.argv[1:]
with el.session() as run:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = el.ElasticLoader(TensorDataset(torch.ones(160, 4)), el.GlobalBatch(16, micro=8), seed=0)
    options: dict[str, Any] = {} if form == "own" else {"format": form}
    saving = el.Checkpoint("saved", every=2, **options)
    for step in run.steps(loader, model, optimizer, until=f"{epochs}ep", checkpoint=saving):
        for (x,) in step:
            step.backward(model(x).square().mean())
        step.update()
        if Path(gate).exists():
            time.sleep(0.3)
    print(f"began at step {run.resumed_step}", flush=True)
