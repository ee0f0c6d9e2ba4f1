"""A script that has changed since its checkpoint was made: differences are named, or the training resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, StepLR
from torch.utils.data import TensorDataset

import elastic_launch as el
from elastic_launch import snapshot
from elastic_launch.errors import UsageError
from elastic_launch.snapshot.format.small_values import UnknownMember
from elastic_launch.training.checkpoints.matching import differences
from elastic_launch.training.checkpoints.resumed import Resumed
from elastic_launch.training.checkpoints.state import TrainingState
from elastic_launch.training.data.samplers import SAMPLE_ORDER
from elastic_launch.training.engine import Engine
from elastic_launch.training.ranks.world import World
from elastic_launch.training.session import Run

DATA = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
DATASET = TensorDataset(DATA, DATA.sum(1, keepdim=True))

Make = Callable[[], nn.Module]
MakeOptimizer = Callable[[nn.Module], Any]


def _small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def _train(
    directory: Path,
    until: str = "3ba",
    make: Make = _small,
    optimizer: MakeOptimizer = _adamw,
    schedule: Callable[[Any], Any] | None = None,
    size: int = 8,
) -> str:
    run, model = Run(Engine(World(), torch.device("cpu"))), make()
    made = optimizer(model)
    scheduler = schedule(made) if schedule is not None else None
    loader = el.ElasticLoader(DATASET, el.GlobalBatch(size, 4), shuffle=False)
    checkpoint = el.Checkpoint(directory, every=100)
    options = {"checkpoint": checkpoint, "exact": True, "scheduler": scheduler}
    for step in run.steps(loader, model, made, until=until, **options):
        for x, y in step:
            step.backward(nn.functional.mse_loss(model(x), y))
        step.update()
        if scheduler is not None:
            scheduler.step()
    return el.weights_sha256(model)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    _train(directory / "plain")
    _train(directory / "scheduled", schedule=lambda optimizer: StepLR(optimizer, 2))
    return directory


def _groups(*sizes: int) -> MakeOptimizer:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        left = list(model.parameters())
        groups = [{"params": [left.pop(0) for _ in range(size)]} for size in sizes]
        return torch.optim.AdamW(groups, lr=0.1)

    return make


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"make": lambda: nn.Sequential(*_small(), nn.Linear(1, 1))}, r"model: it has no '3\.bias', '3\.weight'\."),
        ({"make": lambda: _small()[:2]}, r"model: it has '2\.bias', '2\.weight', and the model here has not"),
        (
            {"make": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))},
            r"model: 2\.(weight has the shape \[1, 4\], and here \[2, 4\]|bias has the shape \[1\], and here \[2\])",
        ),
        ({"make": lambda: _small().double()}, r"model: 0\.weight is torch\.float32 in it, and torch\.float64 here"),
        ({"make": lambda: nn.ModuleDict({"module": _small()})}, r"(.|\n)*register what it wraps, model\.module"),
        (
            {"optimizer": lambda m: torch.optim.Adam(m.parameters())},
            "optimizer: it was saved by AdamW, and here is Adam",
        ),
        ({"optimizer": lambda m: torch.optim.SGD(m.parameters())}, "optimizer: it was saved by AdamW, and here is SGD"),
        ({"optimizer": _groups(4, 2)}, r"optimizer: it has 1 param_groups, and the AdamW here has 2"),
        ({"optimizer": _groups(5)}, r"optimizer: its param_groups\[0\] has 6 parameters, and here 5"),
        ({"optimizer": lambda m: {"a": _adamw(m)}}, r"optimizer: it has one without a name, and this script has 'a'"),
    ],
)
def test_what_does_not_fit_names_the_part_the_checkpoint_and_a_remedy(
    saved: Path, changed: dict[str, Any], message: str
) -> None:
    (path,) = (saved / "plain").glob("step-3*")
    with pytest.raises(UsageError, match=message) as raised:
        _train(saved / "plain", until="6ba", **changed)
    assert f"The checkpoint of step 3 in {path} does not fit this script's" in str(raised.value)
    assert raised.value.hint


class _Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _small().double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.double()).float()  # type: ignore[no-any-return]


def test_the_state_of_an_optimizer_keeps_its_dtypes(tmp_path: Path) -> None:
    """NAdam has float32 numbers for float64 parameters, and torch converts them when it loads them."""

    def train(directory: Path, until: str) -> str:
        return _train(directory, until, _Double, lambda model: torch.optim.NAdam(model.parameters(), lr=0.1))

    train(tmp_path / "resumed", "3ba")
    assert train(tmp_path / "resumed", "8ba") == train(tmp_path / "undisturbed", "8ba")


def test_a_part_that_is_missing_or_too_much_names_the_argument(saved: Path) -> None:
    with pytest.raises(
        UsageError, match=r"step 3 in .* has no scheduler, which this script has.\n.*Leave out scheduler"
    ):
        _train(saved / "plain", schedule=lambda optimizer: StepLR(optimizer, 2))
    with pytest.raises(UsageError, match=r"step 3 in .* has scheduler, which this script does not have.\n.*scheduler="):
        _train(saved / "scheduled")
    with pytest.raises(UsageError, match=r"scheduler: it was saved by StepLR, and here is ExponentialLR"):
        _train(saved / "scheduled", schedule=lambda optimizer: ExponentialLR(optimizer, 0.9))
    with pytest.raises(UsageError, match=r"step 3 in .* was made with global batch 8, this training has 4"):
        _train(saved / "plain", size=4)


def test_what_a_part_of_the_scripts_own_raises_is_named_with_the_checkpoint(tmp_path: Path) -> None:
    class Part:
        def state_dict(self) -> dict[str, Any]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            state["b"]

    def resume() -> int:
        run = Run(Engine(World(), torch.device("cpu")))
        run.register("part", Part())
        step = run.resume(el.Checkpoint(tmp_path, every=1))
        run.boundary(step + 1, end=True)
        run._engine.finish_training()
        return step

    assert resume() == 0
    with pytest.raises(UsageError, match=r"step 1 in .* does not fit this script's part: KeyError: 'b'"):
        resume()


def test_names_of_several_models_and_optimizers_are_compared(tmp_path: Path) -> None:
    def train(*names: str) -> None:
        models = {name: nn.Linear(3, 1) for name in names}
        optimizers = {name: torch.optim.SGD(model.parameters(), 0.1) for name, model in models.items()}
        run, loader = Run(Engine(World(), torch.device("cpu"))), el.ElasticLoader(DATA, el.GlobalBatch(8, 4))
        for step in run.steps(loader, models, optimizers, until="1ba", checkpoint=el.Checkpoint(tmp_path)):
            for x in step:
                step.backward(sum(model(x) for model in models.values()).mean())
            step.update()

    train("a", "b")
    with pytest.raises(
        UsageError, match=r"model: it has no 'c\.bias', 'c\.weight'; it has 'b\.bias', 'b\.weight', and"
    ):
        train("a", "c")


def test_a_checkpoint_without_an_order_of_samples_is_refused(saved: Path, tmp_path: Path) -> None:
    made = snapshot.newest(saved / "plain")
    assert made is not None
    del made.info.meta["identity"][SAMPLE_ORDER]
    snapshot.write(tmp_path, made.state, step=3, round=1, meta=made.info.meta)
    with pytest.raises(
        UsageError, match=r"step 3 in .* was made without order of samples \(as a hash\), this training"
    ):
        _train(tmp_path)


@pytest.mark.parametrize("changed", ["shuffle", "drop_last", "sampler"])
def test_another_order_of_samples_is_refused(tmp_path: Path, changed: str) -> None:
    def train(until: str, **options: Any) -> int:
        run, model = Run(Engine(World(), torch.device("cpu"))), nn.Linear(3, 1)
        loader = el.ElasticLoader(TensorDataset(DATA[:20]), el.GlobalBatch(8, 4), **options)
        optimizer, checkpoint = torch.optim.SGD(model.parameters()), el.Checkpoint(tmp_path, every=100)
        for step in run.steps(loader, model, optimizer, until=until, checkpoint=checkpoint):
            for (x,) in step:
                step.backward(model(x).mean())
            step.update()
        return run.resumed_step

    others = {"shuffle": False, "drop_last": True, "sampler": el.samplers.Weighted([1.0] * 20)}
    train("2ba")
    with pytest.raises(UsageError, match=r"step 2 in .* was made with order of samples \(as a hash\) \d+, this"):
        train("4ba", **{changed: others[changed]})
    assert train("4ba", shuffle=True) == 2


def test_another_class_of_optimizers_is_known_by_its_settings_where_no_name_was_saved() -> None:
    model = _small()
    found = differences(torch.optim.SGD(model.parameters(), 0.1), _adamw(model).state_dict(), "")
    assert "another class of optimizers than the SGD here: it has no 'dampening'" in found


def test_a_member_of_an_enum_that_the_script_has_not_is_refused_with_its_place() -> None:
    class Part:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError

    state = TrainingState()
    state.register("extra", Part())
    member = UnknownMember("train:Phase", "WARM", 1)
    message = r"has train.Phase.WARM with the value 1 at state\['extra'\]\['phases'\]\[1\], and this script has no such"
    with pytest.raises(UsageError, match=message):
        state.load(Resumed(state={"extra": {"phases": [0, member]}}, origin="The checkpoint of step 3"), again=False)


def _square(directory: Path, until: str, order: Callable[[list[Any]], list[Any]]) -> str:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        first, last = order(list(model[:3].parameters())), list(model[3].parameters())  # type: ignore[index]
        return torch.optim.Adam([{"params": first}, {"params": last, "lr": 0.01}], lr=0.1)

    return _train(directory, until, make, optimizer)


def test_an_optimizer_whose_parameters_come_in_another_order(tmp_path: Path) -> None:
    """As from a set, whose order differs between processes; torch would exchange the moments of layers of one shape."""
    undisturbed = _square(tmp_path / "undisturbed", "6ba", lambda given: given)
    _square(tmp_path / "resumed", "3ba", lambda given: given[::-1])
    assert _square(tmp_path / "resumed", "6ba", lambda given: given[2:] + given[:2]) == undisturbed


def test_an_optimizer_whose_groups_have_each_others_parameters(tmp_path: Path) -> None:
    def grouped(*layers: int) -> MakeOptimizer:
        return lambda model: torch.optim.Adam([{"params": model[layer].parameters()} for layer in layers], lr=0.1)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1).requires_grad_(False))

    _train(tmp_path, "3ba", make, grouped(0, 1))
    with pytest.raises(UsageError, match=r"param_groups\[0\] has no 'model\.1\.bias', 'model\.1\.weight', and"):
        _train(tmp_path, "6ba", make, grouped(1, 0))


def test_checkpoints_without_names_are_refused_by_the_shapes() -> None:
    """Checkpoints that a script writes with ``el.snapshot`` have no names of an optimizer's parameters."""
    model = _small()
    optimizer = _adamw(model)
    model(DATA).sum().backward()
    optimizer.step()
    other = torch.optim.AdamW(list(model.parameters())[::-1], lr=0.1)
    found = differences(other, optimizer.state_dict(), "AdamW")
    assert found == "exp_avg of its parameter 0 has the shape [4, 3], and the parameter here [1]"


