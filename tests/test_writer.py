"""Writers: callers never wait for them, with pipes that are read slowly, later, or never."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import wait_for

from elastic_launch.system.writer_thread import OVERHEAD, Writer

LINE = b"x" * 99 + b"\n"


class Pipe:
    """Written by a writer, read by the test."""

    def __init__(self) -> None:
        self.source, self.sink = os.pipe()
        self.seen = b""

    def write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self.sink, data[:4096]) :]
            self.writer.progress()

    def writer_with(self, limit: int, patience: float) -> Writer:
        self.lost: list[tuple[int, float]] = []
        self.writer = Writer("test", limit=limit, patience=patience, lost=lambda *lost: self.lost.append(lost))
        return self.writer

    def fill(self) -> None:
        os.set_blocking(self.sink, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(self.sink, b"#" * 4096)
        os.set_blocking(self.sink, True)

    def read(self) -> bytes:
        """Return all that has been read so far."""
        self.seen += self.drain()
        return self.seen

    def drain(self) -> bytes:
        os.set_blocking(self.source, False)
        seen = b""
        with contextlib.suppress(BlockingIOError):
            while True:
                seen += os.read(self.source, 65536)
        return seen


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    deadline = time.monotonic() + 30
    while not pipe.writer.close(idle=0.1) and time.monotonic() < deadline:
        pipe.drain()
    os.close(pipe.source)
    os.close(pipe.sink)


def test_a_call_that_a_file_system_refuses_does_not_end_the_thread(pipe: Pipe, tmp_path: Path) -> None:
    writer = pipe.writer_with(limit=20_000, patience=30)
    assert writer.put(lambda data: os.listdir(tmp_path / "missing"))
    assert writer.put(pipe.write, LINE)
    assert writer.flush()
    assert pipe.read() == LINE


def test_a_slow_reader_gets_all_from_a_writer_that_waits(pipe: Pipe) -> None:
    writer = pipe.writer_with(limit=20_000, patience=30)
    seen = bytearray()

    def read() -> None:
        while len(seen) < 2000 * len(LINE):
            seen.extend(os.read(pipe.source, 2000))
            time.sleep(0.001)

    reader = threading.Thread(target=read)
    reader.start()
    assert all(writer.put(pipe.write, LINE, wait=True) for _ in range(2000))
    assert writer.flush()
    reader.join()
    assert bytes(seen) == LINE * 2000
    assert not pipe.lost


def test_callers_in_a_hurry_wait_no_longer_and_have_as_much_room_as_those_that_cannot_wait(pipe: Pipe) -> None:
    writer = pipe.writer_with(limit=1000, patience=600)
    pipe.fill()
    assert all(writer.put(pipe.write, LINE, wait=True) for _ in range(5))
    taken: list[bool] = []
    waits = threading.Thread(target=lambda: taken.append(writer.put(pipe.write, LINE, wait=True)))
    waits.start()
    writer.hurry()
    waits.join(60)
    assert taken == [True]
    taken += [writer.put(pipe.write, LINE, wait=True) for _ in range(5)]
    assert taken == [True] * 4 + [False] * 2
    wait_for("all that was taken", lambda: LINE * 9 in pipe.read())
    assert writer.flush()
    assert [lines for lines, _ in pipe.lost] == [2]


def test_a_writer_that_cannot_wait_has_room_of_its_own(pipe: Pipe) -> None:
    size = len(LINE) + OVERHEAD
    writer = pipe.writer_with(limit=10 * size, patience=0.2)
    pipe.fill()
    wait_for("a full queue", lambda: not writer.put(pipe.write, LINE, wait=True))
    assert writer.stuck
    began = time.monotonic()
    taken = [writer.put(pipe.write, b"own\n") for _ in range(100)]
    assert time.monotonic() - began < 5
    assert 5 <= sum(taken) < 100
    assert taken == sorted(taken, reverse=True)
    assert not writer.flush(idle=0.1)
    seen = pipe.drain()
    wait_for("the loss", lambda: (pipe.drain(), pipe.lost)[1])
    assert writer.put(pipe.write, b"again\n", wait=True)
    assert writer.flush()
    ((lines, seconds),) = pipe.lost
    assert lines == 1 + taken.count(False)
    assert seconds > 0.2
    assert b"again" not in seen


def test_requests_to_a_stuck_thread_are_given_up(pipe: Pipe) -> None:
    writer = pipe.writer_with(limit=10_000, patience=0.2)
    assert writer.ask(lambda: 7, 30) == 7
    with pytest.raises(FileNotFoundError):
        writer.ask(lambda: os.stat("/there/is/none"), 30)
    pipe.fill()
    writer.put(pipe.write, LINE)
    done: list[int] = []
    with pytest.raises(TimeoutError):
        writer.ask(lambda: done.append(1), 0.3)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        writer.ask(lambda: done.append(2), 600)
    assert time.monotonic() - began < 60
    wait_for("the thread to go on", lambda: (pipe.drain(), not writer.stuck)[1])
    assert writer.ask(lambda: 8, 30) == 8
    assert not done


def test_what_waits_is_written_even_after_the_end(pipe: Pipe) -> None:
    writer = pipe.writer_with(limit=10_000, patience=60)
    pipe.fill()
    for _ in range(5):
        assert writer.put(pipe.write, LINE)
    assert not writer.close(idle=0.1)
    assert not writer.put(pipe.write, LINE)
    seen: list[bytes] = []
    wait_for("the rest", lambda: (seen.append(pipe.drain()), b"".join(seen).endswith(LINE * 5))[1])


def test_the_order_is_kept_among_many_threads(pipe: Pipe) -> None:
    writer = pipe.writer_with(limit=1000, patience=60)
    seen: list[bytes] = []

    def put(name: int) -> None:
        for number in range(200):
            assert writer.put(seen.append, b"%d %d" % (name, number), wait=True)

    threads = [threading.Thread(target=put, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.flush()
    for name in range(4):
        assert [line for line in seen if line.startswith(b"%d " % name)] == [
            b"%d %d" % (name, number) for number in range(200)
        ]
