"""Sharded models, in a world of this process alone; tests/integration/test_sharded.py has several processes."""

from __future__ import annotations

import shutil
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import elastic_launch as el
from elastic_launch.errors import UsageError
from elastic_launch.snapshot import state_sha256
from elastic_launch.snapshot.format import tree
from elastic_launch.training.checkpoints.manager import CheckpointManager
from elastic_launch.training.checkpoints.sharded import StateGatherer
from elastic_launch.training.checkpoints.state import TrainingState
from elastic_launch.training.gradients.sharded import clip, total_norm
from elastic_launch.training.live.groups import RoundGroups
from elastic_launch.training.rounds import WorkerRounds
from elastic_launch.training.session import Run
from elastic_launch.training.wrapped import ELEMENTWISE, check_elementwise, local, tensors_in

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own: it uses torch.jit.script
    from torch.distributed.optim import ZeroRedundancyOptimizer

DATA = TensorDataset(torch.linspace(-1, 1, 60).view(20, 3), torch.arange(20) % 4)


@pytest.fixture(scope="module")
def meshes() -> Iterator[list[DeviceMesh]]:
    """Meshes of one and of two dimensions. Sharded modules keep their groups: they are made once for all tests."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield [init_device_mesh("cpu", (1,)), init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))]
    finally:
        dist.destroy_process_group()


@pytest.fixture
def run(meshes: list[DeviceMesh]) -> Iterator[Run]:
    with el.session(threads=1) as run:
        yield run


class Branches(nn.Module):
    """Uses one of its parts in some micro-batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.always(x) + (self.sometimes(x) if x[0, 0] > 0 else 0)


def _model(shard: str = "fsdp") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4))
    return _sharded(model) if shard == "fsdp" else model


def _sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    if isinstance(model, nn.Sequential):
        fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _loader() -> el.ElasticLoader:
    return el.ElasticLoader(DATA, el.GlobalBatch(10, micro=4), seed=1)


def _trained(
    until: int, directory: Path | None = None, *, shard: str = "fsdp", exact: bool = True
) -> dict[str, Tensor]:
    """Return the weights after some steps of a training in a session of its own."""
    model = _model(shard)
    optimizer: Any = (
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        if shard == "zero"
        else torch.optim.AdamW(model.parameters(), lr=0.01)
    )
    saving: Any = {} if directory is None else {"checkpoint": el.Checkpoint(directory, every=2)}
    with el.session(threads=1) as run:
        for step in run.steps(_loader(), model, optimizer, until=f"{until}ba", exact=exact, **saving):
            for x, y in step:
                step.backward(nn.functional.cross_entropy(model(x), y))
            assert step.grad_norm() > 0
            step.update(clip_norm=0.1)
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in model.state_dict().items()}


@pytest.mark.usefixtures("meshes")
@pytest.mark.parametrize("shard", ["fsdp", "zero"])
def test_exact_mode_gives_the_weights_of_the_unsharded_model_also_when_resumed(tmp_path: Path, shard: str) -> None:
    expected = state_sha256(_trained(6, shard="none"))
    _trained(4, tmp_path, shard=shard)
    if shard == "fsdp":
        # A checkpoint has whole tensors: an unsharded model goes on from it.
        shutil.copytree(tmp_path, tmp_path / "copy")
        assert state_sha256(_trained(6, tmp_path / "copy", shard="none")) == expected
    assert state_sha256(_trained(6, tmp_path, shard=shard)) == expected
    assert type(el.load_checkpoint(tmp_path)["model"]["0.weight"]) is Tensor


@pytest.mark.usefixtures("meshes")
@pytest.mark.parametrize("shard", ["fsdp", "zero"])
def test_frozen_weights_are_left_out_of_the_states_of_a_sharded_model(tmp_path: Path, shard: str) -> None:
    def trained(until: int, name: str, shard: str = shard, change: float = 0.0, later: float = 0.0) -> str:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4))
        model[0].requires_grad_(False)
        model[0].bias.data[1] += change
        model = _sharded(model) if shard == "fsdp" else model
        trained = [p for p in model.parameters() if p.requires_grad]
        adam: Any = torch.optim.AdamW
        optimizer: Any = ZeroRedundancyOptimizer(trained, adam) if shard == "zero" else adam(trained)
        saving = el.Checkpoint(tmp_path / name, every=1, skip_frozen=True)
        with el.session(threads=1) as run:
            for step in run.steps(_loader(), model, optimizer, until=f"{until}ba", exact=True, checkpoint=saving):
                for x, y in step:
                    step.backward(nn.functional.cross_entropy(step.model(x), y))
                step.update()
                weight = model[0].bias.data
                (weight.to_local() if shard == "fsdp" else weight)[1] += later
        return el.weights_sha256(model)

    expected = trained(4, "undisturbed", "none")
    trained(2, "saved")
    assert set(el.load_checkpoint(tmp_path / "saved")["model"]) == {"2.weight", "2.bias"}
    with pytest.raises(UsageError, match="other values of the frozen weights of model"):
        trained(4, "saved", change=1e-3)
    if shard == "fsdp":
        shutil.copytree(tmp_path / "saved", tmp_path / "copy")
        assert trained(4, "copy", "none") == expected
    assert trained(4, "saved") == expected
    with pytest.raises(UsageError, match=r"'0\.bias' of model is frozen, and its values have changed"):
        trained(4, "changed", later=1e-3)


