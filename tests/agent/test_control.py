"""The agent's end of the socket to its workers; the test is a worker."""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator

import pytest
from harness import SLOWNESS, wait_for

from elastic_agents import policy_types as v
from elastic_agents import status, step_events
from elastic_agents.inbox import FirstStepDone, ProcessEnding
from elastic_agents.snapshots.durable_state import DurableState
from elastic_agents.snapshots.snapshot_store import SnapshotStore
from elastic_agents.warm.ending import SOCKET, last_words
from elastic_agents.workers.control import Control
from elastic_launch import contract as c
from elastic_launch import shared_progress
from elastic_launch.clock import Clock, MonotonicClock
from elastic_launch.events.types import Event, FirstStep, RoundProgress, RoundSteps, SnapshotsLeftOut, TrainingBegun
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.rendezvous.wire.messages import NodeSaved
from elastic_launch.shared_progress import STEP_BOUNDS, SharedProgress
from elastic_launch.system import descriptors
from elastic_launch.testing import FakeClock


class Events(list[Event]):
    """Takes events."""

    def emit(self, event: Event) -> None:
        self.append(event)


Said = queue.SimpleQueue[object]

WAIT = 5 * SLOWNESS


@pytest.fixture
def no_descriptors() -> Iterator[Callable[[], None]]:
    """Leave this process without free descriptors until the yielded function is called."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors.release()
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    yield lambda: resource.setrlimit(resource.RLIMIT_NOFILE, before)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    descriptors.release()


def control_of(
    store: SnapshotStore,
    say: Callable[[object], None],
    events: Events,
    workers: int,
    patience_s: float = 0.0,
    clock: Clock | None = None,
) -> Control:
    return Control(clock or FakeClock(), store, DurableState(store), say, events, workers, patience_s)


@pytest.fixture
def said() -> Said:
    return queue.SimpleQueue()


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def control(said: Said, events: Events) -> Iterator[Control]:
    snapshot_store = SnapshotStore(lambda: True, lambda copied: True)
    snapshot_store.start()
    with (
        contextlib.closing(snapshot_store),
        contextlib.closing(control_of(snapshot_store, said.put, events, 2, 7.0)) as control,
    ):
        yield control


def worker(control: Control, said: Said, rank: int, round_number: int = 1) -> socket.socket:
    """Connect as a worker that is ready with 5 steps done."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(5)
    sock.connect("\0" + control.address[1:])
    sock.sendall(c.pack(c.WorkerHello(round_number, rank, rank)) + c.pack(c.Ready(5)))
    slots, descriptors, _, _ = socket.recv_fds(sock, 4096, 16)
    for descriptor in descriptors:
        os.close(descriptor)
    assert isinstance(c.unpack(slots.strip()), c.SnapshotSlots)
    assert said.get(timeout=WAIT) == v.Reported(round_number, rank, c.Ready(5))
    return sock


def answer(control: Control, hello: c.WorkerHello) -> c.Message:
    """What another process, which ends then, is told."""
    program = (
        "import socket, sys; sock = socket.socket(socket.AF_UNIX); sock.connect('\\0' + sys.argv[1]);"
        "sock.sendall(sys.argv[2].encode()); print(sock.recv(4096).decode(), end='')"
    )
    command = [sys.executable, "-c", program, control.address[1:], c.pack(hello).decode()]
    return c.unpack(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout.strip())


@pytest.mark.parametrize("closed", [False, True])
def test_another_process_is_refused_a_place_as_long_as_its_holder_runs(
    control: Control, said: Said, closed: bool
) -> None:
    with worker(control, said, 0, round_number=2) as sock:
        if closed:
            sock.close()
        assert answer(control, c.WorkerHello(2, 0, 0)) == c.PlaceTaken(os.getpid())
        assert answer(control, c.WorkerHello(1, 0, 0)) == c.PlaceTaken(os.getpid()), "started before the last change"
        assert isinstance(answer(control, c.WorkerHello(2, 1, 1)), c.SnapshotSlots)
        assert isinstance(answer(control, c.WorkerHello(3, 0, 0)), c.SnapshotSlots), "the next process of this rank"
        assert isinstance(answer(control, c.WorkerHello(3, 0, 0)), c.SnapshotSlots), "the one before it has ended"
        assert isinstance(answer(control, c.WorkerHello(0, 0, 0)), c.SnapshotSlots), "started ahead"


