"""Prints each rank's hash of all parameters of the optimizer.

``plain``: calls the model and not ``step.model``; ``weight``: has a loss weight of its own; ``unfrozen``: unfreezes a
layer at step 3; ``nan``: has a sample that is NaN.
"""

import sys

import torch
from torch.utils.data import TensorDataset

import elastic_launch as el

case = sys.argv[1]
data = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
data[40] += float("nan") if case == "nan" else 0.0
with el.session() as run:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    model[0].requires_grad_(case != "unfrozen")
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([*model.parameters(), *([weight] if case == "weight" else [])], lr=0.1)
    for step in run.steps(
        el.ElasticLoader(TensorDataset(data), el.GlobalBatch(8, micro=4)), model, optimizer, until="8ba"
    ):
        model[0].requires_grad_(case != "unfrozen" or step.position.step >= 3)
        for (x,) in step:
            out = (model if case == "plain" else step.model)(x)
            step.backward((out**2).mean() * torch.exp(-weight) + (weight if case == "weight" else 0.0))
        step.update()
    everything = torch.nn.ParameterList([*model.parameters(), weight])
    print(case, "rank", run.rank, el.weights_sha256(everything)[:12], f"weight {weight.item():.4f}", flush=True)
