"""A worker's end of the socket to its agent, and the snapshots that it reports; the test is the agent."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import wait_for
from torch import nn

import elastic_launch as el
from elastic_launch import contract as c
from elastic_launch.clock import MonotonicClock
from elastic_launch.shared_progress import FIRST_STEPS, Activity, SharedProgress
from elastic_launch.snapshot import newest
from elastic_launch.snapshot.memory.slot import Slot
from elastic_launch.snapshot.memory.slot_state import SlotWriter
from elastic_launch.training import link as link_module
from elastic_launch.training.checkpoints.manager import CheckpointManager
from elastic_launch.training.checkpoints.saving import Trained
from elastic_launch.training.durations import Interval
from elastic_launch.training.engine import Engine
from elastic_launch.training.link import AgentLink
from elastic_launch.training.ranks.exchange import exchanging, telling
from elastic_launch.training.ranks.world import World
from elastic_launch.training.session import Run


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, AgentLink]]:
    agent, worker = socket.socketpair()
    link = AgentLink(worker)
    with agent, worker:
        yield agent, link
        link.close()


def test_messages_of_two_threads_do_not_mix(ends: tuple[socket.socket, AgentLink]) -> None:
    agent, link = ends
    assert link._sock is not None
    link._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # a message takes several writes
    number = 200

    def store() -> None:
        for step in range(number):
            link.say(c.Stored(0, c.CopyJob(step, step, 1, "d" * 20_000)))

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
    assert [m.job.step for m in messages if isinstance(m, c.Stored)] == list(range(number))
    assert [m.step for m in messages if isinstance(m, c.StepDone)] == list(range(number))


def test_a_further_training_tells_how_far_the_last_one_has_come_and_its_own_first_step(
    ends: tuple[socket.socket, AgentLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most steps are in shared memory only, which has those of the last training then."""
    agent, link = ends
    agent.settimeout(5)
    monkeypatch.setattr(link, "_written", lambda: True)
    link.begin(c.Ready(0))
    for step in (1, 2, 3):
        link.step(step)
    link.begin(c.Ready(0, training=1))
    link.step(1)
    with agent.makefile("rb") as reader:
        begun, first, again, second = (c.unpack(reader.readline()) for _ in range(4))
    assert (begun, first, second) == (c.Ready(0), c.StepDone(1), c.StepDone(1, training=1))
    assert isinstance(again, c.Ready)
    assert (again.training, again.last) == (1, 3)
    assert 0 <= MonotonicClock().now() - again.last_at < 60


def test_an_agent_that_is_gone_is_noticed_by_the_next_call(ends: tuple[socket.socket, AgentLink]) -> None:
    agent, link = ends
    agent.close()
    link.step(1)
    link.say(c.Stored(0, c.CopyJob(1, 1, 1)))
    assert link.stop_asked() == ""
    assert not link.alive
    link.step(2)


def test_messages_of_the_agent_are_read_while_another_thread_sends(ends: tuple[socket.socket, AgentLink]) -> None:
    agent, link = ends
    agent.sendall(c.pack(c.Use(2)) + c.pack(c.Stop("resize"))[:5])
    assert link.slot_to_use() == 2
    assert link.stop_asked() == ""
    agent.sendall(c.pack(c.Stop("resize"))[5:])
    assert link.stop_asked() == "resize"


@pytest.mark.parametrize("comes", [True, False])
def test_a_long_wait_for_the_agent_says_what_is_awaited(
    ends: tuple[socket.socket, AgentLink],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    comes: bool,
) -> None:
    agent, link = ends
    monkeypatch.setattr(link_module, "QUIET", 0.05)
    monkeypatch.setattr(link_module, "FETCH_TIMEOUT", 60.0 if comes else 0.2)
    agent.sendall(c.pack(c.SnapshotSlots(1, 0, 1, fetching=True)))
    assert not link.stop_asked()
    told = threading.Thread(target=link.wait_fetched)
    told.start()
    wait_for("the first line", lambda: "fetch the newest state from another node, for up to" in caplog.text)
    if comes:
        agent.sendall(c.pack(c.Fetched(1, 2)))
    told.join(60)
    assert not told.is_alive()
    assert ("the newest state did not arrive" in caplog.text) is not comes


