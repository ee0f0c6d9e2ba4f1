"""A training with learning-rate schedules and evaluations: ``schedules.py FORM DIRECTORY [--die-in-evaluation R:S:K]``.

Its state has a log of the learning rate of each step and of all evaluations; each process notes the log and the hash of
its weights at its end (``results.jsonl``). Rank K of round R kills itself in the evaluation after step S, once the
others have come there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from ranks import await_ranks, come
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.utils.data import TensorDataset

import elastic_launch as el
from elastic_launch.training import evaluations

STEPS = 30

parser = argparse.ArgumentParser()
parser.add_argument("form", choices=["warm-up", "epochs", "loop", "clock"])
parser.add_argument("directory", type=Path)
parser.add_argument("--die-in-evaluation", default="0:0:0")
args = parser.parse_args()


class Log(el.Callback):
    """What was seen, as the training's state has it."""

    def __init__(self) -> None:
        self.rates: list[Any] = []
        self.evaluations: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"rates": list(self.rates), "evaluations": list(self.evaluations)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rates, self.evaluations = list(state["rates"]), list(state["evaluations"])

    def on_step(self, end: el.StepEnd) -> None:
        self.rates.append([end.step, *end.lrs])

    def on_evaluation(self, evaluation: el.Evaluation) -> None:
        self.evaluations.append([evaluation.step, evaluation.epoch, evaluation.metrics])


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    here = f"{run.world.round}:{len(log.rates)}:{run.rank}"
    if not model.training:
        place = f"{run.world.round}-{len(log.rates)}"
        come(args.directory, place, run.rank)
        if here == args.die_in_evaluation:
            await_ranks(args.directory, place, range(run.world_size))
            os.kill(os.getpid(), signal.SIGKILL)
    return (output.argmax(dim=1) == target).float().mean()


def train() -> None:
    trainer_of = {
        "loss_fn": nn.functional.cross_entropy,
        "metrics": {"accuracy": accuracy},
        "eval_loader": held_out,
        "checkpoint": checkpoint,
        "callbacks": [log],
        "exact": True,
    }
    plateau = ReduceLROnPlateau(optimizer, "max", factor=0.5, patience=0, threshold=0.1)
    if args.form == "warm-up":
        warm, down = LinearLR(optimizer, 0.1, total_iters=8), CosineAnnealingLR(optimizer, STEPS - 8)
        scheduler = SequentialLR(optimizer, [warm, down], [8])
        el.Trainer(run, model, optimizer, loader, scheduler=scheduler, **trainer_of).fit(f"{STEPS}ba")
    elif args.form == "epochs":
        schedules = {
            "by epoch": el.Schedule(StepLR(optimizer, 1, gamma=0.9), every="1ep"),
            "plateau": el.Schedule(plateau, metric="accuracy"),
        }
        trainer_of |= {"eval_every": "5ba", "clip_norm": 1.0}
        el.Trainer(run, model, optimizer, loader, scheduler=schedules, **trainer_of).fit(f"{STEPS}ba")
    else:
        by_epoch = StepLR(optimizer, 1, gamma=0.9)

        def measure(batch: list[Tensor]) -> dict[str, Tensor]:
            output = model(batch[0])
            return {
                "loss": nn.functional.cross_entropy(output, batch[1]),
                "accuracy": accuracy(output, batch[1]),
            }

        def on_result(evaluation: el.Evaluation) -> None:
            log.on_evaluation(evaluation)
            plateau.step(evaluation.metrics["accuracy"])

        evaluator = el.Evaluator(
            held_out,
            measure,
            metrics=["accuracy", "loss"],
            every="5ba" if args.form == "loop" else "0.2s",
            on_result=on_result,
        )
        saved = {"by epoch": by_epoch, "plateau": plateau}
        for step in run.steps(
            loader,
            model,
            optimizer,
            until=f"{STEPS}ba",
            exact=True,
            scheduler=saved,
            checkpoint=checkpoint,
            evaluator=evaluator,
        ):
            rate = optimizer.param_groups[0]["lr"]
            for inputs, targets in step:
                step.backward(nn.functional.cross_entropy(model(inputs), targets))
            step.update()
            log.rates.append([step.number, rate])
            if step.number % loader.steps_per_epoch == 0:
                by_epoch.step()


with el.session() as run:
    torch.manual_seed(0)
    inputs = torch.randn(140, 6)
    targets = inputs[:, :3].argmax(dim=1)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    loader = el.ElasticLoader(TensorDataset(inputs[:112], targets[:112]), el.GlobalBatch(16, 4), seed=1)
    held_out = el.ElasticLoader(TensorDataset(inputs[112:], targets[112:]), el.GlobalBatch(14, 2), shuffle=False)
    best = el.Best("accuracy", mode="max")
    checkpoint = el.Checkpoint(args.directory / "checkpoints", every=1000, keep=1, keep_best=best)
    log = Log()
    if args.form == "clock":
        # Each rank has its own clock, by which a step takes about 0.05 s however busy the machine is.
        evaluations.time = SimpleNamespace(monotonic=lambda: len(log.rates) * (0.05 + 0.01 * run.rank))  # type: ignore[assignment]
    run.register("log", log)
    train()
    result = {"pid": os.getpid(), "rank": run.rank, "hash": el.weights_sha256(model), **log.state_dict()}
    with (args.directory / "results.jsonl").open("a") as lines:
        lines.write(json.dumps(result) + "\n")
