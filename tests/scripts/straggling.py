"""Train while a rank is slow: ``straggling.py DIRECTORY RANK PHASE``, until DIRECTORY has a file ``finish``.

PHASE is ``data``: the dataset sleeps on that rank; or ``compute``: its loop does.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import elastic_launch as el
from elastic_launch.training.ranks import pace

# Other programs may keep the host of the tests busy.
pace.overloaded = lambda load, pressure: False

work, slow, phase = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
mine = int(os.environ["RANK"]) == slow


class Slow(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        if mine and phase == "data":
            time.sleep(0.005)
        return torch.full((8,), float(index % 7))


with el.session() as run:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader = el.ElasticLoader(Slow(), el.GlobalBatch(24, micro=4), seed=0)
    for step in run.steps(loader, model, optimizer, until="100000ba"):
        for sample in step:
            if phase == "compute" and mine:
                time.sleep(0.02)
            step.backward(step.model(sample).pow(2).mean())
        step.update()
        if (work / "finish").exists():
            run.request_stop()
