"""Checkpoints read without a run, and exported weights, by the programs that read such files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import nn
from torch.utils.data import TensorDataset

import elastic_launch as el
from elastic_launch import snapshot
from elastic_launch.snapshot.format import tensor_file

DATA = TensorDataset(torch.randn(24, 3, generator=torch.Generator().manual_seed(1)), torch.zeros(24, 1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)
        self.again = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.again(self.first(x))))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """Checkpoints of the steps 3 and 6, and the model as it was then."""
    directory, model = tmp_path_factory.mktemp("trained"), Tied()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    loader, checkpoint = el.ElasticLoader(DATA, el.GlobalBatch(4, 4)), el.Checkpoint(directory, every=3)
    with el.session() as run:
        run.register("average", average)
        for step in run.steps(loader, model, optimizer, until="6ba", checkpoint=checkpoint):
            for x, y in step:
                step.backward(nn.functional.mse_loss(step.model(x), y))
            step.update()
            average.update_parameters(model)
    return directory, model


def _one(directory: Path, step: int) -> Path:
    (found,) = directory.glob(f"step-{step}.*")
    return found


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_checkpoint_is_read_by_name_without_a_run(trained: tuple[Path, nn.Module], scheme: str) -> None:
    directory, model = trained
    state = el.load_checkpoint(f"{scheme}{directory}")
    assert set(state) == {"average", "model", "optimizer"}
    fresh = Tied()
    fresh.load_state_dict(state["model"])
    assert el.weights_sha256(fresh) == el.weights_sha256(model)
    torch.optim.AdamW(fresh.parameters()).load_state_dict(state["optimizer"])
    earlier = el.load_checkpoint(f"{scheme}{directory}", step=3)["model"]
    assert not torch.equal(earlier["last.weight"], state["model"]["last.weight"])
    same = el.load_checkpoint(f"{scheme}{_one(directory, 3)}")["model"]
    assert snapshot.state_sha256(same) == snapshot.state_sha256(earlier)


def test_an_inference_program_needs_no_session(trained: tuple[Path, nn.Module]) -> None:
    directory, model = trained
    program = "import sys, elastic_launch as el; print(el.load_checkpoint(sys.argv[1])['model']['last.bias'].item())"
    result = subprocess.run([sys.executable, "-c", program, directory], capture_output=True, text=True, check=True)
    assert float(result.stdout) == model.get_parameter("last.bias").item()


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_weights_only_leaves_the_optimizers_tensors_on_the_disk(
    trained: tuple[Path, nn.Module], scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    one = tensor_file._map_one

    def counted(file: Any, name: str) -> torch.Tensor:
        read.append(name)
        return one(file, name)

    monkeypatch.setattr(tensor_file, "_map_one", counted)
    state = el.load_checkpoint(f"{scheme}{trained[0]}", weights_only=True)
    assert set(state) == {"average", "model"}
    assert read
    assert all(name.startswith(("average/", "model/")) for name in read)
    # What the average shares with the model was stored once, under one of their names.
    assert snapshot.state_sha256(state["model"]) == el.weights_sha256(trained[1])


def test_the_newest_intact_one_is_read_and_a_named_one_must_be_intact(
    trained: tuple[Path, nn.Module], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "damaged"
    shutil.copytree(trained[0], directory)
    third = el.load_checkpoint(directory, step=3)
    with (_one(directory, 6) / "tensors.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    newest = el.load_checkpoint(directory)
    assert snapshot.state_sha256(newest["model"]) == snapshot.state_sha256(third["model"])
    assert "a checkpoint is skipped: The checkpoint" in caplog.text
    for place, step in ((directory, 6), (_one(directory, 6), None)):
        with pytest.raises(el.DamagedCheckpointError, match="does not match its checksum"):
            el.load_checkpoint(place, step=step)
    shutil.rmtree(_one(directory, 3))
    with pytest.raises(el.DamagedCheckpointError):
        el.load_checkpoint(directory)


def test_what_is_not_there_is_an_error_that_says_what_is(trained: tuple[Path, nn.Module], tmp_path: Path) -> None:
    with pytest.raises(el.CheckpointReadError, match=r"no checkpoint of step 4 in .*\n.*the steps 3, 6\."):
        el.load_checkpoint(trained[0], step=4)
    with pytest.raises(el.CheckpointReadError, match="There is no checkpoint in"):
        el.load_checkpoint(tmp_path / "nothing")
    with pytest.raises(el.CheckpointReadError, match=r"is the checkpoint of step 3, not of step 4"):
        el.load_checkpoint(_one(trained[0], 3), step=4)


def test_a_copy_with_another_name_is_read(trained: tuple[Path, nn.Module], tmp_path: Path) -> None:
    shutil.copytree(_one(trained[0], 6), tmp_path / "best")
    state = el.load_checkpoint(tmp_path / "best", weights_only=True)["model"]
    assert snapshot.state_sha256(state) == el.weights_sha256(trained[1])


def test_exported_weights_are_read_by_torch_and_by_safetensors(trained: tuple[Path, nn.Module], tmp_path: Path) -> None:
    directory, model = trained
    for file in (tmp_path / "model.pt", tmp_path / "model.safetensors"):
        file.write_text("an older one")
        el.export(directory, file)
    for state in (
        torch.load(tmp_path / "model.pt", weights_only=True),
        safetensors.torch.load_file(tmp_path / "model.safetensors"),
    ):
        fresh = Tied()
        fresh.load_state_dict(state)
        assert el.weights_sha256(fresh) == el.weights_sha256(model)
    with safe_open(tmp_path / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    el.export(directory, tmp_path / "average.pt", part="average", step=3)
    assert torch.load(tmp_path / "average.pt", weights_only=True)["n_averaged"] == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["average.pt", "model.pt", "model.safetensors"]


def test_the_tensor_file_of_a_checkpoint_is_a_safetensors_file(trained: tuple[Path, nn.Module]) -> None:
    tensors = safetensors.torch.load_file(_one(trained[0], 6) / "tensors.safetensors")
    assert torch.equal(tensors["model/last.weight"], trained[1].get_parameter("last.weight"))


def test_an_export_that_cannot_be_made_leaves_nothing_behind(trained: tuple[Path, nn.Module], tmp_path: Path) -> None:
    with pytest.raises(el.UsageError, match=r"export\(part='optimizer'\): .* has 'average', 'model'"):
        el.export(trained[0], tmp_path / "a.pt", part="optimizer")
    with pytest.raises(el.CheckpointWriteError, match="Could not write"):
        el.export(trained[0], tmp_path / "missing" / "a.pt")
    odd = {"model": {"spectrum": torch.zeros(2, dtype=torch.complex64)}}
    snapshot.write(tmp_path / "odd", odd, step=1, round=1)
    with pytest.raises(el.UnsupportedStateError, match=r"cannot hold 'spectrum': it is torch\.complex64"):
        el.export(tmp_path / "odd", tmp_path / "a.safetensors")
    el.export(tmp_path / "odd", tmp_path / "a.pt")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["a.pt", "odd"]