def test_only_rank_0_of_the_round_is_asked_to_save(control: Control, said: Said) -> None:
    with worker(control, said, 1) as other, worker(control, said, 0) as first:
        control.ask_save(2)
        control.ask_save(1)
        assert c.unpack(first.recv(4096).strip()) == c.Save()
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.recv(4096)


def test_why_no_snapshots_are_taken_is_an_event(control: Control, said: Said, events: Events) -> None:
    with worker(control, said, 0) as sock:
        sock.sendall(c.pack(c.NoSnapshots("3 of 2.00 GiB each need 6.00 GiB more")))
        wait_for("the event", lambda: SnapshotsLeftOut(1, "3 of 2.00 GiB each need 6.00 GiB more") in events)


def test_the_agent_learns_what_a_worker_has_restored(control: Control, said: Said) -> None:
    with worker(control, said, 1, round_number=3) as sock:
        sock.sendall(c.pack(c.Restored(2)))
        assert said.get(timeout=WAIT) == v.Reported(3, 1, c.Restored(2))


def test_a_checkpoint_answers_a_request_if_it_has_all_steps_that_were_done_then(control: Control, said: Said) -> None:
    with worker(control, said, 0) as sock:
        sock.sendall(c.pack(c.StepDone(8)))
        wait_for("the step", lambda: control.step_timer.reached == (1, 8))
        control.ask_save(1)
        for step in (7, 8, 9):
            sock.sendall(c.pack(c.WorkerSaved(step, "full" if step == 8 else "")))
        assert said.get(timeout=WAIT) == FirstStepDone()
        heard = [said.get(timeout=WAIT) for _ in range(3)]
    assert heard == [NodeSaved(1, 7, "", False), NodeSaved(1, 8, "full", True), NodeSaved(1, 9, "", False)]


def test_a_checkpoint_of_a_further_training_answers_a_request_that_came_in_it(control: Control, said: Said) -> None:
    """The agent learns of the training once; its policy knows that the worker trains."""
    with worker(control, said, 0) as sock:
        sock.sendall(c.pack(c.StepDone(8)) + c.pack(c.Ready(0, training=1)) + c.pack(c.StepDone(3, training=1)))
        wait_for("the step", lambda: control.step_timer.position == (1, 3))
        control.ask_save(1)
        sock.sendall(c.pack(c.WorkerSaved(8, "")) + c.pack(c.WorkerSaved(4, "", training=1)))
        assert said.get(timeout=WAIT) == FirstStepDone()
        heard = [said.get(timeout=WAIT) for _ in range(2)]
    assert heard == [NodeSaved(1, 8, "", False), NodeSaved(1, 4, "", True, training=1)]


def test_a_script_that_saves_by_itself_is_not_asked_to_save(control: Control, said: Said) -> None:
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as sock:
        sock.settimeout(5)
        sock.connect("\0" + control.address[1:])
        hello, begins = c.WorkerHello(1, 0, 0, saves=False), c.Ready(5, drains=False)
        sock.sendall(c.pack(hello) + c.pack(begins) + c.pack(c.Ready(6)) + c.pack(c.Stopping(7)))
        _, descriptors, _, _ = socket.recv_fds(sock, 4096, 16)
        for descriptor in descriptors:
            os.close(descriptor)
        assert [said.get(timeout=WAIT) for _ in range(3)] == [
            v.Reported(1, 0, message) for message in (begins, c.Ready(6), c.Stopping(7))
        ]
        control.ask_save(1)
        assert said.get(timeout=WAIT) == NodeSaved(1, 5, "the script saves its state itself", asked=True)
        assert not control.tell_copied(c.Save())
        assert (control.durable.library_saves, control.durable.checkpoints) == (False, False)


