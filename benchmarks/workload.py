"""What the benchmarks train: a plain DDP script that logs the time of every optimizer step.

It imports nothing of any launcher and relies on torchrun's environment variables alone. Every rank appends one JSON
line per step to the same file: {"step", "rank", "world", "round", "pid", "clock", "loss"}, the clock by
``time.monotonic()``, which all processes of a Linux host share; the round is 0 if the launcher has none. Lines of
step 0 have a "mark" instead of a loss: the script begins, before it imports torch (time before this is the launcher's,
time after it the script's own); torch is imported; the process group is ready; the state is restored. With
``--snapshot`` it saves every so many steps, and resumes from there. With ``WORKLOAD_GPU`` in the environment all ranks
of this machine train on its first GPU.
"""

# ruff: noqa: E402
import time

BEGAN = time.monotonic()

import argparse
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

IMPORTED = time.monotonic()
WIDTH = 32
SAMPLES = 4096
GLOBAL_BATCH = 16
NOISE = 0.1
SEED = 0
LEARNING_RATE = 0.01
PLACE = {"rank": "RANK", "world": "WORLD_SIZE", "round": "ELASTIC_LAUNCH_ROUND"}
"""What lines say of a process' place, which changes if the process is kept for another round, and where it is read."""
COLLECTIVE_TIMEOUT = timedelta(minutes=2)
GPU = "WORKLOAD_GPU" in os.environ

if GPU:
    # NCCL refuses a GPU to two ranks of a host.
    os.environ |= {"NCCL_HOSTID": str(os.getpid()), "NCCL_SOCKET_IFNAME": "lo"}
    if "LOCAL_RANK" in os.environ:
        # As --virtual-local-rank does it: the library then takes the first GPU, not the one of the local rank.
        os.environ["ELASTIC_LAUNCH_LOCAL_RANK"] = os.environ["LOCAL_RANK"]


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description="Train a small model for as long as a benchmark needs.")
    options.add_argument("--file", type=Path, required=True, help="where the lines go")
    options.add_argument("--steps", type=int, default=1_000_000, help="after which it ends by itself")
    options.add_argument("--sleep", type=float, default=0.0, help="seconds to sleep after each step")
    options.add_argument(
        "--prepare", type=float, default=0.0, help="seconds that preparing takes before the first step"
    )
    options.add_argument("--rate", type=float, default=LEARNING_RATE, help="learning rate")
    options.add_argument("--busy", action="store_true", help="preparing takes a core")
    options.add_argument("--compile", metavar="BACKEND", help="compile the model with this backend of torch's")
    return options


def prepare(args: argparse.Namespace) -> None:
    """Take the time that a script needs to load a model and data."""
    until = time.monotonic() + args.prepare
    while (left := until - time.monotonic()) > 0:
        if not args.busy:
            time.sleep(left)


@contextmanager
def noting(path: Path) -> Iterator[Callable[..., None]]:
    """Yield a function that appends the line of one step: in one write, so that lines never mix."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    pid = os.getpid()

    def note(step: int, **more: object) -> None:
        # A worker that is started ahead has no place before its first step, and these are not numbers.
        told = {name: os.environ.get(variable, "0") for name, variable in PLACE.items()}
        place = {name: int(text) if text.isdecimal() else -1 for name, text in told.items()}
        line = {"step": step, **place, "pid": pid, "clock": time.monotonic(), **more}
        os.write(file, json.dumps(line).encode() + b"\n")

    try:
        yield note
    finally:
        os.close(file)


class Network(nn.Sequential):
    """Torch compiles no module whose ``forward`` is torch's own."""

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = super().forward(inputs)
        return output


def model(backend: str | None = None) -> nn.Module:
    """Return the same weights in every process.

    Args:
        backend: compile the model with this backend.
    """
    torch.manual_seed(SEED)
    network = Network(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    if backend:
        network.compile(backend=backend)
    return network


def examples() -> tuple[Tensor, Tensor]:
    """Return the same inputs and noisy answers of one linear teacher in every process."""
    source = torch.Generator().manual_seed(SEED)
    inputs = torch.randn(SAMPLES, WIDTH, generator=source)
    teacher = torch.randn(WIDTH, 1, generator=source) / WIDTH**0.5
    return inputs, torch.tanh(inputs @ teacher) + NOISE * torch.randn(SAMPLES, 1, generator=source)


def train(args: argparse.Namespace, note: Callable[..., None]) -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl" if GPU else "gloo", timeout=COLLECTIVE_TIMEOUT)
    device = torch.device("cuda", 0) if GPU else torch.device("cpu")
    note(0, mark="initialized")
    rank, world = dist.get_rank(), dist.get_world_size()
    prepare(args)
    ddp = DistributedDataParallel(model(args.compile).to(device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=args.rate)
    inputs, targets = (tensor.to(device) for tensor in examples())
    done = 0
    if args.snapshot and args.snapshot.exists():
        state = torch.load(args.snapshot)
        ddp.module.load_state_dict(state["model"])
        done = state["step"]
    note(0, mark="restored")
    for step in range(done + 1, args.steps + 1):
        # The global batch is the same for every world size.
        chosen = torch.randint(SAMPLES, (GLOBAL_BATCH,), generator=torch.Generator().manual_seed(step))[rank::world]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(inputs[chosen]), targets[chosen])
        loss.backward()
        optimizer.step()
        note(step, loss=loss.item())
        if args.snapshot and step % args.every == 0 and rank == 0:
            new = args.snapshot.with_suffix(".new")
            torch.save({"model": ddp.module.state_dict(), "step": step}, new)
            new.rename(args.snapshot)
        time.sleep(args.sleep)
    # With these two alive, destroying the process group occasionally hangs.
    del ddp, optimizer
    dist.destroy_process_group()


def main() -> None:
    options = parser()
    options.add_argument("--snapshot", type=Path, help="file to save to and to go on from")
    options.add_argument("--every", type=int, default=10, help="steps between snapshots")
    args = options.parse_args()
    with noting(args.file) as note:
        note(0, mark="begin", clock=BEGAN)
        note(0, mark="imported", clock=IMPORTED)
        train(args, note)


if __name__ == "__main__":
    main()
