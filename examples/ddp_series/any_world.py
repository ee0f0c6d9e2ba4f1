"""Part 4: the same global batch with any number of processes. A node that joins or leaves costs no step.

elastic-launch --nnodes 1:4 --nproc 1 --rdzv-endpoint node0:29400 examples/ddp_series/any_world.py 10 1
"""

import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from common import arguments, data, join_launched, network
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elastic_launch as el


def save(path: Path, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Save everything that is needed to resume, and replace the last snapshot atomically."""
    unfinished = path.with_suffix(".tmp")
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, unfinished)
    os.replace(unfinished, path)
    print(f"step {step} | snapshot saved to {path}", flush=True)


def train_step(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, samples: torch.Tensor, targets: torch.Tensor
) -> float:
    """Make one optimizer step on a global batch, of which this rank takes its micro-batches; return its loss."""
    world_size = dist.get_world_size()
    device = next(model.parameters()).device
    batch = el.GlobalBatch(len(samples), micro=8)
    plan = batch.plan(world_size, dist.get_rank())
    optimizer.zero_grad()
    total = 0.0
    for number, (micro, weight) in enumerate(zip(plan.micro_batches, plan.weights, strict=True), 1):
        part = slice(micro.start, micro.stop)
        # The gradients are exchanged once, after the last micro-batch.
        with nullcontext() if number == plan.grad_accum else model.no_sync():
            loss = nn.functional.mse_loss(model(samples[part].to(device)), targets[part].to(device)) * weight
            (loss * world_size).backward()  # DDP divides the sum over the ranks by their number
        total += loss.item()
    optimizer.step()
    return total


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--snapshot", type=Path, default=Path("snapshot.pt"), help="in a directory of all nodes")
    args = parser.parse_args()
    device = join_launched()
    inner = network(device)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.01, momentum=0.9)
    step = 0
    if args.snapshot.exists():
        state = torch.load(args.snapshot, map_location=device, weights_only=True)
        inner.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
        print(f"[rank {dist.get_rank()}] resumes at step {step}", flush=True)
    model = DistributedDataParallel(inner)
    samples, targets = data(args.batch_size).dataset[:]
    each = len(samples) // args.batch_size
    el.report_step(step)
    stops, loss = False, 0.0
    while step < args.total_epochs * each and not stops:
        epoch, position = divmod(step, each)
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(epoch))
        chosen = order[position * args.batch_size :][: args.batch_size]
        loss = train_step(model, optimizer, samples[chosen], targets[chosen])  # this rank's part
        step += 1
        el.report_step(step)
        stops = el.should_stop()
        if dist.get_rank() == 0 and (stops or step % (args.save_every * each) == 0):
            save(args.snapshot, model, optimizer, step)
    print(f"[rank {dist.get_rank()}] step {step} | world size {dist.get_world_size()} | loss {loss:.6f}", flush=True)
    del model, optimizer  # neither must outlive the process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
