"""Which tensors may be copied while training continues, and which node copies a snapshot to storage."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import elastic_launch as el
from elastic_launch.contract import CopyJob
from elastic_launch.snapshot.memory.slot import EVALUATED, Header, Slot
from elastic_launch.snapshot.memory.slot_state import read_state
from elastic_launch.snapshot.memory.staging import Stagings
from elastic_launch.training.checkpoints.manager import CheckpointManager
from elastic_launch.training.checkpoints.memory import MemorySnapshots, settled
from elastic_launch.training.checkpoints.saving import Trained
from elastic_launch.training.checkpoints.shared_location import Writers
from elastic_launch.training.engine import Engine
from elastic_launch.training.link import AgentLink
from elastic_launch.training.ranks.world import World
from elastic_launch.training.session import Run


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


def test_an_average_stays_until_the_next_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clone of it would take a model's memory on the GPU with each snapshot."""
    found: list[dict[str, bool]] = []
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    average = AveragedModel(model, use_buffers=True)
    real = Engine.step_boundary

    def step_boundary(engine: Engine, after: Trained, **how: Any) -> bool:
        found.append({name: how["stays"](tensor) for name, tensor in average.state_dict().items()})
        return real(engine, after, **how)

    monkeypatch.setattr(Engine, "step_boundary", step_boundary)
    run = Run(Engine(World(), torch.device("cpu")))
    run.register("average", average)
    loader = el.ElasticLoader(torch.rand(8, 3), el.GlobalBatch(4, micro=4))
    for step in run.steps(loader, model, torch.optim.SGD(model.parameters(), 0.1), until="2ba"):
        for x in step:
            step.backward(model(x).square().mean())
        step.update()
        average.update_parameters(model)
    parameters = {f"module.{name}" for name, _ in model.named_parameters()}
    assert [{name for name, stays in each.items() if stays} for each in found] == [parameters] * len(found)
    assert found


def test_without_memory_for_clones_the_training_waits_for_each_snapshot(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    link, changes = AgentLink(), torch.ones(5)
    link.slots, link._use = [Slot.make("test")], 0
    memory = MemorySnapshots(link, World(first_on_node=True, round=1))

    def clone(tensor: torch.Tensor, **how: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore")

    for step in (1, 2):
        changes.fill_(float(step))
        header = Header(0, 1, step, EVALUATED, 0)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "clone", clone, raising=False)
            how: Any = {"stays": lambda tensor: False, "route": lambda job, size: job, "wait": False}
            assert memory.store({"changes": changes}, {}, header, **how)
        changes.fill_(99.0)  # it is copied already
        there = link.slots[0].header()
        assert there is not None
        assert (there.step, read_state(link.slots[0], there)["changes"].tolist()) == (step, [float(step)] * 5)
        link._use = 0
    (line,) = [record.getMessage() for record in caplog.records]
    assert "CUDA out of memory. Tried to allocate 2.00 GiB. From now on" in line
    memory.close()
    link.slots[0].close()


def test_the_thread_that_trains_prepares_what_copies_from_a_gpu_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocated by the thread that writes, it would end the capture of a CUDA graph."""
    link, threads = AgentLink(), list[str]()
    link.slots, link._use = [Slot.make("test")], 0
    prepare = Stagings.prepare

    def noting(stagings: Stagings, tensors: Iterable[torch.Tensor]) -> None:
        threads.append(threading.current_thread().name)
        prepare(stagings, tensors)

    monkeypatch.setattr(Stagings, "prepare", noting)
    memory = MemorySnapshots(link, World(first_on_node=True, round=1))
    how: Any = {"stays": lambda tensor: True, "route": lambda job, size: job, "wait": False}
    assert memory.store({"weight": torch.ones(5)}, {}, Header(0, 1, 1, EVALUATED, 0), **how)
    memory.settle()
    assert threads == [threading.current_thread().name]
    memory.close()
    link.slots[0].close()


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
