"""Two trainings, of which the second is shorter, and fails in its fourth step: ``shorter.py DIRECTORY EVERY [ONCE]``.

The first one saves every two steps, and its end; the second one every EVERY steps; with 0 neither does. With ONCE, a
file that does not exist yet, rank 0 is killed there instead, but not again in its next process.
"""

from __future__ import annotations

import os
import signal
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
        saving = None if sys.argv[2] == "0" else el.Checkpoint(Path(sys.argv[1]) / name, every=every)
        for step in run.steps(loader, model, optimizer, until="1ep", checkpoint=saving):
            if name == "second" and step.number == 4:
                if len(sys.argv) < 4:
                    raise ValueError("planned")
                if run.rank == 0 and not Path(sys.argv[3]).exists():
                    Path(sys.argv[3]).touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            for (x,) in step:
                step.backward(model(x).square().mean())
            step.update()
