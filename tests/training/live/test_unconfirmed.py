"""What a worker says by its exit code after a planned stop."""

from __future__ import annotations

import signal

import pytest
import torch
from played_agent import PlayedAgent
from torch import nn

import elastic_launch as el
from elastic_launch import contract as c
from elastic_launch.integrations.drain import Drain
from elastic_launch.training import link
from elastic_launch.training.stopping import DrainedExit


def train(agent: PlayedAgent) -> None:
    model = nn.Linear(4, 4)
    loader = el.ElasticLoader(torch.randn(8, 4), el.GlobalBatch(8, 4))
    with el.session(live=False) as run:
        for step in run.steps(loader, model, torch.optim.SGD(model.parameters(), 0.1), until="100ba"):
            if step.number == 2:
                agent.worker(0).tell(c.Stop("node b joins"))
            for x in step:
                step.backward(step.model(x).square().mean())
            step.update()


@pytest.mark.parametrize(
    ("confirms", "hangs_up", "code"),
    [(True, False, 0), (False, False, 128 + signal.SIGTERM), (False, True, 128 + signal.SIGTERM)],
)
def test_a_drain_that_the_agent_does_not_confirm_is_no_end_of_the_training(
    agent: PlayedAgent, monkeypatch: pytest.MonkeyPatch, confirms: bool, hangs_up: bool, code: int
) -> None:
    """A frozen agent may learn of the exit before it reads why: with 0, it would take the training for finished."""
    agent.confirms, agent.hangs_up = confirms, hangs_up
    monkeypatch.setattr(link, "ANSWER_TIMEOUT", 0.3)
    with pytest.raises(DrainedExit) as caught:
        train(agent)
    assert caught.value.code == code
    assert len(agent.worker(0).said(c.Drained)) == 1


@pytest.mark.parametrize(("confirms", "code"), [(True, 0), (False, 128 + signal.SIGTERM)])
def test_nor_is_one_where_a_framework_has_the_loop(
    agent: PlayedAgent, monkeypatch: pytest.MonkeyPatch, confirms: bool, code: int
) -> None:
    agent.confirms = confirms
    monkeypatch.setattr(link, "ANSWER_TIMEOUT", 0.3)
    for name, value in agent.environment(7, 0, 0, 1).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(c.ENV_AHEAD)
    drain = Drain()
    drain.begin(0)
    agent.worker(0).tell(c.Stop("node b joins"))
    steps = next(step for step in range(1, 10_000) if drain.boundary(step))
    assert drain.leave() == code
    assert agent.worker(0).said(c.Drained)[-1].step == steps
