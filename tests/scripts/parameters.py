"""A worker that trains small models whose parameters are not simply those of ``step.model``, one after the other.

Each rank writes ``rank-<rank>.json`` to the output directory: by mode and case all final values. Without a launcher it
also trains them by plain PyTorch, on whole global batches: mode ``plain``. With a case that is an error, and a mode, it
trains that alone.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import elastic_launch as el

STEPS, SIZE = 6, 8
INPUTS = torch.randn(STEPS * SIZE, 3, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randn(STEPS * SIZE, 1, generator=torch.Generator().manual_seed(2))


class Case:
    """A model of two layers; subclasses add what a case needs."""

    rate, momentum = 0.1, 0.9

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.own: list[Tensor] = []
        self.make()
        self.optimizer = torch.optim.SGD([*self.model.parameters(), *self.own], lr=self.rate, momentum=self.momentum)

    def make(self) -> None: ...

    def before(self, step: int) -> None:
        """What the script does at the start of a step."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.model(x), y)

    def in_between(self) -> None:
        """What the script does before each micro-batch."""

    def after(self, step: int) -> None:
        """What the script does between the last micro-batch and the update."""

    def values(self) -> list[float]:
        tensors = [p.detach() for group in self.optimizer.param_groups for p in group["params"]]
        real = [torch.view_as_real(p) if p.is_complex() else p for p in tensors]
        return [float(value) for p in real for value in p.flatten()]


class PlainModel(Case):
    """``model(x)`` and not ``step.model(x)``."""


class LossWeight(Case):
    """A parameter that the optimizer has and the model does not."""

    def make(self) -> None:
        self.own = [nn.Parameter(torch.zeros(()))]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) * torch.exp(-self.own[0]) + self.own[0]


class Unfrozen(Case):
    """Layers that are unfrozen at step 2, and others frozen at step 4."""

    def make(self) -> None:
        self.model[0].requires_grad_(False)

    def before(self, step: int) -> None:
        if step == 2:
            self.model[0].requires_grad_(True)
        if step == 4:
            self.model[2].requires_grad_(False)


class Grown(Case):
    """A layer that is built in the middle, and added to the optimizer."""

    def before(self, step: int) -> None:
        if step == 2:
            self.model.append(nn.Tanh()).append(nn.Linear(1, 1))
            with torch.no_grad():
                self.model[4].weight.fill_(0.7)
                self.model[4].bias.fill_(0.1)
            self.optimizer.add_param_group({"params": self.model[4].parameters()})


class Branches(Case):
    """Parameters that only some micro-batches use, and one that none does."""

    def make(self) -> None:
        self.never = nn.Parameter(torch.ones(2))
        self.some = nn.Parameter(torch.ones(3))
        self.own = [self.never, self.some]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        chosen = x[:, 0] > 0.8
        out = self.model(x)
        if chosen.any():
            out = out + (x * self.some).sum(1, keepdim=True) * chosen[:, None]
        return nn.functional.mse_loss(out, y)


class Clipped(Case):
    """Gradients that the script changes before the update."""

    def after(self, step: int) -> None:
        nn.utils.clip_grad_value_(self.model.parameters(), 0.05)


class Zeroed(Case):
    """Gradients set to zero before each backward pass."""

    def in_between(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)


class Kept(Case):
    """Gradients that the script keeps until the next step, as diffGrad does."""

    def make(self) -> None:
        self.kept: list[Tensor] = []

    def after(self, step: int) -> None:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        for gradient, before in zip(gradients, self.kept, strict=False):
            gradient.add_(before, alpha=0.5)
        self.kept = gradients


class Complex(Case):
    def make(self) -> None:
        self.own = [nn.Parameter(torch.tensor([0.3 + 0.1j, -0.2j, 0.5 + 0j]))]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.model(x) + (x * self.own[0]).sum(1, keepdim=True).abs(), y)


