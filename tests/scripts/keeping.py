"""A trainer whose metric is a given number after each step; it keeps the best checkpoints and some others."""

from __future__ import annotations

import sys
import time

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import elastic_launch as el
from elastic_launch.snapshot.storage.listing import positions

directory, *scores = sys.argv[1:]
EVERY = 4


class Paced(el.Callback):
    """Waits for the checkpoint of one evaluation before the next: newer ones replace those that are waiting."""

    def on_step(self, end: el.StepEnd) -> None:
        deadline, evaluated = time.monotonic() + 60, end.step // EVERY * EVERY
        while run.rank == 0 and end.step % EVERY == EVERY - 1 and evaluated:
            if max((step for _, step in positions(directory)), default=0) >= evaluated:
                break
            assert time.monotonic() < deadline, "nothing is saved"
            time.sleep(0.02)


with el.session() as run:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    data = TensorDataset(torch.ones(32, 3), torch.ones(32, 1))

    def score(output: Tensor, target: Tensor) -> Tensor:
        return torch.tensor(float(scores[trainer.step // EVERY - 1]))

    trainer = el.Trainer(
        run,
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        el.ElasticLoader(data, el.GlobalBatch(8, 4)),
        loss_fn=nn.functional.mse_loss,
        metrics={"score": score},
        eval_loader=el.ElasticLoader(data, el.GlobalBatch(8, 4), shuffle=False),
        eval_every=f"{EVERY}ba",
        callbacks=[Paced()],
        checkpoint=el.Checkpoint(
            directory, every=100, keep=1, keep_every=10, keep_best=el.Best("score", mode="max", count=2)
        ),
    )
    trainer.fit(f"{EVERY * len(scores)}ba")
