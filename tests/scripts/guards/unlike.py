"""Give rank 1 other arguments than rank 0, one after the other: ``unlike.py DIRECTORY``."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import elastic_launch as el
from elastic_launch.errors import UsageError

directory = Path(sys.argv[1])


class Drawn(Dataset[Tensor]):
    """64 samples that are random by design: half of them differ each time they are read."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([os.urandom(1)[0] % 2])


class Timed(Dataset[Tensor]):
    """64 samples that contain the seconds since the first one was read; rank 1's clock is ahead."""

    def __init__(self, ahead: bool) -> None:
        self.ahead, self.began = ahead, 0.0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        self.began = self.began or time.monotonic()
        return torch.tensor([int(time.monotonic() - self.began) + self.ahead])


said = {}
with el.session() as run:
    other = run.rank == 1

    def attempt(kind: str) -> None:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        data: Any = torch.zeros(63 if other and kind == "length" else 64, 1)
        if other and kind in ("sample", "sample, not compared"):
            data[63] = 1
        if kind == "random":
            data = Drawn()
        if kind == "time":
            data = Timed(other)
        loader = el.ElasticLoader(
            data,
            el.GlobalBatch(32 if other and kind == "batch" else 16, 8 if other and kind == "micro" else 4),
            seed=int(other and kind == "seed"),
            shuffle=not (other and kind == "shuffle"),
            compare_samples=not (other and kind == "sample, not compared"),
        )
        if kind == "evaluation":
            el.Trainer(run, model, optimizer, loader, loss_fn=nn.functional.mse_loss).evaluate(
                el.ElasticLoader(data, el.GlobalBatch(8, 8 if other else 4))
            )
        next(
            run.steps(
                loader,
                model,
                optimizer,
                until="3ba" if other and kind == "until" else "2ba",
                exact=other and kind == "exact",
                checkpoint=None if other and kind == "checkpoint" else el.Checkpoint(directory / kind),
                scheduler=None if other and kind == "scheduler" else scheduler,
                metrics=["accuracy"] if other and kind == "metrics" else [],
                buffers={"*": "last"} if other and kind == "buffers" else {},
            )
        )

    kinds = ["length", "batch", "micro", "seed", "shuffle", "evaluation", "until", "exact", "checkpoint", "scheduler"]
    for kind in [*kinds, "metrics", "buffers", "sample", "sample, not compared", "random", "time", "nothing"]:
        try:
            attempt(kind)
            said[kind] = ""
        except UsageError as error:
            said[kind] = str(error) if kind == "sample" else error.message
    run.register("model", nn.Linear(1, 1))
    try:
        run.resume(el.Checkpoint(directory / "own"), {"width": run.rank})
    except UsageError as error:
        said["own loop"] = error.message
    (directory / f"rank-{run.rank}.json").write_text(json.dumps(said))
