"""Train a small network on scikit-learn's handwritten digits, elastically.

    elastic-launch --standalone --nproc 2 examples/digits/train.py --exact --checkpoint runs/digits --every 20

With --exact the final weights are the same to the bit at any number of workers and through any restart: compare
weights_sha256 in the result.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import elastic_launch as el


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--global-batch", type=int, default=64, help="samples in each optimizer step, of all workers")
    parser.add_argument("--micro-batch", type=int, default=8, help="samples in each forward and backward pass")
    parser.add_argument("--exact", action="store_true", help="the same weights to the bit at any number of workers")
    parser.add_argument("--checkpoint", type=Path, help="directory to save to and to resume from")
    parser.add_argument("--every", default="20", help="interval of checkpoints: steps, or a duration such as 30s")
    parser.add_argument("--step-time", type=float, default=0.0, help="least seconds per step, to watch a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path, help="file to which rank 0 writes the result as JSON")
    return parser.parse_args()


def data() -> tuple[TensorDataset, Tensor, Tensor]:
    """The samples to train on, and images and labels held out."""
    images, labels = (torch.as_tensor(values) for values in load_digits(return_X_y=True))
    images = images.float().div(16).view(-1, 1, 8, 8)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    held_out, train = order[:360], order[360:]
    return TensorDataset(images[train], labels[train]), images[held_out], labels[held_out]


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 8 * 8, 64),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(64, 10),
    )


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return float((model(images).argmax(dim=1) == labels).float().mean())


def main() -> None:
    args = arguments()
    with el.session() as run:
        dataset, images, labels = data()
        loader = el.ElasticLoader(dataset, el.GlobalBatch(args.global_batch, args.micro_batch), seed=args.seed)
        model = network(args.seed).to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        every = int(args.every) if args.every.isdecimal() else args.every
        checkpoint = el.Checkpoint(args.checkpoint, every=every) if args.checkpoint else None
        loss_fn = nn.CrossEntropyLoss()

        step = None
        for step in run.steps(loader, model, optimizer, checkpoint=checkpoint, until=args.epochs, exact=args.exact):
            started = time.monotonic()
            for image, label in step:
                step.backward(loss_fn(step.model(image.to(run.device)), label.to(run.device)))
            step.update(clip_norm=1.0)
            if run.rank == 0 and (step.number % 20 == 0 or step.number == 1):
                print(f"step {step.number} loss {step.loss:.4f}", flush=True)
            time.sleep(max(0.0, args.step_time - (time.monotonic() - started)))

        if run.rank == 0:
            result = {
                "steps": args.epochs * loader.steps_per_epoch,
                "samples": args.epochs * loader.length,
                "epochs": args.epochs,
                "accuracy": round(accuracy(model.cpu(), images, labels), 4),
                "loss": None if step is None else step.loss,
                "weights_sha256": el.weights_sha256(model),
                "worlds": run.worlds,
                "restarts": run.restarts,
                "resumed_step": run.resumed_step,
            }
            print(json.dumps(result), flush=True)
            if args.result:
                args.result.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
