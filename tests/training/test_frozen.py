"""Frozen weights that checkpoints leave out, and everything that must not pass in silence then."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import SCRIPTS, Job
from torch import nn
from torch.utils.data import TensorDataset

import elastic_launch as el
from elastic_launch.errors import UsageError
from elastic_launch.faults import FaultPlan

SCRIPT = str(SCRIPTS / "starting.py")
DATA = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))


class Adapted(nn.Module):
    """A frozen base, of which a layer is used twice, and what is trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.again = self.base[0]
        self.low, self.head = nn.Linear(3, 2, bias=False), nn.Linear(2, 1)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.low(self.again(self.base(x))))  # type: ignore[no-any-return]


FROZEN = {"base.0.weight", "base.0.bias", "base.1.weight", "base.1.bias", "again.weight", "again.bias"}


def train(
    directory: Path,
    until: int,
    model: nn.Module | None = None,
    *,
    skip: bool = True,
    after: Callable[[nn.Module, int], object] = lambda model, step: None,
) -> str:
    model = Adapted() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    saving = el.Checkpoint(directory, every=1, skip_frozen=skip)
    loader = el.ElasticLoader(TensorDataset(DATA, DATA.sum(1, keepdim=True)), el.GlobalBatch(8, 4))
    with el.session() as run:
        for step in run.steps(loader, model, optimizer, until=f"{until}ba", checkpoint=saving, exact=True):
            for x, y in step:
                step.backward(nn.functional.mse_loss(step.model(x), y))
            step.update()
            after(model, step.number)
    return el.weights_sha256(model)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    train(directory / "part", 2)
    train(directory / "whole", 2, skip=False)
    return directory


def test_frozen_weights_are_not_saved_and_those_of_the_script_are_used(saved: Path, tmp_path: Path) -> None:
    part, whole = (el.load_checkpoint(saved / name)["model"] for name in ("part", "whole"))
    assert whole.keys() - part.keys() == FROZEN
    assert part.keys() >= {"base.1.running_mean", "low.weight"}
    undisturbed = train(tmp_path, 5, skip=False)
    for name, skip in (("part", True), ("part", False), ("whole", True)):
        directory = shutil.copytree(saved / name, tmp_path / f"{name}{skip}")
        assert train(directory, 4, skip=skip) != undisturbed
        assert train(directory, 5, skip=skip) == undisturbed, (name, skip)


def test_the_trained_weights_are_exported_alone(saved: Path, tmp_path: Path) -> None:
    el.export(saved / "part", tmp_path / "adapter.pt")
    model = Adapted()
    found = model.load_state_dict(torch.load(tmp_path / "adapter.pt", weights_only=True), strict=False)
    assert set(found.missing_keys) == FROZEN
    assert not found.unexpected_keys


def _other(change: Callable[[Adapted], object]) -> Adapted:
    model = Adapted()
    with torch.no_grad():
        change(model)
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.base[1].bias.add_(1e-6), "was made with other values of the frozen weights of model"),
        (lambda model: model.base[1].requires_grad_(True), r"has no 'base\.1\.bias', which is not frozen in"),
        (lambda model: model.head.requires_grad_(False), r"has 'head\.bias', which is frozen in this script's model"),
    ],
)
def test_other_frozen_weights_at_a_resume_are_refused(
    saved: Path, change: Callable[[Adapted], object], message: str
) -> None:
    with pytest.raises(UsageError, match=f"The checkpoint of step 2 in .* {message}"):
        train(saved / "part", 4, _other(change))


def test_the_values_of_a_whole_checkpoint_must_be_those_of_the_script(saved: Path) -> None:
    model = _other(lambda model: model.base[1].bias.add_(1e-6))
    with pytest.raises(UsageError, match="other values of the frozen weights"):
        train(saved / "whole", 4, model)


def test_a_frozen_weight_that_changes_or_is_trained_in_the_loop_is_an_error(tmp_path: Path) -> None:
    def changed(model: nn.Module, step: int) -> None:
        if step == 2:
            model.get_parameter("base.0.bias").data[1] += 1e-3  # not seen by torch's versions

    def trained(model: nn.Module, step: int) -> None:
        if step == 2:
            model.get_submodule("base").requires_grad_(True)

    def frozen(model: nn.Module, step: int) -> None:
        if step == 2:
            model.get_parameter("head.bias").requires_grad_(False)

    with pytest.raises(UsageError, match=r"'base\.0\.bias' of model is frozen, and its values have changed"):
        train(tmp_path / "changed", 4, after=changed)
    with pytest.raises(UsageError, match=r"'base\.0\.weight' of model was frozen when the training began, and is not"):
        train(tmp_path / "trained", 4, after=trained)
    # What is frozen later is still saved.
    train(tmp_path / "frozen", 4, after=frozen)
    assert "head.bias" in el.load_checkpoint(tmp_path / "frozen")["model"]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], pytest.param(["--no-live"], marks=pytest.mark.soak)], ids=["live", "restarted"])
def test_a_killed_worker_costs_nothing_without_the_frozen_weights_in_memory(job: Job, flags: list[str]) -> None:
    found = []
    for number, faults in enumerate(({}, FaultPlan.fail_at(1, 4).environment())):
        directory = job.work / str(number)
        agent = job.launch(
            *("--standalone", "--nproc", "2", "--max-restarts", "1", *flags),
            command=[SCRIPT, str(directory), "--skip-frozen"],
            env=faults,
            name=f"run{number}",
        )
        assert agent.wait(90) == 0, agent.output
        found += re.findall(r"weights (\w+)", agent.output)
        assert not {"0.weight", "0.bias"} & el.load_checkpoint(directory)["model"].keys()
    assert len(set(found)) == 1, job.agents[-1].output
