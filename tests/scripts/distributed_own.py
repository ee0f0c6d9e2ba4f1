"""A training that begins from a checkpoint and saves as torch.distributed.checkpoint: ``OWN START RESULT [sharded]``.

What it has before its first step is written to ``RESULT``, as ``scripts/distributed.py`` does.
"""

import sys

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import elastic_launch as el


def whole(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): whole(item) for key, item in value.items()}
    return value.full_tensor() if hasattr(value, "full_tensor") else value


own, start, result, *sharded = sys.argv[1:]
with el.session() as run:
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (run.world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    data = TensorDataset(torch.linspace(-1, 1, 72).view(24, 3))
    loader = el.ElasticLoader(data, el.GlobalBatch(12, 4))
    saving = el.Checkpoint(own, every=1, format="dcp", start_from=start)
    for step in run.steps(loader, model, optimizer, until="2ba", checkpoint=saving, exact=True):
        if step.number == 1:
            found = {"model": whole(model.state_dict()), "optimizer": whole(get_optimizer_state_dict(model, optimizer))}
            if run.rank == 0:
                torch.save(found, result)
        for (x,) in step:
            step.backward(step.model(x).square().mean())
        step.update()
    if run.rank == 0:
        print(f"weights {el.weights_sha256(model) if not sharded else ''}")
