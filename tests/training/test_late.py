"""What is registered in the course of a training, and weights that are swapped in for an evaluation."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import elastic_launch as el
from elastic_launch.training.checkpoints.resumed import Resumed
from elastic_launch.training.engine import Engine
from elastic_launch.training.ranks.world import World
from elastic_launch.training.session import Run

DATA = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


class ScheduleFree(torch.optim.Optimizer):
    """Trains other weights than it evaluates, with the protocol of the package schedulefree."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "train_mode": False, "k": 0})

    def _between(self, group: dict[str, Any], train: bool) -> None:
        if group["train_mode"] is not train:
            for p in (p for p in group["params"] if "z" in self.state[p]):
                p.data.lerp_(self.state[p]["z"], 1 - group["beta"] if train else 1 - 1 / group["beta"])
        group["train_mode"] = train

    def train(self) -> None:
        for group in self.param_groups:
            self._between(group, True)

    def eval(self) -> None:
        for group in self.param_groups:
            self._between(group, False)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("step() in evaluation mode")
            group["k"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.detach().clone())
                p.data.lerp_(z, 1 / group["k"]).add_(
                    p.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"]) - 1)
                )
                z.sub_(p.grad, alpha=group["lr"])


class Training:
    """A training in this process, of which each step of the script's loop is under the test's control."""

    def __init__(
        self, directory: Path | None = None, until: int = 6, make: Any = torch.optim.SGD, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.run = Run(Engine(World(), torch.device("cpu")))
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.optimizer = make(self.model.parameters(), lr=0.1)
        self.checkpoint = None if directory is None else el.Checkpoint(directory, every=1, keep=99)
        self.until, self.options = until, options

    def steps(self) -> Iterator[el.Step]:
        loader = el.ElasticLoader(DATA, el.GlobalBatch(8, 4))
        saving = {"checkpoint": self.checkpoint, **self.options}
        for step in self.run.steps(loader, self.model, self.optimizer, until=f"{self.until}ba", exact=True, **saving):
            for x in step:
                step.backward(step.model(x).square().mean())
            step.update()
            yield step

    def averaged(self, start: int = 3, until: int | None = None, after: bool = False) -> AveragedModel | None:
        """Go through all steps, with an average that starts late."""
        average = None
        for step in self.steps():
            if step.number >= start:
                if average is None:
                    average = AveragedModel(self.model, use_buffers=True)
                    self.run.register("average", average)
                average.update_parameters(self.model)
        if after and average is None:
            average = AveragedModel(self.model, use_buffers=True)
            self.run.register("average", average)
        return average


def bits(module: nn.Module) -> str:
    return el.weights_sha256(module)


def failing(training: Training, average: Any) -> str:
    """Fail within the swap; return the model's bits there."""
    found = ""
    with suppress(ZeroDivisionError), training.run.swapped(average):
        found = bits(training.model)
        raise ZeroDivisionError
    return found


def test_an_average_that_starts_late_is_saved_and_restored_wherever_the_training_was_stopped(tmp_path: Path) -> None:
    undisturbed = Training().averaged()
    assert undisturbed is not None
    for stop in range(1, 7):
        Training(tmp_path / str(stop), until=stop).averaged()
        state = el.load_checkpoint(tmp_path / str(stop))
        assert ("average" in state) is (stop >= 3)
        resumed = Training(tmp_path / str(stop)).averaged(after=True)
        assert resumed is not None
        assert bits(resumed) == bits(undisturbed), stop


def test_a_model_that_is_copied_in_its_first_step_is_copied_without_what_watches_it() -> None:
    """The hooks' weak references were copied, too, and freed memory twice."""
    training = Training()
    steps = training.steps()
    next(steps)
    average = AveragedModel(training.model)
    (hook,) = average.module._forward_hooks.values()
    watch = hook.func.__self__
    average.train()(DATA[:4])
    assert not watch._returned
    (mine,) = training.model._forward_hooks.values()
    assert mine.func.__self__ is not watch
    assert mine.func.__self__._returned


def test_what_is_not_registered_yet_is_saved_again_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Training(tmp_path, until=4).averaged()
    assert first is not None
    Training(tmp_path, until=5).averaged(start=99)
    Training(tmp_path, until=6).averaged(start=99)
    assert [text for text in caplog.messages if text.startswith("average: the restored state is kept and saved again")]
    late = Training(tmp_path, until=7).averaged()
    assert late is not None
    assert int(late.n_averaged) == int(first.n_averaged) + 1
    early = Training(tmp_path, until=7)
    average = AveragedModel(early.model, use_buffers=True)
    early.run.register("average", average)
    assert [*early.steps()] == []
    assert bits(average) == bits(late)


def test_a_restored_state_is_freed_after_the_step_that_registers_its_object(tmp_path: Path) -> None:
    """Without a snapshot or checkpoint after it, too."""

    def held() -> bool:
        gc.collect()
        mine = [x for x in gc.get_objects() if isinstance(x, Resumed) and str(tmp_path) in x.origin]
        return any("average" in (x.state or {}) for x in mine)

    Training(tmp_path, until=4).averaged()
    resumed = Training(tmp_path, until=7)
    resumed.checkpoint = el.Checkpoint(tmp_path, every=1000)
    for step in resumed.steps():
        if step.number == 6:
            resumed.run.register("average", average := AveragedModel(resumed.model, use_buffers=True))
            assert int(average.n_averaged) == 2
        assert held() is (step.number < 7)


def test_what_was_registered_before_the_training_is_still_required(tmp_path: Path) -> None:
    training = Training(tmp_path, until=2)
    training.run.register("average", AveragedModel(training.model))
    assert [step.number for step in training.steps()] == [1, 2]
    with pytest.raises(el.UsageError, match="has average, which this script does not have"):
        next(Training(tmp_path).steps())


def test_a_late_object_that_does_not_fit_or_has_a_taken_name_is_refused(tmp_path: Path) -> None:
    Training(tmp_path, until=4).averaged()
    other = Training(tmp_path)
    for _ in other.steps():
        with pytest.raises(el.UsageError, match="does not fit this script's average"):
            other.run.register("average", AveragedModel(nn.Linear(5, 4)))
        other.run.register("average", average := AveragedModel(other.model, use_buffers=True))
        assert int(average.n_averaged) == 2
        with pytest.raises(el.UsageError, match="the name is taken"):
            other.run.register("average", AveragedModel(other.model))
        break
    taken = Training()
    steps = taken.steps()
    next(steps)
    taken.run.register("model", nn.Linear(1, 1))
    with pytest.raises(el.UsageError, match=r"run\.register\('model'\): the name is taken"):
        next(steps)


def test_a_training_that_begins_from_another_one_takes_its_late_average_only_if_it_is_to(tmp_path: Path) -> None:
    theirs = Training(tmp_path / "base", until=4).averaged()
    assert theirs is not None

    def begin(name: str, **how: Any) -> Training:
        training = Training(tmp_path / name)
        training.checkpoint = el.Checkpoint(tmp_path / name, every=1, start_from=tmp_path / "base", **how)
        return training

    with pytest.raises(el.UsageError, match=r"has average, which that (?s:.*)Checkpoint\(allow=\['average'\]\)"):
        begin("silent").averaged()
    for how, starts in ({"allow": ["average"]}, 5), ({"weights_only": True}, 3):
        name = "".join(how)
        for _ in "begun", "resumed":
            anew = begin(name, **how).averaged(after=True)
            assert anew is not None
            assert int(anew.n_averaged) == 7 - starts
    taking = begin("taking")
    average = AveragedModel(taking.model, use_buffers=True)
    taking.run.register("average", average)
    for step in taking.steps():
        assert step.number > 4
        assert bits(average) == bits(theirs)


def test_in_a_loop_of_its_own_a_script_may_register_late_too(tmp_path: Path) -> None:
    def steps(until: int) -> nn.Linear:
        run, model, late = Run(Engine(World(), torch.device("cpu"))), nn.Linear(1, 1), nn.Linear(1, 1)
        run.register("model", model)
        step = run.resume(el.Checkpoint(tmp_path, every=1))
        while step < until:
            step += 1
            if step == 2 or (step > 2 and "late" not in run._engine.state.names):
                run.register("late", late)
            with torch.no_grad():
                late.weight.fill_(late.weight.item() + 1 if step > 2 else 0)
            run.boundary(step, end=step == until)
        run._engine.close()
        return late

    assert steps(3).weight.item() == 1
    assert steps(5).weight.item() == 3


def test_the_average_is_swapped_in_and_out_to_the_bit_also_by_an_exception() -> None:
    training = Training()
    for step in training.steps():
        if step.number == 1:
            average = AveragedModel(training.model, avg_fn=lambda a, b, n: a * 0.7 + b * 0.3, use_buffers=True)
        average.update_parameters(training.model)
        before, averaged = bits(training.model), bits(average.module)
        assert before != averaged or step.number == 1
        seen = failing(training, average)
        assert seen == averaged
        assert (bits(training.model), bits(average.module)) == (before, averaged)
        with training.run.swapped(copy.deepcopy(average.module)):  # a module like the model
            assert bits(training.model) == averaged
        assert bits(training.model) == before


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(3)), "of shape .3,. in the average, and a .* of shape .4,."),
        (nn.Linear(4, 4), "missing in the"),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double(), "float64 .* in the average"),
        (object(), "has no train.. and eval"),
    ],
)
def test_what_does_not_fit_the_model_is_not_swapped_in(other: Any, says: str) -> None:
    training = Training(until=1)
    for _ in training.steps():
        before = bits(training.model)
        with pytest.raises(el.UsageError, match=says), training.run.swapped(other):
            raise AssertionError
        assert bits(training.model) == before


