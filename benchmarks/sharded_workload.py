"""What sharded.py trains: six square layers, sharded by FSDP2, in a plain loop or in the library's.

In addition to what noting() writes, each line has the bytes that this host has sent to itself, and by how much the
process' memory has grown, at most, since its process group was ready; lines of the library also have the step after
which the last in-memory snapshot was taken. The plain loop saves nothing.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from workload import SEED, noting, parser, prepare

import elastic_launch as el

LAYERS = 6
STEPS = 40
"""Steps of an epoch: no step is shorter than others."""
MICRO = 8
"""Samples of a micro-batch."""


class Memory:
    """How much this process' memory grows from now on: all of it, with what it shares with the agent."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew (proc(5))
        self._before = self._read("VmRSS")

    @property
    def grown(self) -> int:
        return self._read("VmHWM") - self._before

    def _read(self, entry: str) -> int:
        found = re.search(rf"{entry}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        if found is None:
            raise OSError(f"/proc/self/status has no {entry}")
        return int(found[1]) * 1024


def sent() -> int:
    """Return the bytes that this host, or this network namespace, has sent to itself."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:"))


def network(width: int) -> nn.Sequential:
    torch.manual_seed(SEED)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(width, width, bias=False), nn.ReLU()]
    return nn.Sequential(*layers)


def sharded(width: int, mesh: DeviceMesh) -> nn.Sequential:
    model = network(width)
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def plain(args: argparse.Namespace, inputs: Tensor, note: Callable[..., None]) -> None:
    """A hand-written loop."""
    dist.init_process_group("gloo")
    note(0, mark="initialized")
    memory, rank, world_size = Memory(), dist.get_rank(), dist.get_world_size()
    model: Any = sharded(args.width, init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, args.steps + 1):
        chosen = torch.randint(len(inputs), (args.micros, MICRO), generator=torch.Generator().manual_seed(step))
        mine = chosen[rank::world_size]
        optimizer.zero_grad()
        for number, micro in enumerate(mine, 1):
            model.set_requires_gradient_sync(number == len(mine))
            loss = nn.functional.mse_loss(model(inputs[micro]), inputs[micro].flip(1)) / len(mine)
            loss.backward()
        optimizer.step()
        note(step, sent=sent(), grown=memory.grown)
        time.sleep(args.sleep)
    dist.destroy_process_group()


def ours(args: argparse.Namespace, inputs: Tensor, note: Callable[..., None]) -> None:
    """The same with the library's loop."""
    data = torch.utils.data.TensorDataset(inputs, inputs.flip(1))
    loader = el.ElasticLoader(data, el.GlobalBatch(args.micros * MICRO, micro=MICRO), seed=SEED)
    until = f"{args.steps}ba"
    with el.session() as run:
        note(0, mark="initialized")
        memory = Memory()
        # Only this benchmark needs to know when snapshots are taken.
        snapshots = run._engine.saver._memory
        prepare(args)

        def done(step: int) -> None:
            note(step, sent=sent(), grown=memory.grown, snapshot=snapshots.rhythm.last)
            time.sleep(args.sleep)

        mesh = run.mesh(shard=args.replica) if args.replica else init_device_mesh("cpu", (run.world_size,))
        model = sharded(args.width, mesh["shard"] if args.replica else mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def train(step: el.Step) -> None:
            for sample, target in step:
                step.backward(nn.functional.mse_loss(step.model(sample), target))
            step.update()

        for step in run.steps(loader, model, optimizer, until=until, rehearse=train):
            again = step.repeated
            train(step)
            if step.repeated == again:  # else a fault broke it off
                done(step.number)


def main() -> None:
    options = parser()
    options.add_argument("--width", type=int, default=1024, help=f"of {LAYERS} square layers")
    options.add_argument("--micros", type=int, default=6, help=f"micro-batches of {MICRO} samples in a global batch")
    options.add_argument("--replica", type=int, help="ranks that divide the model [all]")
    options.add_argument("--plain", action="store_true", help="without the library")
    args = options.parse_args()
    torch.manual_seed(SEED)
    inputs = torch.randn(STEPS * MICRO * args.micros, args.width)
    with noting(args.file) as note:
        (plain if args.plain else ours)(args, inputs, note)


if __name__ == "__main__":
    main()
