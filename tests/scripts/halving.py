"""A training by el.Trainer with ``micro="auto"`` in which rank 1 has too little memory from step 6 on.

``halving.py DIRECTORY [gives-up | knows | later]``: rank 2 of round 1 kills itself in step 6: while rank 1 reports that
it has too little memory, or once rank 0 knows, while for rank 1 that exchange has failed at its very end; or in step 9,
to which all have come.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from ranks import await_end, await_ranks, come, end
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import elastic_launch as el
from elastic_launch.training.callbacks import Incident
from elastic_launch.training.transaction import Transaction

# What is put in the place of the library's functions below counts as the library's own.
__name__ = "elastic_launch.training.halving"

work, when = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
SIZE = 8  # of the micro-batches before they are halved


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        late = trainer.step >= 5
        now = "later" if trainer.step == 8 else {SIZE: "gives-up"}.get(len(x), "knows")
        if late and run.world.round == 1 and when == now:
            if when != "gives-up":
                come(work, when, run.rank)
            if run.rank == 2:
                await_ranks(work, when, {"gives-up": [1], "knows": [0], "later": [0, 1]}[when])
                end(work)
        if late and run.rank == 1 and len(x) == SIZE:
            torch.empty(2**60)
        return self.body(x)


class Seen(el.Callback):
    def __init__(self) -> None:
        self.incidents: list[list[Any]] = []

    def on_incident(self, incident: Incident) -> None:
        self.incidents.append([incident.kind, incident.step])


def given_up(step: Transaction) -> None:
    give_up(step)
    if run.world.round == 1:
        come(work, "gives-up", run.rank)


def torn(step: Transaction) -> None:
    exchange(step)
    if when == "knows" and step.number == 6 and run.world.round == 1 and run.rank == 1:
        await_end(work)
        raise RuntimeError("Connection closed by peer, as far as this rank knows")


give_up, exchange = Transaction.give_up, Transaction.exchange
Transaction.give_up, Transaction.exchange = given_up, torn  # type: ignore[method-assign]

with el.session() as run:
    torch.manual_seed(0)
    inputs = torch.randn(96, 6)
    model = Net()
    seen = Seen()
    trainer = el.Trainer(
        run,
        model,
        torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
        el.ElasticLoader(TensorDataset(inputs, inputs[:, :3].argmax(dim=1)), el.GlobalBatch(24, "auto"), seed=1),
        loss_fn=nn.functional.cross_entropy,
        exact=True,
        callbacks=[seen],
    )
    trainer.fit("12ba")
    result = {"rank": run.rank, "incidents": seen.incidents, "micro": trainer.loader.batch.micro}
    with (work / "results.jsonl").open("a") as lines:
        lines.write(json.dumps(result | {"pid": os.getpid(), "hash": el.weights_sha256(model)}) + "\n")
