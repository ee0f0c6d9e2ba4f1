"""What a step began with is copied or watched, and what changes between micro-batches is named."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from tensor_reads import Reads
from torch import Tensor, nn

from elastic_launch.training.checkpoints import step_start
from elastic_launch.training.checkpoints.state import TrainingState
from elastic_launch.training.checkpoints.step_start import StepStart, copied


class Holder:
    """Returns what it holds, and keeps what it gets."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.tau = nn.Linear(2, 2), 1.0
        self.register_buffer("seen", torch.zeros(()))

    def get_extra_state(self) -> dict[str, float]:
        return {"tau": self.tau}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.tau = state["tau"]


class Training:
    """A model, its optimizer after a step, a scheduler and a registered object."""

    def __init__(self, **registered: Any) -> None:
        self.model = Gate()
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.1)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.optimizer.step()
        self.state = TrainingState()
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, **registered}
        for name, part in parts.items():
            self.state.register(name, part)
        self.start: StepStart = self.state.follow_steps()

    def head(self, change: Any) -> list[str]:
        self.start.take({})
        change(self)
        return self.start.pass_begins()

    def within(self, change: Any) -> list[str]:
        self.start.take({})
        assert self.start.pass_begins() == []
        change(self)
        return self.start.changed_in_pass()


def step_scheduler(training: Training) -> None:
    training.scheduler.step()


def set_rate(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"] = 0.5


def cool(training: Training) -> None:
    training.model.tau *= 0.5


def change_data(training: Training) -> None:
    training.model.linear.weight.data.mul_(0.5)


def change_value(training: Training) -> None:
    with torch.no_grad():
        training.model.linear.weight.mul_(0.5)


def replace_data(training: Training) -> None:
    training.model.linear.weight.data = training.model.linear.weight.data * 0.5


def replace_parameter(training: Training) -> None:
    training.model.linear.bias = nn.Parameter(torch.zeros(2))


def add_parameter(training: Training) -> None:
    training.model.later = nn.Parameter(torch.zeros(2))


def add_module(training: Training) -> None:
    training.model.linear.more = nn.Linear(2, 2)


def add_group(training: Training) -> None:
    training.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def count(training: Training) -> None:
    training.model.seen += 1


def halve_momentum(training: Training) -> None:
    for state in training.optimizer.state.values():
        state["exp_avg"].mul_(0.5)


def replace_momentum(training: Training) -> None:
    for state in training.optimizer.state.values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])


@pytest.mark.parametrize("change", [step_scheduler, set_rate, cool])
def test_what_is_small_is_handed_on_as_it_was_before_the_head(change: Any) -> None:
    training = Training()
    before = copied(training.state.capture())
    assert training.head(change) == []
    assert str(training.state.capture()) == str(before)
    training.start.close()
    assert str(training.state.capture()) != str(before)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (change_data, "linear.weight"),
        (change_value, "linear.weight"),
        (replace_data, "linear.weight"),
        (replace_parameter, "linear.bias"),
        (add_parameter, "later"),
        (add_module, "linear.more.weight"),
        (add_group, "parameter 2 of the optimizer"),
        (count, "seen"),
        (halve_momentum, "the state of optimizer"),
        (replace_momentum, "the state of optimizer"),
    ],
)
def test_what_is_not_copied_is_named_if_the_head_changes_it(change: Any, named: str) -> None:
    training = Training()
    assert named in training.head(change)
    assert training.head(lambda training: None) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (step_scheduler, "scheduler (StepLR)"),
        (set_rate, "optimizer.param_groups"),
        (cool, "model._extra_state (Gate)"),
        (change_data, "linear.weight"),
        (replace_data, "linear.weight"),
        (change_value, "linear.weight"),
        (add_parameter, "later"),
    ],
)
def test_what_changes_between_micro_batches_is_named(change: Any, named: str) -> None:
    assert named in Training().within(change)


def test_buffers_and_what_is_allowed_may_change_between_micro_batches() -> None:
    training = Training()
    assert training.within(count) == []
    assert training.within(change_value) == ["linear.weight"]
    assert training.start.changed_in_pass({"linear.weight"}) == []