class _Masked(nn.Module):
    """A linear layer with an expanded buffer, which two names have, and an expanded frozen parameter."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("mask", (value * torch.ones(2, 1, 3)).expand(2, 4, 3))
        self.register_buffer("same", self.mask)
        self.scale = nn.Parameter(torch.full((1,), value).expand(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x * self.scale)
        return out


def test_expanded_tensors_get_the_saved_values_and_stay_as_they_are(tmp_path: Path) -> None:
    """As several elements of them are one in memory, torch refuses to write to them."""
    _train(tmp_path, "3ba", lambda: _Masked(2.0))
    model = _Masked(1.0)
    at = model.mask.data_ptr(), model.scale.data_ptr()
    _train(tmp_path, "6ba", lambda: model)
    assert torch.equal(model.mask, torch.full((2, 4, 3), 2.0))
    assert torch.equal(model.scale, torch.full((3,), 2.0))
    assert model.same is model.mask
    assert (model.mask.data_ptr(), model.scale.data_ptr()) == at
    assert model.mask.stride() == (3, 0, 1)


def test_an_expanded_tensor_gets_memory_of_its_own_for_values_that_differ() -> None:
    model = _Masked(1.0)
    state = TrainingState()
    state.register("model", model)
    mask = torch.arange(24.0).reshape(2, 4, 3)
    saved = {**model.state_dict(), "mask": mask, "same": mask}
    state.load(Resumed(state={"model": saved}, origin="The checkpoint of step 3"), again=False)
    assert torch.equal(model.mask, mask)
    assert model.same is model.mask
