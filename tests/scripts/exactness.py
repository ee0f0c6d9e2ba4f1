"""A worker that trains small configurations one after the other in one process group.

Each rank writes ``rank-<rank>.json`` to the output directory: by mode and configuration the hash of the final weights,
the losses, all final values and what was logged. Modes: ``exact``; ``default``; ``saved``, by --save, which ends
at step SAVE_AT and leaves checkpoints; ``resumed``, by --resume, from these to the end; and without a launcher
``reference``: plain PyTorch on whole global batches.
"""

import argparse
import json
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import elastic_launch as el
from elastic_launch.training.transaction import NonFiniteLossError

STEPS = 6
SAVE_AT = 4
"""Inside an epoch of each configuration, so that resuming has to find its place in the order."""
CLASSES = 4
RARE = 3
"""The sample for which alone a branch of a model is used: on one micro-batch of one rank."""


@dataclass(frozen=True)
class Configuration:
    """What one training consists of; samples that fill no global batch make a short last one."""

    size: int = 10
    micro: int = 2
    samples: int = 28
    conv: bool = False
    norm: bool = False
    dropout: float = 0.0
    branches: bool = False
    late_from: int = 1_000_000  # first of the samples for which the branch `late` is used
    frozen: bool = False
    double: bool = False
    sgd: bool = False
    scheduled: bool = False
    clip: float | None = None
    bf16: bool = False
    augmented: bool = False
    workers: int = 0
    weighted: bool = False
    shuffle: bool = True
    poisoned: int | None = None  # a sample whose loss is NaN


PLAIN = Configuration()
CONFIGURATIONS = {
    "plain": PLAIN,
    "dropout": replace(PLAIN, dropout=0.3),
    "norm": replace(PLAIN, conv=True, norm=True),
    "scheduled and clipped": replace(PLAIN, scheduled=True, clip=0.1),
    "bf16": replace(PLAIN, conv=True, bf16=True),
    "augmented": replace(PLAIN, augmented=True),
    "augmented by workers": replace(PLAIN, augmented=True, workers=2),
    # 1 micro-batch in every third step, which leaves ranks without any; `late` is used in it alone.
    "branches": replace(PLAIN, size=8, samples=18, branches=True, late_from=16, shuffle=False),
    # 8, then 7 micro-batches, the last of 1 sample.
    "short last": replace(PLAIN, size=16, samples=45),
    "eleven": replace(PLAIN, size=11, micro=1, samples=31),
    "frozen": replace(PLAIN, frozen=True),
    "mixed dtypes": replace(PLAIN, double=True, clip=0.1),
    # 4 micro-batches of 3, 3, 3 and 2 samples, then 3 of 3, 3 and 1.
    "weighted": replace(PLAIN, size=11, micro=3, samples=29, weighted=True, sgd=True, clip=0.5),
    # 3 micro-batches: fewer than ranks at worlds 4 and 5.
    "few": replace(PLAIN, size=12, micro=4, samples=34, norm=True, dropout=0.2),
    "few branches": replace(PLAIN, size=12, micro=4, samples=34, branches=True, weighted=True),
    "everything": Configuration(
        size=13,
        micro=2,
        samples=35,
        conv=True,
        norm=True,
        dropout=0.2,
        branches=True,
        scheduled=True,
        clip=0.5,
        bf16=True,
        augmented=True,
        weighted=True,
    ),
}
POISONED = replace(PLAIN, norm=True, poisoned=16, shuffle=False)
"""Sample 16 is in step 1 and micro-batch 3, the first of rank 2 of 3; step 0 fills the optimizer's state."""


class Points(Dataset[Any]):
    """Samples of (index, input, class)."""

    def __init__(self, configuration: Configuration) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(configuration.samples, 2, 4, 4, generator=generator)
        self.classes = torch.randint(CLASSES, (configuration.samples,), generator=generator)
        self.augmented = configuration.augmented

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        x = self.inputs[index]
        if self.augmented:
            x = (x + 0.2 * torch.randn(x.shape)) * float(np.random.uniform(0.8, 1.2))
            x = x.flip(2) if random.random() < 0.5 else x
        return index, x, self.classes[index]