class InParts(Case):
    """Reentrant activation checkpointing of a layer that is used twice: its gradient comes in two parts."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        first, last = self.model[0], self.model[2]
        hidden = torch.tanh(checkpoint(first, x.clone().requires_grad_(), use_reentrant=True))
        hidden = torch.tanh(checkpoint(first, hidden[:, :3], use_reentrant=True))
        return nn.functional.mse_loss(last(hidden), y)


class Sparse(Case):
    """An embedding whose gradients are sparse: default mode only. As with NCCL, no collective takes sparse tensors."""

    rate, momentum = 0.05, 0.0  # SGD's momentum would be sparse, too, and no checkpoint holds that

    def make(self) -> None:
        reduce = dist.all_reduce

        def reduce_dense(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.is_sparse:
                raise RuntimeError("Tensors must be dense")
            return reduce(tensor, *args, **kwargs)

        dist.all_reduce = reduce_dense
        self.model = nn.Sequential(nn.EmbeddingBag(4, 3, mode="sum", sparse=True), nn.Linear(3, 1))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.model((x > 0).long()), y)


class Graph(Case):
    """A loss with gradients of the script's own backward pass; and a buffer whose elements all share one place."""

    def make(self) -> None:
        self.model.register_buffer("mask", torch.ones(1).expand(4), persistent=False)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        inputs = x.clone().requires_grad_()
        self.model(inputs).sum().backward(create_graph=True)
        self.model.zero_grad()
        assert inputs.grad is not None
        return super().loss(x, y) + 0.1 * inputs.grad.square().sum(1).mean()


class AnyOrder(Case):
    """An optimizer whose parameters come in another order on each rank, as from a set."""

    def __init__(self) -> None:
        super().__init__()
        parameters = list(self.model.parameters())
        turn = int(os.environ.get("RANK", "0"))
        self.optimizer = torch.optim.SGD([*parameters[turn:], *parameters[:turn]], lr=0.1, momentum=0.9)

    def values(self) -> list[float]:
        return [float(value) for p in self.model.parameters() for value in p.detach().flatten()]


CASES: dict[str, type[Case]] = {
    case.__name__: case
    for case in (
        PlainModel,
        LossWeight,
        Unfrozen,
        Grown,
        Branches,
        Clipped,
        Zeroed,
        Kept,
        Complex,
        InParts,
        Sparse,
        Graph,
        AnyOrder,
    )
}


class Differing(Case):
    """Errors: actions of some ranks only."""

    at = -1

    def __init__(self, rank: int) -> None:
        self.rank = rank
        super().__init__()


class FrozenOnOne(Differing):
    def before(self, step: int) -> None:
        if step == 2 and self.rank == 1:
            self.model[0].requires_grad_(False)


class NewOnEach(Differing):
    def before(self, step: int) -> None:
        if step == 2:
            self.optimizer.add_param_group({"params": [nn.Parameter(torch.full((2,), float(self.rank)))]})


class FrozenInAStep(Differing):
    def in_between(self) -> None:
        self.model[0].requires_grad_(False)


class OtherModel(Differing):
    def make(self) -> None:
        self.model = nn.Sequential(nn.Linear(3, 4 + self.rank), nn.Linear(4 + self.rank, 1))


class LateParts(Differing):
    """Gradients that come in parts from a later step on."""

    def before(self, step: int) -> None:
        if step == 2:
            self.loss = partial(InParts.loss, self)  # type: ignore[method-assign, arg-type]


ERRORS: dict[str, type[Differing]] = {
    case.__name__: case for case in (FrozenOnOne, NewOnEach, FrozenInAStep, OtherModel, LateParts)
}


def train(run: el.Run, case: Case, *, exact: bool) -> list[float]:
    loader = el.ElasticLoader(TensorDataset(INPUTS, TARGETS), el.GlobalBatch(SIZE, micro=2), shuffle=False)
    for step in run.steps(loader, case.model, case.optimizer, until=f"{STEPS}ba", exact=exact):
        case.before(step.position.step)
        for x, y in step:
            case.in_between()
            step.backward(case.loss(x, y))
        case.after(step.position.step)
        step.update()
    return case.values()


def plain(case: Case) -> list[float]:
    for step in range(STEPS):
        case.before(step)
        case.optimizer.zero_grad()
        rows = slice(step * SIZE, (step + 1) * SIZE)
        case.loss(INPUTS[rows], TARGETS[rows]).backward()
        case.after(step)
        case.optimizer.step()
    return case.values()


def runs(run: el.Run) -> Iterator[tuple[str, str, Callable[[], list[float]]]]:
    for name, case in CASES.items():
        yield "default", name, lambda case=case: train(run, case(), exact=False)
        if case is not Sparse:
            yield "exact", name, lambda case=case: train(run, case(), exact=True)
        if run.world.alone:
            yield "plain", name, lambda case=case: plain(case())


def main() -> None:
    output, *error = sys.argv[1:]
    results: dict[str, dict[str, Any]] = {}
    with el.session() as run:
        if error:
            name, mode = error
            train(run, ERRORS[name](run.rank), exact=mode == "exact")
            return
        for mode, name, training in runs(run):
            print(mode, name, flush=True)
            results.setdefault(mode, {})[name] = training()
        Path(output, f"rank-{run.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
