"""A worker that changes one bit of one rank's state in the middle of a run, only in its first start."""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic_launch as el

parser = argparse.ArgumentParser()
parser.add_argument("--exact", action="store_true")
parser.add_argument("--checkpoint")
parser.add_argument("--every", default="8")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--rank", type=int, default=1)
parser.add_argument("--at", type=int, default=-1, help="step after which the bit is changed")
parser.add_argument("--what", default="0.weight")
parser.add_argument("--fail-at", type=int, default=-1, help="step in which the first rank fails by another error")
parser.add_argument("--sleep", type=float, default=0.0, help="seconds a step")
parser.add_argument("--always", action="store_true", help="in every start")
arguments = parser.parse_args()

inputs = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
with el.session() as run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = el.ElasticLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), el.GlobalBatch(12, micro=2), seed=0)
    checkpoint = el.Checkpoint(arguments.checkpoint, every=arguments.every) if arguments.checkpoint else None
    until = f"{arguments.steps}ba"
    for step in run.steps(loader, model, optimizer, until=until, exact=arguments.exact, checkpoint=checkpoint):
        for x, y in step:
            step.backward(nn.functional.mse_loss(step.model(x), y))
        if run.rank == 0 and step.number == arguments.fail_at:
            raise ValueError("another error")
        step.update()
        time.sleep(arguments.sleep)
        here = run.rank == arguments.rank and step.number == arguments.at
        if here and (arguments.always or run.start_reason == "first"):
            value = model.state_dict()[arguments.what]
            value.view(torch.int32).view(-1)[0] ^= 1 << 20  # one bit of the first number
    print(f"hash {el.weights_sha256(model)[:16]} resumed {run.resumed_step} restarts {run.restarts}", flush=True)
