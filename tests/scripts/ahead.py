"""A training for a played agent: ``ahead.py DIRECTORY [FLAGS]``.

It stops after the step that ``limit`` in DIRECTORY names until that rises. Each process notes its steps in
``steps.jsonl`` and writes ``result-<rank>.json`` at its end.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic_launch as el
from elastic_launch.training.callbacks import StepEnd


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    # BatchNorm and Dropout: buffers and random numbers have to arrive, too.
    return nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 3))


class Notes(el.Callback):
    def __init__(self, directory: Path, run: el.Run) -> None:
        self._directory, self._run = directory, run

    def note(self, step: int) -> None:
        run = self._run
        where = {"pid": os.getpid(), "rank": run.rank, "world": run.world_size, "round": run.world.round}
        with (self._directory / "steps.jsonl").open("a") as lines:
            lines.write(json.dumps({**where, "step": step, "RANK": os.environ.get("RANK")}) + "\n")
        while step >= int((self._directory / "limit").read_text() or 0):
            time.sleep(0.01)

    def on_step(self, end: StepEnd) -> None:
        self.note(end.step)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--default-mode", action="store_true")
    parser.add_argument("--trainer", action="store_true")
    parser.add_argument("--early", action="store_true", help="ask for the rank before anything else")
    parser.add_argument("--pause", action="store_true", help="after that, pause until there is a file `go`")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with el.session() as run:
        if args.early:
            print(f"rank {run.rank}", flush=True)
        if args.pause:
            (args.directory / "pauses").touch()
        while args.pause and not (args.directory / "go").exists():
            time.sleep(0.01)
        inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(3))
        dataset = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
        model = network(args.seed).to(run.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        loader = el.ElasticLoader(dataset, el.GlobalBatch(16, 4), seed=1)
        notes, exact, until = Notes(args.directory, run), not args.default_mode, f"{args.steps}ba"
        if args.trainer:
            loss_fn = nn.functional.cross_entropy
            el.Trainer(run, model, optimizer, loader, loss_fn=loss_fn, exact=exact, callbacks=[notes]).fit(until)
        else:
            for step in run.steps(loader, model, optimizer, until=until, exact=exact):
                for features, targets in step:
                    step.backward(nn.functional.cross_entropy(step.model(features), targets))
                step.update()
                notes.note(step.number)
        result = {"hash": el.weights_sha256(model), "worlds": run.worlds, "resumed": run.resumed_step}
        (args.directory / f"result-{run.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
