"""Decays its weights by hand, while the previous step's snapshot is being written; prints a hash of the weights."""

import torch
from torch.utils.data import TensorDataset

import elastic_launch as el

data = TensorDataset(torch.randn(64, 2048, generator=torch.Generator().manual_seed(1)))
with el.session() as run:
    torch.manual_seed(0)
    model = torch.nn.Linear(2048, 2048)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = el.ElasticLoader(data, el.GlobalBatch(4, micro=2))
    for step in run.steps(loader, model, optimizer, until="16ba", exact=True):
        for parameter in model.parameters():
            parameter.data.mul_(0.9)
        for (x,) in step:
            step.backward((model(x) ** 2).mean())
        step.update()
    if run.rank == 0:
        print("weights", el.weights_sha256(model), "resumed", run.resumed_step, flush=True)
