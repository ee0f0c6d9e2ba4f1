"""A training whose dataset grows on the last rank after the second step: ``growing.py DIRECTORY``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import elastic_launch as el

INPUTS = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))


class Growing(Dataset[Tensor]):
    length = 32

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return INPUTS[index]


with el.session() as run:
    torch.manual_seed(0)
    data, model = Growing(), nn.Linear(3, 1)
    loader = el.ElasticLoader(data, el.GlobalBatch(16, micro=4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in run.steps(loader, model, optimizer, until="3ep", checkpoint=el.Checkpoint(Path(sys.argv[1]) / "saved")):
        for x in step:
            step.backward(model(x).square().mean())
        step.update()
        with (Path(sys.argv[1]) / "steps.jsonl").open("a") as file:
            file.write(f"{step.number}\n")
        if step.number == 2 and run.rank == run.world_size - 1:
            data.length = 48
