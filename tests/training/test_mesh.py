"""Meshes of replicas in a world of this process alone; tests/integration/test_meshed.py has several processes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import elastic_launch as el
from elastic_launch.errors import UsageError
from elastic_launch.snapshot.format import tree
from elastic_launch.training.checkpoints.state import TrainingState
from elastic_launch.training.gradients import sharded
from elastic_launch.training.ranks.mesh import check_shape
from elastic_launch.training.ranks.world import World
from elastic_launch.training.session import Run
from elastic_launch.training.wrapped import is_sharded, local

DATA = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 60).view(20, 3), torch.arange(20) % 4)


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A process group for all tests: sharded modules keep it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def run(group: None) -> Iterator[Run]:
    with el.session(threads=1) as run:
        yield run


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4), nn.LayerNorm(4))


def _parallel(model: nn.Sequential, mesh: Any) -> nn.Sequential:
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def _train(run: Run, model: nn.Module, *, exact: bool = True, **options: Any) -> str:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = el.ElasticLoader(DATA, el.GlobalBatch(10, micro=4), seed=1)
    for step in run.steps(loader, model, optimizer, until="3ba", exact=exact, **options):
        for x, y in step:
            step.backward(nn.functional.cross_entropy(step.model(x), y))
        assert step.grad_norm() > 0
        step.update(clip_norm=0.1)
    return el.weights_sha256(model)


@pytest.mark.parametrize("kind", ["shard", "tensor", "both"])
def test_a_replica_of_one_rank_gives_the_weights_of_the_undivided_model(run: Run, kind: str) -> None:
    model, mesh = _model(), run.mesh()
    assert mesh.mesh_dim_names == ("shard", "tensor")
    assert run.mesh(shard=1, tensor=1) is mesh
    if kind != "shard":
        _parallel(model, mesh)
    if kind != "tensor":
        fully_shard(model, mesh=mesh["shard"])
    assert _train(run, model) == _train(run, _model())


def _refused(match: str) -> Any:
    return pytest.raises(UsageError, match=match)


def test_a_shape_that_does_not_fit_is_an_error(group: None) -> None:
    world = World(rank=0, world_size=12, local_world_size=6, nodes=2, alone=False)
    check_shape(world, 3, 2)
    check_shape(world, 1, 2)
    with _refused(r"run.mesh\(shard=2, tensor=2\): a replica has 4 ranks on one node, and the 6 workers of this node"):
        check_shape(world, 2, 2)
    for size in (0, True, 1.0, "2"):
        with _refused("a whole number of ranks, 1 or more"):
            check_shape(world, 1, size)  # type: ignore[arg-type]
    world = World(rank=0, world_size=12, local_world_size=6, nodes=2, alone=False, replica_size=3)
    check_shape(world, 3, 1)
    with _refused("a replica has 6 ranks, and the launcher's replicas have 3"):
        check_shape(world, 3, 2)


def test_without_a_process_group_there_is_no_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with el.session() as run, _refused(r"run.mesh\(shard=2, tensor=1\) needs a process group"):
        run.mesh(shard=2)


def test_a_shape_without_ranks_is_refused(run: Run) -> None:
    with _refused(r"run.mesh\(shard=0, tensor=1\): a dimension has a whole number of ranks, 1 or more"):
        run.mesh(shard=0)


def test_a_run_has_one_shape_which_is_known_before_it_trains(run: Run) -> None:
    optimizer_of = torch.optim.SGD
    model = _model()
    loader = el.ElasticLoader(DATA, el.GlobalBatch(10, micro=4))
    for _ in run.steps(loader, model, optimizer_of(model.parameters(), 0.1), until="1ba"):
        with _refused(r"run.mesh\(\) came after run.steps\(\)"):
            run.mesh()
        break
    run.mesh()
    with _refused(r"run.mesh\(shard=2, tensor=1\) came after run.mesh\(shard=1, tensor=1\)"):
        run.mesh(shard=2)


def test_what_is_made_of_meshes_has_their_rank_until_the_session_ends(group: None) -> None:
    before = [vars(DeviceMesh)[name] for name in ("__init__", "_get_mesh_tensor_from_full_mesh")]
    with el.session(threads=1) as run:
        mesh = run.mesh(shard=1, tensor=1)
        mesh._rank = 7  # as in a round in which this process is another rank
        assert mesh["tensor"]._rank == 7
    assert before == [vars(DeviceMesh)[name] for name in ("__init__", "_get_mesh_tensor_from_full_mesh")]


def test_copies_of_a_mesh_such_as_those_of_the_compiler_do_not_keep_its_groups(group: None) -> None:
    with el.session(threads=1) as run:
        mesh = run.mesh(shard=1, tensor=1)
        copies = [copy.deepcopy(mesh), copy.deepcopy(mesh["tensor"])._root_mesh]
        assert all(each is not mesh and each._pg_registry == mesh._pg_registry != {} for each in copies)
    assert not any(each._pg_registry for each in copies)


def test_other_meshes_are_refused_by_name(run: Run) -> None:
    own = init_device_mesh("cpu", (1, 1), mesh_dim_names=("shard", "tensor"))
    with _refused(r"0\.weight is a DTensor, and fully_shard has not sharded the model") as refused:
        _train(run, _parallel(_model(), own))
    assert "run.mesh(shard=S, tensor=T)" in refused.value.hint
    with _refused(r"the library does not know how to reduce its gradients"):
        _train(run, fully_shard(_parallel(_model(), own), mesh=own["shard"]))
    mesh = run.mesh()
    with _refused(r"fully_shard\(mesh=...\) got a mesh of two dimensions") as refused:
        _train(run, fully_shard(_model(), mesh=mesh))
    assert 'fully_shard(module, mesh=mesh["shard"])' in refused.value.hint
    with _refused(r"which is not of run.mesh\(\)"):
        _train(run, fully_shard(_model(), mesh=init_device_mesh("cpu", (1,))))


def test_what_a_divided_model_cannot_be_trained_with(run: Run) -> None:
    model = _parallel(_model(), run.mesh())
    with _refused("scaler"):
        _train(run, model, scaler=torch.amp.GradScaler("cpu"), exact=False)
    with _refused("cannot be computed with a sharded model"):
        _train(run, model, verify="100%")


def test_tensor_ranks_are_told_apart_from_those_with_micro_batches() -> None:
    worlds = [World(rank=rank, world_size=8, tensor=2) for rank in range(8)]
    assert [world.data_rank for world in worlds] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {world.data_size for world in worlds} == {4}
    assert [world.speaks for world in worlds] == [True, False] * 4


@pytest.mark.parametrize(("length", "fits"), [(10, True), (50304, True), (50257, False), (33, False)])
def test_a_dimension_that_both_dimensions_of_a_mesh_cut_has_parts_that_fit(length: int, fits: bool) -> None:
    assert sharded._fit(length, 4, 2) is fits


def test_a_rank_with_the_same_shards_takes_over_a_state_that_is_sent_without_its_mesh(run: Run) -> None:
    mesh = run.mesh()
    model = _parallel(_model(), mesh)
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    loader = el.ElasticLoader(DATA, el.GlobalBatch(10, micro=4), seed=1)
    for step in run.steps(loader, model, optimizer, until="2ba"):
        for x, y in step:
            step.backward(nn.functional.cross_entropy(step.model(x), y))
        step.update()
    state = TrainingState().extended({"model": model, "optimizer": optimizer})
    sent = state.captured_here()
    assert sent is not None
    tensors, rest = tree.encode(sent)
    assert not any(map(is_sharded, tensors.values()))
    cut = state.taking({"orders": state.orders()})
    assert cut is not None
    found, own = cut.as_received(tree.decode(rest, tensors)), state.own()
    assert is_sharded(found["model"]["0.weight"])
    pairs = [(found["model"][name], value) for name, value in own["model"].items()]
    for number, values in own["optimizer"]["state"].items():
        pairs += [(found["optimizer"]["state"][number][key], value) for key, value in values.items()]
    assert len(pairs) == 6 + 6 * 3
    for taken, value in pairs:
        assert torch.equal(local(taken), local(value))
        assert is_sharded(taken) == is_sharded(value)
        if is_sharded(value):
            assert (taken.shape, taken.placements, taken.device_mesh) == (
                value.shape,
                value.placements,
                value.device_mesh,
            )


def test_a_dtensor_that_another_rank_could_not_make_is_not_sent(run: Run) -> None:
    model = fully_shard(_model(), mesh=run.mesh()["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainingState().extended({"model": model, "optimizer": optimizer})
    assert state.captured_here() is not None
    optimizer.state[model[0].weight] = {"rows": model[0].weight.detach().sum(dim=1)}  # not of the parameter's shape
    assert state.captured_here() is None
