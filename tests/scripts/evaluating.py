"""A training by el.Trainer that evaluates: ``evaluating.py DIRECTORY [--die-in-evaluation R:S:K] [--torn S]``.

Each process notes the evaluations that it begins (``begun.jsonl``) and, at its end, what its callbacks saw
(``results.jsonl``). Rank K of round R kills itself in the evaluation after step S, or in step S with ``--die-in-step``,
once the others have come there. Snapshots in memory are complete before training goes on.
With ``--torn S`` the last exchange of the evaluation after step S succeeds everywhere, but fails for rank 1 of the
first round, as if the connection had been lost at its very end. With ``--fail S`` a callback fails after step S.
With ``--checkpoint D`` the state is saved to that directory, but not before the end.
With ``--shard`` the model is sharded over all ranks. With ``--merge`` its last layer has another weight in evaluation
mode, and snapshots are copied slowly while training goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from ranks import await_end, await_ranks, come, end
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import elastic_launch as el
from elastic_launch.snapshot.memory.slot_state import SlotWriter
from elastic_launch.training.callbacks import Evaluation, RoundStart, StepEnd
from elastic_launch.training.checkpoints.memory import MemorySnapshots
from elastic_launch.training.evaluations import evaluated

# What is put in the place of the library's functions below counts as the library's own.
__name__ = "elastic_launch.training.evaluating"

TRACKER = compile("raise RuntimeError('Connection closed by peer: the tracker')", "tracker", "exec")

parser = argparse.ArgumentParser()
parser.add_argument("directory", type=Path)
parser.add_argument("--checkpoint", type=Path)
parser.add_argument("--die-in-evaluation", default="0:0:0")
parser.add_argument("--die-in-step", default="0:0:0")
parser.add_argument("--fail", type=int, default=0)
parser.add_argument("--torn", type=int, default=0)
parser.add_argument("--shard", action="store_true")
parser.add_argument("--merge", action="store_true")
args = parser.parse_args()


def note(file: str, **what: Any) -> None:
    with (args.directory / file).open("a") as lines:
        lines.write(json.dumps({"pid": os.getpid(), "rank": run.rank, "round": run.world.round, **what}) + "\n")


def dies(when: str, step: int) -> None:
    if when == f"{run.world.round}:{step}:{run.rank}":
        # The rank for which an exchange has failed does not come.
        torn = {1} if args.torn and run.world.round == 1 else set()
        await_ranks(args.directory, here(step), {*range(run.world_size)} - torn)
        end(args.directory)


def here(step: int) -> str:
    return f"{run.world.round}-{step}-{'training' if model.training else 'evaluation'}"


class Merging(nn.Linear):
    """Changes its weight with its mode, as LoRA layers do."""

    def train(self, mode: bool = True) -> Merging:
        if mode != self.training:
            self.weight.data *= 0.5 if mode else 2
        super().train(mode)
        return self


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        last = Merging if args.merge else nn.Linear
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), last(16, 3))
        self.begun = 0

    def forward(self, x: Tensor) -> Tensor:
        step = trainer.step + self.training
        if not self.training and self.begun != (now := (run.world.round, step)):
            self.begun = now
            note("begun.jsonl", step=step)
            come(args.directory, here(step), run.rank)
        elif self.training:
            come(args.directory, here(step), run.rank)
            dies(args.die_in_step, step)
        else:
            dies(args.die_in_evaluation, step)  # in its second micro-batch
        return self.body(x)


class Seen(el.Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.rounds: list[int] = []
        self.evaluations: list[Any] = []

    def on_round(self, start: RoundStart) -> None:
        self.rounds.append(start.resumed_step)

    def on_step(self, end: StepEnd) -> None:
        self.steps.append(end.step)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self.evaluations.append([evaluation.step, evaluation.metrics])
        if evaluation.step == args.fail:
            exec(TRACKER, {})  # not under this file's name


def torn_evaluation(*arguments: Any, **options: Any) -> dict[str, float]:
    means = evaluated(*arguments, **options)
    if (run.world.round, run.rank, trainer.step) == (1, 1, args.torn):
        await_end(args.directory)
        raise RuntimeError("Connection closed by peer, as far as this rank knows")
    return means


def complete(*arguments: Any, **options: Any) -> bool:
    return store(*arguments, **options | {"wait": True})


def slow(*arguments: Any) -> bool:
    time.sleep(0.3)
    return write(*arguments)


store, write = MemorySnapshots.store, SlotWriter.write
if args.merge:
    SlotWriter.write = slow  # type: ignore[method-assign]
else:
    MemorySnapshots.store = complete  # type: ignore[method-assign]
if args.torn:
    import elastic_launch.training.trainer

    elastic_launch.training.trainer.evaluated = torn_evaluation

with el.session() as run:
    torch.manual_seed(0)
    inputs = torch.randn(120, 6)
    targets = inputs[:, :3].argmax(dim=1)
    model = Net()
    if args.shard:
        mesh = init_device_mesh("cpu", (run.world_size,))
        for module in (model.body[0], model.body[3], model):
            fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    seen = Seen()
    trainer = el.Trainer(
        run,
        model,
        optimizer,
        el.ElasticLoader(TensorDataset(inputs[:96], targets[:96]), el.GlobalBatch(16, 4), seed=1),
        loss_fn=nn.functional.cross_entropy,
        # Halves the rate in each evaluation.
        scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", factor=0.5, patience=0, threshold=1e9),
        eval_loader=el.ElasticLoader(TensorDataset(inputs[96:], targets[96:]), el.GlobalBatch(12, 2), shuffle=False),
        eval_every="5ba",
        exact=True,
        checkpoint=None if args.checkpoint is None else el.Checkpoint(args.checkpoint, every=1000),
        callbacks=[seen],
    )
    trainer.fit("18ba")
    result = {
        "steps": seen.steps,
        "evaluations": seen.evaluations,
        "rounds": seen.rounds,
        "history": [[x.step, x.metrics] for x in trainer.history],
        "rate": optimizer.param_groups[0]["lr"],
        "hash": el.weights_sha256(model),
    }
    note("results.jsonl", **result)
