"""Checkpoints written and read by plain torch: ``distributed.py WHAT DIRECTORY RESULT [sharded]``.

``WHAT`` is ``save``, ``load``, or ``titan``: load under torchtitan's names. What was saved or loaded is written to
``RESULT``, a file for ``torch.load``, as whole tensors.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): whole(item) for key, item in value.items()}
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def main(what: str, directory: str, result: str, sharded: str = "") -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(3 if what == "save" else 4)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    for step in range(2):
        model(torch.linspace(-1, 1, 12).view(4, 3) + step).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, moments = model.state_dict(), get_optimizer_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    if what == "save":
        dcp.save(state, checkpoint_id=directory)
    elif what == "titan":  # torchtitan's names
        dcp.load(state := {**weights, "optimizer": moments}, checkpoint_id=directory)
    else:
        dcp.load(state, checkpoint_id=directory)
    if what != "save":
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    found = {"model": whole(model.state_dict()), "optimizer": whole(get_optimizer_state_dict(model, optimizer))}
    if dist.get_rank() == 0:
        torch.save(found, result)
    dist.barrier()
    sys.stdout.flush()
    # The sharded model keeps its process group, whose threads torch does not join: now and then the interpreter's end
    # aborts with "terminate called without an active exception".
    os._exit(0)


main(*sys.argv[1:])
