"""A training with an average that starts at step 5, and with the mistakes and faults that a test wants.

late.py WORK MODE: "one-rank": only rank 1 registers it; "equal": a process that begins later does not; "die": rank 1
kills itself in step 9 while the average is swapped in, and later in its place; "sharded": with fully_shard.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import elastic_launch as el

WORK, MODE = Path(sys.argv[1]), sys.argv[2]
START, STEPS = 5, 20

with el.session() as run:

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        if MODE == "sharded":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(model, mesh=init_device_mesh("cpu", (run.world_size,)))
        return model

    model, average = build(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    loader = el.ElasticLoader(data, el.GlobalBatch(8, micro=2))
    for step in run.steps(loader, model, optimizer, until=f"{STEPS}ba", exact=True):
        for x in step:
            step.backward((step.model(x) - x).square().mean())
        step.update()
        starts = step.number == START if MODE == "equal" else step.number >= START
        if starts and average is None:
            average = build()
            if MODE != "one-rank" or run.rank == 1:
                run.register("average", average)
        if average is not None:
            with torch.no_grad():
                for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                    mine.lerp_(theirs, 0.5)
            with run.swapped(average):
                if MODE == "sharded":
                    model(x)  # which gathers all shards
                if MODE in ("die", "equal") and step.number == 9 and run.rank == 1 and not run.restarts:
                    os.kill(os.getpid(), signal.SIGKILL)
                swapped = el.weights_sha256(model) if MODE == "sharded" or step.number == STEPS else ""
    hashes = [el.weights_sha256(model), el.weights_sha256(average), swapped] if average is not None else []
    if run.rank == 0:
        (WORK / "result.json").write_text(json.dumps(hashes))
