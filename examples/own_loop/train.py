"""A hand-written DDP loop that survives restarts and resizes with only the library's hooks.

    elastic-launch --nnodes 1:4 --nproc 2 examples/own_loop/train.py --checkpoint runs/own_loop

The script provides the loop, the data, the model and its wrapping in DDP. The library provides the arithmetic of the
global batch (GlobalBatch), saving and resuming (register, resume, boundary), and the agreement on when to stop.
"""

import argparse
import json
from contextlib import nullcontext
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import elastic_launch as el


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--checkpoint", required=True, help="directory or URL to save to and to resume from")
    parser.add_argument("--every", default="20", help="interval of checkpoints: steps, or a duration such as 30s")
    parser.add_argument("--stop-at", type=float, default=0.0, help="stop as soon as the loss is below")
    parser.add_argument("--result", type=Path, help="file to which rank 0 writes the result as JSON")
    return parser.parse_args()


def data() -> tuple[Tensor, Tensor]:
    images, labels = (torch.as_tensor(values) for values in load_digits(return_X_y=True))
    return images.float().div(16), labels


def order(samples: int, epoch: int) -> Tensor:
    """The samples of an epoch in the order in which they are used: the same on all ranks, in all rounds."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(epoch))


def main() -> None:
    args = arguments()
    with el.session() as run:
        images, labels = (values.to(run.device) for values in data())
        batch = el.GlobalBatch(128, micro=16)
        if batch.idle_ranks(run.world_size):
            raise SystemExit(f"{run.world_size} ranks are too many for {batch}: DDP needs a micro-batch on each.")

        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(run.device)
        model = DistributedDataParallel(network) if run.world_size > 1 else network
        optimizer = torch.optim.SGD(network.parameters(), lr=0.2, momentum=0.9)
        loss_fn = nn.CrossEntropyLoss()

        # What a checkpoint holds. DDP adds a prefix to names: register what it wraps.
        run.register("model", network)
        run.register("optimizer", optimizer)
        step = run.resume(el.Checkpoint(args.checkpoint, every=args.every), {"global batch": batch.size})
        steps_per_epoch = len(images) // batch.size
        end = args.epochs * steps_per_epoch
        if run.rank == 0 and step:
            print(f"resumed at step {step}, world size {run.world_size}", flush=True)

        # This rank's micro-batches; with fewer ranks each has more.
        plan = batch.plan(run.world_size, run.rank)
        while step < end:
            epoch, place = divmod(step, steps_per_epoch)
            samples = order(len(images), epoch)[place * batch.size :]
            optimizer.zero_grad()
            mean = torch.zeros((), device=run.device)
            for number, (micro, weight) in enumerate(zip(plan.micro_batches, plan.weights, strict=True)):
                chosen = samples[micro.start : micro.stop]
                last = number == plan.grad_accum - 1
                with nullcontext() if last or model is network else model.no_sync():
                    loss = loss_fn(model(images[chosen]), labels[chosen]) * weight
                    # DDP takes the mean over the ranks; the weights sum up to 1 over all of them.
                    (loss * run.world_size).backward()
                mean += loss.detach()
            optimizer.step()
            step += 1
            if run.rank == 0 and (step == 1 or step % 20 == 0):
                print(f"step {step} loss of rank 0's share {float(mean):.4f}", flush=True)
            if args.stop_at and run.world_size * float(mean) < args.stop_at:
                run.request_stop()
            if run.boundary(step, end=step == end):
                break
        if run.draining:
            return  # the training continues in another process, which writes the result

        with torch.no_grad():
            accuracy = float((network(images).argmax(dim=1) == labels).float().mean())
        if run.rank == 0:
            result = {
                "steps": step,
                "accuracy": round(accuracy, 4),
                "stopped": run.stopped,
                "worlds": run.worlds,
                "restarts": run.restarts,
                "resumed_step": run.resumed_step,
            }
            print(json.dumps(result), flush=True)
            if args.result:
                args.result.write_text(json.dumps(result) + "\n")
        # DDP must not outlive the process group.
        del model


if __name__ == "__main__":
    main()
