"""Sharded models in a second round of one process; tests/integration/test_kept_shards.py has several processes."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic_launch.errors import UsageError
from elastic_launch.training.gradients.parameters import Parameters
from elastic_launch.training.gradients.sharded import ShardSums, _Gather
from elastic_launch.training.live.resharding import let_go, obstacle, reshard
from elastic_launch.training.loop import Loop
from elastic_launch.training.ranks.exchange import is_of_exchange
from elastic_launch.training.ranks.mesh import RankGroup, ReplicaMesh, own_ranks
from elastic_launch.training.ranks.world import World
from elastic_launch.training.rounds import WorkerRounds


def _form() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    _form()
    try:
        yield
    finally:
        while MADE:
            let_go(MADE.pop())
        dist.destroy_process_group()
        gc.collect()


MADE: list[nn.Module] = []
"""The models of a test, which keep its process group."""


def _sharded(**how: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
    mesh = init_device_mesh("cpu", (1,))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh, **how)
    MADE.append(model)
    return model


def _whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.full_tensor().clone() for name, value in model.state_dict().items()}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(torch.ones(2, 3)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@pytest.mark.parametrize(
    "how", [{}, {"reshard_after_forward": False}, {"shard_placement_fn": lambda p: Shard(p.dim() - 1)}]
)
def test_a_model_goes_on_in_the_next_group_with_the_same_parameters(how: dict[str, Any]) -> None:
    model = _sharded(**how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    _step(model, optimizer)
    saved, expected = _whole(model), [*model.parameters()]
    assert obstacle(model) == ""
    before = weakref.ref(distributed_c10d._get_default_group())
    let_go(model)
    dist.destroy_process_group()
    gc.collect()
    assert before() is None
    _form()
    reshard(model, optimizer)
    assert all(now is then for now, then in zip(model.parameters(), expected, strict=True))
    assert not optimizer.state
    mesh = next(model.parameters()).device_mesh  # type: ignore[attr-defined]
    model.load_state_dict(
        {name: _distributed(whole, like) for (name, whole), like in zip(saved.items(), expected, strict=True)}
    )
    assert all(torch.equal(whole, _whole(model)[name]) for name, whole in saved.items())
    assert mesh.get_group() is distributed_c10d._get_default_group()
    assert _step(model, optimizer) > _step(model, optimizer)


def test_a_process_whose_rank_is_another_one_has_that_ranks_shards() -> None:
    """The ranks of the mesh are the same, so that it equals the one of the round before."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5))
    MADE.append(model)
    for module in (model[0], model):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    total_norm(model)
    for rank in (0, 1, 0):
        let_go(model)
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        reshard(model, optimizer)
        group = distributed_c10d._get_default_group()
        for parameter in model.parameters():
            length = parameter.shape[0]
            mine: Any = _distributed(torch.arange(length), parameter).clone()
            assert mine.to_local().tolist() == torch.arange(length).chunk(2)[rank].tolist()
            made: tuple[Any, ...] = (parameter, mine, torch.zeros_like(parameter), parameter.detach().norm())
            assert all(tensor.device_mesh.get_group() is group for tensor in made)
        total_norm(model)


@pytest.mark.parametrize(("shard", "tensor"), [(1, 2), (2, 1), (2, 2)])
def test_a_mesh_can_be_sliced_in_a_round_in_which_its_replica_is_another_one(shard: int, tensor: int) -> None:
    size, mesh = shard * tensor, None
    with own_ranks():
        for replica, replicas in ((1, 2), (0, 1), (2, 3)):
            dist.destroy_process_group()
            rank, ranks = replica * size + size - 1, replicas * size
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
            world = World(rank, ranks, size - 1, size, alone=False, replica_size=size)
            how: dict[str, Any] = {"forming": lambda **_: contextlib.nullcontext(), "outlives": True}
            mesh = ReplicaMesh.formed(world, "cpu", shard, tensor, 60.0, mesh, **how)
            for name, kept, length in zip(("shard", "tensor"), mesh.slices, (shard, tensor), strict=True):
                sliced = mesh.inner[name]
                assert (sliced.get_coordinate(), sliced.mesh.tolist()) == ((length - 1,), kept.mesh.tolist())
                assert sliced == kept
                assert DTensor.from_local(torch.ones(2), sliced, [Shard(0)]).to_local().tolist() == [1.0, 1.0]


