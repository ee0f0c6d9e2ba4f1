"""Threads that wait at an epoll descriptor look again at once."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_launch.training.live import turns
from elastic_launch.training.live.turns import quick_turns

LONG = 20_000


class Waiter:
    """A thread that waits at an epoll descriptor, as gloo's do: it does not try again when it is interrupted."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.ended_with: int | None = None
        self._readable, self._writable = os.pipe()
        self.epoll.register(self._readable, select.EPOLLIN)
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        events = ctypes.create_string_buffer(64)
        found = libc.epoll_wait(self.epoll.fileno(), events, 1, LONG)
        self.ended_with = ctypes.get_errno() if found < 0 else 0

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def close(self) -> None:
        os.write(self._writable, b"x")
        self._thread.join(10)
        self.epoll.close()
        os.close(self._readable)
        os.close(self._writable)


@pytest.fixture
def waiters() -> Iterator[list[Waiter]]:
    made = [Waiter(), Waiter()]
    yield made
    for waiter in made:
        waiter.close()


def test_only_threads_that_wait_at_the_descriptors_are_interrupted(waiters: list[Waiter]) -> None:
    one, other = waiters
    assert turns._without_handler([signal.SIGURG]) == [signal.SIGURG]
    with quick_turns([one.epoll.fileno()]):
        one.join(10)
    assert one.ended_with == errno.EINTR
    other.join(0.05)
    assert other.ended_with is None
    assert turns._without_handler([signal.SIGURG]) == [signal.SIGURG]


WORKER = """
import errno, faulthandler, sys
from test_turns import Waiter
from elastic_launch import stack_dump
from elastic_launch.training.live import turns
from elastic_launch.training.live.turns import quick_turns

faulthandler.register(stack_dump.SIGNAL)
waiter = Waiter()
with quick_turns([waiter.epoll.fileno()]):
    waiter.join(10)
assert waiter.ended_with == errno.EINTR, waiter.ended_with
"""


def test_also_in_a_worker_whose_stacks_are_dumped_on_a_signal() -> None:
    """In a process of its own, since pytest has a handler for the other signal, too."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", WORKER], env=environ, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_scripts_own_handler_gets_no_signal(waiters: list[Waiter], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_SIGNALS", [signal.SIGURG])
    got: list[int] = []
    before = signal.signal(signal.SIGURG, lambda number, frame: got.append(number))
    try:
        with quick_turns([waiters[0].epoll.fileno()]):
            waiters[0].join(0.05)
        assert waiters[0].ended_with is None
        assert got == []
        os.kill(os.getpid(), signal.SIGURG)
        assert got == [signal.SIGURG], "it is still installed"
    finally:
        signal.signal(signal.SIGURG, before)


def test_a_handler_that_is_installed_meanwhile_stays(waiters: list[Waiter]) -> None:
    got: list[int] = []
    with quick_turns([waiters[0].epoll.fileno()]):
        waiters[0].join(10)
        before = signal.signal(signal.SIGURG, lambda number, frame: got.append(number))
    try:
        os.kill(os.getpid(), signal.SIGURG)
        assert got == [signal.SIGURG]
    finally:
        signal.signal(signal.SIGURG, before)


def test_nothing_is_changed_without_descriptors() -> None:
    with quick_turns([]):
        assert "elastic-launch leave" not in [thread.name for thread in threading.enumerate()]
