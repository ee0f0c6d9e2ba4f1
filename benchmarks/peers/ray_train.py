"""The training of ../workload.py under Ray Train: this is the driver, which Ray's head node runs beside itself."""

import argparse
import os
import tempfile
import time
from pathlib import Path

import ray
import torch
import torch.distributed as dist
import workload
from hangs import hanging
from ray import train
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CONNECTED_S = 60
"""Seconds until the head node must answer."""


def each_worker(config: dict[str, argparse.Namespace]) -> None:
    args = config["args"]
    rank, world = dist.get_rank(), dist.get_world_size()
    model = workload.model()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=workload.LEARNING_RATE)
    inputs, targets = workload.examples()
    done = 0
    if saved := train.get_checkpoint():
        with saved.as_directory() as directory:
            state = torch.load(Path(directory, "state.pt"))
        model.load_state_dict(state["model"])
        done = state["step"]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    with workload.noting(args.file) as write:
        note = hanging(write, args.file.parent)
        for step in range(done + 1, args.steps + 1):
            picked = torch.Generator().manual_seed(step)
            chosen = torch.randint(workload.SAMPLES, (workload.GLOBAL_BATCH,), generator=picked)[rank::world]
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(ddp(inputs[chosen]), targets[chosen])
            loss.backward()
            optimizer.step()
            note(step, loss=loss.item())
            if step % args.every == 0:
                report(rank, {"model": model.state_dict(), "step": step})
            time.sleep(args.sleep)


def report(rank: int, state: dict[str, object]) -> None:
    """Rank 0 saves; all ranks must call this."""
    with tempfile.TemporaryDirectory() as directory:
        if rank == 0:
            torch.save(state, Path(directory, "state.pt"))
        train.report({}, checkpoint=train.Checkpoint.from_directory(directory) if rank == 0 else None)


def connect(address: str) -> None:
    until = time.monotonic() + CONNECTED_S
    while True:
        try:
            ray.init(address=address, log_to_driver=True)
            return
        except ConnectionError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def main() -> None:
    options = workload.parser()
    options.add_argument("--address", required=True, help="of Ray's head node")
    options.add_argument("--storage", required=True, help="folder of the checkpoints")
    options.add_argument("--workers", type=int, required=True, help="at most")
    options.add_argument("--fixed", action="store_true", help="train with so many workers only")
    options.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    options.add_argument("--timeout", type=int, required=True, help="seconds for collectives")
    args = options.parse_args()
    connect(args.address)
    # Each worker takes one CPU, and each node has as many as it has workers.
    size = args.workers if args.fixed else (1, args.workers)
    TorchTrainer(
        each_worker,
        train_loop_config={"args": args},
        torch_config=TorchConfig(backend="gloo", timeout_s=args.timeout),
        scaling_config=train.ScalingConfig(num_workers=size, elastic_resize_monitor_interval_s=1),
        run_config=train.RunConfig(
            name="benchmark",
            storage_path=args.storage,
            failure_config=train.FailureConfig(max_failures=1000, controller_failure_limit=1000),
            checkpoint_config=train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


if __name__ == "__main__":
    main()