def test_a_swap_within_a_swap_is_refused() -> None:
    training = Training()
    steps = training.steps()
    next(steps)
    average = AveragedModel(training.model)
    with training.run.swapped(average):
        before = bits(training.model)
        for other in (average, AveragedModel(training.model)):
            with pytest.raises(el.UsageError, match=r"within .* of the same model"), training.run.swapped(other):
                raise AssertionError
        assert bits(training.model) == before


def test_a_step_that_goes_on_within_a_swap_is_refused() -> None:
    training = Training()
    steps = training.steps()
    step = next(steps)
    before, average = bits(training.model), AveragedModel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    with training.run.swapped(average):
        for call in (step.update, lambda: step.backward(torch.zeros(())), lambda: training.run.boundary(1)):
            with pytest.raises(el.UsageError, match=r"came within run\.swapped"):
                call()
        with pytest.raises(el.UsageError, match=r"The step's end came within run\.swapped\(\)"):
            next(steps)
    assert bits(training.model) == before


def test_a_snapshot_that_is_being_copied_is_awaited_before_weights_are_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    training, settled = Training(), list[str]()
    steps = training.steps()
    next(steps)
    before, average = bits(training.model), AveragedModel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    monkeypatch.setattr(training.run._engine.saver, "settle", lambda: settled.append(bits(training.model)))
    with training.run.swapped(average):
        assert settled == [before] != [bits(training.model)]