def test_steps_are_read_from_shared_memory_and_the_last_one_after_the_worker_hung_up(
    control: Control, said: Said, events: Events
) -> None:
    """It reports the first step, and none after that."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(5)
        sock.connect("\0" + control.address[1:])
        sock.sendall(c.pack(c.WorkerHello(1, 0, 0)) + c.pack(c.Ready(5)))
        _, descriptors, _, _ = socket.recv_fds(sock, 4096, 16)
        said.get(timeout=WAIT)
        with contextlib.closing(SharedProgress(descriptors.pop())) as progress:
            for descriptor in descriptors:
                os.close(descriptor)
            progress.write(1, 6)
            sock.sendall(c.pack(c.StepDone(6)))
            wait_for("the first step", lambda: len(events) == 2)
            progress.write(1, 40)
            assert control.step_timer.reached == (1, 40)
            progress.write(1, 41)
    wait_for("the last word", lambda: len(events) == 3)
    assert events[:2] == [TrainingBegun(1, 0, 5, 0, 0.0), FirstStep(1, 6)]
    last = events[2]
    assert isinstance(last, RoundSteps)
    assert (last.round, last.first, last.last) == (1, 5, 41)
    assert control.step_timer.done == 41


def test_the_last_steps_of_a_training_are_known_from_the_beginning_of_the_next(
    control: Control, said: Said, events: Events
) -> None:
    """Shared memory tells of the next one by then."""
    with worker(control, said, 0) as sock:
        sock.sendall(c.pack(c.StepDone(6)) + c.pack(c.Ready(0, training=1, last=9)) + c.pack(c.StepDone(1, training=1)))
        wait_for("the step", lambda: control.step_timer.position == (1, 1))
        assert control.step_timer.of_round(1) == (5, 5)
    wait_for("the last word", lambda: isinstance(events[-1], RoundSteps))
    assert [(type(event), getattr(event, "step", None)) for event in events] == [
        *[(TrainingBegun, 5), (FirstStep, 6), (RoundProgress, 9)],
        *[(TrainingBegun, 0), (FirstStep, 1), (RoundSteps, None)],
    ]
    assert [getattr(event, "training", None) for event in events] == [0, 0, 0, 1, 1, 1]


def test_a_beat_names_the_training_of_the_newest_snapshot(control: Control, said: Said) -> None:
    """Until the first step of a training that is that of the one before."""
    with worker(control, said, 0) as sock:
        sock.sendall(c.pack(c.Ready(0, training=1, last=9)))
        wait_for("the training", lambda: control.step_timer.position == (1, 0))
        beat = status.beat(control, (0, 9), None)
    assert beat == m.ProgressBeat(1, 0, 9, training=1, snapshot_training=0)


def test_progress_of_a_round_that_goes_on_is_recorded_without_a_word_of_the_worker(
    said: Said, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_events, "FIRST", 0.2)
    store = SnapshotStore(lambda: True, lambda copied: True)
    with contextlib.ExitStack() as owned:
        store.start()
        owned.callback(store.close)
        control = owned.enter_context(contextlib.closing(control_of(store, said.put, events, 2, 7.0, MonotonicClock())))
        sock = owned.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        sock.settimeout(5)
        sock.connect("\0" + control.address[1:])
        sock.sendall(c.pack(c.WorkerHello(1, 0, 0)) + c.pack(c.Ready(5)))
        _, descriptors, _, _ = socket.recv_fds(sock, 4096, 16)
        said.get(timeout=WAIT)
        with contextlib.closing(SharedProgress(descriptors.pop())) as progress:
            for descriptor in descriptors:
                os.close(descriptor)
            progress.write(1, 6)
            sock.sendall(c.pack(c.StepDone(6)))
            wait_for("the first step", lambda: len(events) == 2)
            progress.write(1, 40)
            wait_for("the progress", lambda: len(events) == 3, 10)
    found = events[2]
    assert isinstance(found, RoundProgress)
    assert (found.round, found.step) == (1, 40)


def place(number: int, rank: int) -> c.Place:
    placement = c.Placement(rank, 1, 0, 3, 2, 2, "host", 7000, rank, 3, False)
    return c.Place(number, "5eed", placement, 1, 3, "rank 0 crashed", None, 0, fetching=False)


def heard(sock: socket.socket) -> c.Message:
    return c.unpack(sock.recv(4096).strip())


def test_a_suspended_workers_connection_belongs_to_its_new_place(control: Control, said: Said, events: Events) -> None:
    with worker(control, said, 0) as other, worker(control, said, 1) as sock:
        control.suspend(1, {1}, "rank 0 crashed")
        assert heard(sock) == c.Suspend(1, "rank 0 crashed")
        assert not control.place(1, place(3, 2)), "it has not left the round yet"
        sock.sendall(c.pack(c.StepDone(6)) + c.pack(c.Disconnected(6, "closed")) + c.pack(c.Suspended(6)))
        assert said.get(timeout=WAIT) == FirstStepDone()
        assert said.get(timeout=WAIT) == v.Reported(1, 1, c.Disconnected(6, "closed"))
        assert said.get(timeout=WAIT) == v.Reported(1, 1, c.Suspended(6))
        other.close()
        wait_for("the end of the round's steps", lambda: isinstance(events[-1], RoundSteps))
        assert control.place(1, place(3, 2))
        slots, _ = control._snapshot_store.offer()
        placed = heard(sock)
        assert isinstance(placed, c.Place)
        assert (placed.round, placed.placement.rank, placed.use) == (3, 2, slots.use)
        sock.sendall(c.pack(c.Ready(6, live=True)) + c.pack(c.StepDone(7)))
        assert said.get(timeout=WAIT) == v.Reported(3, 1, c.Ready(6, live=True))
        wait_for("a step of the new round", lambda: control.step_timer.reached == (3, 7))
        control.ask_stop(1, {0, 1}, "an old round")
        control.ask_stop(3, {0}, "another worker")
        control.ask_stop(3, {1}, "resize")
        assert heard(sock) == c.Stop("resize")
    wait_for("the last word", lambda: len(events) == 6)
    assert [(type(event), getattr(event, "round", 0)) for event in events] == [
        *[(TrainingBegun, 1), (FirstStep, 1), (RoundSteps, 1)],
        *[(TrainingBegun, 3), (FirstStep, 3), (RoundSteps, 3)],
    ]


@pytest.mark.parametrize(("writers", "writes"), [((0, 0), (False, True)), ((1, 0), (True, False))])
def test_one_worker_of_those_that_are_told_to_exit_may_write_a_last_snapshot(
    control: Control, said: Said, writers: tuple[int, int], writes: tuple[bool, bool]
) -> None:
    """The other one may still be writing when the next is told."""
    with worker(control, said, 0) as first, worker(control, said, 1) as second:
        for rank, sock in enumerate((first, second)):
            sock.sendall(c.pack(c.Suspended(5)))
            assert said.get(timeout=WAIT) == v.Reported(1, rank, c.Suspended(5))
        slots, _ = control._snapshot_store.offer()
        for rank, sock, writer, writing in zip((1, 0), (second, first), writers, writes, strict=True):
            control.dismiss({rank}, writer)
            assert heard(sock) == c.Exit(slots.use if writing else None, slots.sequence)


def test_a_suspended_worker_is_told_to_exit_and_missed_if_it_hangs_up(control: Control, said: Said) -> None:
    with worker(control, said, 0) as running, worker(control, said, 1) as sock:
        sock.sendall(c.pack(c.Suspended(5)))
        assert said.get(timeout=WAIT) == v.Reported(1, 1, c.Suspended(5))
        control.dismiss({0, 1}, 0)
        assert heard(sock) == c.Exit()
        running.setblocking(False)
        with pytest.raises(BlockingIOError):
            running.recv(4096)
    assert said.get(timeout=WAIT) == v.HungUp(1, 1)
    assert not control.place(1, place(2, 1))


def test_a_worker_that_was_started_ahead_says_when_it_has_come_and_gets_its_place(
    control: Control, said: Said, events: Events
) -> None:
    with worker(control, said, 0) as other, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(5)
        sock.connect("\0" + control.address[1:])
        sock.sendall(c.pack(c.WorkerHello(0, 0, 1)))
        _, descriptors, _, _ = socket.recv_fds(sock, 4096, 16)
        for descriptor in descriptors:
            os.close(descriptor)
        assert not control.place(1, place(2, 1)), "it has not come yet"
        control.tell_fetched(c.Fetched(0, 1))
        assert heard(other) == c.Fetched(0, 1)
        control.writer = 1
        assert not control.tell_copied(c.Copying()), "it writes nothing yet"
        sock.sendall(c.pack(c.Ahead()))
        assert said.get(timeout=WAIT) == v.Reported(0, 1, c.Ahead())
        assert control.place(1, place(2, 1))
        placed = heard(sock)
        assert isinstance(placed, c.Place)
        assert placed.round == 2
        assert control.tell_copied(c.Copying())
        assert heard(sock) == c.Copying()
        sock.sendall(c.pack(c.Ready(5, live=True)))
        assert said.get(timeout=WAIT) == v.Reported(2, 1, c.Ready(5, live=True))


@pytest.mark.parametrize("message", [c.Ready(5), c.StepDone(1), c.Suspended(1)], ids=lambda m: type(m).__name__)
def test_a_worker_without_a_place_says_nothing_about_a_round(control: Control, said: Said, message: c.Message) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(5)
        sock.connect("\0" + control.address[1:])
        sock.sendall(c.pack(c.WorkerHello(0, 0, 1)) + c.pack(c.Ahead()) + c.pack(message))
        assert said.get(timeout=WAIT) == v.Reported(0, 1, c.Ahead())
        assert said.get(timeout=WAIT) == v.HungUp(0, 1)


def test_a_worker_of_a_round_is_not_ahead_of_one(control: Control, said: Said) -> None:
    with worker(control, said, 0) as sock:
        sock.sendall(c.pack(c.Ahead()))
        assert sock.recv(1) == b"", "hung up"
    assert said.empty()


@pytest.mark.parametrize("patience", [0.0, 7.0])
def test_workers_learn_whether_they_may_be_suspended(said: Said, events: Events, patience: float) -> None:
    snapshot_store = SnapshotStore(lambda: True, lambda copied: True)
    snapshot_store.start()
    with (
        contextlib.closing(snapshot_store),
        contextlib.closing(control_of(snapshot_store, said.put, events, 2, patience)) as control,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock,
    ):
        sock.connect("\0" + control.address[1:])
        sock.sendall(c.pack(c.WorkerHello(1, 0, 0)) + c.pack(c.Ready(5, live=True)))
        line, descriptors, _, _ = socket.recv_fds(sock, 4096, 16)
        for descriptor in descriptors:
            os.close(descriptor)
        slots = c.unpack(line.strip())
        assert isinstance(slots, c.SnapshotSlots)
        assert slots.patience_s == patience
        assert said.get(timeout=WAIT) == v.Reported(1, 0, c.Ready(5, live=patience > 0))


@pytest.mark.parametrize("member", [True, False])
def test_a_worker_that_writes_checkpoints_itself_learns_whether_its_node_is_still_a_member(
    control: Control, said: Said, member: bool
) -> None:
    control._snapshot_store.may_commit = lambda: member
    with worker(control, said, 0) as sock:
        sock.sendall(c.pack(c.MayCommit(3)))
        assert c.unpack(sock.recv(4096).strip()) == c.CommitAnswer(3, allowed=member)


def test_a_worker_that_does_not_read_its_answers_is_disconnected_with_one_warning(
    control: Control, said: Said, caplog: pytest.LogCaptureFixture
) -> None:
    with worker(control, said, 0) as deaf, worker(control, said, 1) as other:
        with contextlib.suppress(OSError):
            for _ in range(100):
                deaf.sendall(c.pack(c.MayCommit(1)) * 1000)
        while deaf.recv(65536):
            pass  # whole answers, and the end
        other.sendall(c.pack(c.MayCommit(2)))
        assert c.unpack(other.recv(4096).strip()) == c.CommitAnswer(2, allowed=True)
    closed = "a message to a worker could not be sent, its connection is closed: it does not read"
    assert [record.message for record in caplog.records] == [closed]


def test_more_connections_than_workers_have_are_closed(
    control: Control, said: Said, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.ExitStack() as stack:
        socks = []
        for _ in range(60):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sock.settimeout(30)
            sock.connect("\0" + control.address[1:])
            socks.append(sock)
        assert socks[-1].recv(1) == b"", "hung up"
        assert len(control._peers) == 24
        assert caplog.text.count("there are 24 already") == 1
    wait_for("their end", lambda: not control._peers)
    worker(control, said, 0).close()


def test_a_thread_that_is_busy_for_longer_than_its_end_is_waited_for_ends_afterwards(
    said: Said, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    called, go_on = threading.Event(), threading.Event()

    def say(message: object) -> None:
        called.set()
        go_on.wait(60)

    snapshot_store = SnapshotStore(lambda: True, lambda copied: True)
    snapshot_store.start()
    with contextlib.closing(snapshot_store), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        control = control_of(snapshot_store, say, events, 1)
        thread = control._thread
        sock.connect("\0" + control.address[1:])
        sock.sendall(c.pack(c.WorkerEnding(0)))
        assert called.wait(WAIT)
        with monkeypatch.context() as patch:
            patch.setattr(thread, "join", lambda seconds: None)  # as if the 10 s were over
            control.close()
        go_on.set()
        thread.join(WAIT)
        assert not thread.is_alive()


@pytest.mark.parametrize(("step", "at"), [(2**60, 1.0), (3, float("nan")), (3, 1e300)])
def test_impossible_progress_is_none(step: int, at: float) -> None:
    """A worker's script has access to the shared memory."""

    def forge(step: int, at: float) -> None:
        counts = [0] * (len(STEP_BOUNDS) + 1)
        fields = shared_progress._FIELDS.pack(1, step, at, 0, 0.0, 1, b"", 0.0, 0, 0, 0.0, 0.0, *counts, 0)
        os.pwrite(progress.descriptor, shared_progress._RECORD.pack(fields, zlib.crc32(fields)), 0)

    with contextlib.closing(SharedProgress.make("test")) as progress:
        forge(3, 1.0)
        assert (reached := progress.read()) is not None
        assert reached.step == 3
        forge(step, at)
        assert progress.read() is None
        progress.write(1, 4)
        reached = progress.read()
        assert reached is not None
        assert reached.step == 4


