"""Checkpoints that the script's process writes itself, where memory has no room for a copy of the state."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import elastic_launch as el
from elastic_launch import snapshot
from elastic_launch.training.checkpoints import manager as checkpoint_module


class Copies:
    """Counts the copies of the state that exist at the same time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int, step: int = 0) -> None:
        self.most = self.now = self.made = 0
        copied = checkpoint_module.copied

        def copy(value: Any, tensor: Any) -> Any:
            found = copied(value, tensor)
            if isinstance(value, dict) and "model" in value:
                self.made += 1
                self.now += 1
                self.most = max(self.most, self.now)
                weakref.finalize(found["model"]["weight"], self._gone)
            return found

        monkeypatch.setattr(checkpoint_module, "copied", copy)
        monkeypatch.setattr(checkpoint_module, "room", lambda: (free - self.now * 80, "in this test"))
        # The peak was when there was a copy beside a step, if any was made.
        monkeypatch.setattr(checkpoint_module, "below_peak", lambda: step + 80 * bool(self.made))

    def _gone(self) -> None:
        self.now -= 1


def train(directory: Path) -> torch.nn.Module:
    """The state has 80 bytes of weights, and none of the optimizer; each of the six steps is saved."""
    with el.session() as run:
        torch.manual_seed(0)
        model = torch.nn.Linear(19, 1)
        loader = el.ElasticLoader(TensorDataset(torch.ones(12, 19), torch.ones(12, 1)), el.GlobalBatch(2, micro=2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in run.steps(loader, model, optimizer, until="1ep", checkpoint=el.Checkpoint(directory, every=1)):
            for x, y in step:
                step.backward(torch.nn.functional.mse_loss(model(x), y))
            step.update()
    return model


@pytest.mark.parametrize(("free", "step"), [(80, 0), (90, 2)], ids=["for the copy", "for a step beside it"])
def test_without_room_for_a_copy_training_waits_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, free: int, step: int
) -> None:
    copies = Copies(monkeypatch, free, step)
    model = train(tmp_path)
    assert copies.made == 0
    torch.testing.assert_close(el.load_checkpoint(tmp_path)["model"], dict(model.state_dict()), rtol=0, atol=0)
    (said,) = [record.getMessage() for record in caplog.records if "copy of the state" in record.getMessage()]
    assert said.startswith("from step 1 on training waits")
    assert "0.00 GiB are free in this test. To avoid the wait, take a host with more memory" in said


@pytest.mark.parametrize(("free", "step"), [(90, 0), (110, 18)])
def test_with_room_for_one_copy_there_is_never_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, free: int, step: int
) -> None:
    """A copy that was made earlier does not count as what a step needs."""
    caplog.set_level(logging.WARNING)
    copies = Copies(monkeypatch, free, step)
    model = train(tmp_path)
    assert copies.made == 6
    assert copies.most == 1
    torch.testing.assert_close(el.load_checkpoint(tmp_path)["model"], dict(model.state_dict()), rtol=0, atol=0)
    assert not caplog.records


def test_a_write_that_does_not_end_leaves_the_next_checkpoint_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = Copies(monkeypatch, free=90)
    copies.now = 1  # a copy that stays
    monkeypatch.setattr(snapshot.BackgroundWriter, "flush", lambda self, timeout: False)
    with pytest.raises(snapshot.CheckpointError, match="the only copy of the state that there is memory for"):
        train(tmp_path)
