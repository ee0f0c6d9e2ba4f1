"""The classic DDP tutorial: one program in all processes, each with a share of its node's devices.

    elastic-launch --standalone --nproc 8 examples/tutorial/example.py --local_world_size=8
    python -m elastic_launch.launch --nproc_per_node=8 --nnodes=1 --node_rank=0 \\
        examples/tutorial/example.py --local_world_size=8
    torchrun --standalone --nproc-per-node 8 examples/tutorial/example.py --local_world_size=8

A node with 8 devices may run 8 processes with one device each, or one process that spans all 8. With P processes on a
node each has n = devices // P of them, and local rank r has those from r * n on. If there are not enough devices, all
processes train on the CPU; --devices 8 shows the arithmetic there. Based on "distributed/ddp" of
https://github.com/pytorch/examples; each process prints the same three lines.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def share(devices: int, local_world_size: int, local_rank: int) -> list[int]:
    """The devices of one process: each process of a node gets the same number, in order of local ranks."""
    n = devices // local_world_size
    return list(range(local_rank * n, (local_rank + 1) * n))


def train(devices: int, local_world_size: int, local_rank: int, device: torch.device) -> None:
    """Do one step on random data."""
    device_ids = share(devices, local_world_size, local_rank)
    print(
        f"[{os.getpid()}] rank = {dist.get_rank()}, world_size = {dist.get_world_size()}, "
        f"n = {len(device_ids)}, device_ids = {device_ids}",
        flush=True,
    )
    network = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)).to(device)
    # This model uses one device; the process's other devices are for a model that is split manually.
    model = DistributedDataParallel(network, device_ids=[device_ids[0]] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    optimizer.zero_grad()
    outputs = model(torch.randn(20, 10, device=device))
    nn.functional.mse_loss(outputs, torch.randn(20, 5, device=device)).backward()
    optimizer.step()
    del model, optimizer  # neither must outlive the process group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # torch.distributed.launch passes it as an argument; elastic-launch and torchrun set it in the environment.
    parser.add_argument("--local_rank", "--local-rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    parser.add_argument(
        *("--local_world_size", "--local-world-size"), type=int, default=int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    )
    parser.add_argument("--devices", type=int, help="count so many devices on the node; default: those that there are")
    args = parser.parse_args()

    found = torch.cuda.device_count()
    devices = found if args.devices is None else args.devices
    device_ids = share(devices, args.local_world_size, args.local_rank)
    on_gpu = bool(device_ids) and devices <= found
    device = torch.device("cuda", device_ids[0]) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)

    world = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")}
    print(f"[{os.getpid()}] Initializing process group with: {world}", flush=True)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    print(
        f"[{os.getpid()}]: world_size = {dist.get_world_size()}, "
        f"rank = {dist.get_rank()}, backend={dist.get_backend()}",
        flush=True,
    )
    train(devices, args.local_world_size, args.local_rank, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
