"""Fit a line with DeepSpeed and ZeRO 1: a plain script for torchrun and similar launchers.

    elastic-launch --standalone --nproc 2 examples/frameworks/deepspeed/train.py --dir runs/deepspeed

After a restart it resumes from DeepSpeed's own newest checkpoint.
"""

import argparse
import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn


def main(drain: Any = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default="runs/deepspeed", help="shared by all nodes")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="steps from one checkpoint to the next")
    args = parser.parse_args()

    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 8,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}},
            "zero_optimization": {"stage": 1},
        },
    )
    path, _ = engine.load_checkpoint(args.dir)
    if path and rank == 0:
        print(f"resumed at step {engine.global_steps}", flush=True)
    if drain:
        drain.begin(engine.global_steps, args.steps)
    while engine.global_steps < args.steps:
        # Drawn anew for each step and rank, so that a restart has the same data at the same step.
        seed = engine.global_steps * dist.get_world_size() + rank
        inputs = torch.rand(8, 1, generator=torch.Generator().manual_seed(seed)).to(engine.device)
        engine.backward(nn.functional.mse_loss(engine(inputs), 3 * inputs + 1))
        engine.step()
        if engine.global_steps % args.every == 0:
            engine.save_checkpoint(args.dir)
        if drain and drain.boundary(engine.global_steps, end=engine.global_steps == args.steps):
            engine.save_checkpoint(args.dir)
            sys.exit(drain.leave())
    if drain:
        drain.end()
    if rank == 0:
        print(f"done: steps {engine.global_steps}", flush=True)
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