@pytest.mark.usefixtures("meshes")
def test_default_mode_gives_about_the_same_weights() -> None:
    found, expected = _trained(6, exact=False), _trained(6, shard="none")
    del found["0.bias"], expected["0.bias"]  # before a BatchNorm its gradient is rounding, which AdamW makes large
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_the_hash_of_a_sharded_model_is_that_of_the_whole(run: Run) -> None:
    assert el.weights_sha256(_model()) == el.weights_sha256(_model("none"))


@pytest.mark.parametrize("exact", [False, True])
def test_the_norm_over_sharded_and_other_gradients(run: Run, exact: bool) -> None:
    model, own = _model(), nn.Parameter(torch.zeros(3))
    gradients = [torch.full_like(p, 2.0) for p in model.parameters()]
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        p.grad = gradient
    own.grad = torch.full((3,), 2.0)
    count = sum(p.numel() for p in model.parameters()) + 3
    assert float(total_norm([*gradients, own.grad], exact=exact)) == pytest.approx(2 * count**0.5)
    assert float(clip([*model.parameters(), own], 1.0, exact=exact)) == pytest.approx(2 * count**0.5)
    assert float(total_norm([*gradients, own.grad], exact=exact)) == pytest.approx(1.0, rel=1e-4)


def _go(run: Run, model: Any, optimizer: Any = None, loader: Any = None, **options: Any) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    for step in run.steps(loader or _loader(), model, optimizer, until="2ba", **options):
        for x, y in step:
            step.backward(nn.functional.cross_entropy(step.model(x), y))
        step.update()


