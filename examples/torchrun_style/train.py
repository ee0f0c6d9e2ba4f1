"""Train a digit classifier with DistributedDataParallel: a plain script for torchrun and similar launchers.

It depends on its launcher only through torchrun's environment variables. To survive a restart, rank 0 writes a
snapshot every few steps, and every start resumes from the last one. The data are scikit-learn's handwritten digits,
which are part of the package.

    torchrun --standalone --nproc-per-node 2 examples/torchrun_style/train.py --dir runs/digits
"""

import argparse
import io
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

SEED = 0
LOG_EVERY = 10
COLLECTIVE_TIMEOUT = timedelta(minutes=2)


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {value}")
    return value


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a digit classifier with DistributedDataParallel.")
    parser.add_argument("--epochs", type=positive_int, default=20)
    parser.add_argument("--batch", type=positive_int, default=64, help="global batch, split over the ranks")
    parser.add_argument("--every", type=positive_int, default=20, help="steps from one snapshot to the next")
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path("snapshots"),
        help="where the snapshot is kept; with several nodes, a directory that all of them share",
    )
    parser.add_argument(
        "--step-time", type=float, default=0.0, help="least seconds per step, for a run slow enough to watch"
    )
    return parser.parse_args()


def load_data(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32, device=device) / 16.0
    labels = torch.tensor(digits.target, dtype=torch.int64, device=device)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SEED)).to(device)
    held_out, train = order[:360], order[360:]
    return images[train], labels[train], images[held_out], labels[held_out]


def build_model() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def global_batches(samples: int, batch: int, epoch: int) -> list[Tensor]:
    """The epoch's batches as sample indices: the same on every rank and at every world size."""
    generator = torch.Generator().manual_seed(SEED * 1_000_003 + epoch)
    order = torch.randperm(samples, generator=generator)
    return [order[start : start + batch] for start in range(0, samples, batch)]


def save_snapshot(path: Path, snapshot: dict[str, Any]) -> None:
    """Replace the snapshot atomically: even after a kill, a reader finds the old one or the new one."""
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        torch.save(snapshot, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def load_snapshot(path: Path, device: torch.device) -> dict[str, Any] | None:
    """Read the file on rank 0 and send it to all, so that no two ranks can start from different snapshots."""
    content = b""
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in path.parent.glob("*.tmp"):
            leftover.unlink(missing_ok=True)
        if path.exists():
            content = path.read_bytes()
    size = torch.tensor(len(content), device=device)
    dist.broadcast(size, src=0)
    if size == 0:
        return None
    data = torch.empty(int(size), dtype=torch.uint8, device=device)
    if content:
        data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    dist.broadcast(data, src=0)
    snapshot: dict[str, Any] = torch.load(
        io.BytesIO(data.cpu().numpy().tobytes()), map_location=device, weights_only=True
    )
    return snapshot


def train_step(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    batch: Tensor,
) -> Tensor:
    """One optimizer step on this rank's slice of the global batch; returns its part of the mean loss."""
    mine = batch.tensor_split(dist.get_world_size())[dist.get_rank()].to(images.device)
    # Slices may differ in length or be empty, so the mean is taken over the global batch, not over the slice;
    # DDP divides by the world size, hence the factor.
    loss = cross_entropy(ddp(images[mine]), labels[mine], reduction="sum") / len(batch)
    optimizer.zero_grad()
    (loss * dist.get_world_size()).backward()
    optimizer.step()
    return loss.detach()


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    path = args.dir / "snapshot.pt"
    images, labels, held_out_images, held_out_labels = load_data(device)
    model = build_model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    step = 0
    snapshot = load_snapshot(path, device)
    if snapshot is not None:
        if snapshot["batch"] != args.batch:
            raise ValueError(
                f"{path} was written with --batch {snapshot['batch']}, this run has --batch {args.batch}: "
                "use the same, or another --dir"
            )
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        step = snapshot["step"]
        if rank == 0:
            print(f"resumed at step {step} (restart {restarts})", flush=True)

    ddp = DistributedDataParallel(model)
    steps_per_epoch = len(global_batches(len(images), args.batch, epoch=0))
    last_step = args.epochs * steps_per_epoch
    for epoch in range(step // steps_per_epoch, args.epochs):
        for batch in global_batches(len(images), args.batch, epoch)[step - epoch * steps_per_epoch :]:
            started = time.monotonic()
            loss = train_step(ddp, optimizer, images, labels, batch)
            step += 1
            if rank == 0 and (step % args.every == 0 or step == last_step):
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save_snapshot(path, {**state, "epoch": epoch, "step": step, "batch": args.batch})
            if step % LOG_EVERY == 0:
                dist.all_reduce(loss)
                if rank == 0:
                    print(f"step {step} loss {loss.item():.4f}", flush=True)
            time.sleep(max(0.0, args.step_time - (time.monotonic() - started)))

    if rank == 0:
        with torch.no_grad():
            correct = model(held_out_images).argmax(dim=1) == held_out_labels
        accuracy = correct.float().mean().item()
        print(f"done: steps {step} accuracy {accuracy:.3f} world {world} restarts {restarts}", flush=True)
    # While these two are alive, destroying the process group sometimes hangs.
    del ddp, optimizer


@record
def main() -> None:
    args = parse_args()
    # NCCL takes one process per GPU; with more workers than GPUs all train on the CPU.
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    use_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= local_world
    device = torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_gpu else "gloo", timeout=COLLECTIVE_TIMEOUT)
    train(args, device)
    # If this is left to the interpreter's exit, it sometimes aborts.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
