"""Start a training that must be refused: ``refused.py KIND DIRECTORY``."""

import sys

import torch
import torch.distributed as dist
from torch import nn

import elastic_launch as el

kind, directory = sys.argv[1:]
with el.session() as run:
    model = nn.Sequential(nn.Embedding(8, 4, max_norm=1.0 if kind == "max_norm" else None), nn.Linear(4, 4))
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"file://{directory}.store", rank=0, world_size=1)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    if kind == "hybrid":
        from torch.distributed.fsdp import fully_shard

        fully_shard(
            model,
            mesh=torch.distributed.init_device_mesh("cpu", (run.world_size, 1), mesh_dim_names=("replicate", "shard")),
        )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if kind == "late":
        run.register("model", model)
        run.resume(el.Checkpoint(directory))
        run.register("optimizer", optimizer)
    loader = el.ElasticLoader(torch.arange(64) % 8, el.GlobalBatch(16, 4))
    for step in run.steps(loader, model, optimizer, until="8ba", checkpoint=el.Checkpoint(directory), exact=True):
        for x in step:
            step.backward(step.model(x).square().mean())
        step.update()
