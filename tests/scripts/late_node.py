"""A training whose steps wait as long as a file is there: ``late_node.py EPOCHS FORMAT FILE``, 10 steps an epoch.

It saves every two steps to the directory ``saved`` in the current one, and prints with which step each round begins.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic_launch as el

epochs, form, gate = sys.argv[1:]
assert form in ("safetensors", "dcp")
with el.session() as run:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = el.ElasticLoader(TensorDataset(torch.ones(160, 4)), el.GlobalBatch(16, micro=8), seed=0)
    saving, began = el.Checkpoint("saved", every=2, format=form), ""
    for step in run.steps(loader, model, optimizer, until=f"{epochs}ep", checkpoint=saving):
        if began != (began := os.environ["ELASTIC_LAUNCH_ROUND"]):
            print(f"round {began} begins with step {step.number}", flush=True)
        for (x,) in step:
            step.backward(model(x).square().mean())
        step.update()
        if Path(gate).exists():
            time.sleep(0.3)
