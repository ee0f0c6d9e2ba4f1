"""Exact mode: micro-batches whose result depends on others are refused by name; what alters no result is not."""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import all_gather
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import elastic_launch as el
from elastic_launch.errors import UsageError
from elastic_launch.training import held, purity
from elastic_launch.training.engine import Engine
from elastic_launch.training.ranks import collectives
from elastic_launch.training.ranks.world import World
from elastic_launch.training.rounds import RoundOverError, WorkerRounds
from elastic_launch.training.session import Run

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


@pytest.fixture
def run() -> Run:
    return Run(Engine(World(), torch.device("cpu")))


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()  # a graph that an error has cut off holds the group
    dist.destroy_process_group()
    gc.collect()


def _loader() -> el.ElasticLoader:
    return el.ElasticLoader(TensorDataset(X, Y), el.GlobalBatch(8, micro=2), seed=0)


Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def _plain(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def _train(run: Run, model: nn.Module, loss: Loss = _plain, until: str = "2ba", **options: Any) -> str:
    options = {"exact": True, **options}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in run.steps(_loader(), model, optimizer, until=until, **options):
        for x, y in step:
            step.backward(loss(model, x, y))
        step.update()
    return el.weights_sha256(model)


def _model(*others: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), *others, nn.Linear(8, 2))


class Gate(nn.Module):
    """Keeps something of each forward pass, which may change the next one's output."""

    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.keeps, self.tau, self.calls, self.last = keeps, 1.0, 0, torch.zeros(1)
        self.settings, self.centre = {"tau": 1.0}, torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        if self.keeps == "number":
            self.tau *= 0.9
        elif self.keeps == "number in a dict":
            self.settings["tau"] *= 0.9
        elif self.keeps == "tensor":
            self.centre = 0.9 * self.centre + 0.1 * x.detach().mean(0)
        elif self.keeps == "counter":
            self.calls += 1
            self.last = x.detach()
        return (x - self.centre) / self.tau / self.settings["tau"]


class Extra(nn.Module):
    """Has an extra state, which it may change."""

    def __init__(self, state: Any, change: bool) -> None:
        super().__init__()
        self.state, self.change = state, change

    def forward(self, x: Tensor) -> Tensor:
        if self.change:
            self.state = {"after": self.state}
        return x

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class Settings:
    def __init__(self, rate: float) -> None:
        self.rate, self.names = rate, ["a"]


