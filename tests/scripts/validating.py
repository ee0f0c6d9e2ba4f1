"""Lightning trainings that get SIGTERM in one step and go on: ``validating.py DIRECTORY EVERY ACCUMULATE STEP...``.

Each validates after EVERY batches, and accumulates the gradients of ACCUMULATE batches; an epoch has 8. For each STEP,
this prints what a training that stops there and its continuation did, as JSON. STEP 0 is for no stop.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim.lr_scheduler import ReduceLROnPlateau

import elastic_launch as el

directory, every, accumulate, *steps = Path(sys.argv[1]), *map(int, sys.argv[2:])
BATCHES = 8


class Batches:
    """A loader that Lightning can resume within an epoch."""

    def __init__(self) -> None:
        self.next = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[torch.Tensor]:
        begin, self.next = self.next % BATCHES, 0
        for number in range(begin, BATCHES):
            self.next = number + 1
            yield torch.tensor([[float(number)]])

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Model(LightningModule):
    def __init__(self, stop: int, done: list[Any]) -> None:
        super().__init__()
        self.layer, self.stop, self.done = torch.nn.Linear(1, 1), stop, done

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.done.append(["batch", self.current_epoch, index, int(batch)])
        if self.global_step + 1 == self.stop:
            self.stop = -1
            signal.raise_signal(signal.SIGTERM)
        return self.layer(batch / BATCHES).square().mean()

    def validation_step(self, batch: torch.Tensor) -> None:
        self.log("score", self.layer(batch).square().mean())

    def on_train_batch_end(self, *args: Any) -> None:
        self.done.append(["after batch", self.trainer.fit_loop.epoch_loop._batches_that_stepped])

    def on_validation_end(self) -> None:
        self.done.append(["validated", self.global_step])

    def on_train_epoch_start(self) -> None:
        self.done.append(["begins", self.current_epoch])

    def on_train_epoch_end(self) -> None:
        self.done.append(["ends", self.current_epoch, self.global_step])

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "score", "strict": False}}


def fit(path: Path, stop: int, done: list[Any]) -> Any:
    torch.manual_seed(0)
    model = Model(stop, done)
    trainer = Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        accumulate_grad_batches=accumulate,
        val_check_interval=every,
        check_val_every_n_epoch=None if every > BATCHES else 1,
        callbacks=[
            el.integrations.lightning.DrainCallback(path / "stop.ckpt"),
            ModelCheckpoint(path, save_top_k=0),
        ],
    )
    validation = torch.utils.data.DataLoader(torch.ones(2, 1))
    saved = path / "stop.ckpt"
    try:
        trainer.fit(model, Batches(), validation, ckpt_path=saved if saved.exists() else None, weights_only=True)
    except SystemExit as end:
        return end.code
    return {
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "weight": model.layer.weight.item(),
        "steps": trainer.global_step,
    }


warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
for step in steps:
    done: list[Any] = []
    path = directory / str(step)
    ends = [fit(path, step, done)]
    if ends == [143]:
        ends.append(fit(path, 0, done))
    print(json.dumps({"ends": ends, "done": done}))