def test_an_evaluator_measures_the_average() -> None:
    seen: list[tuple[int, Tensor]] = []
    training = Training()
    average = AveragedModel(training.model, avg_fn=lambda a, b, n: a * 0.7 + b * 0.3, use_buffers=True)
    evaluator = el.Evaluator(
        el.ElasticLoader(DATA, el.GlobalBatch(8, 4)),
        lambda x: {"loss": training.model(x).square().mean()},
        every="2ba",
        within=lambda: training.run.swapped(average),
    )
    training.options["evaluator"] = evaluator
    for step in training.steps():
        average.update_parameters(training.model)
        inner = copy.deepcopy(average.module).eval()
        with torch.no_grad():
            seen.append((step.number, torch.stack([inner(x).square().mean() for x in DATA.split(4)]).mean()))
    assert {x.step: x.metrics["loss"] for x in evaluator.history} == {
        number: pytest.approx(float(value)) for number, value in seen if number % 2 == 0
    }


def test_an_optimizer_with_modes_is_the_same_to_the_bit_after_an_evaluation_and_a_restart(tmp_path: Path) -> None:
    def train(directory: Path | None, until: int, evaluates: bool) -> str:
        training = Training(directory, until, ScheduleFree)
        training.optimizer.train()
        for _ in training.steps():
            if evaluates:
                before = bits(training.model)
                assert failing(training, training.optimizer) != before or training.optimizer.param_groups[0]["k"] == 1
                assert bits(training.model) == before
        training.optimizer.eval()
        with pytest.raises(el.UsageError, match="in evaluation mode"), training.run.swapped(training.optimizer):
            raise AssertionError
        return bits(training.model)

    undisturbed = train(None, 6, False)
    assert train(tmp_path, 3, True) != undisturbed
    assert train(tmp_path, 6, True) == undisturbed
    assert train(tmp_path, 6, True) == undisturbed