def test_what_a_worker_has_said_last_is_known_before_its_exit(control: Control, said: Said) -> None:
    """Else the exit of a drained one, with 0, would be the end of the training."""
    for step in range(100):
        with worker(control, said, 0) as sock:
            sock.sendall(c.pack(c.Drained(step, 0.0)))
        control.after_reading(lambda: said.put("its exit"))
        assert said.get(timeout=WAIT) == v.Reported(1, 0, c.Drained(step, 0.0))
        assert said.get(timeout=WAIT) == "its exit"


def test_an_exit_is_told_of_after_the_end_of_the_thread_too(said: Said, events: Events) -> None:
    snapshot_store = SnapshotStore(lambda: True, lambda copied: True)
    snapshot_store.start()
    with contextlib.closing(snapshot_store):
        with contextlib.closing(control_of(snapshot_store, said.put, events, 2, 7.0)) as control:
            control.after_reading(lambda: said.put("before"))
        control.after_reading(lambda: said.put("after"))
    assert [said.get(timeout=WAIT) for _ in range(2)] == ["before", "after"]


@pytest.mark.parametrize("code", [0, 3, 255, -2])
def test_the_agent_receives_the_exit_code_of_a_script(code: int, control: Control, said: Said) -> None:
    """A worker writes this message itself, since it imports nothing at its end."""
    assert c.ENV_SOCKET == SOCKET
    assert last_words(code) == c.pack(c.WorkerEnding(code))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect("\0" + control.address[1:])
        sock.sendall(last_words(code))
    assert said.get(timeout=30) == ProcessEnding(os.getpid(), c.WorkerEnding(code))


def test_workers_wait_while_there_are_no_descriptors(
    control: Control, said: Said, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(60)
    go_on = request.getfixturevalue("no_descriptors")
    sock.connect("\0" + control.address[1:])
    sock.sendall(c.pack(c.WorkerHello(1, 0, 0)) + c.pack(c.Ready(5)))
    wait_for("the lack to be told", lambda: "Too many open files" in caplog.text)
    time.sleep(3 * descriptors.PAUSE)  # more than one retry
    assert said.empty()
    go_on()
    assert said.get(timeout=60) == v.Reported(1, 0, c.Ready(5))
    assert caplog.text.count("Too many open files") == 1
    sock.close()
