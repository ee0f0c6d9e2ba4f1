"""Which tensors may be copied behind the training's back."""

from __future__ import annotations

import torch

from elastic_launch.training.checkpoints.memory import settled


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
