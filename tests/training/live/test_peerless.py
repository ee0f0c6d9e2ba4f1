"""Groups without peers, in which a process that was started ahead builds a model that is divided within its replica."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _register_process_group
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from elastic_launch.training.live.peerless import PeerlessGroups
from elastic_launch.training.ranks.mesh import ReplicaMesh, own_ranks
from elastic_launch.training.ranks.world import World


class Replica:
    """The second of two ranks of a replica; its round has one rank, which adds nothing to what it exchanges."""

    def __init__(self, directory: Path) -> None:
        self.finds = self._rounds = 0
        self._store = directory / "store"
        self.groups = PeerlessGroups(1, 2, self._find_place)
        world = World(1, 2, 1, 2, alone=False, replica_size=2)
        formed = ReplicaMesh.formed(world, "cpu", 1, 2, 60.0, forming=lambda **_: nullcontext(), outlives=True)
        self.mesh, (_, self.wide) = formed.inner, formed.slices

    def _find_place(self) -> None:
        self.finds += 1
        if self.finds == 1:
            self.groups.leave()
            self._join()

    def _join(self) -> None:
        self._rounds += 1
        store = dist.FileStore(f"{self._store}-{self._rounds}", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        for name in self.mesh._dim_group_names:
            _register_process_group(name, dist.new_group([0]))


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Replica]:
    before = {name: function for name, function in vars(dist.ProcessGroup).items() if callable(function)}
    with own_ranks():
        replica = Replica(tmp_path)
        yield replica
    replica.groups.close()
    dist.destroy_process_group()
    assert {name: function for name, function in vars(dist.ProcessGroup).items() if callable(function)} == before


def test_a_model_is_built_without_a_place(replica: Replica) -> None:
    """Each tensor is this rank's part of what the script has made."""
    whole = torch.arange(6.0)
    parts = [distribute_tensor(whole, replica.wide, [each]) for each in (Shard(0), Replicate())]
    assert [part.to_local().tolist() for part in parts] == [[3.0, 4.0, 5.0], whole.tolist()]
    layer = nn.Linear(4, 6)
    weight = layer.weight.detach().clone()
    parallelize_module(layer, replica.wide, ColwiseParallel())
    fully_shard(layer, mesh=replica.mesh["shard"])
    assert isinstance(layer.weight, DTensor)
    torch.testing.assert_close(layer.weight.to_local(), weight[3:])
    group = replica.wide.get_group()
    assert (dist.get_world_size(group), dist.get_rank(group), replica.mesh.get_coordinate()) == (2, 1, (0, 1))
    assert replica.finds == 0


USES: dict[str, Any] = {
    "rank": lambda mesh: dist.get_rank() == 0,
    "world size": lambda mesh: dist.get_world_size() == 1,
    "group of all": lambda mesh: (lambda group: dist.group.WORLD.size() == 1)(mesh.get_group()),
    "all ranks": lambda mesh: dist.barrier() is None,
    "new group": lambda mesh: dist.get_backend(dist.new_group([0])) == "gloo",
    "objects": lambda mesh: dist.all_gather_object([None], 3) is None,
    "mesh": lambda mesh: dist.all_reduce(torch.ones(1), group=mesh.get_group()) is None,
    "functional": lambda mesh: bool(all_reduce(torch.ones(1), "sum", mesh) == 1),
    "redistributed": lambda mesh: bool(DTensor.from_local(torch.ones(1), mesh, [Partial()]).full_tensor() == 1),
}


@pytest.mark.parametrize("use", USES)
def test_what_else_is_exchanged_waits_for_the_place(replica: Replica, use: str) -> None:
    assert USES[use](replica.wide)
    assert replica.finds == 1
    assert replica.groups.exchanged == (use in ("mesh", "functional", "redistributed"))
    assert dist.get_world_size() == 1
    assert distributed_c10d.get_backend() == "gloo"


def test_in_a_rehearsal_only_the_scripts_own_exchanges_wait(replica: Replica) -> None:
    """What a pass through a divided model exchanges ends at once. The script may read the results of its own."""
    layer = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    parallelize_module(layer, replica.wide, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    with replica.groups.rehearsing():
        layer(torch.ones(2, 4)).sum().backward()
        assert layer[0].weight.grad is not None
        assert not replica.finds
        dist.all_reduce(torch.ones(1), group=replica.wide.get_group())
    assert replica.finds == 1


def test_a_model_that_is_built_after_the_place_was_found_is_the_same(replica: Replica) -> None:
    """The script asks for its rank meanwhile. Ranks of its replica that are kept are not at this place."""
    replica._find_place()
    wide = replica.mesh["tensor"]
    assert (wide.get_coordinate(), replica.mesh["shard"].get_coordinate()) == ((1,), (0,))
    layer = nn.Linear(4, 6)
    weight = layer.weight.detach().clone()
    parallelize_module(layer, wide, ColwiseParallel())
    assert isinstance(layer.weight, DTensor)
    torch.testing.assert_close(layer.weight.to_local(), weight[3:])
    assert distribute_tensor(weight, wide, [Replicate()]).to_local().equal(weight)


def test_groups_that_were_given_away_stand_for_those_of_the_round(replica: Replica) -> None:
    kept = replica.wide.get_group()
    replica._find_place()
    values = torch.ones(2)
    dist.all_reduce(values, group=kept)
    assert (values.tolist(), replica.finds) == ([1.0, 1.0], 2)


def test_groups_are_left_once_however_many_rounds_follow(replica: Replica) -> None:
    """A process joins each round in the same way, also where the first one breaks before it has trained."""
    kept = replica.wide.get_group()
    replica._find_place()
    dist.destroy_process_group()  # the round is over
    replica.groups.leave()
    replica._join()
    values = torch.ones(2)
    dist.all_reduce(values, group=kept)
    assert values.tolist() == [1.0, 1.0]
