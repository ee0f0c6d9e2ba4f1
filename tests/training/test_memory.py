"""When snapshots are taken, and which tensors may be copied behind the training's back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_launch.training.memory import SHARE, Rhythm, settled


def rhythm(step_seconds: float, cost: float, steps: int = 50) -> Rhythm:
    found = Rhythm()
    for step in range(steps):
        found.step_done(step, step * step_seconds)
    found.cost(cost)
    return found


def test_the_first_snapshot_is_due_at_once() -> None:
    assert Rhythm().due(1)


def test_one_that_costs_nothing_is_due_after_every_step() -> None:
    found = rhythm(1.0, 0.001)
    found.taken(50)
    assert not found.due(50)
    assert found.due(51)


@given(st.floats(1e-3, 10), st.floats(1e-4, 100))
def test_the_interval_keeps_the_cost_at_its_share_and_no_lower_than_need_be(step: float, cost: float) -> None:
    interval = rhythm(step, cost).interval
    assert cost <= SHARE * step * interval * 1.0001
    assert interval == 1 or cost > SHARE * step * (interval - 1) * 0.9999


def test_costs_that_change_are_learnt() -> None:
    found = rhythm(1.0, 1.0)
    assert found.interval == 100
    for _ in range(20):
        found.cost(0.1)
    assert found.interval == pytest.approx(10, abs=1)


def test_parameters_and_the_optimizers_state_stay_until_its_step_and_nothing_else_does() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    stays = settled(optimizer, model.parameters())
    of_model = {name: stays(tensor) for name, tensor in model.state_dict().items()}
    assert of_model == {
        "0.weight": True,
        "0.bias": True,
        "1.weight": True,
        "1.bias": True,
        "1.running_mean": False,
        "1.running_var": False,
        "1.num_batches_tracked": False,
    }
    of_optimizer = optimizer.state_dict()["state"][0]
    assert {name: stays(tensor) for name, tensor in of_optimizer.items()} == {
        "step": False,
        "exp_avg": True,
        "exp_avg_sq": True,
    }
    assert not stays(torch.zeros(3))


def test_a_second_training_of_a_session_has_snapshots_from_its_first_step_on() -> None:
    rhythm = Rhythm()
    rhythm.begin(0)
    for step in range(1, 100):
        rhythm.step_done(step, float(step))
        if rhythm.due(step):
            rhythm.taken(step)
    rhythm.begin(0)
    assert rhythm.due(1)
    rhythm.begin(50)
    assert not rhythm.due(50)
    assert rhythm.due(51)
