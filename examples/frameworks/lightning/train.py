"""Fit a line with Lightning: a plain script for torchrun and similar launchers.

    elastic-launch --standalone --nproc 2 examples/frameworks/lightning/train.py --dir runs/lightning

After a restart it resumes from Lightning's own last checkpoint.
"""

import argparse
import os
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.layer(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.05)

    def on_train_start(self) -> None:
        if self.global_step:
            self.print(f"resumed at step {self.global_step}", flush=True)


def main(callbacks: list[Callback] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/lightning"), help="shared by all nodes")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="steps from one checkpoint to the next")
    args = parser.parse_args()

    seed_everything(0, verbose=False)
    inputs = torch.linspace(-1, 1, 256)[:, None]
    loader = DataLoader(TensorDataset(inputs, 3 * inputs + 1), batch_size=8)
    trainer = Trainer(
        default_root_dir=args.dir,
        max_steps=args.steps,
        # Those of the current round: Lightning compares their product with WORLD_SIZE.
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        strategy="ddp",
        callbacks=[ModelCheckpoint(args.dir, every_n_train_steps=args.every, save_last=True), *(callbacks or [])],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Line(), loader, ckpt_path="last")
    if trainer.is_global_zero:
        print(f"done: steps {trainer.global_step}", flush=True)


if __name__ == "__main__":
    main()
