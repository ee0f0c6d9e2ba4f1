"""Two trainers that take turns, epoch by epoch: ``alternating.py DIRECTORY [--exact]``."""

import sys
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic_launch as el

inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(3))


def loss_fn(predicted, target):
    time.sleep(0.02)
    return nn.functional.mse_loss(predicted, target)


def trainer(run, name, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return el.Trainer(
        run,
        model,
        optimizer,
        el.ElasticLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), el.GlobalBatch(12, 3), seed=seed),
        loss_fn=loss_fn,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9),
        exact="--exact" in sys.argv,
        checkpoint=el.Checkpoint(f"{sys.argv[1]}/{name}", every=5),
    )


with el.session() as run:
    trainers = [trainer(run, "a", 1), trainer(run, "b", 2)]
    for epoch in range(1, 4):
        for each in trainers:
            each.fit(f"{epoch}ep")
    hashes = [el.weights_sha256(each.model)[:16] for each in trainers]
    print("hashes", *hashes, "restarts", run.restarts, flush=True)
