"""A training with all that must go back with the model: ``registered.py DIRECTORY``.

The model is compiled, with a scheduler, an average, a scaler, and a layer that is trained only from step 10 on. No
snapshot is taken after step 6. Each process notes at its end what it has (``results.jsonl``).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic_launch as el
from elastic_launch.training.checkpoints.snapshot_interval import Rhythm

directory = Path(sys.argv[1])
STEPS, UNFROZEN = 24, 10

Rhythm.due = lambda self, step: 0 < step <= 6  # type: ignore[method-assign]
torch.manual_seed(0)
inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(3))
dataset = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 3))
model[3].requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
average = torch.optim.swa_utils.AveragedModel(model)
model.compile(backend="eager")

with el.session() as run:
    run.register("average", average)
    loader = el.ElasticLoader(dataset, el.GlobalBatch(16, 4), seed=1)
    more = {"scheduler": scheduler, "scaler": scaler, "exact": True}
    seen, losses, broken_off = 0, [], 0
    tensors = None
    for step in run.steps(loader, model, optimizer, until=f"{STEPS}ba", **more):
        seen += 1
        again = step.repeated
        if step.number == UNFROZEN:
            model[3].requires_grad_(True)
        for features, targets in step:
            step.backward(nn.functional.cross_entropy(step.model(features), targets))
        step.update()
        scheduler.step()
        average.update_parameters(model)
        broken_off += step.repeated != again
        if not step.repeated:
            losses.append((step.number, step.loss))
        held = [id(x) for p in list(model.parameters())[:4] for x in optimizer.state[p].values()]
        tensors = tensors or held
        assert held == tensors, "the optimizer has other tensors now"
    graphs = torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)
    result = {
        "pid": os.getpid(),
        "seen": seen,
        "broken_off": broken_off,
        "losses": losses,
        "graphs": graphs,
        "hash": el.weights_sha256(model),
        "average": el.weights_sha256(average.module),
        "averaged": int(average.n_averaged),
        "scale": scaler.get_scale(),
        "lr": optimizer.param_groups[0]["lr"],
    }
    with (directory / "results.jsonl").open("a") as lines:
        lines.write(json.dumps(result) + "\n")
