"""transformers' Trainer keeps the best checkpoint: ``keeping_best.py DIRECTORY STEP [LIMIT]``.

Each step ends with an evaluation, of which the first is the best. After STEP it gets SIGTERM. Without a LIMIT it saves
only the best state; else each, of which it keeps so many, and it loads the best one at the end.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import elastic_launch as el


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * x - labels).square().mean()}


class Terminates(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == int(sys.argv[2]):
            signal.raise_signal(signal.SIGTERM)


def collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    x, labels = zip(*samples, strict=True)
    return {"x": torch.stack(x), "labels": torch.stack(labels)}


limit = int(sys.argv[3]) if len(sys.argv) > 3 else None
data = TensorDataset(torch.ones(32, 1), torch.ones(32, 1))
Trainer(
    Model(),
    TrainingArguments(
        sys.argv[1],
        max_steps=8,
        per_device_train_batch_size=2,
        learning_rate=0.0,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="best" if limit is None else "steps",
        save_steps=1,
        save_total_limit=limit,
        log_level="info",
        load_best_model_at_end=limit is not None,
        metric_for_best_model="loss",
        greater_is_better=False,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
    ),
    data_collator=collate,
    train_dataset=data,
    eval_dataset=data,
    callbacks=[Terminates(), el.integrations.transformers.DrainCallback()],
).train()
