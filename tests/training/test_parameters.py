"""Whose gradients are reduced: all parameters of model and optimizer that require a gradient at each step."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SCRIPTS, Job, run_script
from torch import nn
from torch.utils.data import TensorDataset

import elastic_launch as el
from elastic_launch.errors import UsageError
from elastic_launch.training.engine import Engine
from elastic_launch.training.gradients.buckets import BucketedReduction
from elastic_launch.training.gradients.reduction import ExactReduction
from elastic_launch.training.ranks.world import World
from elastic_launch.training.session import Run
from elastic_launch.training.transaction import NonFiniteLossError

SCRIPT = str(SCRIPTS / "parameters.py")


def _results(directory: Path, rank: int = 0) -> dict[str, dict[str, Any]]:
    return dict(json.loads((directory / f"rank-{rank}.json").read_text()))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("alone")
    run_script(SCRIPT, str(directory))
    return _results(directory)


def _compare(alone: dict[str, dict[str, Any]], results: dict[str, dict[str, Any]]) -> None:
    for name, expected in alone["plain"].items():
        assert results["default"][name] == pytest.approx(expected, rel=1e-4, abs=1e-6), name
        if name in alone["exact"]:
            assert results["exact"][name] == alone["exact"][name], name
            assert alone["exact"][name] == pytest.approx(expected, rel=1e-4, abs=1e-6), name


def test_one_process_trains_what_plain_pytorch_does(alone: dict[str, dict[str, Any]]) -> None:
    _compare(alone, alone)


@pytest.mark.parametrize("nproc", [2, pytest.param(3, marks=pytest.mark.soak), pytest.param(5, marks=pytest.mark.slow)])
def test_each_world_trains_the_same_on_all_ranks(job: Job, alone: dict[str, dict[str, Any]], nproc: int) -> None:
    """At 5 ranks one has no micro-batch."""
    agent = job.launch("--standalone", "--nproc", str(nproc), command=[SCRIPT, str(job.directory)])
    assert agent.wait(100) == 0, agent.output
    ranks = [_results(job.directory, rank) for rank in range(nproc)]
    assert ranks == [ranks[0]] * nproc
    _compare(alone, ranks[0])


@pytest.mark.parametrize(
    ("case", "mode", "message"),
    [
        ("FrozenOnOne", "default", "on rank 1 these changed: 0.weight, 0.bias"),
        pytest.param("FrozenOnOne", "exact", "on rank 1 these changed: 0.weight, 0.bias", marks=pytest.mark.soak),
        pytest.param(
            "NewOnEach",
            "default",
            "optimizer.param_groups[1]['params'][0] is new in this training",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "OtherModel",
            "exact",
            "rank 1 has 0.weight (float32[5, 3], requires_grad=True) where",
            marks=pytest.mark.slow,
        ),
        pytest.param("LateParts", "default", "The gradient of 0.", marks=pytest.mark.slow),
        pytest.param(
            "FrozenInAStep", "exact", "changed in the middle of a step: 0.weight, 0.b", marks=pytest.mark.soak
        ),
    ],
)
def test_ranks_that_differ_stop_with_the_difference(job: Job, case: str, mode: str, message: str) -> None:
    flags = ["--standalone", "--nproc", "2", "--max-restarts", "0"]
    agent = job.launch(*flags, command=[SCRIPT, str(job.directory), case, mode])
    assert agent.wait(60) != 0
    assert message in agent.output


def _weighted(directory: Path, until: int, *, poisoned: bool = False) -> list[float]:
    """Train with a loss weight of its own, which the model does not have, from where the directory's checkpoint is."""
    torch.manual_seed(0)
    model, weight = nn.Linear(2, 1), nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([*model.parameters(), weight], lr=0.1)
    data = TensorDataset(torch.arange(16.0).view(8, 2) / 16)
    loader = el.ElasticLoader(data, el.GlobalBatch(4, micro=2))
    run = Run(Engine(World(), torch.device("cpu")))
    for step in run.steps(loader, model, optimizer, until=f"{until}ba", checkpoint=el.Checkpoint(directory)):
        for (x,) in step:
            step.backward((model(x) ** 2).mean() * torch.exp(-weight) + weight)
        if poisoned and step.number == until - 1:
            assert model.weight.grad is not None
            model.weight.grad.fill_(float("nan"))
        step.update()
    return [float(value) for p in (*model.parameters(), weight) for value in p.detach().flatten()]


