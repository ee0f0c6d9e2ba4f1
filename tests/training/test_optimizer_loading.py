"""An optimizer's state is loaded into the tensors that it has."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from elastic_launch.training.checkpoints.optimizer_loading import load_optimizer

Makes = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Makes] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), fused=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


def step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for number, parameter in enumerate(group["params"]):
            parameter.grad = torch.full_like(parameter, 0.25 * (number + 1))
    optimizer.step()


def made(makes: Makes, dtype: torch.dtype) -> torch.optim.Optimizer:
    return makes([nn.Parameter(torch.ones(3, 2, dtype=dtype)), nn.Parameter(torch.ones(4, dtype=dtype))])


def tensors(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], torch.Tensor]:
    states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    found = {(n, k): v for n, state in enumerate(states) for k, v in state.items() if isinstance(v, torch.Tensor)}
    for group in optimizer.param_groups:
        found |= {(-1, key): value for key, value in group.items() if isinstance(value, torch.Tensor)}
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_tensors_stay_and_have_the_saved_values_and_dtypes(name: str, dtype: torch.dtype) -> None:
    optimizer = made(OPTIMIZERS[name], dtype)
    step(optimizer)
    saved: dict[str, Any] = deepcopy(optimizer.state_dict())
    at = tensors(optimizer)
    values = {key: value.clone() for key, value in at.items()}
    step(optimizer)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    load_optimizer(optimizer, saved)
    now = tensors(optimizer)
    assert now.keys() == at.keys() != set()
    for key, value in now.items():
        assert value is at[key], key
        assert value.dtype == values[key].dtype
        assert torch.equal(value, values[key]), key
    assert optimizer.param_groups[0]["lr"] == saved["param_groups"][0]["lr"]
    shared = {
        value.data_ptr() for state in saved["state"].values() for value in state.values() if torch.is_tensor(value)
    }
    assert not shared & {value.data_ptr() for value in now.values()}, "what was loaded may be loaded once more"


def test_a_state_without_steps_takes_the_steps_back() -> None:
    optimizer = made(OPTIMIZERS["AdamW"], torch.float32)
    saved = deepcopy(optimizer.state_dict())
    step(optimizer)
    load_optimizer(optimizer, saved)
    assert not optimizer.state


class Clearing(torch.optim.SGD):
    """One that empties its tensors before it reads the state that it is given."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for state in self.state.values():
            state["momentum_buffer"].zero_()
        super().load_state_dict(state_dict)


def test_an_optimizer_that_loads_its_state_itself_gets_the_state_as_it_was_saved() -> None:
    optimizer = made(lambda p: Clearing(p, lr=0.1, momentum=0.9), torch.float32)
    step(optimizer)
    saved = deepcopy(optimizer.state_dict())
    load_optimizer(optimizer, saved)
    assert all(state["momentum_buffer"].any() for state in optimizer.state.values())


class Listing(torch.optim.SGD):
    """One whose state is not a mapping."""

    def state_dict(self) -> Any:
        return [group["lr"] for group in self.param_groups]

    def load_state_dict(self, state_dict: Any) -> None:
        for group, rate in zip(self.param_groups, state_dict, strict=True):
            group["lr"] = rate


def test_an_optimizer_may_have_a_format_of_its_own() -> None:
    optimizer = made(lambda p: Listing(p, lr=0.1), torch.float32)
    load_optimizer(optimizer, [0.5])  # type: ignore[arg-type]
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("other", [0.25, 0.5])
def test_a_tensor_that_two_groups_share_stays_only_where_it_has_their_value(other: float) -> None:
    def makes(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": [parameter]} for parameter in parameters]
        return torch.optim.SGD(groups, lr=torch.tensor(0.125))

    optimizer = made(makes, torch.float32)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates[0] is rates[1], "as torch makes them"
    saved = deepcopy(optimizer.state_dict())
    for group, rate in zip(saved["param_groups"], (0.25, other), strict=True):
        group["lr"] = torch.tensor(rate)
    load_optimizer(optimizer, saved)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.25, other]
    assert [group["lr"] is rates[0] for group in optimizer.param_groups] == [True, other == 0.25]


