"""Which tensors may be copied while training continues, and which node copies a snapshot to storage."""

from __future__ import annotations

from pathlib import Path

import torch

import elastic_launch as el
from elastic_launch.contract import CopyJob
from elastic_launch.training.checkpoints.manager import CheckpointManager
from elastic_launch.training.checkpoints.memory import settled
from elastic_launch.training.checkpoints.shared_location import Writers
from elastic_launch.training.ranks.world import World


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


def test_a_large_state_is_copied_by_all_nodes_and_a_small_one_by_the_first_alone(tmp_path: Path) -> None:
    def route(node: int, size: int, *, now: bool = True) -> CopyJob:
        checkpoint = CheckpointManager(el.Checkpoint(tmp_path, split=9000))
        checkpoint._writers = Writers(node == 0, drawn=9)
        world = World(rank=node, world_size=2, node_rank=node, nodes=2)
        return checkpoint.route(world, now, CopyJob(1, 7, 1), size)

    shares = [route(node, 9000) for node in (0, 1)]
    assert [(job.shares, job.share, job.now) for job in shares] == [(2, 0, True), (2, 1, True)]
    assert len({job.nonce for job in shares}) == 1
    for first, other in [(route(0, 8999), route(1, 8999)), (route(0, 9000, now=False), route(1, 9000, now=False))]:
        assert (first.directory, first.shares) == (str(tmp_path), 1)
        assert (other.directory, other.now, other.shares) == (str(tmp_path), False, 1)
        assert (first.stands_by, other.stands_by) == (False, True)
