"""Log a training's steps and evaluations to a file of JSON lines, to TensorBoard, W&B and MLflow.

    elastic-launch --standalone --nproc 2 examples/loggers/train.py --log runs/loggers/log.jsonl

Only rank 0 writes. However often workers are killed, the file has one line for each step and each evaluation.
"""

import argparse
import json
import os
from collections import deque
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, ReduceLROnPlateau
from torch.utils.data import TensorDataset
from trackers import MLflow, WandB

import elastic_launch as el


class JsonLines(el.Callback):
    """Writes one line for each step and each evaluation.

    After a fault steps may be done again, or a step that other ranks have done is not done again by the new rank 0. So
    the number of lines, and the last lines, are a part of the training's state. Register this object to have them
    saved. In each round rank 0 cuts the file off where these begin, and appends them.
    """

    def __init__(self, path: Path, keep: int = 100) -> None:
        self.path = path
        self.count = 0
        self.last: deque[str] = deque(maxlen=keep)
        self.file: TextIO | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "last": list(self.last)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.last = state["count"], deque(state["last"], maxlen=self.last.maxlen)

    def on_round(self, start: el.RoundStart) -> None:
        self.close()
        if start.rank:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        unfinished = self.path.with_suffix(".tmp")
        unfinished.write_text("".join([*lines[: self.count - len(self.last)], *self.last]))
        os.replace(unfinished, self.path)
        self.file = self.path.open("a")

    def on_step(self, end: el.StepEnd) -> None:
        self.write(step=end.step, loss=end.loss, lr=end.lrs[0], grad_norm=end.grad_norm)

    def on_evaluation(self, evaluation: el.Evaluation) -> None:
        self.write(step=evaluation.step, evaluation=evaluation.metrics)

    def write(self, **values: Any) -> None:
        line = json.dumps(values) + "\n"
        self.count += 1
        self.last.append(line)
        if self.file:
            self.file.write(line)
            self.file.flush()

    def close(self) -> None:
        if self.file:
            self.file.close()
            self.file = None


class TensorBoard(el.Callback):
    """Writes scalars for TensorBoard, which needs ``pip install tensorboard``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.writer: Any = None

    def on_round(self, start: el.RoundStart) -> None:
        self.close()
        if start.rank == 0:
            from torch.utils.tensorboard import SummaryWriter

            # TensorBoard hides what former rounds have written about these steps, which are done again.
            self.writer = SummaryWriter(str(self.directory), purge_step=start.resumed_step + 1)

    def on_step(self, end: el.StepEnd) -> None:
        self.write(end.step, {"loss": end.loss, "lr": end.lrs[0]})

    def on_evaluation(self, evaluation: el.Evaluation) -> None:
        self.write(evaluation.step, {f"evaluation/{name}": value for name, value in evaluation.metrics.items()})

    def on_incident(self, incident: el.Incident) -> None:
        if self.writer:
            self.writer.add_text("incident", f"{incident.kind}: {incident.cause}", incident.step)

    def write(self, step: int, values: dict[str, float]) -> None:
        if self.writer:
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)
            self.writer.flush()  # or a kill would lose two minutes

    def close(self) -> None:
        if self.writer:
            self.writer.close()
            self.writer = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, required=True, help="file for the lines, in a directory of all nodes")
    parser.add_argument("--tensorboard", type=Path, help="directory for TensorBoard")
    parser.add_argument("--wandb", type=Path, help="directory for W&B's offline runs, for all nodes")
    parser.add_argument("--mlflow", help="MLflow's tracking URI")
    parser.add_argument("--name", default="loggers", help="of the run in W&B and MLflow; a resumed one has the same")
    parser.add_argument("--checkpoint", help="directory or URL to save to and to resume from")
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()

    with el.session() as run:
        torch.manual_seed(0)
        inputs = torch.randn(320, 8)
        data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).sin())
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(run.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        loggers: list[Any] = [JsonLines(args.log)]
        run.register("log", loggers[0])
        if args.tensorboard:
            loggers.append(TensorBoard(args.tensorboard))
        if args.wandb:
            loggers.append(WandB(args.wandb, args.name, args.log))
        if args.mlflow:
            loggers.append(MLflow(args.mlflow, args.name))
        trainer = el.Trainer(
            run,
            model,
            optimizer,
            el.ElasticLoader(data, el.GlobalBatch(32, micro=4)),
            loss_fn=nn.functional.mse_loss,
            scheduler={
                "warm-up": LinearLR(optimizer, start_factor=0.1, total_iters=15),
                "plateau": ReduceLROnPlateau(optimizer, patience=0, threshold=0.2),
            },
            clip_norm=1.0,
            eval_loader=el.ElasticLoader(data, el.GlobalBatch(64, micro=16), shuffle=False),
            checkpoint=el.Checkpoint(args.checkpoint, every="1min") if args.checkpoint else None,
            exact=True,
            callbacks=[*loggers, el.Progress(every=10)],
        )
        trainer.fit(f"{args.epochs}ep")
        for logger in loggers:
            logger.close()


if __name__ == "__main__":
    main()
