"""A checkpoint that the agent requests: the worker's end of a real socket; the test is the agent."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness import wait_for
from torch import nn

import elastic_launch as el
from elastic_launch import contract as c
from elastic_launch.snapshot import newest
from elastic_launch.training.engine import Engine
from elastic_launch.training.link import LONGEST_ERROR, AgentLink
from elastic_launch.training.ranks.world import World
from elastic_launch.training.session import Run


class Asking:
    """A run in this process, and its agent's end of the link: an agent of a member, which allows what is written."""

    def __init__(self, agent: socket.socket, worker: socket.socket) -> None:
        self._agent = agent
        self._said: list[c.WorkerSaved] = []
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()
        self.link = AgentLink(worker)
        self.run = Run(Engine(World(), torch.device("cpu"), self.link))

    def resume(self, checkpoint: el.Checkpoint) -> None:
        self.run.register("model", nn.Linear(1, 1))
        self.run.resume(checkpoint)

    def ask(self) -> None:
        self._agent.sendall(c.pack(c.Save()))

    def saved(self) -> list[c.WorkerSaved]:
        """The worker's messages about checkpoints, once there are any."""
        return wait_for("the worker's word", lambda: list(self._said))

    def _answer(self) -> None:
        with self._agent.makefile("rb") as lines:
            for line in lines:
                match c.unpack(line):
                    case c.MayCommit(number=number):
                        self._agent.sendall(c.pack(c.CommitAnswer(number, True)))
                    case c.WorkerSaved() as saved:
                        self._said.append(saved)

    def close(self) -> None:
        self.run._engine.release()
        self._agent.shutdown(socket.SHUT_RDWR)
        self._thread.join(30)


@pytest.fixture
def asking() -> Iterator[Asking]:
    agent, worker = socket.socketpair()
    with agent, worker:
        asking = Asking(agent, worker)
        yield asking
        asking.close()


def step_of(directory: Path) -> int:
    loaded = newest(directory)
    return -1 if loaded is None else loaded.info.step


def test_everything_is_saved_at_the_next_step_at_any_interval_and_reported_to_the_agent(
    asking: Asking, tmp_path: Path
) -> None:
    asking.resume(el.Checkpoint(tmp_path, every=1000))
    assert not asking.run.boundary(1)
    asking.ask()
    assert not asking.run.boundary()
    assert not asking.run.boundary(2)
    assert not asking.run.boundary(3)
    asking.run._engine.finish_training()
    assert step_of(tmp_path) == 2
    assert asking.saved() == [c.WorkerSaved(2, "")]


def test_a_request_postpones_the_interval_s_next_checkpoint_and_no_more(asking: Asking, tmp_path: Path) -> None:
    asking.resume(el.Checkpoint(tmp_path, every=3))
    due = []
    for step in range(1, 9):
        if step == 2:
            asking.ask()
        asking.run.boundary(step)
        due += [step] if not asking.run._engine.checkpoint.needs(step) else []
    asking.run._engine.finish_training()
    assert due == [2, 5, 8]


def test_a_script_that_saves_nothing_reports_that_at_once(asking: Asking) -> None:
    asking.run._engine.begin(0)
    asking.ask()
    asking.run.boundary(1)
    assert asking.saved() == [c.WorkerSaved(1, "the script saves no checkpoints")]


def test_a_checkpoint_that_cannot_be_written_is_reported_with_its_error(asking: Asking, tmp_path: Path) -> None:
    directory = tmp_path / "file"
    asking.resume(el.Checkpoint(directory, every=1000))
    shutil.rmtree(directory)
    directory.write_text("no directory")
    asking.ask()
    asking.run.boundary(1)
    asking.run._engine.finish_training()
    (saved,) = asking.saved()
    assert saved.step == 1
    assert 0 < len(saved.error) <= LONGEST_ERROR
