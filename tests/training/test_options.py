"""A training that resumes with other options of optimizers and schedulers: what is said, and what is overridden."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import TensorDataset

import elastic_launch as el
from elastic_launch.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # torch's SequentialLR

DATA = TensorDataset(torch.randn(32, 3, generator=torch.Generator().manual_seed(1)))
Make = Callable[[nn.Module], Any]
Schedule = Callable[[Any], Any]


def sgd(lr: Any = 0.1, **options: Any) -> Make:
    return lambda model: SGD(model.parameters(), lr=lr, **options)


class Training:
    """A training, and the learning rates of each of its steps by group."""

    def __init__(
        self,
        directory: Path,
        until: int,
        optimizer: Make,
        schedule: Schedule | None = None,
        *,
        move: Callable[[Any, int], None] = lambda optimizer, step: None,
        **saving: Any,
    ) -> None:
        self.rates: list[list[float]] = []
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        self.optimizer = optimizer(model)
        self.scheduler = None if schedule is None else schedule(self.optimizer)
        schedulers = self.scheduler if isinstance(self.scheduler, dict) else {"": self.scheduler}
        several = self.optimizer if isinstance(self.optimizer, dict) else {"": self.optimizer}
        loader = el.ElasticLoader(DATA, el.GlobalBatch(8, 4))
        checkpoint = el.Checkpoint(directory, every=100, **saving)
        how = {"until": f"{until}ba", "checkpoint": checkpoint, "scheduler": self.scheduler}
        with el.session() as run:
            for step in run.steps(loader, model, self.optimizer, **how):
                self.rates.append([float(g["lr"]) for each in several.values() for g in each.param_groups])
                for (x,) in step:
                    step.backward(model(x).square().mean() * 1e-4)
                step.update()
                move(self.optimizer, step.number)
                for each in schedulers.values():
                    if isinstance(each, ReduceLROnPlateau):
                        each.step(1.0)
                    elif each is not None:
                        each.step()

    @property
    def group(self) -> Mapping[str, Any]:
        group: Mapping[str, Any] = self.optimizer.param_groups[0]
        return group


def sequential(lasts: int) -> Schedule:
    return lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=3), CosineAnnealingLR(o, lasts)], [3])


def chained(lasts: int) -> Schedule:
    return lambda o: ChainedScheduler([LinearLR(o, 0.1, total_iters=3), CosineAnnealingLR(o, lasts)])


MOMENTUM = sgd(0.1, momentum=0.9)
WITH_TENSOR = [lambda model, lr=lr: AdamW(model.parameters(), lr=torch.tensor(lr)) for lr in (0.1, 0.02)]
SCHEDULES: dict[str, tuple[Any, Any, list[str], Any, Any]] = {
    "none": (None, None, ["lr"], sgd(), sgd(0.02)),
    "cosine": (lambda o: CosineAnnealingLR(o, 6), lambda o: CosineAnnealingLR(o, 20), ["lr", "T_max"], sgd(), sgd(2)),
    "tensor": (lambda o: CosineAnnealingLR(o, 6), lambda o: CosineAnnealingLR(o, 20), ["lr", "T_max"], *WITH_TENSOR),
    "step": (lambda o: StepLR(o, 2), lambda o: StepLR(o, 4, 0.5), ["lr", "scheduler"], sgd(), sgd(0.02)),
    "milestones": (
        lambda o: MultiStepLR(o, [3, 8]),
        lambda o: MultiStepLR(o, [2, 7]),
        ["milestones", "optimizer"],
        sgd(),
        sgd(2),
    ),
    "exponential": (lambda o: ExponentialLR(o, 0.9), lambda o: ExponentialLR(o, 0.8), ["gamma"], sgd(), sgd()),
    "lambda": (*2 * [lambda o: LambdaLR(o, lambda epoch: 1 / (epoch + 1))], ["lr"], sgd(), sgd(0.02)),
    "sequential": (sequential(6), sequential(20), ["lr", "T_max"], sgd(), sgd(0.02)),
    "chained": (chained(6), chained(20), ["lr", "T_max"], sgd(), sgd(0.02)),
    "one cycle": (
        lambda o: OneCycleLR(o, 1.0, total_steps=30),
        lambda o: OneCycleLR(o, 2.0, total_steps=40),
        ["optimizer", "scheduler"],
        MOMENTUM,
        MOMENTUM,
    ),
    "cyclic": (
        lambda o: CyclicLR(o, 0.01, 0.1, step_size_up=4),
        lambda o: CyclicLR(o, 0.02, 0.3, step_size_up=3),
        ["optimizer", "scheduler"],
        MOMENTUM,
        MOMENTUM,
    ),
    "warm restarts": (
        lambda o: CosineAnnealingWarmRestarts(o, 4),
        lambda o: CosineAnnealingWarmRestarts(o, 5),
        ["lr", "T_0", "T_i"],
        sgd(),
        sgd(0.02),
    ),
    "two": (
        *2 * [lambda o: {"warm": LinearLR(o, 0.1, total_iters=3), "down": ExponentialLR(o, 0.9)}],
        ["lr"],
        sgd(),
        sgd(0.02),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_overridden_is_as_in_a_training_that_had_it_from_the_start(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, after, override, old, new = SCHEDULES[name]
    Training(tmp_path / "a", 6, old, before)
    resumed = Training(tmp_path / "a", 11, new, after, override=override)
    expected = Training(tmp_path / "b", 11, new, after)
    assert resumed.rates == [pytest.approx(rates) for rates in expected.rates[6:]]
    assert resumed.group.get("momentum") == pytest.approx(expected.group.get("momentum"))
    assert caplog.text.count("options that the script gives replace those of the checkpoint of step 6 in") == 1
    assert "replaces options" not in caplog.text
    # With the same values again, there is nothing to override, and nothing to say.
    caplog.clear()
    again = Training(tmp_path / "a", 13, new, after, override=override)
    assert again.rates == [pytest.approx(rates) for rates in Training(tmp_path / "c", 13, new, after).rates[11:]]
    assert not caplog.text


def test_options_that_are_not_overridden_are_those_of_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def others(model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=0.02, betas=(0.8, 0.99), weight_decay=0, eps=1e-8)

    Training(tmp_path, 6, lambda model: AdamW(model.parameters(), lr=0.1), lambda o: CosineAnnealingLR(o, 20))
    for step, until in ((6, 8), (8, 9)):  # each run that resumes with others says so
        caplog.clear()
        (place,) = tmp_path.glob(f"step-{step}.*")
        resumed = Training(tmp_path, until, others, lambda o: CosineAnnealingLR(o, 40, eta_min=1))
        assert resumed.group["betas"] == (0.9, 0.999)
        assert caplog.messages == [
            f"The checkpoint of step {step} in {place} replaces options that the script gives: "
            "optimizer group 0: lr 0.1 (given: 0.02), "
            "betas [0.9, 0.999] (given: [0.8, 0.99]), weight_decay 0.01 (given: 0); scheduler: T_max 20 (given: 40), "
            "eta_min 0 (given: 1). To use the script's: "
            "Checkpoint(override=['lr', 'betas', 'weight_decay', 'T_max', 'eta_min'])"
        ]
    # One of them is overridden, and the scheduler goes on from the checkpoint's rate.
    resumed = Training(tmp_path, 12, others, lambda o: CosineAnnealingLR(o, 40, eta_min=1), override=["T_max", "betas"])
    expected = Training(tmp_path / "b", 12, sgd(0.1), lambda o: CosineAnnealingLR(o, 40))
    assert resumed.rates == [pytest.approx(rates) for rates in expected.rates[9:]]
    assert resumed.group["betas"] == (0.8, 0.99)
    assert resumed.group["weight_decay"] == 0.01


def test_what_changes_in_the_training_is_no_difference(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def move(optimizer: Any, step: int) -> None:
        optimizer.param_groups[0].update(lr=0.1 / step, momentum=0.5)

    Training(tmp_path, 4, sgd(0.1), move=move)
    assert Training(tmp_path, 5, sgd(torch.tensor(0.1), momentum=0.0)).rates == [[0.025]]
    assert not caplog.text
    # To override an option takes the script's value, although that is the same as before.
    assert Training(tmp_path, 6, sgd(0.1), override=["lr"]).rates == [[0.1]]


def test_a_plateau_goes_on_from_the_rate_that_the_script_gives(tmp_path: Path) -> None:
    def plateau(optimizer: Any) -> ReduceLROnPlateau:
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    assert Training(tmp_path, 4, sgd(0.8), plateau).rates[-1] == [0.2]
    resumed = Training(tmp_path, 6, sgd(4.0), lambda o: ReduceLROnPlateau(o, factor=0.1), override=["lr", "factor"])
    assert resumed.rates == [[4.0], [pytest.approx(0.4)]]
    assert resumed.scheduler is not None
    assert resumed.scheduler.patience == 0


def test_options_are_told_apart_by_optimizer_and_group(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def two(first: float, decay: float, *critic: float) -> Make:
        def make(model: nn.Module) -> dict[str, Optimizer]:
            groups = [{"params": each.parameters(), "lr": lr} for each, lr in zip(model, critic, strict=True)]
            return {"actor": SGD(model.parameters(), lr=first), "critic": SGD(groups, weight_decay=decay)}

        return make

    Training(tmp_path, 2, two(0.1, 0, 0.2, 0.3))
    resumed = Training(tmp_path, 3, two(0.5, 0.1, 0.6, 0.3), override=["optimizer/critic"])
    assert resumed.rates == [[0.1, 0.6, 0.3]]
    kept, replaced = caplog.messages
    assert "optimizer/actor group 0: lr 0.1 (given: 0.5). To use the script's: Checkpoint(override=['lr'])" in kept
    assert "optimizer/critic group 0: lr 0.6 (saved: 0.2); optimizer/critic group 0, 1: weight_decay 0.1" in replaced


def test_a_name_that_nothing_has_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"names 'learning_rate', but no option.*\n.*'lr', 'momentum'.*'optimizer'"):
        Training(tmp_path, 2, sgd(), override=["lr", "learning_rate"])
    with pytest.raises(UsageError, match=r"Checkpoint\(override='lr'\) is a string"):
        el.Checkpoint(tmp_path, override="lr")


def test_a_training_that_begins_from_another_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Training(tmp_path / "base", 4, sgd(0.1), lambda o: StepLR(o, 100))
    start = {"start_from": tmp_path / "base"}
    said = "optimizer group 0: lr 0.1 (given: 0.2)"
    assert Training(tmp_path / "a", 5, sgd(0.2), lambda o: StepLR(o, 100), **start).rates == [[0.1]]
    assert caplog.text.count(said) == 1
    new = Training(tmp_path / "b", 5, sgd(0.2), lambda o: StepLR(o, 100), override=["lr"], **start)
    assert new.rates == [[0.2]]
    Training(tmp_path / "c", 1, sgd(0.2), lambda o: StepLR(o, 100), weights_only=True, **start)
    Training(tmp_path / "d", 5, sgd(0.1), lambda o: StepLR(o, 9), allow=["scheduler"], **start)
    assert caplog.text.count("replaces options") == 1


def test_a_loop_of_its_own_is_told_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def loop(lr: float, end: int, **saving: Any) -> float:
        model = nn.Linear(2, 1)
        optimizer = SGD(model.parameters(), lr=lr)
        scheduler = StepLR(optimizer, 2)
        with el.session() as run:
            for name, part in {"schedule": scheduler, "model": model, "sgd": optimizer}.items():
                run.register(name, part)
            step = run.resume(el.Checkpoint(tmp_path, every=1, **saving))
            rate = float(optimizer.param_groups[0]["lr"])
            while step < end:
                optimizer.step()
                scheduler.step()
                step += 1
                run.boundary(step, end=step == end)
        return rate

    loop(1.0, 2)
    assert loop(5.0, 3) == pytest.approx(0.1)
    assert "sgd group 0: lr 1 (given: 5)" in caplog.text
    assert loop(5.0, 4, override=["lr"]) == pytest.approx(0.5)


def test_a_state_has_few_options_of_thousands_of_groups(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def many(rate: float, decay: float, count: int = 1000) -> Make:
        def make(model: nn.Module) -> Optimizer:
            own = [nn.Parameter(torch.ones(1)) for _ in range(count)]
            groups = [
                {"params": [parameter], "weight_decay": decay if x == 7 else 0.0} for x, parameter in enumerate(own)
            ]
            return SGD([{"params": model.parameters()}, *groups], lr=rate)

        return make

    Training(tmp_path, 1, many(0.1, 0.0))
    (manifest,) = tmp_path.glob("step-*/manifest.json")
    assert len(manifest.read_bytes()) < 200_000
    assert Training(tmp_path, 2, many(0.1, 0.5), override=["weight_decay"]).group["weight_decay"] == 0
    assert "optimizer group 8: weight_decay 0.5 (saved: 0)" in caplog.text
    caplog.clear()
    Training(tmp_path, 3, many(0.1, 0.5))
    assert not caplog.text
    Training(tmp_path, 4, many(0.2, 0.5))
    assert "optimizer group 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, and 991 more: lr 0.1 (given: 0.2). To" in caplog.text


def test_a_group_that_was_added_in_the_loop_is_no_difference(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    added = nn.Parameter(torch.ones(1))

    def two(model: nn.Module) -> Optimizer:
        return SGD([{"params": model.parameters()}, {"params": [added], "lr": 0.5}], lr=0.1)

    def add(optimizer: Any, step: int) -> None:
        if step == 1:
            optimizer.add_param_group({"params": [added], "lr": 0.5})

    Training(tmp_path, 3, sgd(0.1), move=add)
    assert Training(tmp_path, 4, two).rates == [[0.1, 0.5]]
    assert not caplog.text


def test_the_name_of_a_group_may_be_of_a_class_of_strings(tmp_path: Path) -> None:
    def named(model: nn.Module) -> Optimizer:
        return SGD([{"params": model.parameters(), "name": np.str_("head")}], lr=0.1)

    assert Training(tmp_path, 2, named).rates == Training(tmp_path, 4, named).rates


def test_a_rate_may_be_a_numpy_scalar(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Training(tmp_path, 2, sgd(np.float32(0.1)))
    assert Training(tmp_path, 4, sgd(np.float32(0.02))).rates == [[pytest.approx(0.1)]] * 2
    assert "0: lr 0.1 (given: 0.02)" in caplog.text
    assert Training(tmp_path, 6, sgd(np.float32(0.02)), override=["lr"]).rates == [[pytest.approx(0.02)]] * 2