def total_norm(model: nn.Module) -> None:
    """Have torch compute something of all parameters together."""
    torch.nn.utils.get_total_norm(model.parameters()).full_tensor()  # type: ignore[attr-defined]


def _distributed(whole: Tensor, like: Any) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def test_a_pass_that_broke_off_leaves_nothing() -> None:
    model = _sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = _step(model, optimizer)
    saved = _whole(model)
    model(torch.ones(2, 3))  # without a backward pass: parameters are gathered
    let_go(model)
    reshard(model, optimizer)
    model.load_state_dict({n: _distributed(w, p) for (n, w), p in zip(saved.items(), model.parameters(), strict=True)})
    assert _step(model, optimizer) < first


def test_within_a_pass_an_exchange_that_fails_gives_zeros_and_the_pass_ends_with_the_error() -> None:
    model = _sharded()
    parameters = Parameters(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sums = ShardSums(model, parameters, 1, 0, exact=False, outlives=True)
    output, error = torch.ones(3), RuntimeError("Connection closed by peer")

    def fail() -> None:
        raise error

    with sums.going_through():
        assert sums.exchanged(output, fail) is None
        assert not output.any()
        output.fill_(1.0)
        assert sums.exchanged(output, lambda: pytest.fail("nothing is exchanged any more")) is None
        assert not output.any()
        with pytest.raises(RuntimeError, match="Connection closed") as raised:
            sums.end_pass()
        assert raised.value is error is sums.failed


def test_after_a_failure_tensor_ranks_complete_what_they_exchange_within_their_replica() -> None:
    model = _sharded()
    mesh: Any = SimpleNamespace(data=RankGroup(1, 0), across=RankGroup(1, 0), tensor=RankGroup(2, 0))
    parameters = Parameters(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sums = ShardSums(model, parameters, 1, 0, exact=True, outlives=True, mesh=mesh)
    first, second = (RuntimeError(f"Connection closed by peer {number}") for number in (1, 2))
    with sums.going_through():
        sums.exchanged(torch.ones(1), lambda: _raise(first), inner=False)
        assert sums.exchanged(torch.ones(1), lambda: "done") == "done"
        sums.exchanged(torch.ones(1), lambda: pytest.fail("others are not in it any more"), inner=False)
        sums.exchanged(torch.ones(1), lambda: _raise(second))
        sums.exchanged(torch.ones(1), lambda: pytest.fail("the replica is broken"))
    assert sums.failed is first


def test_an_error_outside_of_a_pass_is_raised_at_once() -> None:
    model = _sharded()
    sums = ShardSums(model, Parameters(model, torch.optim.SGD(model.parameters())), 1, 0, exact=False, outlives=True)
    with pytest.raises(RuntimeError, match="closed"):
        sums.exchanged(torch.ones(1), lambda: _raise(RuntimeError("closed")))
    assert str(sums.failed) == "closed"


def test_where_the_process_ends_with_its_round_an_error_in_a_pass_is_raised() -> None:
    model = _sharded()
    sums = ShardSums(model, Parameters(model, torch.optim.SGD(model.parameters())), 1, 0, exact=False)
    with sums.going_through(), pytest.raises(RuntimeError, match="closed"):
        sums.exchanged(torch.ones(1), lambda: _raise(RuntimeError("closed")))


def _raise(error: Exception) -> None:
    raise error


class _OwnGather:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        output_tensor.copy_(input_tensor)


def test_what_cannot_be_sharded_again_is_named() -> None:
    model = _sharded()
    model[0].set_custom_all_gather(_OwnGather())
    assert "set_custom_all_gather" in obstacle(model)
    assert obstacle(nn.Linear(2, 2)) == ""


def test_sharded_tensors_of_the_script_keep_their_mesh() -> None:
    model = _sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert obstacle(model, [model, optimizer]) == ""
    average = nn.ParameterList([parameter.detach().clone() for parameter in model.parameters()])
    MADE.append(average)
    assert obstacle(model, [model, optimizer, average]).startswith("ParameterList has DTensors")
    optimizer.add_param_group({"params": [*average]})
    assert obstacle(model, [model, optimizer]).startswith("SGD has DTensors")


def test_after_a_failed_exchange_gradients_may_have_other_sizes() -> None:
    model = _sharded()
    parameters = Parameters(model, torch.optim.SGD(model.parameters()))
    sums = ShardSums(model, parameters, 1, 0, exact=False, outlives=True)
    scatter, output = sums._scatters[0], torch.ones(2)
    scatter.sizes[:] = [20]
    with pytest.raises(UsageError, match="did not compute one gradient"):
        scatter(output, torch.ones(2), dist.group.WORLD, dist.ReduceOp.SUM)
    scatter.made = 0
    with sums.going_through():
        sums.exchanged(torch.ones(1), lambda: _raise(RuntimeError("closed")))
        scatter(output, torch.ones(2), dist.group.WORLD, dist.ReduceOp.SUM)
    assert not output.any()


def test_a_gather_that_is_to_end_later_ends_at_once_where_its_work_could_raise_in_the_scripts_code() -> None:
    model = _sharded()
    sums = ShardSums(model, Parameters(model, torch.optim.SGD(model.parameters())), 1, 0, exact=False, outlives=True)
    output = torch.zeros(2)
    assert _Gather(sums)(output, torch.ones(2), dist.group.WORLD, async_op=True) is None
    assert output.all()


STARTS_AHEAD = """
import sys

import torch
import torch.distributed.fsdp

from elastic_launch.training import rounds
from elastic_launch.training.link import AgentLink
from elastic_launch.training.live.groups import RoundGroups

assert "torch._dynamo" not in sys.modules
rounds.wait_for_place = lambda arguments: sys.exit(0 if "torch._dynamo" in sys.modules else "not imported")
rounds.WorkerRounds(None, torch.device("cpu"), AgentLink(), RoundGroups(), timeout=1, live=None).find_place("")
"""


def test_a_process_that_starts_ahead_imports_what_fully_shard_needs_before_others_wait_for_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTS_AHEAD], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_fault_in_an_evaluation_that_is_repeated_does_not_count_as_the_scripts() -> None:
    """Its error comes from the script's evaluation, which has used the sharded model: again, after a first one."""
    failed = RuntimeError("Connection closed by peer")

    def evaluate(*_: object) -> None:
        raise failed

    nothing = contextlib.nullcontext()
    loop = Loop.__new__(Loop)
    loop._epochs = cast(Any, SimpleNamespace(position=lambda step: SimpleNamespace(epoch=0)))
    loop._options = cast(Any, SimpleNamespace(evaluations=SimpleNamespace(evaluate=evaluate), buffers={}))
    loop._step, loop._model, loop.engine = 5, torch.nn.Linear(1, 1), cast(Any, SimpleNamespace(checkpoint=None))
    loop._gradients = cast(Any, SimpleNamespace(failed=failed))
    loop._rounds = cast(Any, SimpleNamespace(link=SimpleNamespace(doing=lambda _: nothing), in_pass=lambda: nothing))
    rounds = cast(WorkerRounds, SimpleNamespace(caused=is_of_exchange))
    assert WorkerRounds.attempt(rounds, loop._evaluate) is failed
    loop._gradients = cast(Any, SimpleNamespace(failed=None))
    with pytest.raises(RuntimeError):
        WorkerRounds.attempt(rounds, loop._evaluate)
