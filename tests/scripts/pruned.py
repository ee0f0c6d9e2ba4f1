"""A worker that prunes its model in the loop, twice, and makes it permanent for one layer; prints the hash."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import TensorDataset

import elastic_launch as el

x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
y = (x.sum(1) > 0).long()

with el.session() as run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = el.ElasticLoader(TensorDataset(x, y), el.GlobalBatch(16, micro=4), seed=0)
    for step in run.steps(loader, model, optimizer, until="24ba", exact=True):
        for a, b in step:
            step.backward(F.cross_entropy(model(a), b))
        step.update()
        if step.number in (6, 18):
            prune.l1_unstructured(model[0], "weight", 0.3)
            prune.random_unstructured(model[2], "bias", 1)
        if step.number == 12:
            prune.remove(model[2], "bias")
    print("hash", el.weights_sha256(model), "seen", run.resumed_step, flush=True)
