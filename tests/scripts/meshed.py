"""Train a small model that is divided within replicas: ``meshed.py RESULT``, what came out of it.

``--shard`` and ``--tensor`` give the shape of the replicas; without them the model is not divided.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import elastic_launch as el

parser = argparse.ArgumentParser()
parser.add_argument("result", type=Path)
parser.add_argument("--shard", type=int, default=0)
parser.add_argument("--tensor", type=int, default=1)
parser.add_argument("--sgd", action="store_true")
parser.add_argument("--wrap", action="store_true", help="call fully_shard for a single shard, too")
parser.add_argument("--exact", action="store_true")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--micro", type=int, default=2)
parser.add_argument("--checkpoint")
parser.add_argument("--seed-by-rank", action="store_true", help="each rank builds another model")
parser.add_argument("--kill", metavar="RANK:STEP", help="in the first round")
parser.add_argument("--kill-in-pass", metavar="RANK:STEP", help="before a backward pass, in the first round")
parser.add_argument("--spoil", metavar="RANK:STEP", help="change a part of a weight, in the first round")
parser.add_argument(
    "--pause", type=float, default=0.0, help="seconds that each micro-batch takes besides, until RESULT.fast exists"
)
args = parser.parse_args()

torch.manual_seed(1)
DATA = torch.utils.data.TensorDataset(torch.randn(46, 6), torch.randint(3, (46,)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.narrow(torch.relu(self.wide(self.norm(x))))
        return y


def build(run: el.Run) -> nn.Module:
    torch.manual_seed(run.rank if args.seed_by_rank else 0)
    model = nn.Sequential(nn.Linear(6, 6), Block(), Block(), nn.Dropout(0.2), nn.BatchNorm1d(6), nn.Linear(6, 3))
    if not args.shard:
        return model
    mesh = run.mesh(shard=args.shard, tensor=args.tensor)
    assert run.mesh(args.shard, args.tensor) is mesh
    blocks = [model[1], model[2]]
    if args.tensor > 1:
        for block in blocks:
            parallelize_module(block, mesh["tensor"], {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
    if args.wrap or args.shard > 1 or args.tensor == 1:
        for block in blocks:
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
    return model


with el.session(threads=1) as run:
    model = build(run)
    built_ahead = "ELASTIC_LAUNCH_AHEAD" in os.environ  # before this process had a place
    scale = nn.Parameter(torch.ones(()))  # only the optimizer has it
    parameters = [*model.parameters(), scale]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=0.01)
    if args.sgd:  # which does not make a difference in the last bits of a gradient near 0 large
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    loader = el.ElasticLoader(DATA, el.GlobalBatch(16, micro=args.micro))

    def measure(sample: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(model(sample[0]), sample[1])}

    held_out = el.ElasticLoader(DATA, el.GlobalBatch(16, micro=8), shuffle=False)
    evaluator = el.Evaluator(held_out, measure, every="2ba")
    saving = None if args.checkpoint is None else el.Checkpoint(args.checkpoint, every=2)
    rehearsed = []

    def rehearse(step: el.Step) -> None:
        for x, y in step:
            loss = nn.functional.cross_entropy(model(x) * scale, y)
            if Path(f"{args.result}.fail").exists():
                raise ValueError("in the middle of a rehearsal")
            step.backward(loss)
        rehearsed.append(step.number)

    steps = run.steps(
        loader,
        model,
        optimizer,
        until=f"{args.steps}ba",
        exact=args.exact,
        evaluator=evaluator,
        checkpoint=saving,
        rehearse=rehearse,
    )
    norms, losses, seen = [], [], []
    for step in steps:
        here = f"{run.rank}:{{}}" if run.restarts == 0 else ""
        mine = iter(step.plan.micro_batches)
        for x, y in step:
            if (micro := next(mine, None)) is not None:  # else it counts nothing
                seen.append([step.number, micro.index])
            loss = nn.functional.cross_entropy(model(x) * scale, y)
            if here.format(step.number) == args.kill_in_pass:
                os.kill(os.getpid(), signal.SIGKILL)
            if args.pause and not Path(f"{args.result}.fast").exists():
                time.sleep(args.pause)
            step.backward(loss, weight=2.0 * len(x))
        norms.append(step.grad_norm())
        if here.format(step.number) == args.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        step.update(clip_norm=0.3)
        if here.format(step.number) == args.spoil:
            model[0].weight.data.to_local().add_(1)
        losses.append(step.loss)
        with Path(f"{args.result}.steps").open("a") as file:
            line = {"pid": os.getpid(), "rank": run.rank, "step": step.number, "repeated": step.repeated}
            line |= {"built_ahead": built_ahead, "rehearsed": bool(rehearsed)}
            file.write(json.dumps(line) + "\n")
    found = {
        "hash": el.weights_sha256(model),
        "history": evaluator.history[-1].metrics["loss"],
        "norms": norms,
        "losses": losses,
        "worlds": run.worlds,
        "restarts": run.restarts,
        "resumed": run.resumed_step,
        "weights": {
            name: (p.full_tensor() if hasattr(p, "full_tensor") else p).flatten().tolist()
            for name, p in model.state_dict().items()
        },
    }
    Path(f"{args.result}.{run.rank}").write_text(json.dumps({"seen": seen, "hash": found["hash"]}))
    if run.rank == 0:
        args.result.write_text(json.dumps(found))
