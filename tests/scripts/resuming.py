"""A training in exact mode that may be resumed with other options; rank 0 prints its last rate and its weights."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic_launch as el

parser = argparse.ArgumentParser()
parser.add_argument("checkpoint")
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--t-max", type=int, default=8)
parser.add_argument("--until", default="12ba")
parser.add_argument("--override", nargs="*", default=[])
parser.add_argument("--by-rank", action="store_true")
args = parser.parse_args()

with el.session() as run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
    lr = args.lr * (1 + run.rank) if args.by_rank else args.lr
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=args.momentum)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.t_max)
    data = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    loader = el.ElasticLoader(TensorDataset(data, data.sum(1, keepdim=True)), el.GlobalBatch(8, 4))
    checkpoint = el.Checkpoint(args.checkpoint, every=100, override=args.override)
    saving = {"checkpoint": checkpoint, "scheduler": scheduler, "exact": True}
    for step in run.steps(loader, model, optimizer, until=args.until, **saving):
        for x, y in step:
            step.backward(nn.functional.mse_loss(step.model(x), y))
        step.update()
        scheduler.step()
    if run.rank == 0:
        group = optimizer.param_groups[0]
        options = group["initial_lr"], group["momentum"], scheduler.T_max, f"{group['lr']:.6f}"
        print("options", *options, "weights", el.weights_sha256(model), flush=True)
