"""A training by el.Trainer whose model takes ``--compile-time`` to compile: ``rehearsing.py DIRECTORY [FLAGS]``.

With ``--loop`` it is one by run.steps. Then the worker ahead also rehearses an update, and notes in ``rehearsed.jsonl``
what that has changed.

It notes the same as ``changes.py``, and in ``compiled.jsonl`` each process that compiles, and whether it has a place.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic_launch as el
from elastic_launch.contract import ENV_AHEAD
from elastic_launch.training.callbacks import StepEnd

parser = argparse.ArgumentParser()
parser.add_argument("directory", type=Path)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--step-time", type=float, default=0.1)
parser.add_argument("--compile-time", type=float, default=2.0)
parser.add_argument("--loop", action="store_true")
args = parser.parse_args()


def write(file: str, **what: Any) -> None:
    with (args.directory / file).open("a") as lines:
        lines.write(json.dumps({"clock": time.monotonic(), "pid": os.getpid(), **what}) + "\n")


def backend(graph: Any, inputs: Any) -> Any:
    write("compiled.jsonl", ahead=ENV_AHEAD in os.environ)
    end = time.monotonic() + args.compile_time
    while time.monotonic() < end and not (args.directory / "hurry").exists():
        time.sleep(0.01)
    return graph.forward


def note(step: int) -> None:
    began = time.monotonic()
    if run.rank == 0:
        write("steps.jsonl", node="", round=run.world.round, rank=0, world=run.world_size, step=step)
    while time.monotonic() < began + args.step_time and not (args.directory / "hurry").exists():
        time.sleep(0.01)


class Steps(el.Callback):
    def on_step(self, end: StepEnd) -> None:
        note(end.step)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.body(x + noise)
        return output


def forward(model: nn.Module, sample: Any) -> Any:
    x, target = sample
    return model(x, random.random() * torch.rand_like(x)), target


with el.session() as run:
    env = {name: value for name, value in os.environ.items() if name.isupper()}
    write("started.jsonl", children=[], env=env)
    torch.manual_seed(0)
    inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(3))
    model = Net()
    model.compile(backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = el.ElasticLoader(TensorDataset(inputs, inputs[:, :3].argmax(dim=1)), el.GlobalBatch(16, 4), seed=1)
    until = f"{args.steps}ba"

    def work(step: el.Step) -> None:
        for sample in step:
            output, target = forward(step.model, sample)
            step.backward(nn.functional.cross_entropy(output, target), metrics={"size": float(len(target))})
        step.update()

    def rehearse(step: el.Step) -> None:
        before = [each.detach().clone() for each in model.parameters()]
        work(step)
        assert step.updated
        same = all(map(torch.equal, before, model.parameters()))
        changed = [not same, bool(optimizer.state)]
        write("rehearsed.jsonl", ahead=ENV_AHEAD in os.environ, changed=changed)

    if args.loop:
        steps = run.steps(loader, model, optimizer, until=until, exact=True, metrics=["size"], rehearse=rehearse)
        for step in steps:
            work(step)
            note(step.number)
    else:
        trainer = el.Trainer(
            run,
            model,
            optimizer,
            loader,
            loss_fn=nn.functional.cross_entropy,
            forward=forward,
            exact=True,
            callbacks=[Steps()],
        )
        trainer.fit(until)
    if run.rank == 0:
        result = {"hash": el.weights_sha256(model), "worlds": run.worlds, "restarts": run.restarts}
        (args.directory / "result.json").write_text(json.dumps(result))
