"""A training in exact mode that may begin from another one's checkpoint; rank 0 prints its steps and weights."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic_launch as el

parser = argparse.ArgumentParser()
parser.add_argument("checkpoint")
parser.add_argument("--start-from")
parser.add_argument("--weights-only", action="store_true")
parser.add_argument("--skip-frozen", action="store_true")
parser.add_argument("--size", type=int, default=8)
parser.add_argument("--until", default="8ba")
args = parser.parse_args()

with el.session() as run:
    torch.manual_seed(0 if args.skip_frozen else run.rank)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
    model[0].requires_grad_(not args.skip_frozen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    data = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    loader = el.ElasticLoader(TensorDataset(data, data.sum(1, keepdim=True)), el.GlobalBatch(args.size, 4))
    allow = [] if args.start_from is None or args.weights_only else ["global batch"]
    start = {"start_from": args.start_from, "weights_only": args.weights_only, "allow": allow}
    saving = el.Checkpoint(args.checkpoint, every=100, skip_frozen=args.skip_frozen, **start)
    steps = []
    for step in run.steps(loader, model, optimizer, until=args.until, checkpoint=saving, exact=True):
        for x, y in step:
            step.backward(nn.functional.mse_loss(step.model(x), y))
        step.update()
        steps.append(step.number)
    if run.rank == 0:
        print(f"steps {steps[0]} to {steps[-1]}, weights {el.weights_sha256(model)}")
