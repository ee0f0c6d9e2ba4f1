"""Train on handwritten digits with DeepSpeed: the example of Composer's documentation, made small.

    elastic-launch --standalone --nproc 2 examples/deepspeed/train.py --dir runs/deepspeed --epochs 4

After a kill, or when it is started again with another --nproc, the global batch is the same, and each rank takes its
part of the optimizer from the checkpoint. The precision is fp16 on GPUs and bf16 on CPUs, unless --precision names one.
"""

from __future__ import annotations

import argparse
import json
import resource

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import elastic_launch as el


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default="runs/deepspeed", help="checkpoints")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--width", type=int, default=64, help="of the hidden layers")
    parser.add_argument("--stage", type=int, default=1, help="of ZeRO")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], help="fp16 on a GPU, else bf16")
    args = parser.parse_args()

    data, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = data.float().view(-1, 1, 8, 8) / 16
    train, held_out = TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])
    torch.manual_seed(0)
    with el.session() as run:
        precision = args.precision or ("fp16" if run.device.type == "cuda" else "bf16")
        width = args.width
        layers = (
            nn.Flatten(),
            nn.Linear(64, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 10),
        )
        model = nn.Sequential(*layers).to(run.device)
        half = {} if precision == "fp32" else {precision: {"enabled": True}}
        trainer = el.Trainer(
            run,
            model,
            torch.optim.AdamW(model.parameters(), lr=0.002),
            el.ElasticLoader(train, el.GlobalBatch(64, micro=8), seed=0),
            loss_fn=nn.functional.cross_entropy,
            metrics={"accuracy": accuracy},
            eval_loader=el.ElasticLoader(held_out, el.GlobalBatch(60, micro=20), shuffle=False),
            checkpoint=el.Checkpoint(args.dir, every="1min"),
            deepspeed_config={"train_batch_size": 64, **half, "zero_optimization": {"stage": args.stage}},
        )
        trainer.fit(f"{args.epochs}ep")
        if run.rank == 0:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            result = {
                "steps": trainer.step,
                **trainer.history[-1].metrics,
                "precision": precision,
                "worlds": run.worlds,
            }
            print(json.dumps({**result, "resumed_step": run.resumed_step, "peak_mib": peak}), flush=True)


if __name__ == "__main__":
    main()
