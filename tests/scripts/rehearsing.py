"""A training by el.Trainer whose model takes ``--compile-time`` to compile: ``rehearsing.py DIRECTORY [FLAGS]``.

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


class Steps(el.Callback):
    def on_step(self, end: StepEnd) -> None:
        began = time.monotonic()
        if run.rank == 0:
            write("steps.jsonl", node="", round=run.world.round, rank=0, world=run.world_size, step=end.step)
        while time.monotonic() < began + args.step_time and not (args.directory / "hurry").exists():
            time.sleep(0.01)


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
    trainer = el.Trainer(
        run,
        model,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        el.ElasticLoader(TensorDataset(inputs, inputs[:, :3].argmax(dim=1)), el.GlobalBatch(16, 4), seed=1),
        loss_fn=nn.functional.cross_entropy,
        forward=forward,
        exact=True,
        callbacks=[Steps()],
    )
    trainer.fit(f"{args.steps}ba")
    if run.rank == 0:
        result = {"hash": el.weights_sha256(model), "worlds": run.worlds, "restarts": run.restarts}
        (args.directory / "result.json").write_text(json.dumps(result))