def test_a_trainer_takes_what_torch_compile_returns(run: Run) -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model: Any = _sharded(nn.Linear(3, 4))
        model = torch.compile(model, backend="eager") if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        trainer = el.Trainer(run, model, optimizer, _loader(), loss_fn=nn.functional.cross_entropy, exact=True)
        trainer.fit("2ba")
        found.append([p.full_tensor() for p in model.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_what_a_sharded_model_cannot_be_trained_with(run: Run) -> None:
    model = _model()
    with pytest.raises(UsageError, match="scaler"):
        _go(run, model, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(UsageError, match="of several models none may be sharded"):
        _go(run, {"a": model}, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(UsageError, match=r"exact=True: .* SGD\(fused=True\)|exact=True: SGD\(fused=True\)"):
        _go(run, model, torch.optim.SGD(model.parameters(), 0.1, fused=True), exact=True)
    trainer = el.Trainer(
        run, model, torch.optim.SGD(model.parameters(), 0.1), el.ElasticLoader(DATA, el.GlobalBatch(8, "auto")),
        loss_fn=nn.functional.cross_entropy,
    )  # fmt: skip
    with pytest.raises(UsageError, match=r'micro="auto" does not work with a sharded model'):
        trainer.fit("1ba")


def test_parameters_may_be_used_by_some_micro_batches_or_none(run: Run) -> None:
    """Those that no micro-batch of a step has used have no gradient in it, as in a model that is not sharded."""
    found = []
    for shard in (True, False):
        torch.manual_seed(0)
        model = Branches()
        model.never = nn.Linear(2, 2)
        model = _sharded(model) if shard else model
        _go(run, model, torch.optim.AdamW(model.parameters(), 0.1), exact=True)
        assert model.never.weight.grad is None
        found.append(el.weights_sha256(model))
    assert found[0] == found[1]


def test_a_module_that_is_sharded_by_itself_must_be_called(run: Run) -> None:
    model = Branches()
    model.never = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(UsageError, match=r"did not compute one gradient for each parameter, such as never\.weight"):
        _go(run, _sharded(model))


@pytest.mark.parametrize("exact", [True, False])
def test_a_backward_pass_of_the_scripts_own_is_refused_and_a_gradient_of_inputs_is_not(run: Run, exact: bool) -> None:
    def trained(model: nn.Module, *, own: bool) -> str:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in run.steps(_loader(), model, optimizer, until="2ba", exact=exact):
            for x, y in step:
                inputs = x.clone().requires_grad_()
                loss = nn.functional.cross_entropy(step.model(inputs), y)
                if own:
                    loss.backward()  # type: ignore[no-untyped-call]
                (gradient,) = torch.autograd.grad(loss, inputs)
                step.backward(nn.functional.cross_entropy(step.model(x + gradient.sign()), y))
            step.update()
        return el.weights_sha256(model)

    found, expected = trained(_model(), own=False), trained(_model("none"), own=False)
    assert found == expected or not exact
    with pytest.raises(UsageError, match="run a backward pass itself that reaches parameters of the sharded model"):
        trained(_model(), own=True)


def test_sparse_gradients_are_refused_by_name(run: Run) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Embedding(4, 2, sparse=True))
    with pytest.raises(UsageError, match=r"1\.weight, of an embedding with sparse=True, gets a sparse gradient"):
        _go(run, _sharded(model))


@pytest.mark.usefixtures("meshes")
@pytest.mark.parametrize("saved_by", ["fsdp", "none"])
def test_a_loop_with_hooks_saves_dtensors_whole_and_resumes_them(tmp_path: Path, saved_by: str) -> None:
    """By the hooks alone: the loop has its own pass and step."""

    def trained(until: int, directory: Path, shard: str) -> dict[str, Tensor]:
        model = _model(shard)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with el.session(threads=1) as run:
            run.register("model", model)
            run.register("optimizer", optimizer)
            step = run.resume(el.Checkpoint(directory, every=1), {})
            while step < until:
                optimizer.zero_grad()
                x, y = DATA[step * 5 : step * 5 + 5]
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                step += 1
                run.boundary(step, end=step == until)
        return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in model.state_dict().items()}

    expected = trained(4, tmp_path / "undisturbed", "none")
    trained(2, tmp_path / "saved", saved_by)
    assert all(type(x) is Tensor for x in el.load_checkpoint(tmp_path / "saved")["model"].values())
    torch.testing.assert_close(trained(4, tmp_path / "saved", "fsdp"), expected)


@pytest.mark.usefixtures("meshes")
@pytest.mark.parametrize("nested", [lambda x: {"first": x}, lambda x: [{"first": [x]}]])
def test_an_optimizer_may_have_its_shards_in_lists_and_dicts(nested: Callable[[Tensor], Any]) -> None:
    model = _model()
    parameter: Any = model[0].weight  # type: ignore[index]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moments = torch.full_like(parameter.detach(), 2.0)
    optimizer.state[parameter] = {"moments": nested(moments), "count": [torch.ones(3)]}
    state = TrainingState().extended({"model": model, "optimizer": optimizer})
    tensors, rest = tree.encode(state.capture())
    found = tree.decode(rest, tensors, state.taking({"orders": state.orders()}))["optimizer"]["state"][0]
    (shard,) = tensors_in(found["moments"])
    assert (shard.placements, shard.device_mesh) == (parameter.placements, parameter.device_mesh)  # type: ignore[attr-defined]
    assert torch.equal(shard.to_local(), moments.to_local())  # type: ignore[attr-defined]
    assert type(found["count"][0]) is Tensor
    assert state.captured_here() is not None


def test_a_dtensor_that_fully_shard_did_not_make_is_refused(run: Run, meshes: list[DeviceMesh]) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    model = nn.Linear(3, 4)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), meshes[0], [Shard(0)]))
    with pytest.raises(UsageError, match="weight is a DTensor, and fully_shard has not sharded the model"):
        _go(run, model)
    sharded = _sharded(nn.Sequential(nn.Linear(3, 4)))
    sharded.other = nn.Linear(1, 1)
    sharded.other.weight = nn.Parameter(distribute_tensor(torch.ones(1, 1), meshes[1], [Replicate(), Shard(0)]))
    with pytest.raises(UsageError, match=r"other\.weight is a DTensor with the placements"):
        _go(run, sharded)


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE))
def test_optimizers_that_exact_mode_accepts_treat_a_shard_as_the_whole(kind: str) -> None:
    name = kind.rpartition(".")[2]
    torch.manual_seed(0)
    start, gradients = torch.randn(103, 3), torch.randn(4, 103, 3).exp()
    for foreach in (False, True):

        def trained(part: slice, foreach: bool = foreach) -> Tensor:
            parameter = nn.Parameter(start[part].clone())
            optimizer = getattr(torch.optim, name)([parameter], lr=0.013, foreach=foreach)
            check_elementwise([optimizer])
            for gradient in gradients:
                parameter.grad = gradient[part].clone()
                optimizer.step()
            return parameter.detach()

        whole = trained(slice(None))
        for size in (21, 26, 35, 52):
            parts = [trained(slice(at, at + size)) for at in range(0, 103, size)]
            assert torch.equal(torch.cat(parts), whole), (name, foreach, size)


