"""A model that the script prunes in its loop: a process that begins later has it as it was before."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from harness import SCRIPTS, Job, run_script
from torch import nn
from torch.nn.utils import parametrizations, prune

from elastic_launch.errors import UsageError
from elastic_launch.faults import FaultPlan
from elastic_launch.training.checkpoints.resumed import Resumed
from elastic_launch.training.checkpoints.state import TrainingState


def _state(model: nn.Module) -> TrainingState:
    state = TrainingState()
    state.register("model", model)
    state.register("optimizer", torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return state


def _resumed(state: TrainingState, **more: Any) -> Resumed:
    return Resumed(3, copy.deepcopy(state.capture()), origin="the state of step 3", **more)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def test_a_pruned_state_is_restored_by_a_model_that_is_not(caplog: pytest.LogCaptureFixture) -> None:
    there, here = _model(), _model()
    before = _state(here)
    parameters = {id(p) for p in here.parameters()}
    saved = _state(there)
    prune.l1_unstructured(there[0], "weight", 0.5)
    prune.ln_structured(there[2], "weight", 0.5, n=2, dim=0)
    before.load(_resumed(saved, orders=saved.orders()), again=False)
    x = torch.randn(3, 4)
    assert torch.equal(there(x), here(x))
    assert {id(p) for p in here.parameters()} == parameters  # the optimizer's
    assert "the same was done here to 0.weight, 2.weight" in caplog.text
    prune.l1_unstructured(there[0], "weight", 0.5)
    prune.l1_unstructured(here[0], "weight", 0.5)
    assert torch.equal(there(x), here(x))
    assert int((here[0].weight_mask == 0).sum()) == 24


def test_pruning_that_was_made_permanent_is_ended() -> None:
    there, here = _model(), _model()
    before, saved = _state(here), _state(there)
    for model in (there, here):
        prune.l1_unstructured(model[0], "weight", 0.5)
    prune.remove(there[0], "weight")
    before.load(_resumed(saved), again=False)
    assert not prune.is_pruned(here)
    assert torch.equal(there[0].weight, here[0].weight)


def test_what_cannot_be_done_again_is_refused_by_name() -> None:
    there, here = _model(), _model()
    before = _state(here)
    parametrizations.weight_norm(there[0], "weight")
    with pytest.raises(UsageError, match=r"'0\.parametrizations\.weight\.original0'(.|\n)*before the loop"):
        before.load(_resumed(_state(there)), again=False)


@pytest.mark.parametrize("how", [[], ["--no-live"]])
def test_a_kill_after_pruning_costs_no_step_and_changes_nothing(job: Job, how: list[str]) -> None:
    script = [str(SCRIPTS / "pruned.py")]
    env = FaultPlan.fail_at(1, 9).environment()
    agent = job.launch("--standalone", "--nproc", "2", *how, command=script, env=env)
    alone = re.findall(r"hash \w+", run_script(*script))
    assert agent.wait(60) == 0, agent.output
    assert "restarts: 1" in agent.output
    assert re.findall(r"hash \w+", agent.output) == alone * 2, agent.output
