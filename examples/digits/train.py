"""Train a small network on scikit-learn's handwritten digits, elastically.

    elastic-launch --standalone --nproc 2 examples/digits/train.py --exact --checkpoint runs/digits --every 20

With --exact the final weights are bitwise identical at any number of workers and after any restart: compare
weights_sha256 in the result. accuracy and loss are those of the held-out images.
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
from elastic_launch.errors import UsageError


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=positive, default=6)
    parser.add_argument(
        "--global-batch", type=positive, default=64, help="samples in each optimizer step, of all workers"
    )
    parser.add_argument("--micro-batch", type=positive, default=8, help="samples in each forward and backward pass")
    parser.add_argument("--exact", action="store_true", help="the same weights to the bit at any number of workers")
    parser.add_argument("--checkpoint", help="directory or URL to save to and to resume from")
    parser.add_argument("--every", default="20", help="interval of checkpoints: steps, or a duration such as 30s")
    parser.add_argument("--step-time", type=float, default=0.0, help="least seconds per step, to watch a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path, help="file to which rank 0 writes the result as JSON")
    return parser


def data() -> tuple[TensorDataset, Tensor, Tensor]:
    """The training samples, and the held-out images and labels."""
    images, labels = (torch.as_tensor(values) for values in load_digits(return_X_y=True))
    images = images.float().div(16).view(-1, 1, 8, 8)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    held_out, train = order[:360], order[360:]
    return TensorDataset(images[train], labels[train]), images[held_out], labels[held_out]


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        # BatchNorm removes a bias: its gradient is only rounding errors, which Adam turns into full steps.
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 8 * 8, 64),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(64, 10),
    )


def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Accuracy and mean cross-entropy."""
    model.eval()
    with torch.no_grad():
        logits = model(images)
    right = (logits.argmax(dim=1) == labels).float().mean()
    return round(float(right), 4), float(nn.functional.cross_entropy(logits, labels))


def train(args: argparse.Namespace) -> None:
    # Before the session, so that an error ends each worker at once and none waits for another.
    batch = el.GlobalBatch(args.global_batch, args.micro_batch)
    checkpoint = el.Checkpoint(args.checkpoint, every=args.every) if args.checkpoint else None

    with el.session() as run:
        dataset, images, labels = data()
        loader = el.ElasticLoader(dataset, batch, seed=args.seed)
        model = network(args.seed).to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        loss_fn = nn.CrossEntropyLoss()

        for step in run.steps(loader, model, optimizer, checkpoint=checkpoint, until=args.epochs, exact=args.exact):
            started = time.monotonic()
            for image, label in step:
                step.backward(loss_fn(step.model(image.to(run.device)), label.to(run.device)))
            step.update(clip_norm=1.0)
            if run.rank == 0 and (step.number % 20 == 0 or step.number == run.resumed_step + 1):
                print(f"step {step.number} loss {step.loss:.4f}", flush=True)
            time.sleep(max(0.0, args.step_time - (time.monotonic() - started)))

        if run.rank == 0:
            accuracy, loss = evaluate(model.cpu(), images, labels)
            result = {
                "steps": args.epochs * loader.steps_per_epoch,
                "samples": args.epochs * loader.length,
                "epochs": args.epochs,
                "accuracy": accuracy,
                "loss": loss,
                "weights_sha256": el.weights_sha256(model),
                "worlds": run.worlds,
                "restarts": run.restarts,
                "resumed_step": run.resumed_step,
            }
            print(json.dumps(result), flush=True)
            if args.result:
                args.result.parent.mkdir(parents=True, exist_ok=True)
                args.result.write_text(json.dumps(result) + "\n")


def main() -> None:
    parser = options()
    args = parser.parse_args()
    if args.micro_batch > args.global_batch:
        parser.error(f"--micro-batch {args.micro_batch} is more than --global-batch {args.global_batch}")
    try:
        train(args)
    except UsageError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
