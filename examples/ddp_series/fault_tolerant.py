"""Part 2: a snapshot every few epochs. When a worker dies, all workers restart and continue from the last snapshot.

elastic-launch --standalone --nproc 2 examples/ddp_series/fault_tolerant.py 10 1
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from common import arguments, data, join_launched, network, train_epoch
from torch.nn.parallel import DistributedDataParallel


def save(path: Path, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, epochs: int) -> None:
    """Save everything that is needed to resume, and replace the last snapshot atomically."""
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epochs}
    unfinished = path.with_suffix(".tmp")
    torch.save(state, unfinished)
    os.replace(unfinished, path)
    print(f"epoch {epochs - 1} | snapshot saved to {path}", flush=True)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--snapshot", type=Path, default=Path("snapshot.pt"))
    args = parser.parse_args()
    device = join_launched()
    inner = network(device)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.01, momentum=0.9)
    done = 0
    if args.snapshot.exists():
        state = torch.load(args.snapshot, map_location=device, weights_only=True)
        inner.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["epochs"]
        print(f"[rank {dist.get_rank()}] resumes at epoch {done}", flush=True)
    model = DistributedDataParallel(inner)
    loader = data(args.batch_size)
    for epoch in range(done, args.total_epochs):
        train_epoch(epoch, model, optimizer, loader)
        if dist.get_rank() == 0 and (epoch + 1) % args.save_every == 0:
            save(args.snapshot, model, optimizer, epoch + 1)
    del model, optimizer  # neither must outlive the process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
