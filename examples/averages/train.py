"""Train a small network on handwritten digits, and average its weights from a step in the middle on.

    elastic-launch --standalone --nproc 2 examples/averages/train.py --checkpoint runs/averages --every 20

The average (EMA) is made late, and registered when it is made: from then on it is saved and restored with the rest, and
processes that join get it. Each evaluation swaps it in. The weights and the average are bitwise identical at any number
of workers and after any restart: compare the two hashes in the result.
"""

import argparse
import json
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import elastic_launch as el


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--average-from", type=int, default=40, help="step in which the average starts")
    parser.add_argument("--evaluate", default="25ba", help="interval of evaluations")
    parser.add_argument("--checkpoint", help="directory or URL to save to and to resume from")
    parser.add_argument("--every", default="20", help="interval of checkpoints: steps, or a duration such as 30s")
    parser.add_argument("--step-time", type=float, default=0.0, help="least seconds per step, to watch a run")
    parser.add_argument("--result", type=Path, help="file to which rank 0 writes the result as JSON")
    return parser.parse_args()


def data() -> tuple[TensorDataset, TensorDataset]:
    """The samples to train with, and those to evaluate."""
    images, labels = (torch.as_tensor(values) for values in load_digits(return_X_y=True))
    images = images.float().div(16).view(-1, 1, 8, 8)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return TensorDataset(images[order[360:]], labels[order[360:]]), TensorDataset(
        images[order[:360]], labels[order[:360]]
    )


def main() -> None:
    args = arguments()
    checkpoint = el.Checkpoint(args.checkpoint, every=args.every) if args.checkpoint else None
    with el.session() as run:
        train_set, held_out = data()
        loader = el.ElasticLoader(train_set, el.GlobalBatch(64, micro=8))
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 10)
        ).to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        loss_fn = nn.CrossEntropyLoss()
        average: AveragedModel | None = None

        def started() -> AveragedModel:
            made = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
            run.register("average", made)  # if the training was resumed from a state with an average, it gets that
            return made

        def swapped() -> AbstractContextManager[None]:
            nonlocal average
            if average is None and run.resumed_step >= args.average_from:
                average = started()  # a process that has just begun may evaluate before its first step
            return run.swapped(average) if average is not None else nullcontext()

        def measure(batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
            images, labels = (values.to(run.device) for values in batch)
            return {"accuracy": (model(images).argmax(dim=1) == labels).float().mean()}

        evaluator = el.Evaluator(
            el.ElasticLoader(held_out, el.GlobalBatch(64, micro=8)),
            measure,
            metrics=["accuracy"],
            every=args.evaluate,
            within=swapped,  # the model has the average's weights meanwhile, once there is one
        )
        steps = run.steps(
            loader,
            model,
            optimizer,
            until=f"{args.epochs}ep",
            checkpoint=checkpoint,
            exact=True,
            evaluator=evaluator,
        )
        for step in steps:
            began = time.monotonic()
            for images, labels in step:
                step.backward(loss_fn(step.model(images.to(run.device)), labels.to(run.device)))
            step.update()
            if step.number >= args.average_from:
                # ">=" and not "==": a process that begins later makes it in its first step, and gets its state there.
                average = average or started()
                average.update_parameters(model)
            if run.rank == 0 and step.number % 5 == 0:
                print(f"step {step.number} loss {step.loss:.4f}", flush=True)
            time.sleep(max(0.0, began + args.step_time - time.monotonic()))

        if average is None and evaluator.history[-1].step >= args.average_from:
            average = started()  # a process that begins after the last step makes no step

        result = {
            "steps": evaluator.history[-1].step,
            "accuracy": [round(each.metrics["accuracy"], 4) for each in evaluator.history],
            "weights_sha256": el.weights_sha256(model),
            "average_sha256": el.weights_sha256(average) if average is not None else None,
            "worlds": run.worlds,
            "resumed_step": run.resumed_step,
        }
    if run.rank == 0:
        print(json.dumps(result), flush=True)
        if args.result:
            args.result.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