def test_a_parameter_of_the_optimizer_alone_is_saved_and_restored(tmp_path: Path) -> None:
    undisturbed = _weighted(tmp_path / "undisturbed", 6)
    _weighted(tmp_path / "resumed", 4)
    assert _weighted(tmp_path / "resumed", 6) == undisturbed
    assert undisturbed[-1] != 0


def _tempered(directory: Path, until: int, at: int) -> list[float]:
    """Train with a temperature that the optimizer gets at a step, or has from the start if that is done."""
    torch.manual_seed(0)
    model, temperature = nn.Linear(2, 1), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = el.ElasticLoader(TensorDataset(torch.arange(16.0).view(8, 2) / 16), el.GlobalBatch(4, micro=2))
    run = Run(Engine(World(), torch.device("cpu")))
    if at == 0:
        optimizer.add_param_group({"params": [temperature]})
    for step in run.steps(loader, model, optimizer, until=f"{until}ba", checkpoint=el.Checkpoint(directory)):
        if at and step.position.step == at:
            optimizer.add_param_group({"params": [temperature]})
        for (x,) in step:
            step.backward(((model(x) - temperature) ** 2).mean())
        step.update()
    return [float(value) for p in (*model.parameters(), temperature) for value in p.detach().flatten()]


def test_a_parameter_that_only_the_optimizer_gets_in_the_middle_is_saved(tmp_path: Path) -> None:
    undisturbed = _tempered(tmp_path / "undisturbed", 6, at=2)
    _tempered(tmp_path / "resumed", 4, at=2)
    assert _tempered(tmp_path / "resumed", 6, at=0) == undisturbed


def test_gradients_that_no_reduction_takes_are_named() -> None:
    """A weight that an embedding and another module share; a sparse gradient in exact mode that no module announces."""
    weight = nn.Parameter(torch.ones(4, 2))
    buckets = BucketedReduction({"tied": weight}, frozenset([0]), overlap=True)
    with pytest.raises(UsageError, match=r"tied is the weight of an embedding with sparse=True, and gets a dense"):
        buckets.put(0, torch.ones(4, 2))
    exact = ExactReduction([weight], 2, 0, names=["weight"])
    exact.begin(0)
    with pytest.raises(UsageError, match="weight gets a sparse gradient"):
        exact.put(0, torch.ones(4, 2).to_sparse(1))


@pytest.mark.parametrize("whose", ["its own", "one of the model's", "another model's"])
def test_an_optimizer_of_another_model_is_warned_of(whose: str, caplog: pytest.LogCaptureFixture) -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    chosen = {"its own": model.parameters(), "one of the model's": [model.bias], "another model's": other.parameters()}
    loader = el.ElasticLoader(TensorDataset(torch.zeros(4, 2)), el.GlobalBatch(4, micro=2))
    run = Run(Engine(World(), torch.device("cpu")))
    for step in run.steps(loader, model, torch.optim.SGD(chosen[whose], lr=0.1), until="1ba"):
        for (x,) in step:
            step.backward(model(x).mean())
        step.update()
    warned = "the optimizer has none of the model's parameters: none of these is trained" in caplog.messages
    assert warned == (whose == "another model's")


def test_a_loss_that_is_nan_says_if_a_gradient_before_was(tmp_path: Path) -> None:
    """The loss of that step was finite; the next one's is not."""
    with pytest.raises(NonFiniteLossError) as caught:
        _weighted(tmp_path, 4, poisoned=True)
    assert "The loss is nan in step 4, micro-batch 0, on rank 0." in str(caught.value)
    assert "weight is not finite already: an earlier step's gradient was not" in str(caught.value)
    assert f"Newest checkpoint: none yet in {tmp_path}" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["unfrozen", *(pytest.param(x, marks=pytest.mark.soak) for x in ("plain", "weight"))])
