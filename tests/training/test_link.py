"""A worker's end of the socket to its agent, and the snapshots it tells of; the test is the agent."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import elastic_launch as el
from elastic_launch import contract as c
from elastic_launch.snapshot import newest
from elastic_launch.snapshot.slot import Slot
from elastic_launch.training.link import AgentLink
from elastic_launch.training.session import Run
from elastic_launch.training.world import World


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, AgentLink]]:
    agent, worker = socket.socketpair()
    link = AgentLink(worker)
    with agent, worker:
        yield agent, link
        link.close()


def test_what_two_threads_tell_does_not_mix(ends: tuple[socket.socket, AgentLink]) -> None:
    agent, link = ends
    assert link._sock is not None
    link._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # a message takes several writes
    number = 200

    def store() -> None:
        for step in range(number):
            link.stored(c.Stored(0, step, step, 1, True, "d" * 20_000, 1))

    other = threading.Thread(target=store)
    other.start()
    heard = b""
    reader = agent.makefile("rb")
    with reader:
        told = threading.Thread(target=lambda: [link.step(step) for step in range(number)])
        told.start()
        for _ in range(2 * number):
            heard += reader.readline()
        told.join()
        other.join()
    messages = [c.unpack(line) for line in heard.splitlines()]
    assert [m.step for m in messages if isinstance(m, c.Stored)] == list(range(number))
    assert [m.step for m in messages if isinstance(m, c.StepDone)] == list(range(number))


def test_an_agent_that_is_gone_is_noticed_by_who_asks_next(ends: tuple[socket.socket, AgentLink]) -> None:
    agent, link = ends
    agent.close()
    link.step(1)
    link.stored(c.Stored(0, 1, 1, 1, False, "", 1))
    assert link.stop_asked() == ""
    assert not link.alive
    link.step(2)


def test_what_the_agent_says_is_heard_while_another_thread_tells(ends: tuple[socket.socket, AgentLink]) -> None:
    agent, link = ends
    agent.sendall(c.pack(c.Use(2)) + c.pack(c.Stop("resize"))[:5])
    assert link.slot_to_use() == 2
    assert link.stop_asked() == ""
    agent.sendall(c.pack(c.Stop("resize"))[5:])
    assert link.stop_asked() == "resize"


def test_a_snapshot_that_is_lost_while_it_is_written_is_no_checkpoint(
    ends: tuple[socket.socket, AgentLink],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody waits for its copy at the end, and the next one is written without the agent."""
    agent, link = ends
    link.slots = [Slot.make(f"test-{number}") for number in range(3)]
    link._use = 0
    run = Run(World(), torch.device("cpu"), link)
    model = nn.Linear(2, 2)
    run.register("model", model)
    checkpoint = el.Checkpoint(tmp_path, every=1)
    run.resume(checkpoint)
    monkeypatch.setattr("elastic_launch.snapshot.saving.MAX_STATE_BYTES", 10)
    save = {"identity": {}, "state": run.state, "worlds": [1], "last": False, "draining": False, "stays": None}
    run._saver.save(1, checkpoint, **{**save, "stays": lambda tensor: True})
    run._saver.settle()
    run._saver.poll(1, checkpoint)
    assert "checkpoint of step 1: its snapshot is lost: A checkpoint cannot hold" in caplog.text
    assert any(
        isinstance(m, c.Saved) and m.step == 1 and m.error for m in map(c.unpack, agent.recv(65536).splitlines())
    )
    monkeypatch.undo()
    run._saver.save(2, checkpoint, **save)
    began = time.monotonic()
    run._saver.poll(2, checkpoint)
    run._saver.finish(wait=True)
    assert time.monotonic() - began < 60  # of the ten minutes that a copy is waited for
    loaded = newest(tmp_path)
    assert loaded is not None
    assert loaded.step == 2
    assert [record.levelno for record in caplog.records].count(logging.ERROR) == 2
    run.release()


def test_a_copy_is_waited_for_as_long_as_the_agent_says_that_it_goes_on(ends: tuple[socket.socket, AgentLink]) -> None:
    agent, link = ends
    copied = c.Copied(1, 1, 9.0, "/d/step-1", "abc", 10, "", "")

    def tell() -> None:
        for message in (*[c.Copying()] * 6, copied):
            time.sleep(0.5)
            agent.sendall(c.pack(message))

    teller = threading.Thread(target=tell)
    teller.start()
    assert link.wait_copied(2.0)
    assert link.copies() == [copied]
    teller.join()
    assert not link.wait_copied(0.1)


def test_a_final_checkpoint_whose_agent_is_gone_is_not_taken_for_saved(
    ends: tuple[socket.socket, AgentLink], tmp_path: Path
) -> None:
    agent, link = ends
    checkpoint = el.Checkpoint(tmp_path, every=1)
    checkpoint.requested(7, link)
    agent.close()
    (outcome,) = checkpoint.finish(wait=True)
    assert (outcome.step, outcome.info) == (7, None)
    assert "the agent, which copies it, does not answer" in str(outcome.error)
