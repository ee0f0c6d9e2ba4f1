"""Train a sharded model: ``sharded_memory.py CHECKPOINT STEPS``; each rank prints what a restore took at its peak."""

import re
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import elastic_launch as el

WIDTH, LAYERS = 1024, 8
STATE = 3 * LAYERS * WIDTH * WIDTH * 4  # with AdamW


def resident(entry: str) -> int:
    """Return this process' memory from /proc, in bytes."""
    found = re.search(rf"{entry}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    saved, steps = sys.argv[1:]
    data = torch.utils.data.TensorDataset(torch.ones(8, WIDTH))
    with el.session(threads=1) as run:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (run.world_size,))
        model = nn.Sequential(*(fully_shard(nn.Linear(WIDTH, WIDTH, bias=False), mesh=mesh) for _ in range(LAYERS)))
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
        loader = el.ElasticLoader(data, el.GlobalBatch(4, micro=1), seed=0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = resident("VmRSS")
        saving = el.Checkpoint(saved, every=1)
        for step in run.steps(loader, model, optimizer, until=f"{steps}ba", checkpoint=saving):
            if before and run.resumed_step:
                grown, before = (resident("VmHWM") - before) / STATE, 0
                print(f"rank {run.rank} restored step {run.resumed_step}: {grown:.2f} of the state", flush=True)
            for (x,) in step:
                step.backward(model(x).square().mean())
            step.update()


if __name__ == "__main__":
    main()