def _asked(agent: socket.socket) -> c.MayCommit:
    """Wait until the worker asks whether it may commit."""
    agent.settimeout(60)
    data = b""
    while not (asked := [x for x in map(c.unpack, data.splitlines()) if isinstance(x, c.MayCommit)]):
        data += agent.recv(4096)
    return asked[0]


def _allow(agent: socket.socket) -> None:
    """Answer as the agent of a member, once."""
    agent.sendall(c.pack(c.CommitAnswer(_asked(agent).number, True)))


def _no_room(*arguments: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_snapshot_that_is_lost_while_it_is_written_does_not_become_a_checkpoint(
    ends: tuple[socket.socket, AgentLink],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its copy is not awaited at the end, and the next one is written without the agent."""
    agent, link = ends
    link.slots = [Slot.make(f"test-{number}") for number in range(3)]
    link._use = 0
    run = Run(Engine(World(), torch.device("cpu"), link))
    model = nn.Linear(2, 2)
    run.register("model", model)
    run.resume(el.Checkpoint(tmp_path, every=1))
    checkpoint = run._engine.checkpoint
    monkeypatch.setattr(os, "posix_fallocate", _no_room)
    save = partial(run._engine.saver.save, last=False, draining=False)
    save(Trained(1, checkpoint, {}, run._engine.state, [1]), stays=lambda tensor: True)
    run._engine.saver.settle()
    run._engine.saver.poll(1, checkpoint)
    assert "checkpoint of step 1: its snapshot is lost: not enough memory" in caplog.text
    assert any(
        isinstance(m, c.WorkerSaved) and m.step == 1 and m.error for m in map(c.unpack, agent.recv(65536).splitlines())
    )
    monkeypatch.undo()
    allowing = threading.Thread(target=_allow, args=(agent,))
    allowing.start()
    save(Trained(2, checkpoint, {}, run._engine.state, [1]), stays=None)
    began = time.monotonic()
    run._engine.saver.poll(2, checkpoint)
    run._engine.saver.finish(wait=True)
    allowing.join()
    assert time.monotonic() - began < 60  # of the ten minutes that a copy is waited for
    loaded = newest(tmp_path)
    assert loaded is not None
    assert loaded.info.step == 2
    assert [record.levelno for record in caplog.records].count(logging.ERROR) == 2
    run._engine.release()


def test_a_copy_is_awaited_as_long_as_the_agent_reports_progress(ends: tuple[socket.socket, AgentLink]) -> None:
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


def test_a_worker_that_is_not_the_first_of_its_node_any_more_awaits_no_copy(
    ends: tuple[socket.socket, AgentLink], tmp_path: Path
) -> None:
    """The agent tells the new first one how it ends."""
    _agent, link = ends
    checkpoint = CheckpointManager(el.Checkpoint(tmp_path, every=1))
    checkpoint.requested(9, link)
    checkpoint.go_on(World(round=3, rank=0, local_rank=1, first_on_node=False), {}, (9, 0.0), (2, 9))
    began = time.monotonic()
    assert checkpoint.finish() == []
    assert time.monotonic() - began < 60  # of the ten minutes that a copy is waited for


def test_a_worker_that_has_saved_a_newer_state_itself_awaits_no_copy(
    ends: tuple[socket.socket, AgentLink], tmp_path: Path
) -> None:
    """As one does that goes on after its node has left snapshots out; the agent may have nothing left to copy."""
    _agent, link = ends
    checkpoint = CheckpointManager(el.Checkpoint(tmp_path, every=1))
    checkpoint.requested(3, link)
    checkpoint.save({"model": {"weight": torch.ones(1)}}, 6, {})
    began = time.monotonic()
    assert [(outcome.step, outcome.error) for outcome in checkpoint.finish()] == [(6, None)]
    assert time.monotonic() - began < 60  # of the ten minutes that a copy is waited for


def test_a_copy_of_another_training_of_the_script_is_not_taken_for_the_own_one(
    ends: tuple[socket.socket, AgentLink], tmp_path: Path
) -> None:
    """An earlier process has requested it, and a fault has ended that process."""
    agent, link = ends
    checkpoint = CheckpointManager(el.Checkpoint(tmp_path / "b", every=1))
    checkpoint.requested(9, link)
    other, own = str(tmp_path / "a"), str(tmp_path / "b")
    agent.sendall(c.pack(c.Copied(13, 3, path=f"{other}/step-13", directory=other)))
    agent.sendall(c.pack(c.Copied(14, 3, error="no room", directory=other)))
    assert link.wait_copied(10.0)
    assert checkpoint.outcomes() == []
    agent.sendall(c.pack(c.Copied(9, 4, path=f"{own}/step-9", directory=own)))
    (outcome,) = checkpoint.finish()
    assert (outcome.step, outcome.error) == (9, None)
    assert checkpoint.failed() is None


def test_a_final_checkpoint_whose_agent_is_gone_does_not_count_as_saved(
    ends: tuple[socket.socket, AgentLink], tmp_path: Path
) -> None:
    agent, link = ends
    checkpoint = CheckpointManager(el.Checkpoint(tmp_path, every=1))
    checkpoint.requested(7, link)
    agent.close()
    (outcome,) = checkpoint.finish(wait=True)
    assert (outcome.step, outcome.info) == (7, None)
    assert "the agent, which copies it, does not answer" in str(outcome.error)


@pytest.fixture
def saver(
    ends: tuple[socket.socket, AgentLink], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Run, CheckpointManager]]:
    """A run of one process, with one step between checkpoints and an agent that sends nothing unasked."""
    _, link = ends
    monkeypatch.setattr("elastic_launch.training.link.ANSWER_TIMEOUT", 0.1)
    link.slots = [Slot.make(f"test-{number}") for number in range(3)]
    run = Run(Engine(World(), torch.device("cpu"), link))
    run.register("model", nn.Linear(2, 2))
    run.resume(el.Checkpoint(tmp_path / "checkpoints", every=1))
    assert run._engine.checkpoint is not None
    yield run, run._engine.checkpoint
    run._engine.release()


def _heard(agent: socket.socket, kind: type[c.Message]) -> list[c.Message]:
    agent.settimeout(0.2)
    data = b""
    try:
        while part := agent.recv(65536):
            data += part
    except TimeoutError:
        pass
    return [message for message in map(c.unpack, data.splitlines()) if isinstance(message, kind)]


def _save(run: Run, checkpoint: CheckpointManager, step: int, *, last: bool = False) -> None:
    after = Trained(step, checkpoint, {}, run._engine.state, [1])
    run._engine.saver.agree(run._engine.saver.wishes(step, checkpoint))
    run._engine.saver.save(after, last=last, draining=False, stays=None)


def test_while_an_agent_is_slow_checkpoints_are_put_off_until_it_answers(
    ends: tuple[socket.socket, AgentLink], saver: tuple[Run, CheckpointManager], caplog: pytest.LogCaptureFixture
) -> None:
    """Written by the worker itself, they would be newer than memory, and might be those of a node that is left out."""
    agent, _ = ends
    run, checkpoint = saver
    for step in (1, 2, 3):
        _save(run, checkpoint, step)
    assert not checkpoint.directory.exists() or newest(checkpoint.directory) is None
    assert _heard(agent, c.Stored) == []
    assert caplog.text.count("postponed until the agent answers") == 1
    agent.sendall(c.pack(c.Use(1)))
    checkpoint.settings.every = Interval.parse(1000)  # but for what is owed
    _save(run, checkpoint, 4)
    (told,) = _heard(agent, c.Stored)
    assert isinstance(told, c.Stored)
    assert (told.job.step, told.job.now, told.slot) == (4, True, 1)
    assert not checkpoint.owes


def test_the_last_checkpoint_waits_for_an_agent_that_is_slow(
    ends: tuple[socket.socket, AgentLink], saver: tuple[Run, CheckpointManager]
) -> None:
    agent, _ = ends
    run, checkpoint = saver
    _save(run, checkpoint, 1)
    answer = threading.Timer(1.0, lambda: agent.sendall(c.pack(c.Use(2))))
    answer.start()
    _save(run, checkpoint, 2, last=True)
    answer.join()
    (told,) = _heard(agent, c.Stored)
    assert isinstance(told, c.Stored)
    assert (told.job.step, told.job.now) == (2, True)


def test_a_snapshot_for_which_a_gpu_has_no_memory_does_not_end_the_training(
    ends: tuple[socket.socket, AgentLink],
    saver: tuple[Run, CheckpointManager],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def write(*args: Any) -> bool:
        raise torch.OutOfMemoryError("CUDA out of memory.\nMore")

    monkeypatch.setattr(SlotWriter, "write", write)
    agent, _ = ends
    run, checkpoint = saver
    agent.sendall(c.pack(c.Use(1)))
    _save(run, checkpoint, 1)
    assert caplog.text.count("no snapshots in memory from now on: CUDA out of memory.") == 1
    agent.sendall(c.pack(c.CommitAnswer(_asked(agent).number, True)))
    assert [outcome.error for outcome in checkpoint.finish(wait=True)] == [None]


def test_a_checkpoint_that_stays_put_off_is_reported_at_the_end(saver: tuple[Run, CheckpointManager]) -> None:
    run, checkpoint = saver
    _save(run, checkpoint, 1)
    (outcome,) = checkpoint.finish(wait=True)
    assert "the agent did not answer" in str(outcome.error)


@pytest.mark.parametrize("allowed", [True, False, None], ids=["member", "cut off", "silent"])
def test_what_a_worker_writes_itself_appears_only_if_the_agent_allows_it(
    ends: tuple[socket.socket, AgentLink],
    saver: tuple[Run, CheckpointManager],
    monkeypatch: pytest.MonkeyPatch,
    allowed: bool | None,
) -> None:
    monkeypatch.setattr("elastic_launch.training.link.COMMIT_TIMEOUT", 1.0 if allowed is None else 60.0)
    agent, _ = ends
    run, checkpoint = saver
    run._engine.saver._give_up_memory(OSError(12, "there is none"))
    _save(run, checkpoint, 1)
    asked = _asked(agent)
    assert newest(checkpoint.directory) is None
    if allowed is not None:
        agent.sendall(c.pack(c.CommitAnswer(asked.number, allowed)))
    (outcome,) = checkpoint.finish(wait=True)
    found = newest(checkpoint.directory)
    assert (found is not None) == bool(allowed)
    assert (outcome.error is None) == bool(allowed)
    if not allowed:
        assert "was not committed" in str(outcome.error)


def test_what_a_process_does_as_it_enters_a_round_is_reported(ends: tuple[socket.socket, AgentLink]) -> None:
    _, link = ends
    link._progress = SharedProgress.make("test")

    def doing() -> int | None:
        report = link._progress.read() if link._progress is not None else None
        return None if report is None else report.activity

    with link.forming():
        assert doing() is None, "nothing is known of the network when a run's first processes find each other"
    link._forms, link.patience = True, 1.0
    with link.forming(), telling(link):
        assert doing() == Activity.RESTORE
        with exchanging():
            assert doing() == Activity.FORMING
            first = link._progress.read()
            time.sleep(0.6)
            link.advanced()
            assert link._progress.read() != first
        assert doing() == Activity.RESTORE
    assert doing() == Activity.UNWATCHED, "the script may do anything"
    with link.forming():
        with link.forming():
            pass
        assert doing() == Activity.FORMING
        link.watch(7)
    assert doing() == Activity.FIRST_STEP
    link.watch(7, Activity.RESUMED_STEP)
    assert doing() == Activity.RESUMED_STEP


def test_in_a_later_round_no_step_is_reported_until_it_is_known_where_training_goes_on(
    ends: tuple[socket.socket, AgentLink],
) -> None:
    """It may go back: the steps of the round before would count as those of this one."""
    agent, link = ends
    link._progress = progress = SharedProgress.make("test")
    link._forms = True
    link.watch(0)
    link.step(20)
    placement = c.Placement(0, 0, 0, 1, 1, 1, "localhost", 1, 0, 1, first_on_node=True)
    agent.sendall(c.pack(c.Place(2, "5eed", placement, 1, 3, "rank 1 crashed", None, 0, fetching=False)))
    assert link.wait_for_place() is not None
    with link.forming():
        found = progress.read()
        assert found is not None
        assert found[:2] == (2, 0)
        link.watch(4)
    found = progress.read()
    assert found is not None
    assert found[:2] == (2, 4)


@pytest.mark.parametrize("first", FIRST_STEPS)
def test_the_steps_that_a_process_receives_are_not_counted_as_its_own(first: Activity) -> None:
    with closing(SharedProgress.make("test")) as progress:
        progress.write(2, 0, Activity.FORMING)
        time.sleep(0.1)
        progress.write(2, 500, first)
        began = time.monotonic()
        progress.write(2, 501, Activity.STEP)
        found = progress.read()
        assert found is not None
        assert (sum(found.durations), found.steps_s < 0.1 + time.monotonic() - began) == (1, True)