def test_buffers_of_a_registered_module_may_not_change_unless_they_are_the_model_s() -> None:
    gate = Gate()
    training = Training(target=gate)
    assert training.within(lambda training: gate.seen.add_(1)) == ["target: seen"]
    assert training.start.spoiled() == ["target: seen"]
    gate.seen = torch.ones(())
    assert training.start.changed_in_pass() == training.start.spoiled() == ["target: seen"]
    gate.register_buffer("mask", torch.ones(2), persistent=False)
    cached = Training(target=gate)
    # It is not saved, and may be made anew for larger inputs.
    assert cached.within(lambda training: gate.register_buffer("mask", torch.ones(3), persistent=False)) == []
    wrapped = Training()
    wrapped.state.register("wrapper", nn.Sequential(wrapped.model))
    wrapped.start = wrapped.state.follow_steps()
    assert wrapped.within(count) == wrapped.start.spoiled() == []


class Point:
    def __init__(self, x: float) -> None:
        self.x = x
        self.own = self


@pytest.mark.parametrize(
    "value",
    [
        3,
        float("nan"),
        "name",
        (1, 2.5),
        torch.ones(2),
        [torch.zeros(100)],
        {"a": {1}},
        np.ones(3),
        deque([np.ones(2)]),
        deque([torch.ones(2)], maxlen=3),
        Point(2.0),
    ],
)
def test_a_registered_value_that_stays_the_same_is_not_named(value: Any) -> None:
    training = Training(own=Fresh(value))
    assert training.head(lambda training: None) == []
    assert training.start.changed_in_pass() == []


class Fresh(Holder):
    """Returns a copy of its state each time."""

    def __init__(self, value: Any) -> None:
        super().__init__(value=value)

    def state_dict(self) -> dict[str, Any]:
        return {key: copied(value) for key, value in self.state.items()}


@pytest.mark.parametrize(
    ("before", "value"),
    [(torch.ones(2), each) for each in (2.0, torch.zeros(2), [torch.ones(100)])]
    + [(np.ones(2), np.zeros(2)), (np.ones(2), np.ones(2, np.float32)), ({1}, {2}), (deque([1]), deque([2]))]
    + [(deque([torch.ones(2)]), deque([torch.zeros(2)])), (Holder(x=1), Holder(x=2)), (np.float64(1), np.float64(2))],
)
def test_a_registered_value_that_changes_is_named(before: Any, value: Any) -> None:
    own = Fresh(before)
    training = Training(own=own)

    def change(training: Training) -> None:
        own.state["value"] = value

    assert training.within(change) == ["own (Fresh)"]


def test_a_large_registered_object_is_watched_by_its_tensors() -> None:
    own = Holder(values=torch.zeros(step_start.SMALL), updates=0)
    training = Training(own=own)
    assert training.start.blind == []
    assert training.head(lambda training: None) == []
    assert training.head(lambda training: own.state["values"].add_(1)) == ["the state of own"]
    assert training.head(lambda training: own.state.update(updates=1)) == ["the state of own"]
    assert training.head(lambda training: own.state.update(values=torch.zeros(step_start.SMALL))) == [
        "the state of own"
    ]


def test_a_large_object_that_returns_copies_and_a_slow_one_cannot_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Training(own=Fresh(torch.zeros(step_start.SMALL))).start.blind == ["own"]
    monkeypatch.setattr(step_start, "QUICK", 0.0)
    assert Training(own=Holder(value=1)).start.blind == ["scheduler", "own"]


def test_the_copies_of_all_small_states_have_one_limit() -> None:
    half = step_start.SMALL // 8 + 1  # floats
    training = Training(**{f"own{number}": Holder(values=torch.zeros(half)) for number in range(3)})
    training.start.take({})
    assert len([name for name in training.start.starts[0]["states"] if name.startswith("own")]) == 1


def test_what_has_grown_is_watched_instead_of_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Holder(values={})
    training = Training(own=own)
    training.start.take({})
    assert "own" in training.start.starts[0]["states"]
    own.state["values"]["more"] = torch.zeros(step_start.SMALL)
    monkeypatch.setattr(step_start, "AGAIN", 0)
    monkeypatch.setattr(step_start, "QUICK", 1e-9)  # as if copying it took long
    training.start.take({})
    monkeypatch.setattr(step_start, "QUICK", 60.0)
    training.start._divide_all()
    training.start.take({})
    assert "own" not in training.start.starts[0]["states"]
    assert training.head(lambda training: own.state["values"]["more"].add_(1)) == ["the state of own"]