class Net(nn.Module):
    """An MLP or a conv net, with branches that see only some samples."""

    def __init__(self, configuration: Configuration) -> None:
        super().__init__()
        c = configuration
        norm: list[nn.Module] = []
        if c.norm:
            norm = [nn.BatchNorm2d(6) if c.conv else nn.BatchNorm1d(16)]
        # No bias before BatchNorm: its gradient is nothing but rounding errors, which AdamW would enlarge.
        body = [nn.Conv2d(2, 6, 3, bias=False)] if c.conv else [nn.Flatten(), nn.Linear(32, 16, bias=not c.norm)]
        self.body = nn.Sequential(*body, *norm, nn.Tanh(), nn.Dropout(c.dropout), nn.Flatten())
        self.head = nn.Linear(24 if c.conv else 16, CLASSES, dtype=torch.float64 if c.double else None)
        self.branches = nn.ModuleDict()
        self.late_from = c.late_from
        if c.branches:
            self.branches = nn.ModuleDict({x: nn.Linear(32, CLASSES) for x in ("some", "rare", "late", "never")})
        if c.frozen:
            self.body.requires_grad_(False)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        out = self.head(self.body(x).to(self.head.weight.dtype))
        chosen = {"some": index % 5 == 0, "rare": index == RARE, "late": index >= self.late_from}
        for name, those in chosen.items():
            if self.branches and those.any():
                out = out + self.branches[name](x.flatten(1)) * those[:, None]
        return out


def mean_loss(c: Configuration, model: Any, index: Tensor, x: Tensor, target: Tensor) -> tuple[Tensor, float]:
    """The loss of some samples, each of which counts as often as its weight says, and the weights' sum."""
    counts = (1 + index % 4 if c.weighted else torch.ones_like(index)).double()
    with torch.autocast("cpu", torch.bfloat16) if c.bf16 else nullcontext():
        each = nn.functional.cross_entropy(model(x, index), target, reduction="none")
        loss = (each * counts.to(each.dtype)).sum() / counts.sum().to(each.dtype)
    if c.poisoned is not None and (index == c.poisoned).any():
        loss = loss * float("nan")
    return loss, float(counts.sum())


class Training:
    """A configuration's model, optimizer and scheduler, and their final values."""

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = c = configuration
        torch.manual_seed(0)
        self.model = Net(c)
        # A large eps: gradients that differ in their last digits are to make steps that do.
        self.optimizer = (
            torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
            if c.sgd
            else torch.optim.AdamW(self.model.parameters(), lr=0.02, weight_decay=0.1, eps=1e-3)
        )
        one_cycle = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.05, total_steps=STEPS + 1)
        self.scheduler = one_cycle(self.optimizer) if c.scheduled else None
        batch = el.GlobalBatch(c.size, micro=c.micro)
        self.loader = el.ElasticLoader(Points(c), batch, seed=7, shuffle=c.shuffle, num_workers=c.workers)
        self.losses: list[float] = []
        self.graded: set[str] = set()
        self.start = self.state()

    def state(self) -> dict[str, Tensor]:
        """Copies of all that a step may change."""
        model = {name: value.clone() for name, value in self.model.state_dict().items()}
        for number, values in self.optimizer.state_dict()["state"].items():
            model |= {
                f"optimizer.{number}.{name}": value.clone() for name, value in values.items() if value is not None
            }
        return model

    def changed(self, before: dict[str, Tensor]) -> list[str]:
        now = self.state()
        return sorted(x for x in now.keys() | before.keys() if x not in before or not torch.equal(now[x], before[x]))

    def after_step(self, loss: float) -> None:
        self.losses.append(loss)
        self.graded |= {name for name, value in self.model.named_parameters() if value.grad is not None}
        if self.scheduler is not None:
            self.scheduler.step()

    def result(self) -> dict[str, Any]:
        return {
            "hash": el.weights_sha256(self.model),
            "losses": self.losses,
            "values": [float(x) for value in self.model.state_dict().values() for x in value.flatten()],
            "graded": sorted(self.graded),
            "moved": [name for name in self.changed(self.start) if not name.startswith("optimizer.")],
        }


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.funcName != "_warn_of_repeating":  # one process has all configurations, and no Checkpoint
            self.texts.append(record.getMessage())