@pytest.mark.parametrize("micro_twice", [False, True])
@pytest.mark.parametrize("keeps", ["number", "number in a dict", "tensor"])
def test_an_attribute_that_changes_the_output_is_refused_by_name(run: Run, keeps: str, micro_twice: bool) -> None:
    name = {"number": "tau", "number in a dict": "settings", "tensor": "centre"}[keeps]
    model = _model(Gate(keeps))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(UsageError, match=rf"exact=True: step 1: (.|\n)*the module '2', whose {name}") as found:
        _train(run, model, verify=micro_twice)
    assert ("the micro-batches changed" in found.value.message) is not micro_twice
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("verify", [False, True])
def test_an_attribute_that_changes_no_output_is_accepted(run: Run, caplog: Any, verify: bool) -> None:
    model, plain = _model(Gate("counter")), _model(Gate("nothing"))
    assert _train(run, model, verify=verify) == _train(Run(Engine(World(), torch.device("cpu"))), plain)
    assert model[2].calls == 8  # what is computed once more leaves nothing
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_call_that_cannot_be_repeated_causes_one_warning(run: Run, caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(purity, "_warned", False)

    def mapped(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(vmap(model, randomness="different")(x), y)

    _train(run, _model(Gate("counter")), mapped)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "changed calls of the module '2'" in line
    assert "verify=True" in line


COUNT = 0
"""Calls of a Hidden that counts in a global variable."""

NOISE = torch.Generator()


class Totals:
    __slots__ = ("mean",)

    def __init__(self) -> None:
        self.mean = 1.0


class Scaled(torch.autograd.Function):
    norm = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        Scaled.norm = 0.5 * Scaled.norm + 0.5 * float(gradient.norm())
        return gradient / Scaled.norm


class Told:
    """An attribute of a class that is made each time that it is read."""

    def __get__(self, instance: object, owner: type) -> list[str]:
        return [owner.__name__]


class Hidden(nn.Module):
    """Keeps something elsewhere than in an attribute, and uses it or not."""

    calls = 0

    told = Told()

    def __init__(self, keeps: str, uses: bool = True) -> None:
        super().__init__()
        self.keeps, self.uses, self.totals, self.history = keeps, uses, Totals(), np.ones(1, dtype=np.float32)

    def forward(self, x: Tensor) -> Tensor:
        global COUNT
        factor: Any = 1.0
        if self.keeps == "global":
            COUNT += 1
            factor = 1 + COUNT
        elif self.keeps == "class":
            Hidden.calls += 1
            factor = 1 + Hidden.calls
        elif self.keeps == "object":
            self.totals.mean *= 0.9
            factor = self.totals.mean
        elif self.keeps == "array":
            self.history *= 0.9
            factor = torch.from_numpy(self.history)
        elif self.keeps == "generator":
            factor = 1 + torch.rand(1, generator=NOISE)
        elif self.keeps == "function":
            return Scaled.apply(x) if self.uses else x
        return x * factor if self.uses else x


NAMES = {
    "global": "COUNT",
    "class": r"Hidden\.calls",
    "object": r"2\.totals\.mean",
    "array": "history",
    "generator": "NOISE",
    "function": r"Scaled\.norm",
}


@pytest.mark.parametrize("keeps", NAMES)
def test_what_the_model_s_code_keeps_elsewhere_is_refused_by_name(run: Run, keeps: str) -> None:
    with pytest.raises(UsageError, match=rf"exact=True: step 1: (.|\n)*changed {NAMES[keeps]}"):
        _train(run, _model(Hidden(keeps)))


@pytest.mark.parametrize("keeps", ["global", "class", "object", "array"])
def test_what_alters_no_output_is_accepted_and_stays(run: Run, caplog: Any, keeps: str) -> None:
    calls, count, model = Hidden.calls, COUNT, _model(Hidden(keeps, uses=False))
    assert _train(run, model) == _train(Run(Engine(World(), torch.device("cpu"))), _model(Hidden("nothing")))
    assert Hidden.calls - calls == (8 if keeps == "class" else 0)
    assert count + (8 if keeps == "global" else 0) == COUNT
    assert model[2].totals.mean == pytest.approx(0.9**8 if keeps == "object" else 1.0)
    assert model[2].history == pytest.approx(0.9**8 if keeps == "array" else 1.0)
    assert isinstance(vars(Hidden)["told"], Told)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("kind", ["forward", "backward", "parameter"])
def test_a_hook_that_keeps_something_is_refused(run: Run, kind: str) -> None:
    model, kept = _model(), {"norm": 1.0}

    def scaled(*values: Any) -> Any:
        kept["norm"] *= 0.9
        last = values[-1] if kind != "backward" else values[1]
        return last / kept["norm"] if isinstance(last, Tensor) else tuple(each / kept["norm"] for each in last)

    if kind == "parameter":
        model[0].weight.register_hook(scaled)
    else:
        (model[2].register_forward_hook if kind == "forward" else model[2].register_full_backward_hook)(scaled)
    with pytest.raises(UsageError, match=r"gave (another output|other gradients) (.|\n)*changed kept of scaled\(\)"):
        _train(run, model)


def test_a_hook_that_only_notes_something_is_accepted(run: Run, caplog: Any) -> None:
    model, seen = _model(nn.utils.spectral_norm(nn.Linear(8, 8))), []
    model.register_forward_hook(lambda module, args, output: seen.append(output))
    _train(run, model)
    assert len(seen) == 8
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


class Criterion(nn.Module):
    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.keeps, self.mean = keeps, 1.0
        self.register_buffer("centre", torch.zeros(2))

    def forward(self, output: Tensor, *, target: Tensor) -> Tensor:
        if self.keeps == "buffer":
            self.centre = 0.5 * self.centre + 0.5 * output.detach().mean(0)
        loss = F.cross_entropy(output - self.centre, target)
        if self.keeps != "buffer":
            self.mean = 0.5 * self.mean + 0.5 * float(loss.detach())
        return loss / self.mean if self.keeps == "number" else loss


@pytest.mark.parametrize(("keeps", "name"), [("buffer", "centre"), ("number", "mean"), ("for a log", "")])
def test_a_module_that_is_no_part_of_the_model(run: Run, keeps: str, name: str) -> None:
    criterion = Criterion(keeps)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return criterion(model(x), target=y)

    if not name:
        _train(run, _model(), loss)
        return
    with pytest.raises(UsageError, match=rf"the Criterion outside the model gave (.|\n)*changed {name} of"):
        _train(run, _model(), loss)


def test_a_teacher_that_micro_batches_change_is_refused_and_a_metric_is_not(run: Run) -> None:
    class Metric(nn.Module):
        total = 0.0

        def forward(self, output: Tensor) -> Tensor:
            self.total += float(output.detach().sum())
            return torch.tensor(self.total)

    teacher, metric = _model().requires_grad_(False).eval(), Metric()

    def measured(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        output = model(x)
        metric(output)
        return F.mse_loss(output, teacher(x))

    def moved(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = measured(model, x, y)
        with torch.no_grad():
            teacher[0].weight.lerp_(model[0].weight + 1, 0.1)
        return loss

    _train(run, _model(), measured)
    with pytest.raises(UsageError, match=r"the micro-batches changed 0\.weight of the Sequential outside the model"):
        _train(Run(Engine(World(), torch.device("cpu"))), _model(), moved)


def _train_towards(run: Run, target: nn.Module, *, within: bool, exact: bool) -> str:
    """Train a model towards the output of a network that is its average, as BYOL does."""
    online = _model(nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD(online.parameters(), lr=0.1)
    model = {"online": online, "target": target} if within else online
    for step in run.steps(_loader(), model, optimizer, until="2ba", exact=exact):
        for x, _ in step:
            with torch.no_grad():
                wanted = target(x)
            step.backward(F.mse_loss(online(x), wanted))
        step.update()
        with torch.no_grad():
            for parameter, trained in zip(target.parameters(), online.parameters(), strict=True):
                parameter.lerp_(trained, 0.1)
    return el.weights_sha256(target)


def test_a_registered_target_network_with_batch_norm(run: Run, caplog: Any) -> None:
    def another() -> Run:
        return Run(Engine(World(), torch.device("cpu")))

    target = _model(nn.BatchNorm1d(8)).requires_grad_(False)
    before = el.weights_sha256(target)
    run.register("target", target)
    with pytest.raises(UsageError, match=r"step 1: (.|\n)*target: 2\.running_mean(.|\n)*one of the models, or call"):
        _train_towards(run, target, within=False, exact=True)
    assert all(map(torch.equal, target.parameters(), _model(nn.BatchNorm1d(8)).parameters()))
    assert el.weights_sha256(target) != before  # its buffers
    default = another()
    default.register("target", target)
    _train_towards(default, target, within=False, exact=False)
    assert [record.levelno for record in caplog.records if "target: 2.running_mean" in record.message] == [
        logging.WARNING
    ]
    for within, mode in [(True, True), (False, False)]:
        caplog.clear()
        accepted, target = another(), _model(nn.BatchNorm1d(8)).requires_grad_(False).train(mode)
        if not within:
            accepted.register("target", target)
        _train_towards(accepted, target, within=within, exact=True)
        assert not caplog.records


def test_generators_of_the_loop(run: Run) -> None:
    def train(draw: Callable[[], float]) -> None:
        run, model = Run(Engine(World(), torch.device("cpu"))), _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in run.steps(_loader(), model, optimizer, until="2ba", exact=True):
            for x, y in step:
                step.backward(_plain(model, x * draw(), y))
            step.update()

    numpys, pythons, torchs = np.random.default_rng(0), random.Random(0), torch.Generator()
    for draw in (numpys.random, pythons.random, lambda: float(torch.rand(1, generator=torchs))):
        with pytest.raises(UsageError, match="step 1: the micro-batches have drawn from the generator"):
            train(draw)
    train(lambda: float(torch.rand(1, generator=torchs.manual_seed(torch.initial_seed()))))


class Noise:
    """A loader that draws micro-batches from a generator, whose state it saves."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield torch.randn(2, 4, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


@pytest.mark.parametrize("draws", [False, True])
def test_a_generator_of_the_loader_is_refused_only_if_the_loop_draws_from_it(run: Run, draws: bool) -> None:
    noise, model = Noise(), _model()
    loader = el.StatefulLoader(noise, el.GlobalBatch(8, micro=2), steps_per_epoch=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for step in run.steps(loader, model, optimizer, until="3ba", exact=True):
            for x in step:
                shift = float(torch.rand(1, generator=noise.generator)) if draws else 0.0
                step.backward(model(x + shift).mean())
            step.update()

    if not draws:
        train()
        return
    with pytest.raises(UsageError, match=r"step 1: the micro-batches have drawn from the generator noise\.generator"):
        train()


class Bar:
    """Wraps a step or all steps, as tqdm does."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def __iter__(self) -> Iterator[Any]:
        yield from self.wrapped


class Moved:
    """Wraps a step, as a loader that moves micro-batches to a device."""

    def __init__(self, step: Any) -> None:
        self.samples = iter(step)

    def __iter__(self) -> Moved:
        return self

    def __next__(self) -> Any:
        return next(self.samples)


def _yielded(step: Any) -> Iterator[Any]:
    yield from step


def _numbered(step: Any) -> Iterator[Any]:
    return (sample for _, sample in enumerate(step))


@pytest.mark.parametrize("steps", [iter, Bar])
@pytest.mark.parametrize("wrap", [iter, Bar, Moved, _yielded, _numbered, lambda step: _yielded(Moved(Bar(step)))])
def test_a_loop_over_a_wrapper_of_the_step(wrap: Callable[[Any], Any], steps: Callable[[Any], Any]) -> None:
    generator, teacher = torch.Generator(), _model().requires_grad_(False).eval()

    def drawn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x + torch.rand(x.shape, generator=generator))

    def moved(model: nn.Module, x: Tensor) -> Tensor:
        teacher[0].weight.add_(0.1)
        return model(x) - teacher(x)

    def run_steps() -> tuple[nn.Module, Iterator[Any]]:
        run, model = Run(Engine(World(), torch.device("cpu"))), _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, run.steps(_loader(), model, optimizer, until="1ba", exact=True)

    def within(loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
        model, found = run_steps()
        for step in steps(found):
            for x, _ in wrap(step):
                step.backward(loss(model, x).mean())
            step.update()

    def train(step: Any, loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
        for x, _ in wrap(step):
            step.backward(loss(step.model, x).mean())
        step.update()

    def by_function(loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
        for step in steps(run_steps()[1]):
            train(step, loss)

    for loop in (within, by_function):
        with pytest.raises(UsageError, match="have drawn from the generator generator"):
            loop(drawn)
        with pytest.raises(UsageError, match=r"changed 0\.weight of the Sequential outside the model"):
            loop(moved)


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="a function then gets another dict each time")
@pytest.mark.parametrize("wrap", [iter, _yielded])
def test_what_the_script_has_got_from_locals_stays_as_it_is(run: Run, wrap: Callable[[Any], Any]) -> None:
    """A function has one such dict, and reading the variables of its frame writes them into it."""

    def keeps(step: Any) -> Any:
        rate = 0.5
        settings = locals()
        settings["rate"] = 0.25
        for x, y in wrap(step):
            step.backward(_plain(step.model, x, y) * rate)
        step.update()
        return settings["rate"]

    def asks_again(step: Any) -> Any:
        locals()["rate"] = 0.25
        for x, y in wrap(step):
            step.backward(_plain(step.model, x, y))
        step.update()
        return vars()["rate"]

    def executes(step: Any) -> Any:
        exec("rate = 0.25")
        for x, y in wrap(step):
            step.backward(_plain(step.model, x, y))
        step.update()
        return eval("rate")

    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = run.steps(_loader(), model, optimizer, until="3ba", exact=True)
    found = [train(step) for train, step in zip((keeps, asks_again, executes), steps, strict=True)]
    assert found == [0.25, 0.25, 0.25]


@pytest.mark.parametrize("wrap", [iter, _yielded])
def test_what_the_loop_had_in_its_variables_is_freed(run: Run, wrap: Callable[[Any], Any]) -> None:
    model, seen = _model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in run.steps(_loader(), model, optimizer, until="3ba", exact=True):
        for x, y in wrap(step):
            output = model(x)
            seen.append(weakref.ref(output))
            step.backward(F.cross_entropy(output, y))
        step.update()
    gc.collect()
    assert [ref() is not None for ref in seen] == [*[False] * (len(seen) - 1), True]


def test_without_exact_nothing_is_checked(run: Run) -> None:
    _train(run, _model(Gate("number"), Extra({}, change=True)), exact=False)
    with pytest.raises(UsageError, match="verify=True"):
        _train(run, _model(), exact=False, verify=True)


@pytest.mark.parametrize("state", [{"tau": 1.0}, torch.ones(2), [1, (2.5, None)], Settings(0.1), None])
def test_an_extra_state_that_a_step_changes_is_refused(run: Run, state: Any) -> None:
    with pytest.raises(UsageError, match=r"step 1: the micro-batches changed the extra state .*the module '2'"):
        _train(run, _model(Extra(state, change=True)))
    same = _train(Run(Engine(World(), torch.device("cpu"))), _model(Extra(state, change=False)))
    assert len(same) == 64


def test_weights_sha256_counts_extra_states() -> None:
    def of(state: Any) -> str:
        return el.weights_sha256(_model(Extra(state, change=False)))

    states = [{"tau": 1.0}, {"tau": 2.0}, torch.ones(2), torch.zeros(2), Settings(0.1), Settings(0.2), [1], (1,), None]
    assert len({of(state) for state in states}) == len(states)
    assert of(Settings(0.1)) == of(Settings(0.1))
    assert of({"a": {1, 2, 3}}) == of({"a": {3, 2, 1}})
    with pytest.raises(el.snapshot.UnsupportedStateError if hasattr(el, "snapshot") else Exception, match="generator"):
        of({"a": (x for x in range(3))})


def test_the_script_s_own_code_is_named_if_no_module_differs(run: Run) -> None:
    other = iter(DataLoader(TensorDataset(X), batch_size=2))
    noise = random.Random(0)

    def second_loader(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return _plain(model, x + next(other)[0], y)

    def weighted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return _plain(model, x, y) * noise.random()

    for loss in (second_loader, weighted):
        with pytest.raises(UsageError, match=r"gave another loss (.|\n)*the loop's own code"):
            _train(Run(Engine(World(), torch.device("cpu"))), _model(), loss, verify=True)


def test_a_gradient_that_differs_is_named(run: Run) -> None:
    model, factors = _model(), [1.0]

    def grow(gradient: Tensor) -> Tensor:
        factors.append(factors[-1] * 0.9)
        return gradient * factors[-1]

    model[0].weight.register_hook(grow)
    with pytest.raises(UsageError, match=r"another gradient of 0\.weight"):
        _train(run, model, verify=True)


def test_what_is_given_twice_leaves_nothing(run: Run) -> None:
    """With buffers, dropout, in-place changes of the micro-batch, and checkpointed activations."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = _model(nn.BatchNorm1d(8))
            self.register_buffer("queue", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            self.queue = x.detach()[:, 0] + random.random()
            return checkpoint(self.layers, x, use_reentrant=False)

    drawn: list[float] = []

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return _plain(model, x, y) + float(torch.rand(1))

    def train(verify: bool) -> str:
        torch.manual_seed(0)
        run, model = Run(Engine(World(), torch.device("cpu"))), Net()
        optimizer, checked = torch.optim.SGD(model.parameters(), lr=0.1), 0
        options = {"exact": True, "verify": verify, "buffers": {"queue": "last"}}
        for step in run.steps(_loader(), model, optimizer, until="4ba", **options):
            for x, y in step:
                checked += step.checking
                step.backward(loss(model, x, y), weight=2.0)
            step.update()
            drawn.append(float(torch.rand(1)))
        assert checked == (purity.FIRST if verify else 0)
        return el.weights_sha256(model)

    assert train(False) == train(True)
    assert drawn[:4] == drawn[4:]


def test_no_micro_batch_is_given_twice_once_the_round_is_over(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that compute one together, as tensor ranks do, would wait for those that know of the end."""
    given: list[int] = []

    def over_after_four(rounds: WorkerRounds) -> None:
        if len(given) == 4:
            raise RoundOverError("the round is over")

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        given.append(len(x))
        return _plain(model, x, y)

    monkeypatch.setattr(WorkerRounds, "check_over", over_after_four)
    with pytest.raises(RoundOverError):
        _train(run, _model(), loss, verify=True)
    assert len(given) == 4


def test_a_micro_batch_that_is_given_twice_needs_backward(run: Run) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for step in run.steps(_loader(), model, optimizer, until="1ba", exact=True, verify=True):
            for x, y in step:
                if not step.checking:
                    step.backward(_plain(model, x, y))

    with pytest.raises(UsageError, match=r"step\.checking"):
        train()


def test_the_same_later_steps_are_checked_by_all_ranks() -> None:
    found = [step for step in range(1000) if purity.due(7, step)]
    assert found[:3] == [0, 1, 2]
    assert 5 < len(found) < 40
    assert found != [step for step in range(1000) if purity.due(8, step)]


@pytest.mark.parametrize("keeps", ["number", "counter"])
def test_a_trainer_computes_a_micro_batch_twice(run: Run, keeps: str) -> None:
    model, measured = _model(Gate(keeps)), []

    def metric(output: Tensor, target: Tensor) -> Tensor:
        measured.append(1)
        return output.mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = el.Trainer(
        run, model, optimizer, _loader(), loss_fn=nn.CrossEntropyLoss(), exact=True, metrics={"mean": metric}
    )
    if keeps == "number":
        with pytest.raises(UsageError, match=r"gave another loss(.|\n)*the module '2', whose tau"):
            trainer.fit("2ba")
    else:
        trainer.fit("2ba")
        assert len(measured) == 8
        assert model[2].calls == 8


# torch.func


def _by_vmap(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    parameters = dict(model.named_parameters())
    return F.cross_entropy(vmap(lambda one: functional_call(model, parameters, (one,)))(x), y)


def _per_sample(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    detached = {name: p.detach() for name, p in model.named_parameters()}

    def one(parameters: dict[str, Tensor], sample: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (sample[None],)), target[None])

    gradients = vmap(grad(one), (None, 0, 0))(detached, x, y)
    norms = sum(each.flatten(1).square().sum(1) for each in gradients.values())
    return (F.cross_entropy(model(x), y, reduction="none") / (1 + norms)).mean()


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("loss", [_by_vmap, _per_sample])
def test_functions_of_torch_func(run: Run, loss: Loss, verify: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Gate("counter"), nn.Linear(8, 2))
    assert len(_train(run, model, loss, verify=verify)) == 64


# What the script exchanges


def _gathered(x: Tensor) -> None:
    all_gather([torch.zeros_like(x)], x)


CALLS: dict[str, Callable[[Tensor], Any]] = {
    "all_gather": _gathered,
    "all_reduce": lambda x: dist.all_reduce(x.clone()),
    "broadcast": lambda x: dist.broadcast(x.clone(), src=0),
    "barrier": lambda x: dist.barrier(),
    "all_gather_object": lambda x: dist.all_gather_object([None], 1),
    "all_reduce ": lambda x: functional.all_reduce(x, "sum", dist.group.WORLD).sum(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_collective_within_a_micro_batch_is_refused(run: Run, group: None, name: str) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        CALLS[name](x)
        return _plain(model, x, y)

    with pytest.raises(UsageError, match=f"exact=True: the script calls {name.strip()} while"):
        _train(run, _model(), loss)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_it_is_refused_in_a_hook_and_in_a_differentiable_function(run: Run, group: None) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.distributed.nn.functional.all_gather(model(x))[0], y)

    with pytest.raises(UsageError, match="the script calls all_gather while"):
        _train(run, _model(), loss)
    model = _model()
    model[0].weight.register_hook(lambda gradient: dist.all_reduce(gradient.clone()))
    with pytest.raises(UsageError, match="the script calls all_reduce while"):
        _train(Run(Engine(World(), torch.device("cpu"))), model)


def test_on_another_group_and_by_a_compiled_operation(run: Run, group: None) -> None:
    other = dist.new_group([0])

    def on_another(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        dist.all_reduce(x.clone(), group=other)
        return _plain(model, x, y)

    def by_operation(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        gathered = torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name)  # type: ignore[union-attr]
        torch.ops._c10d_functional.wait_tensor(gathered)
        return _plain(model, x, y)

    with pytest.raises(UsageError, match="the script calls all_reduce while"):
        _train(run, _model(), on_another)
    with pytest.raises(UsageError, match="the script calls a collective while"):
        _train(Run(Engine(World(), torch.device("cpu"))), _model(), by_operation)


def test_between_steps_it_is_not_refused_and_in_default_mode_warned_of_once(
    run: Run, group: None, caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(collectives, "_warned", False)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        dist.all_reduce(x.clone())
        return _plain(model, x, y)

    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in run.steps(_loader(), model, optimizer, until="2ba", exact=True):
        for x, y in step:
            step.backward(_plain(model, x, y))
        dist.all_reduce(torch.zeros(1))
        step.update()
        dist.all_reduce(torch.zeros(1))
    _train(Run(Engine(World(), torch.device("cpu"))), model, loss, exact=False)
    for call in CALLS.values():  # as if nothing had been watched
        call(torch.ones(2))
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "the script calls all_reduce while a micro-batch is computed" in line
    assert os.environ.get("WORLD_SIZE") is None


# Frozen parameters with a rule


class Momentum(nn.Module):
    """A momentum encoder that follows in the forward pass."""

    def __init__(self, by_data: bool) -> None:
        super().__init__()
        self.q, self.k, self.by_data = nn.Linear(4, 8), nn.Linear(4, 8), by_data
        self.head = nn.Linear(8, 2)
        self.k.load_state_dict(self.q.state_dict())
        self.k.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for q, k in zip(self.q.parameters(), self.k.parameters(), strict=True):
                if self.by_data:
                    k.data = k.data * 0.9 + q.data * 0.1
                else:
                    k.mul_(0.9).add_(q, alpha=0.1)
        return self.head(torch.tanh(self.q(x) - self.k(x)))


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("by_data", [False, True])
def test_a_momentum_encoder_with_a_rule_follows_once_a_step(run: Run, by_data: bool, verify: bool) -> None:
    torch.manual_seed(0)
    model = Momentum(by_data)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    _train(run, model, until="1ba", buffers={"k.*": "last"}, verify=verify)
    for name in ("weight", "bias"):
        expected = start[f"k.{name}"] * 0.9 + start[f"q.{name}"] * 0.1
        torch.testing.assert_close(model.k.get_parameter(name).detach(), expected)
        assert not torch.equal(model.q.get_parameter(name), start[f"q.{name}"])


def test_rules_of_frozen_parameters() -> None:
    from elastic_launch.training.gradients.buffer_rules import buffers_of, ruled_names

    model = Momentum(by_data=False)
    assert ruled_names(model, {"k.*": "last"}) == {"k.weight", "k.bias"}
    assert ruled_names(model, {"k.weight": "error", "k.bias": "mean"}) == {"k.bias"}
    assert ruled_names(model, {"*": "last"}) == set()  # the default is for buffers alone
    assert ruled_names(nn.Sequential(model, nn.BatchNorm1d(8)), {}) == {
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }
    with pytest.raises(UsageError, match=r"no frozen parameter(.|\n)*q\.weight is trained"):
        buffers_of(model, {"q.*": "last"})


def test_what_a_function_has_got_from_locals_gets_no_further_variables() -> None:
    def main(rate: float = 0.1) -> tuple[dict[str, Any], torch.Generator]:
        noise, config = torch.Generator(), locals()
        held.of_loop(held.callers())
        return config, noise

    assert main()[0] == {"rate": 0.1}


def test_in_another_thread_than_the_loop_over_the_steps_one_function_is_searched() -> None:
    """Those that have called it are not the script's."""

    def found(before: list[held.Caller]) -> list[Any]:
        inner = torch.Generator()
        places = held.of_loop(before)[0]
        assert inner in [place.generator for place in places]
        return [place.name for place in places]

    outer = torch.Generator()
    assert found(held.callers()) == ["inner", "outer"]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda before: (outer, found(before))[1], held.callers()).result(60) == ["inner"]


def test_functions_with_similar_names_are_searched() -> None:
    def main(args: Any, model: nn.Module) -> dict[str, Any]:
        noise, config = torch.Generator(), vars(args)
        model.eval()
        assert [place.generator for place in held.of_loop(held.callers())[0]] == [noise]
        return config

    assert main(Settings(0.1), _model()) == {"rate": 0.1, "names": ["a"]}