def test_a_large_extra_state_is_not_copied() -> None:
    training = Training()
    training.model.tau = torch.zeros(step_start.SMALL)  # type: ignore[assignment]
    start = StepStart({"model": training.model})
    start.take({})
    assert (start.starts[0]["extra"], start.blind) == ({}, ["_extra_state"])


def test_each_pass_has_a_start_of_its_own() -> None:
    counter = Holder(count=0)
    training = Training(counter=counter)
    training.start.take({"a": True})
    counter.state["count"] = 1
    training.start.pass_begins()
    counter.state["count"] = 2
    training.start.take({"a": False}, passes=1)
    counter.state["count"] = 3
    assert [start["states"]["counter"]["count"] for start in training.start.starts] == [0, 2]
    assert training.state.capture()["counter"] == {"count": 2}
    assert training.start.trained == {"a": False}
    training.start.take({})
    assert [start["states"]["counter"]["count"] for start in training.start.starts] == [3]


def test_a_start_is_loaded_as_a_copy() -> None:
    there, here = Training(own=Holder(values=torch.ones(2))), Training(own=Holder(values=torch.zeros(2)))
    there.start.take({})
    set_rate(there)
    start = there.start.starts[0]
    for _ in range(2):
        cool(here)
        set_rate(here)
        here.start.load(start)
        (own,) = [part for part in here.state.parts if isinstance(part, Holder)]
        assert own.state["values"].tolist() == [1.0, 1.0]
        own.state["values"].zero_()
        assert (here.model.tau, here.optimizer.param_groups[0]["lr"]) == (1.0, 0.1)


def test_learning_rates_that_are_tensors_are_not_read_and_stay_the_same_tensors() -> None:
    """On a GPU, reading one waits for it, and CUDA graphs hold it. The scheduler's state has them, too."""
    there, here = Training(), Training()
    for training, rate in ((there, 0.5), (here, 0.25)):
        training.optimizer.param_groups[0]["lr"] = torch.tensor(rate)
        training.scheduler.step()
    with Reads() as reads:
        assert there.within(lambda training: None) == []
        assert here.within(lambda training: None) == []
    assert reads.addresses == []
    rate = here.optimizer.param_groups[0]["lr"]
    here.start.load(there.start.starts[0])
    assert here.optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.5
    assert there.within(lambda training: training.optimizer.param_groups[0]["lr"].mul_(2)) == ["optimizer.param_groups"]


def test_a_step_that_goes_on_in_another_round_is_marked_anew() -> None:
    training = Training()
    assert training.head(lambda training: None) == []
    change_value(training)  # as an exchange of parameters does
    training.start.go_on()
    assert training.start.changed_in_pass() == []
    assert training.start.spoiled() == []
    change_value(training)
    assert training.start.spoiled() == ["linear.weight"]


def test_tensors_without_versions_or_addresses_are_watched_by_identity() -> None:
    training = Training()
    with torch.inference_mode():
        training.model.register_buffer("made", torch.ones(2))
    training.model.register_buffer("sparse", torch.eye(2).to_sparse())
    assert training.head(lambda training: None) == []
    assert training.head(change_value) == ["linear.weight"]


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_the_tensors_of_a_torchscript_module_are_watched() -> None:
    training = Training()
    training.model.later = later = torch.jit.script(nn.Linear(2, 2))
    assert training.head(lambda training: None) == []
    assert training.head(lambda training: nn.init.zeros_(later.weight)) == ["later.weight"]


def test_a_copy_shares_nothing() -> None:
    class Own:
        def __init__(self) -> None:
            self.values = [1]

    value = {"a": [torch.ones(1)], "b": (Own(), {2}), "c": OrderedDict(d=torch.zeros(1)), "e": None}
    found = copied(value)
    found["a"][0].zero_()
    found["b"][0].values.append(2)
    found["c"]["d"].add_(1)
    assert type(found["c"]) is OrderedDict
    tensors: list[Tensor] = [value["a"][0], value["c"]["d"]]  # type: ignore[index,call-overload]
    assert [float(x) for x in tensors] == [1.0, 0.0]
    assert value["b"][0].values == [1]  # type: ignore[index]


def test_an_entry_beside_those_of_the_parameters_is_watched() -> None:
    """MADGRAD counts its steps there."""
    training = Training()
    training.optimizer.state["k"] = torch.zeros(1)
    assert training.head(lambda training: None) == []
    assert training.head(lambda training: training.optimizer.state["k"].add_(1)) == ["the state of optimizer"]