def test_other_optimizers_are_refused_in_exact_mode() -> None:
    parameter = nn.Parameter(torch.ones(2))
    with pytest.raises(UsageError, match="not known whether LBFGS changes each element"):
        check_elementwise([torch.optim.LBFGS([parameter])])
    with pytest.raises(UsageError, match=r"AdamW\(fused=True\) rounds the last elements"):
        check_elementwise([torch.optim.AdamW([parameter], fused=True)])


def test_a_tensor_that_this_rank_has_whole_is_not_taken_for_a_copy(run: Run) -> None:
    """A writer reads what was made for it while the training goes on."""
    model = _model()
    gatherer = StateGatherer(keep=True)
    state = gatherer.state(model)
    mine = {p.to_local().data_ptr() for p in model.parameters() if hasattr(p, "to_local")}
    assert mine & {x.data_ptr() for x in state.values()}
    assert not mine & gatherer.own


@pytest.mark.parametrize("each_step", [False, True])
def test_what_is_gathered_for_a_checkpoint_is_confirmed_before_it_is_saved(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, each_step: bool
) -> None:
    """On GPUs, a gather that was aborted raises no error; ``each_step``: as with live="confirmed"."""
    done: list[str] = []

    def noting(kind: Any, name: str) -> None:
        real = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *args, **how: (done.append(name), real(*args, **how))[1])

    def agreed(rounds: WorkerRounds, *, aborts: bool) -> None:
        rounds.confirms, rounds.doubts = each_step, not each_step

    monkeypatch.setattr(WorkerRounds, "agreed", agreed)
    noting(StateGatherer, "state")
    noting(RoundGroups, "confirm")
    noting(CheckpointManager, "save")
    _go(run, _model(), checkpoint=el.Checkpoint(tmp_path, every=1), exact=True)
    at = [number for number, each in enumerate(done) if each == "save"]
    assert len(at) == 2
    for number in at:
        assert done[number - 2 : number] == ["state", "confirm"]


def test_a_state_that_is_gathered_keeps_the_types_of_its_dicts(run: Run) -> None:
    gatherer = StateGatherer(keep=True)
    part = SimpleNamespace(state_dict=lambda: {"by name": defaultdict(list, a=[1])})
    found = gatherer.state(part)
    assert found == {"by name": {"a": [1]}}
    assert found["by name"]["b"] == []
    assert gatherer.state(_model())._metadata.keys() == _model().state_dict()._metadata.keys()


@pytest.mark.parametrize("sharded", [True, False])
def test_gradients_that_the_script_clears_before_each_micro_batch_count(run: Run, sharded: bool) -> None:
    def weights(clear: Callable[[nn.Module], object]) -> list[Tensor]:
        model = _model() if sharded else _model("none")
        for step in run.steps(_loader(), model, torch.optim.SGD(model.parameters(), 0.1), until="3ba"):
            for x, y in step:
                clear(model)
                step.backward(nn.functional.cross_entropy(step.model(x), y))
            step.update()
        return [local(p).detach() for p in model.parameters()]

    expected = weights(lambda model: None)
    for found in (weights(lambda model: model.zero_grad()), weights(lambda model: model.zero_grad(set_to_none=False))):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("exact", [True, False])
def test_a_model_may_be_gathered_at_the_end_of_a_step(run: Run, exact: bool, caplog: pytest.LogCaptureFixture) -> None:
    """By a forward pass without gradients, or because it is not resharded after the backward pass."""
    model: Any = _model()
    model.set_reshard_after_backward(False)
    for step in run.steps(_loader(), model, torch.optim.SGD(model.parameters(), 0.1), until="3ba", exact=exact):
        for x, y in step:
            step.backward(nn.functional.cross_entropy(step.model(x), y))
            with torch.no_grad():
                step.model.eval()(x)
                step.model.train()
        step.update()
    assert "changed" not in caplog.text
