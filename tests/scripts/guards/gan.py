"""A GAN: two models and two optimizers in one loop, with a pass over the micro-batches for each."""

import sys

import torch
from torch import nn
from torch.nn.functional import softplus

import elastic_launch as el

with el.session() as run:
    torch.manual_seed(0)
    real = torch.randn(64, 4, generator=torch.Generator().manual_seed(1)) + 2
    g, d = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)), nn.Linear(4, 1)
    optimizers = {"g": torch.optim.Adam(g.parameters(), 0.01), "d": torch.optim.Adam(d.parameters(), 0.01)}
    schedulers = {name: torch.optim.lr_scheduler.StepLR(optimizer, 5) for name, optimizer in optimizers.items()}
    loader = el.ElasticLoader(real, el.GlobalBatch(16, 4))
    checkpoint = el.Checkpoint(sys.argv[1], every=5)
    exact = "default" not in sys.argv
    for step in run.steps(
        loader, {"g": g, "d": d}, optimizers, until="24ba", checkpoint=checkpoint, scheduler=schedulers, exact=exact
    ):
        for x in step:
            step.backward(softplus(-d(x)).mean() + softplus(d(g(torch.randn_like(x)).detach())).mean())
        step.update(optimizer="d")
        for x in step:
            step.backward(softplus(-d(g(torch.randn_like(x)))).mean())
        step.update(optimizer="g", clip_norm=1.0)
        for scheduler in schedulers.values():
            scheduler.step()
    if run.rank == 0:
        hashes = el.weights_sha256(g)[:16], el.weights_sha256(d)[:16]
        print("hashes", *hashes, "restarts", run.restarts, "resumed", run.resumed_step, flush=True)
