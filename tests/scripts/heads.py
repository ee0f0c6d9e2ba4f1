"""A training whose loop body changes what is saved before its first micro-batch: ``heads.py DIRECTORY HEAD [FLAGS]``.

HEAD is what the head of each step does; ``small`` and ``between`` do several things, before the step and between its
two passes. ``--end R:S``: in round R, rank 0 kills itself in step S (with ``between``, in its second pass) once all
ranks are there. Rank 0 writes ``result.json``.
"""

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from ranks import await_ranks, come
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import elastic_launch as el


class Counter:
    """A weight of the loss that is annealed."""

    def __init__(self) -> None:
        self.count = 0

    def step(self) -> float:
        self.count += 1
        return min(1.0, self.count / 40)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state.pop("count")  # it may change what it gets


class Noise:
    """A generator of the script's own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def draw(self) -> float:
        return float(torch.rand((), generator=self.generator))

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["state"])


class Average:
    """An average that keeps the tensors that it loads, and is too large to be copied at each start."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: value.detach().clone() for name, value in model.named_parameters()}
        self.values["room"] = torch.zeros(20_000)

    def update(self, model: nn.Module) -> None:
        for name, value in model.named_parameters():
            self.values[name].mul_(0.9).add_(value.detach(), alpha=0.1)

    def state_dict(self) -> dict[str, Tensor]:
        return self.values

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.values = state


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
        self.register_buffer("scale", torch.ones(()))
        self.tau = 1.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(x) / self.tau))
        return out * self.scale

    def get_extra_state(self) -> dict[str, float]:
        return {"tau": self.tau}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.tau = state["tau"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("head")
    parser.add_argument("--end", action="append", default=[])
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    ends = {tuple(map(int, end.split(":"))) for end in args.end}

    with el.session() as run:
        torch.manual_seed(0)
        data = torch.randn(64, 4, generator=torch.Generator().manual_seed(1)) + 1
        model = Net()
        later = nn.Parameter(torch.ones(()))
        two = args.head == "between"
        optimizers = {
            "a": torch.optim.Adam(model.body.parameters(), 0.01),
            "b": torch.optim.Adam(model.head.parameters(), 0.01),
        }
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.CyclicLR(
            optimizers["a"] if two else optimizer, 0.001, 0.02, step_size_up=4, cycle_momentum=False
        )
        counter, noise, average, averaged = Counter(), Noise(), Average(model), AveragedModel(model)
        for name, each in (("counter", counter), ("noise", noise), ("average", average), ("averaged", averaged)):
            run.register(name, each)
        loader = el.ElasticLoader(data, el.GlobalBatch(16, 4))

        def change_small() -> float:
            """Change what is copied at each start; return what the loss depends on."""
            scheduler.step()
            for group in (optimizers["b"] if two else optimizer).param_groups:
                group["lr"] *= 0.98
            model.tau *= 0.97
            return counter.step() + noise.draw()

        @torch.no_grad()
        def change_large() -> None:
            if args.head == "value":
                model.head.weight.mul_(0.99)
            elif args.head == "freeze":
                model.body.requires_grad_(step.number < 5)
            elif args.head == "data":
                model.head.weight.data.mul_(0.99)
            elif args.head == "buffer":
                model.scale.mul_(1.01)
            elif args.head == "large":
                average.update(model)
            elif args.head == "averaged":
                averaged.update_parameters(model)
            elif args.head == "momentum":
                for state in optimizer.state.values():
                    state["exp_avg"].mul_(0.5)

        def reached(step: el.Step) -> None:
            if (run.world.round, step.number) in ends:
                come(args.directory, f"{run.world.round}-{step.number}", run.rank)
                await_ranks(args.directory, f"{run.world.round}-{step.number}", range(run.world_size))
                if run.rank == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        trained: Any = optimizers if two else optimizer
        models: Any = {"net": model} if two else model
        for step in run.steps(loader, models, trained, until=args.steps, exact=True, scheduler=scheduler):
            beta = change_small() if args.head in ("small", "between") else 0.5
            if args.head == "group" and step.number == 5:
                optimizer.add_param_group({"params": [later], "lr": 0.1})
            change_large()
            extra = float(average.values["head.bias"]) + float(averaged.module.head.bias)
            for x in step:
                if not two:
                    reached(step)
                out = model(x)
                step.backward((out - later).square().mean() + (beta + extra) * out.mean())
            step.update(optimizer="a" if two else None)
            if two:
                gamma = change_small()
                for x in step:
                    reached(step)
                    step.backward(model(x).square().mean() * gamma + beta * model(x).mean())
                step.update(optimizer="b")
        if run.rank == 0:
            values = [*map(float, (later, average.values["head.bias"], averaged.module.head.bias, model.scale))]
            result = {
                "hash": [el.weights_sha256(x)[:16] for x in (model.body, model.head)],
                "count": counter.count,
                "tau": model.tau,
                "values": values,
            }
            result |= {"noise": noise.draw(), "rate": scheduler.get_last_lr()}
            (args.directory / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