@contextmanager
def listening() -> Iterator[list[str]]:
    """Collect what the library logs, and all Python warnings."""
    messages, logger = Messages(), logging.getLogger("elastic_launch")
    logger.addHandler(messages)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield messages.texts
        messages.texts += [f"{warning.category.__name__}: {warning.message}" for warning in caught]
    finally:
        logger.removeHandler(messages)


def train(run: Any, c: Configuration, *, exact: bool, until: int = STEPS, at: Path | None = None) -> dict[str, Any]:
    """Train with the library; a loss that is not finite ends it, and the result lists what the step had changed."""
    training, error, before = Training(c), None, {}
    with listening() as messages:
        steps = run.steps(
            training.loader,
            training.model,
            training.optimizer,
            until=f"{until}ba",
            checkpoint=None if at is None else el.Checkpoint(at, every=SAVE_AT),
            exact=exact,
            scheduler=training.scheduler,
        )
        with closing(steps):
            for step in steps:
                before = training.state() if c.poisoned is not None else {}
                for index, x, target in step:
                    loss, counts = mean_loss(c, step.model, index, x, target)
                    step.backward(loss, counts if c.weighted else None)
                try:
                    step.update(c.clip)
                except NonFiniteLossError as caught:
                    error = str(caught)
                    break
                training.after_step(step.loss)
    result = {**training.result(), "messages": messages, "resumed": run.resumed_step}
    return result | ({"error": error, "changed": training.changed(before)} if error else {})


def by_hand(c: Configuration) -> dict[str, Any]:
    """Train without the library's steps, on each global batch as a whole."""
    training = Training(c)
    points = training.loader.dataset
    for number in range(STEPS):
        index = torch.tensor([i for micro in training.loader.indices(number, 1, 0) for i in micro])
        training.optimizer.zero_grad()
        loss, _ = mean_loss(c, training.model, index, points.inputs[index], points.classes[index])
        loss.backward()
        if c.clip is not None:
            nn.utils.clip_grad_norm_(training.model.parameters(), c.clip)
        training.optimizer.step()
        training.after_step(loss.item())
    return training.result()


def same_as_a_whole(c: Configuration) -> bool:
    """Whether randomness, a micro-batch's statistics and rounding all leave micro-batches equal to the whole batch."""
    return not (c.norm or c.dropout or c.augmented or c.bf16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--resume", type=Path)
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}

    def put(mode: str, name: str, training: Callable[[], dict[str, Any]]) -> None:
        print(mode, name, flush=True)  # the last one is that which fails or hangs
        results.setdefault(mode, {})[name] = training()

    with el.session() as run:
        for name, c in (CONFIGURATIONS | {"poisoned": POISONED}).items():
            put("exact", name, partial(train, run, c, exact=True))
            if not c.workers:
                put("default", name, partial(train, run, c, exact=False))
        for name, c in CONFIGURATIONS.items():
            if options.save is not None:
                put("saved", name, partial(train, run, c, exact=True, until=SAVE_AT, at=options.save / name))
            if options.resume is not None:
                put("resumed", name, partial(train, run, c, exact=True, at=options.resume / name))
            if run.world.alone and same_as_a_whole(c):
                put("reference", name, partial(by_hand, c))
        (options.output / f"rank-{run.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
