"""How a step of several micro-batches updates a model's buffers, by rule, and which cases it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import pytest
import torch
from harness import SCRIPTS, Job, run_script
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from elastic_launch.batch import BatchPlan, GlobalBatch
from elastic_launch.errors import UsageError
from elastic_launch.faults import FaultPlan
from elastic_launch.training.data.loader import ElasticLoader
from elastic_launch.training.engine import Engine
from elastic_launch.training.gradients.buffers import BY_VALUE, Buffers
from elastic_launch.training.ranks.world import World
from elastic_launch.training.session import Run

INPUTS = torch.arange(24.0).reshape(12, 2)
INFINITE = float("inf")
Change = Callable[[nn.Module, Tensor], None]


class Model(nn.Module):
    """A linear layer beside one buffer, which is changed in every forward pass."""

    def __init__(self, name: str, start: Tensor, change: Change, persistent: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.name = name
        self.register_buffer(name, start, persistent=persistent)
        self._change = change

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self._change(self, x)
        return self.layer(x)


def _after(model: nn.Module, rules: Mapping[str, str] | None, exact: bool, micro: int = 2, steps: int = 1) -> nn.Module:
    """Train steps of 6 samples each."""
    run = Run(Engine(World(), torch.device("cpu")))
    loader = ElasticLoader(TensorDataset(INPUTS), GlobalBatch(6, micro), shuffle=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in run.steps(loader, model, optimizer, until=f"{steps}ba", exact=exact, buffers=rules):
        for (x,) in step:
            step.backward(step.model(x).mean())
        step.update()
    return model


def _least(model: nn.Module, x: Tensor) -> None:
    model.found.copy_(torch.minimum(model.found, x.amin(0).to(model.found)))


def _greatest(model: nn.Module, x: Tensor) -> None:
    model.found = torch.maximum(model.found, x.amax(0).to(model.found))  # another tensor


def _count(model: nn.Module, x: Tensor) -> None:
    model.found += len(x)


def _keep(model: nn.Module, x: Tensor) -> None:
    model.found.copy_(x[-1])


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("rule", "start", "change", "expected"),
    [
        ("min", torch.full((2,), INFINITE), _least, [0, 1]),
        ("min", torch.full((2,), -0.5, dtype=torch.bfloat16), _least, [-0.5, -0.5]),
        ("max", torch.full((2,), -INFINITE, dtype=torch.float64), _greatest, [10, 11]),
        ("max", torch.full((2,), -7, dtype=torch.int16), _greatest, [10, 11]),
        ("min", torch.full((2,), float("nan")), _least, [float("nan"), float("nan")]),
        ("sum", torch.tensor(3), _count, 9),
        ("sum", torch.tensor(0.5), _count, 6.5),
        ("last", torch.zeros(2), _keep, [10, 11]),
        ("last", torch.zeros(2, dtype=torch.complex64), _keep, [10, 11]),
        ("mean", torch.zeros(2), _keep, [6, 7]),
        ("mean", torch.full((2,), INFINITE), _keep, [6, 7]),
        ("ignore", torch.tensor(0), _count, 6),
    ],
)
def test_a_rule_makes_one_value_of_those_of_all_micro_batches(
    rule: str, start: Tensor, change: Change, expected: object, exact: bool
) -> None:
    model = _after(Model("found", start.clone(), change), {"fou*": rule}, exact)
    torch.testing.assert_close(
        model.found, torch.tensor(expected, dtype=start.dtype), equal_nan=True, rtol=0, atol=1e-6
    )


def test_a_minimum_orders_signed_zeros_in_any_micro_batch() -> None:
    """A negative zero is less than a positive one, in whichever micro-batch it is."""
    for first, second in ((0.0, -0.0), (-0.0, 0.0)):
        model = Model("found", torch.tensor(1.0), lambda model, x: None)
        buffers = Buffers(model, 1, {"found": "min"})
        buffers.begin(BatchPlan((), 2, ()))
        for index, value in enumerate((first, second)):
            model.found.fill_(value)
            buffers.take(index)
            buffers.restore()
        buffers.exchange([])
        buffers.finish()
        assert torch.signbit(model.found)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("name", "start", "change", "guess"),
    [
        ("queue", torch.zeros(2), lambda model, x: model.queue.copy_(x[0]), "last"),
        ("ptr", torch.tensor(0), lambda model, x: model.ptr.add_(1), "last"),
        ("samples_seen", torch.tensor(0.0), lambda model, x: model.samples_seen.data.add_(len(x)), "sum"),
        ("running_min", torch.zeros(2), lambda model, x: model.running_min.copy_(-x[0]), "min"),
        ("bound", torch.full((2,), -INFINITE), lambda model, x: model.bound.copy_(x[0]), "max"),
    ],
)
def test_a_change_that_no_rule_explains_is_refused_by_name(
    name: str, start: Tensor, change: Change, guess: str, exact: bool
) -> None:
    with pytest.raises(UsageError, match=rf"buffer '{name}' changed in a micro-batch") as caught:
        _after(Model(name, start.clone(), change), None, exact)
    assert f'buffers={{"{name}": "{guess}"}}' in caught.value.hint


def test_a_change_without_a_trace_is_found_by_value_now_and_then() -> None:
    """A change of this kind that the script makes between steps is not attributed to a micro-batch."""
    model = Model("found", torch.zeros(2), lambda model, x: None)
    buffers = Buffers(model, 1)
    refused = []
    for step in range(2 * BY_VALUE + 1):
        buffers.begin(BatchPlan((), 2, ()))
        if step > 0:
            model.found.data.add_(1)
        try:
            buffers.take(0)
        except UsageError:
            refused.append(step)
        model.found.data.add_(1)
    assert refused == [BY_VALUE, 2 * BY_VALUE]


@pytest.mark.parametrize("exact", [False, True])
def test_one_micro_batch_alone_needs_no_rule(exact: bool) -> None:
    model = _after(Model("ptr", torch.tensor(0), lambda model, x: model.ptr.add_(len(x))), None, exact, 6, steps=2)
    assert int(model.ptr) == 12


def test_a_buffer_that_is_not_saved_may_change_only_as_a_cache() -> None:
    def change(model: nn.Module, x: Tensor) -> None:
        model.table = torch.arange(float(len(x)))  # it grows

    with pytest.raises(UsageError, match="'table'") as caught:
        _after(Model("table", torch.zeros(0), change, persistent=False), None, exact=False)
    assert 'buffers={"table": "ignore"}' in caught.value.hint
    model = _after(Model("table", torch.zeros(0), change, persistent=False), {"table": "ignore"}, exact=False)
    assert len(model.table) == 2
    with pytest.raises(UsageError, match="not saved with the model, so a restart would lose it"):
        _after(Model("table", torch.zeros(0), change, persistent=False), {"table": "last"}, exact=False)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"found": "median"}, "no such rule"),
        ({"fonud": "last"}, r"'fonud': ...\}: no buffer of the model has such a name"),
        ({"found": "mean"}, "elements of type int64, which have no mean"),
        (["found"], "not a dict of patterns and rules"),
        ({"found": "error"}, "'found' changed in a micro-batch"),
    ],
)
def test_rules_that_cannot_be_are_refused(rules: Mapping[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _after(Model("found", torch.tensor(0), _count), rules, exact=True)


@pytest.mark.parametrize("exact", [False, True])
def test_a_mean_that_is_not_finite_is_refused_before_anything_has_changed(exact: bool) -> None:
    model = Model("loss_ema", torch.tensor(1.0), lambda model, x: model.loss_ema.fill_(INFINITE))
    with pytest.raises(
        UsageError, match="The mean of the buffer 'loss_ema' over the micro-batches is not a finite number"
    ):
        _after(model, None, exact)
    assert model.loss_ema == 1.0


def test_a_change_after_the_last_micro_batch_would_be_lost() -> None:
    model = Model("found", torch.tensor(0), _count)
    buffers = Buffers(model, 1, {"found": "sum"})
    buffers.begin(BatchPlan((), 1, ()))
    buffers.take(0)
    buffers.restore()
    model.found.add_(1)
    buffers.exchange([])
    with pytest.raises(UsageError, match="'found' was changed between a step's last micro-batch and step"):
        buffers.finish()


@pytest.mark.parametrize("exact", [False, True])
def test_what_torch_itself_has_needs_no_rule(exact: bool) -> None:
    """BatchNorm with either momentum, spectral norm, and observers of a quantisation, whose minimum begins at inf."""
    from torch.ao.quantization import FakeQuantize, MinMaxObserver, MovingAverageMinMaxObserver

    moving = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
    norms = [nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=None)]
    linear = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 4))
    model = nn.Sequential(MinMaxObserver(), moving, linear, *norms, nn.Linear(4, 1))
    _after(model, None, exact, steps=2)
    observer, average = model[0], moving.activation_post_process
    assert (float(observer.min_val), float(observer.max_val)) == (0, 23)
    # The mean over micro-batches of the least value of each: 0, 4, 8; then 12, 16, 20 count a hundredth.
    assert float(average.min_val) == pytest.approx(4 + 0.01 * (16 - 4))
    assert all(bool(torch.isfinite(x).all()) for x in model.buffers())
    assert [int(norm.num_batches_tracked) for norm in norms] == [2, 2]
    assert torch.linalg.vector_norm(linear.parametrizations.weight[0]._u) == pytest.approx(1, abs=1e-6)


@pytest.mark.slow
def test_worlds_and_kills_leave_the_same_buffers(job: Job) -> None:
    script = [str(SCRIPTS / "buffers.py"), "--exact"]
    env = FaultPlan.fail_at(1, 5).environment()
    agent = job.launch("--standalone", "--nproc", "3", command=script, env=env)
    alone = run_script(*script)
    assert agent.wait(60) == 0, agent.output
    assert "restarts: 1" in agent.output
    pattern = r"hash \w+ seen 120 place 0 lowest .*"
    assert re.findall(pattern, agent.output) == re.findall(pattern, alone) * 3, agent.output