def test_a_short_script_trains_one_model_at_one_and_two_workers(job: Job, case: str) -> None:
    found = []
    for nproc in (1, 2):
        command = [str(SCRIPTS / "guards" / "given.py"), case]
        agent = job.launch("--standalone", "--nproc", str(nproc), command=command, name=f"of {nproc}")
        assert agent.wait(100) == 0, agent.output
        found += re.findall(rf"{case} rank \d (\w+)", agent.output)
    assert len(found) == 3
    assert len(set(found)) == 1


class Wrapping(torch.optim.Optimizer):
    """One that wraps another and does not call its base class, as some scripts do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.slow, self.steps = inner, [p.detach().clone() for p in inner.param_groups[0]["params"]], 0
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)
        self.steps += 1
        for parameter, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
            slow.lerp_(parameter.detach(), 0.5)
            parameter.data.copy_(slow)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "slow": self.slow, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.slow, self.steps = state["slow"], state["steps"]


def test_an_optimizer_that_wraps_another_is_trained_and_resumed(tmp_path: Path) -> None:
    def train(until: int, directory: str) -> str:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = Wrapping(torch.optim.Adam(model.parameters(), lr=0.1))
        loader = el.ElasticLoader(torch.arange(24.0).view(8, 3), el.GlobalBatch(2, 1))
        run = Run(Engine(World(), torch.device("cpu")))
        for step in run.steps(
            loader, model, optimizer, until=f"{until}ba", checkpoint=el.Checkpoint(tmp_path / directory)
        ):
            for x in step:
                step.backward(model(x).square().mean())
            step.update()
        run._engine.close()
        return el.weights_sha256(model)

    undisturbed = train(6, "a")
    assert train(3, "b") != undisturbed
    assert train(6, "b") == undisturbed


def test_a_generator_of_the_models_own_is_refused_in_exact_mode() -> None:
    model = nn.Sequential(nn.Linear(3, 1), nn.Dropout())
    model[1].noise = torch.Generator()  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = el.ElasticLoader(torch.ones(8, 3), el.GlobalBatch(2, 1))
    run = Run(Engine(World(), torch.device("cpu")))
    with pytest.raises(UsageError, match=r"the model has a generator of its own.*: 1\.noise \(torch\.Generator\)"):
        list(run.steps(loader, model, optimizer, until=1, exact=True))
    model[1].noise = torch.default_generator
    iter(run.steps(loader, model, optimizer, until=1, exact=True))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("place", ["between steps", "in a step"])
def test_a_model_that_is_converted_in_the_middle(place: str, exact: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    model.register_buffer("seen", torch.zeros(1))
    loader = el.ElasticLoader(torch.randn(16, 3), el.GlobalBatch(4, 2))
    run, optimizer = Run(Engine(World(), torch.device("cpu"))), torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for step in run.steps(loader, model, optimizer, until="4ba", exact=exact, buffers={"seen": "sum"}):
            if step.number == 3 and place == "between steps":
                model.double()
            for number, x in enumerate(step):
                if step.number == 3 and number == 1 and place == "in a step":
                    model[0].double()
                    model[1:].double()
                model.seen += 1
                step.backward(model(x.to(model[0].weight.dtype)).square().mean())
            step.update()

    if place == "in a step":
        with pytest.raises(UsageError, match=r"changed in the middle of a step: 0\.weight(.|\n)*convert(.|\n)*between"):
            train()
        return
    train()
    assert (model.seen.dtype, model.seen.item(), model[0].weight.dtype) == (torch.float64, 8, torch.float64)


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_model_that_stays_in_evaluation_mode_is_reported(caplog: pytest.LogCaptureFixture, forgotten: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 1), nn.Dropout())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = el.ElasticLoader(torch.ones(8, 3), el.GlobalBatch(2, 1))
    for step in Run(Engine(World(), torch.device("cpu"))).steps(loader, model, optimizer, until="4ba"):
        if not forgotten:
            model.train()
        for x in step:
            step.backward(model(x).mean())
        step.update()
        if step.number == 2:
            model.eval()
    said = [text for text in caplog.messages if "trained the model in evaluation mode" in text]
    assert [text.split()[:2] for text in said] == ([["step", "3"]] if forgotten else [])
