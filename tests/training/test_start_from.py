"""A training that begins from another training's checkpoint."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SCRIPTS, Job, run_script
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.utils.data import TensorDataset

import elastic_launch as el
from elastic_launch.errors import UsageError
from elastic_launch.faults import FaultPlan
from elastic_launch.training.engine import Engine
from elastic_launch.training.ranks.world import World
from elastic_launch.training.session import Run

SCRIPT = str(SCRIPTS / "starting.py")
DATA = torch.randn(48, 3, generator=torch.Generator().manual_seed(1))


def test_relative_directories_are_those_of_the_construction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = el.Checkpoint("own", start_from="other")
    with pytest.raises(UsageError, match="its own directory"):
        el.Checkpoint("own", start_from=tmp_path / "own")
    monkeypatch.chdir("/")
    assert checkpoint.directory == tmp_path / "own"
    assert checkpoint.start_from is not None
    assert checkpoint.start_from.place == tmp_path / "other"


class Trained:
    """What a training had when it ended, and the state that it began with."""

    def __init__(self, run: Run, steps: list[int], first: dict[str, Any], model: nn.Module) -> None:
        self.worlds, self.steps, self.first = run.worlds, steps, first
        self.weights = el.weights_sha256(model)


def train(
    checkpoint: el.Checkpoint,
    until: str = "4ba",
    *,
    size: int = 8,
    samples: int = 24,
    seed: int = 0,
    shuffle: bool = True,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    schedule: bool = False,
    parts: dict[str, Any] | None = None,
) -> Trained:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    made = optimizer(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(made, 2) if schedule else None
    data = TensorDataset(DATA[:samples], DATA[:samples].sum(1, keepdim=True))
    loader = el.ElasticLoader(data, el.GlobalBatch(size, 4), seed=seed, shuffle=shuffle)
    steps, first = [], {}
    options = {"checkpoint": checkpoint, "exact": True, "scheduler": scheduler}
    with el.session() as run:
        for name, part in (parts or {}).items():
            run.register(name, part)
        for step in run.steps(loader, model, made, until=until, **options):
            if not steps:
                first = {"weights": el.weights_sha256(model), "optimizer": deepcopy(made.state_dict()["state"])}
            for x, y in step:
                step.backward(nn.functional.mse_loss(step.model(x), y))
            step.update()
            if scheduler is not None:
                scheduler.step()
            steps.append(step.number)
    return Trained(run, steps, first, model)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trained]:
    """With checkpoints of steps 2 and 4. Each ends a training: within one, the next may come before one is written."""
    directory = tmp_path_factory.mktemp("pretrained")
    train(el.Checkpoint(directory), "2ba")
    return directory, train(el.Checkpoint(directory), "4ba")


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_weights_only_begin_a_training_of_its_own(
    pretrained: tuple[Path, Trained], tmp_path: Path, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory, before = pretrained
    saving = el.Checkpoint(f"{scheme}{tmp_path}/own", every=1, start_from=f"{scheme}{directory}", weights_only=True)
    tuned = train(saving, "2ba", size=4, samples=16, seed=9, optimizer=torch.optim.SGD)
    assert tuned.steps == [1, 2]
    assert tuned.first == {"weights": before.weights, "optimizer": {}}
    assert tuned.worlds == [1]
    assert re.search(
        rf"begins at step 0 with model of the checkpoint of step 4 in \S*{directory}\S*; not taken: optimizer, "
        "the number of steps; different: not compared",
        caplog.text,
    )


def test_a_restart_goes_on_from_its_own_checkpoint(pretrained: tuple[Path, Trained], tmp_path: Path) -> None:
    """Also if what it began from is gone, or has gone on."""
    start = shutil.copytree(pretrained[0], tmp_path / "start")

    def saving() -> el.Checkpoint:
        return el.Checkpoint(tmp_path / "own", every=1, start_from=start, weights_only=True)

    first = train(saving(), "2ba", size=4)
    shutil.rmtree(start)
    again = train(saving(), "3ba", size=4)
    assert again.steps == [3]
    assert again.first["weights"] == first.weights
    with pytest.raises(UsageError, match="was made with global batch 4, this training has 8"):
        train(saving(), "3ba", size=8)


def test_all_of_a_training_goes_on_with_the_wanted_differences(
    pretrained: tuple[Path, Trained], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory, before = pretrained
    allow = ["global batch", "dataset length", "seed"]
    larger = train(
        el.Checkpoint(tmp_path / "larger", start_from=directory, allow=allow), "6ba", size=16, samples=48, seed=3
    )
    assert larger.steps == [5, 6]
    assert larger.first["weights"] == before.weights
    assert larger.first["optimizer"][0]["step"] == 4
    assert larger.worlds == [1, 1, 1]
    assert "not taken: nothing; different: global batch 8 (here 16), seed 0 (here 3), dataset" in caplog.text
    # The new training's own identity counts from now on.
    assert train(el.Checkpoint(tmp_path / "larger"), "7ba", size=16, samples=48, seed=3).steps == [7]


def test_without_a_difference_it_is_the_same_training(pretrained: tuple[Path, Trained], tmp_path: Path) -> None:
    branched = train(el.Checkpoint(tmp_path / "branch", start_from=pretrained[0]), "6ba")
    resumed = train(el.Checkpoint(shutil.copytree(pretrained[0], tmp_path / "copy")), "6ba")
    assert branched.weights == resumed.weights


@pytest.mark.parametrize("step", [2, 4])
def test_one_checkpoint_is_named_by_its_directory(pretrained: tuple[Path, Trained], tmp_path: Path, step: int) -> None:
    (place,) = pretrained[0].glob(f"step-{step}.*")
    assert train(el.Checkpoint(tmp_path, start_from=place), "6ba").steps[0] == step + 1


def test_other_differences_are_refused_all_at_once(pretrained: tuple[Path, Trained], tmp_path: Path) -> None:
    with pytest.raises(
        UsageError,
        match=r"step 4 in .* was made with another global batch 8 \(here 4\), dataset length 24 \(here 48\), order of "
        r"samples .*\n.*allow=\['global batch', 'dataset length', 'order of samples'\]\). Or weights_only=True",
    ):
        train(el.Checkpoint(tmp_path, start_from=pretrained[0]), size=4, samples=48)
    with pytest.raises(UsageError, match=r"another dataset length 24 \(here 48\)\.\n"):
        train(el.Checkpoint(tmp_path, start_from=pretrained[0], allow=["global batch"]), size=4, samples=48)
    with pytest.raises(UsageError, match="another order of samples"):
        train(el.Checkpoint(tmp_path, start_from=pretrained[0]), shuffle=False)
    assert not list(tmp_path.glob("step-*"))
    train(el.Checkpoint(tmp_path, start_from=pretrained[0], allow=["order of samples"]), "5ba", shuffle=False)


def test_an_unknown_name_lists_the_known_ones(pretrained: tuple[Path, Trained], tmp_path: Path) -> None:
    with pytest.raises(
        UsageError,
        match=r"names 'batch size', .*\n.*Known: 'global batch', 'seed', 'dataset length', 'order of "
        "samples', 'micro-batch', 'model', 'optimizer'",
    ):
        train(el.Checkpoint(tmp_path, start_from=pretrained[0], allow=["batch size"]))


def test_parts_that_differ_begin_anew_if_allowed(pretrained: tuple[Path, Trained], tmp_path: Path) -> None:
    directory, before = pretrained
    changes: list[dict[str, Any]] = [
        {"schedule": True},
        {"optimizer": torch.optim.SGD},
        {"parts": {"x": nn.Linear(1, 1)}},
    ]
    for change, name in zip(changes, ("scheduler", "optimizer", "x"), strict=True):
        with pytest.raises(UsageError, match=rf"allow=\['{name}'\] to begin with the rest of it"):
            train(el.Checkpoint(tmp_path / name, start_from=directory), "5ba", **change)
        began = train(el.Checkpoint(tmp_path / name, start_from=directory, allow=[name]), "5ba", **change)
        assert began.steps == [5]
        assert began.first["weights"] == before.weights
    assert began.first["optimizer"][0]["step"] == 4


def test_weights_that_the_checkpoint_lacks_are_an_error_unless_allowed(
    pretrained: tuple[Path, Trained], tmp_path: Path
) -> None:
    more = {"head": nn.Linear(1, 1)}
    with pytest.raises(UsageError, match="has no head, which this script has"):
        train(el.Checkpoint(tmp_path, start_from=pretrained[0], weights_only=True), parts=more)
    start = el.Checkpoint(tmp_path, start_from=pretrained[0], weights_only=True, allow=["head"])
    assert train(start, parts=more).first["weights"] == pretrained[1].weights


def test_arguments_that_do_not_fit_are_refused(pretrained: tuple[Path, Trained], tmp_path: Path) -> None:
    for arguments, message in (
        ({"weights_only": True}, "came without start_from="),
        ({"allow": ["seed"]}, "came without start_from="),
        ({"start_from": tmp_path, "allow": "seed"}, r"Give a list: allow=\['seed'\]"),
        ({"start_from": tmp_path}, "is its own directory"),
    ):
        with pytest.raises(UsageError, match=message):
            el.Checkpoint(tmp_path, **arguments)
    with pytest.raises(el.CheckpointReadError, match="There is no checkpoint in"):
        train(el.Checkpoint(tmp_path, start_from=tmp_path / "nothing"))
    assert not tmp_path.exists() or not list(tmp_path.glob("step-*"))


def test_a_loop_of_its_own_begins_with_the_registered_parts(tmp_path: Path) -> None:
    made: list[Run] = []

    def begin(directory: Path, **start: Any) -> tuple[int, nn.Linear, torch.optim.SGD, Run]:
        run, model = Run(Engine(World(), torch.device("cpu"))), nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        run.register("net", model)
        run.register("optimizer", optimizer)
        step = run.resume(el.Checkpoint(directory, every=1, **start), {"batch": 8 if start else 4})
        made.append(run)
        return step, model, optimizer, run

    _, model, optimizer, run = begin(tmp_path / "a")
    optimizer.param_groups[0]["lr"] = 0.5
    run.boundary(1, end=True)
    run._engine.close()
    step, other, theirs, _ = begin(tmp_path / "b", start_from=tmp_path / "a", allow=["batch"])
    assert (step, theirs.param_groups[0]["lr"]) == (1, 0.5)
    assert el.weights_sha256(other) == el.weights_sha256(model)
    step, other, theirs, _ = begin(tmp_path / "c", start_from=tmp_path / "a", weights_only=True)
    assert (step, theirs.param_groups[0]["lr"]) == (0, 1.0)
    assert el.weights_sha256(other) == el.weights_sha256(model)
    for run in made:
        run._engine.release()


def _launched(job: Job, *arguments: str, workers: int = 2, faults: dict[str, str] | None = None) -> tuple[str, str]:
    flags = ["--standalone", "--nproc", str(workers), "--max-restarts", "1"]
    agent = job.launch(*flags, command=[SCRIPT, *arguments], env=faults or {}, name=f"run{len(job.agents)}")
    assert agent.wait(90) == 0, agent.output
    found = re.search(r"steps (\d+ to \d+), weights (\w+)", agent.output)
    assert found, agent.output
    return found[1], found[2]


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param(["--weights-only"], marks=pytest.mark.soak), []], ids=["weights", "all"])
def test_a_worker_that_is_killed_costs_nothing_of_what_it_began_with(job: Job, how: list[str]) -> None:
    """In the first round no state is in storage, and the first snapshot may be that of another start."""
    run_script(SCRIPT, str(job.work / "a"), "--until", "3ba")
    start = ["--start-from", str(job.work / "a"), "--size", "16", *how]
    first = 1 if how else 4
    alone = _launched(job, str(job.work / "b"), *start, workers=1)
    assert alone[0] == f"{first} to 8"
    for number, at in enumerate((first, first + 2)):
        faults = FaultPlan.fail_at(1, at).environment()
        assert _launched(job, str(job.work / f"c{number}"), *start, faults=faults)[1] == alone[1]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("allow", [(), ("optimizer",)])
def test_torchs_checkpoint_has_the_states_of_several_optimizers(tmp_path: Path, allow: tuple[str, ...]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    several = {str(n): torch.optim.Adam(layer.parameters(), lr=0.1) for n, layer in enumerate(model)}
    model(torch.ones(2, 3)).sum().backward()
    for each in several.values():
        each.step()
    saved = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, [*several.values()])}
    saved["seen/words"] = nn.BatchNorm1d(1).state_dict() | {"num_batches_tracked": torch.tensor(7)}
    dcp.save(saved, checkpoint_id=tmp_path / "torch")
    several = {str(n): torch.optim.Adam(layer.parameters(), lr=0.1) for n, layer in enumerate(model)}
    checkpoint = el.Checkpoint(tmp_path / "own", every=5, start_from=tmp_path / "torch", allow=allow)
    loader = el.ElasticLoader(TensorDataset(torch.ones(8, 3)), el.GlobalBatch(4, 4))
    seen = nn.BatchNorm1d(1)
    with el.session() as run:
        run.register("seen/words", seen)
        for step in run.steps(loader, model, several, until="1ba", checkpoint=checkpoint):
            for (x,) in step:
                step.backward(model(x).sum())
            step.update()
    done = [float(state["step"]) for each in several.values() for state in each.state.values()]
    assert done == [1.0 if allow else 2.0] * 4
    assert int(seen.num_batches_tracked) == 7, "it is not a member of a group"