def test_two_values_that_are_one_tensor_now_become_two() -> None:
    optimizer = made(OPTIMIZERS["SGD"], torch.float32)
    step(optimizer)
    for state in optimizer.state.values():
        state["before"] = state["momentum_buffer"].clone()
    saved = deepcopy(optimizer.state_dict())
    step(optimizer)
    for state in optimizer.state.values():
        state["before"] = state["momentum_buffer"].mul_(2)
    for state in saved["state"].values():
        state["before"].add_(1)
    load_optimizer(optimizer, saved)
    for number, state in enumerate(optimizer.state.values()):
        for key, value in state.items():
            assert torch.equal(value, saved["state"][number][key]), key


def test_what_torch_cannot_write_to_is_replaced() -> None:
    optimizer = made(OPTIMIZERS["SGD"], torch.float32)
    step(optimizer)
    saved = deepcopy(optimizer.state_dict())
    first, second = optimizer.state.values()
    first["momentum_buffer"] = torch.zeros(()).expand(3, 2)
    with torch.inference_mode():
        second["momentum_buffer"] = torch.zeros(4)
    load_optimizer(optimizer, saved)
    for number, state in enumerate(optimizer.state.values()):
        assert torch.equal(state["momentum_buffer"], saved["state"][number]["momentum_buffer"])


@pytest.mark.parametrize("name", ["SGD", "AdamW", "fused AdamW"])
def test_a_new_optimizer_gets_states_with_the_strides_of_its_parameters(name: str) -> None:
    """A saved state has none, and fused optimizers read states, parameters and gradients in the order of memory."""

    def made() -> torch.optim.Optimizer:
        values = torch.arange(24.0).view(2, 3, 2, 2).to(memory_format=torch.channels_last)
        return OPTIMIZERS[name]([nn.Parameter(values)])

    def go(optimizer: torch.optim.Optimizer) -> None:
        (parameter,) = optimizer.param_groups[0]["params"]
        parameter.grad = torch.arange(24.0).view(2, 3, 2, 2).to(memory_format=torch.channels_last)
        optimizer.step()

    expected, resumed = made(), made()
    go(expected)
    saved = deepcopy(expected.state_dict())
    for key, value in saved["state"][0].items():
        saved["state"][0][key] = value.contiguous() if isinstance(value, torch.Tensor) else value
    with torch.no_grad():
        resumed.param_groups[0]["params"][0].copy_(expected.param_groups[0]["params"][0])
    load_optimizer(resumed, saved)
    go(expected)
    go(resumed)
    one, other = tensors(expected), tensors(resumed)
    assert {key: value.stride() for key, value in other.items()} == {key: value.stride() for key, value in one.items()}
    assert torch.equal(resumed.param_groups[0]["params"][0], expected.param_groups[0]["params"][0])


def test_tensors_in_lists_tuples_and_dicts_stay_and_keep_their_dtypes() -> None:
    optimizer = made(OPTIMIZERS["SGD"], torch.bfloat16)
    for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
        value = torch.full_like(parameter, number + 1 / 3, dtype=torch.float32)
        optimizer.state[parameter] = {"moments": [value], "pair": (value + 1, 2), "by": {"name": {"of": value + 2}}}
    saved = deepcopy(optimizer.state_dict())

    def inner() -> list[torch.Tensor]:
        states = optimizer.state.values()
        return [each for x in states for each in (x["moments"][0], x["pair"][0], x["by"]["name"]["of"])]

    at = inner()
    then = [each.clone() for each in at]
    for each in at:
        each.zero_()
    load_optimizer(optimizer, saved)
    for own, now, was in zip(at, inner(), then, strict=True):
        assert now is own
        assert torch.equal(now, was)
    optimizer.state.clear()
    load_optimizer(optimizer, saved)
    assert [each.dtype for each in inner()] == [torch.float32] * 6
    assert all(map(torch.equal, inner(), then))
    assert [state["pair"][1] for state in optimizer.state.values()] == [2, 2]
