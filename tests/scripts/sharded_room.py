"""Train a sharded model: ``sharded_room.py DIRECTORY STEPS CHECKPOINT``. In the first step it waits for a file ``go``.

Each step is followed by a snapshot. The last lines have the step from which the process went on, and the weights. With
``EVERY`` it saves after so many steps, with ``ROWS`` its large layer has so many, and with ``SLOW`` each share of a
checkpoint takes so many seconds, times its rank.
"""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import elastic_launch as el
from elastic_launch.snapshot.storage.shares import OwnShare
from elastic_launch.training.checkpoints import snapshot_interval

snapshot_interval.SHARE = 1000.0

EVERY, ROWS = int(os.environ.get("EVERY", "1000")), int(os.environ.get("ROWS", 2**16))


class Model(nn.Module):
    """Most of its state is a layer that it does not use, so that a step needs little memory."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(8, 3)
        self.large = nn.Linear(1, 1, bias=False).requires_grad_(False)
        self.large.weight.data = torch.arange(ROWS * 2**10, dtype=torch.float32).view(ROWS, 2**10)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def slow_shares(seconds: float) -> None:
    parts = OwnShare.parts

    def slowly(self: OwnShare, index: int) -> Iterator[bytes | memoryview]:
        time.sleep(seconds)
        return parts(self, index)

    OwnShare.parts = slowly  # type: ignore[method-assign]


def main() -> None:
    directory, steps, saved = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    data = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 64).view(8, 8))
    with el.session(threads=1) as run:
        torch.manual_seed(0)
        model = Model()
        if run.world_size > 1:
            mesh = init_device_mesh("cpu", (run.world_size,))
            fully_shard(model.large, mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.used.parameters(), lr=0.01)
        loader = el.ElasticLoader(data, el.GlobalBatch(8, micro=2), seed=0)
        saving = el.Checkpoint(saved, every=EVERY, keep=100, split=1)
        slow_shares(run.rank * float(os.environ.get("SLOW", "0")))
        for step in run.steps(loader, model, optimizer, until=f"{steps}ba", checkpoint=saving, exact=True):
            if step.number == 1:
                (directory / f"waiting-{run.rank}").touch()
                while not (directory / "go").exists():
                    time.sleep(0.02)
            for (x,) in step:
                step.backward(model(x).square().mean())
            step.update()
        print(f"rank {run.rank} went on from step {run.resumed_step}", flush=True)
        mine = model.large.weight.detach()
        mine = (mine.to_local() if isinstance(mine, DTensor) else mine).flatten()
        assert torch.equal(mine, torch.arange(int(mine[0]), int(mine[0]) + len(mine), dtype=torch.float32))
        weights = el.weights_sha256(model.used)
        if run.rank == 0:
            print(f"weights {weights}", flush=True)


if __name__ == "__main__":
    main()
