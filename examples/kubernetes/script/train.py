"""The example job's script: trains a small network in exact mode on all available pods.

``STEPS`` is the number of steps, ``CHECKPOINT`` a directory that all pods share, or a URL. Without it the state is only
in the pods' memory: it survives the loss of any pod, but not of all pods.
"""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic_launch as el


def main() -> None:
    with el.session() as run:
        torch.manual_seed(0)
        inputs = torch.randn(4096, 32)
        dataset = TensorDataset(inputs, inputs[:, :8].argmax(dim=1))
        model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 8)).to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        where = os.environ.get("CHECKPOINT")
        trainer = el.Trainer(
            run,
            model,
            optimizer,
            el.ElasticLoader(dataset, el.GlobalBatch(64, micro=8), seed=0),
            loss_fn=nn.functional.cross_entropy,
            checkpoint=el.Checkpoint(where, every="1min") if where else None,
            exact=True,
        )
        steps = int(os.environ.get("STEPS", "20000"))
        trainer.fit(f"{steps}ba")
        if run.rank == 0:
            print(f"trained {steps} steps on {run.world_size} workers: weights {el.weights_sha256(model)[:16]}")


if __name__ == "__main__":
    main()
