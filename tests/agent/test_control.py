"""The agent's end of the socket to its workers; the test is a worker."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
from collections.abc import Iterator

import pytest
from harness import wait_for

from elastic_agents.control import Control, WorkerSaved
from elastic_agents.keeper import Keeper
from elastic_agents.vocabulary import WorkerReady
from elastic_launch import contract as c
from elastic_launch.events import Event
from elastic_launch.testing import FakeClock


class Nowhere:
    """Takes events, and forgets them."""

    def emit(self, event: Event) -> None:
        del event


Said = queue.SimpleQueue[object]


@pytest.fixture
def said() -> Said:
    return queue.SimpleQueue()


@pytest.fixture
def control(said: Said) -> Iterator[Control]:
    keeper = Keeper(lambda: True, lambda copied: True)
    keeper.start()
    with contextlib.closing(keeper), contextlib.closing(Control(FakeClock(), keeper, said.put, Nowhere())) as control:
        yield control


def worker(control: Control, said: Said, rank: int, round_number: int = 1) -> socket.socket:
    """Connect as a worker that is ready with 5 steps done."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(5)
    sock.connect("\0" + control.address[1:])
    sock.sendall(c.pack(c.Hello(round_number, rank, rank)) + c.pack(c.Ready(5)))
    slots, descriptors, _, _ = socket.recv_fds(sock, 4096, 16)
    for descriptor in descriptors:
        os.close(descriptor)
    assert isinstance(c.unpack(slots.strip()), c.Slots)
    assert said.get(timeout=5) == WorkerReady(round_number, rank)
    return sock


def test_only_rank_0_of_the_round_is_asked_to_save(control: Control, said: Said) -> None:
    with worker(control, said, 1) as other, worker(control, said, 0) as first:
        control.ask_save(2)
        control.ask_save(1)
        assert c.unpack(first.recv(4096).strip()) == c.Save()
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.recv(4096)


def test_a_checkpoint_answers_a_request_if_it_has_all_steps_that_were_done_then(control: Control, said: Said) -> None:
    with worker(control, said, 0) as sock:
        sock.sendall(c.pack(c.StepDone(8)))
        wait_for("the step", lambda: control.pace.reached == (1, 8))
        control.ask_save(1)
        for step in (7, 8, 9):
            sock.sendall(c.pack(c.Saved(step, "full" if step == 8 else "")))
        heard = [said.get(timeout=5) for _ in range(3)]
    assert heard == [WorkerSaved(1, 7, "", False), WorkerSaved(1, 8, "full", True), WorkerSaved(1, 9, "", False)]
