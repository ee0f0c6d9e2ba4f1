"""The workers' lines on the console and in files, the launcher's own, and the termination message for Kubernetes."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import json
import logging
import os
import pty
import re
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from harness import wait_for
from hypothesis import given
from hypothesis import strategies as st

from elastic_agents import console as console_module
from elastic_agents.console import Consoles, announce, configure_logging, name_incidents
from elastic_agents.output_sinks import LONGEST_LINE, Appended, Kept, Lines
from elastic_agents.summary import failure_summary, hint_on, root_cause
from elastic_agents.workers import output as output_module
from elastic_agents.workers.logs import link_latest
from elastic_agents.workers.output import OutputPump
from elastic_launch.config.launch_config import Command, LaunchConfig
from elastic_launch.config.output import LOG_FORMATS, Route
from elastic_launch.events.incidents import Incidents
from elastic_launch.failure import Failure
from elastic_launch.system.termination_log import LIMIT, write_termination_log
from elastic_launch.system.writer_thread import Writer

FAILURE = Failure("a", "crash", 5, 1, 42, 1, "ValueError: boom", log="/logs", round=3, host="h7", ran=2.0)


class Poured:
    """A sink that records each write."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def close(self) -> None:
        self.closed = True

    @property
    def lines(self) -> list[bytes]:
        return b"".join(self.writes).splitlines()


def poured(*pieces: bytes, filters: tuple[str, ...] = ()) -> Poured:
    kept = Poured()
    lines = Lines(kept, "> ", filters)
    for piece in pieces:
        lines.write(piece)
    lines.close()
    assert kept.closed
    return kept


# Lines.


def test_lines_are_complete_in_whatever_pieces_they_are_written() -> None:
    assert poured(b"a", b"b\nc", b"", b"d\n\n", b"end").lines == [b"> ab", b"> cd", b"> ", b"> end"]


def test_a_line_is_not_passed_on_before_its_end() -> None:
    kept = Poured()
    lines = Lines(kept, "")
    lines.write(b"no end")
    assert kept.writes == []
    lines.write(b" yet\nx")
    assert kept.writes == [b"no end yet\n"]


def test_each_state_of_a_progress_bar_is_a_line() -> None:
    data = b"\r 10 %\r 20 %\r 30 %\r\nend\r\n\r\n\nlast\r"
    lines = [b">  10 %", b">  20 %", b">  30 %", b"> end", b"> ", b"> ", b"> last"]
    assert poured(data).lines == lines
    assert poured(*(data[i : i + 1] for i in range(len(data)))).lines == lines


@given(st.lists(st.text("a\r\n", max_size=6).map(str.encode), max_size=12))
def test_how_output_is_cut_into_writes_makes_no_difference(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    assert poured(*pieces).lines == poured(whole).lines
    assert b"".join(line[2:] for line in poured(whole).lines) == whole.translate(None, b"\r\n")
    if b"\r" not in whole:
        assert poured(whole).lines == [b"> " + line for line in whole.splitlines()]


def test_an_endless_line_comes_in_pieces() -> None:
    kept = poured(b"x" * (2 * LONGEST_LINE + 10))
    assert [len(line) for line in kept.lines] == [LONGEST_LINE + 2, LONGEST_LINE + 2, 12]


def test_a_write_holds_what_a_pipe_takes_in_one_piece() -> None:
    kept = poured(b"".join(b"line %d\n" % i for i in range(10_000)))
    assert all(len(data) <= 4096 and data.endswith(b"\n") for data in kept.writes)
    assert kept.lines == [b"> line %d" % i for i in range(10_000)]


def test_filters_choose_lines() -> None:
    text = "step 1 loss 2\nstep 1 done\nein Fehler: ä\n"
    assert poured(text.encode(), filters=("loss", "ä")).lines == [b"> step 1 loss 2", "> ein Fehler: ä".encode()]


# The pump.


@pytest.fixture
def pump() -> Iterator[OutputPump]:
    with contextlib.closing(Consoles()) as consoles, contextlib.closing(OutputPump(consoles)) as pump:
        yield pump


def shown(pump: OutputPump, route: Route, data: bytes) -> bytes:
    """The output of a stream on a terminal."""
    terminal, console = pty.openpty()
    tty.setraw(console)
    stream, sink = pump.open(console, route)
    os.write(sink, data)
    os.close(sink)
    assert stream.ended.wait(10)
    assert pump.flush()
    os.write(console, b"#")
    seen = b""
    while not seen.endswith(b"#"):
        seen += os.read(terminal, 65536)
    os.close(console)
    os.close(terminal)
    return seen[:-1]


def test_prefixes_are_coloured_on_a_terminal(pump: OutputPump, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "")
    first, second = (shown(pump, Route(prefix="[a:0]", rank=rank), b"x\n") for rank in (0, 1))
    assert first == b"\x1b[36m[a:0]\x1b[0mx\n"
    assert second == b"\x1b[33m[a:0]\x1b[0mx\n"
    assert shown(pump, Route(), b"x\n") == b"x\n"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_prefixes_are_plain_where_no_colours_are_wanted(
    pump: OutputPump, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv(name, value)
    assert shown(pump, Route(prefix="[a:0]"), b"x\n") == b"[a:0]x\n"


class Shown:
    """A console, workers that write to it, and the text that it shows."""

    def __init__(self, workers: int) -> None:
        self._source, self._console = os.pipe()
        os.set_blocking(self._source, False)
        self.consoles = Consoles()
        self._pump = OutputPump(self.consoles)
        self.workers = [self._pump.open(self._console, Route())[1] for _ in range(workers)]
        self.launcher = self.consoles.put_to(self._console, wait=False)
        self.text = b""

    def sees(self, text: bytes) -> None:
        def probe() -> bool:
            with contextlib.suppress(BlockingIOError):
                self.text += os.read(self._source, 65536)
            return self.text == text

        try:
            wait_for("the console to show it", probe, 10)
        except AssertionError:
            assert self.text == text

    def close(self) -> None:
        for worker in self.workers:
            os.close(worker)
        self._pump.close()
        self.consoles.close()
        os.close(self._console)
        os.close(self._source)


def test_pieces_of_the_lines_of_two_workers_do_not_mix() -> None:
    with contextlib.closing(Shown(2)) as shown:
        first, second = shown.workers
        for piece in (b"a", b"b", b"c\n"):
            os.write(first, piece)
            os.write(second, piece.upper())
            time.sleep(0.03)
        shown.sees(b"abc\nABC\n")


def test_what_others_write_begins_at_the_start_of_a_line() -> None:
    with contextlib.closing(Shown(2)) as shown:
        first, second = shown.workers
        os.write(first, b"password: ")
        shown.sees(b"password: ")
        shown.launcher(b"[ours] one\n[ours] two\n")
        shown.sees(b"password: \n[ours] one\n[ours] two\n")
        os.write(first, b"\nafter")  # the end of the line is there already
        shown.sees(b"password: \n[ours] one\n[ours] two\nafter")
        os.write(second, b"second\n")
        shown.sees(b"password: \n[ours] one\n[ours] two\nafter\nsecond\n")
        os.write(first, b" all\n\nend")
        shown.sees(b"password: \n[ours] one\n[ours] two\nafter\nsecond\n all\n\nend")


def test_progress_bars_move_and_leave_the_line_to_others() -> None:
    with contextlib.closing(Shown(2)) as shown:
        first, second = shown.workers
        os.write(first, b"\r10 %")
        os.write(first, b"\r20 %")
        shown.sees(b"\r10 %\r20 %")
        os.write(second, b"\rother")
        shown.sees(b"\r10 %\r20 %\rother")
        shown.launcher(b"[ours]\n")
        shown.sees(b"\r10 %\r20 %\rother\n[ours]\n")
        os.write(second, b"\n")
        os.write(first, b"\r30 %\n")
        shown.sees(b"\r10 %\r20 %\rother\n[ours]\n\r30 %\n")


def test_a_console_gets_an_endless_line_and_a_last_one_without_an_end() -> None:
    with contextlib.closing(Shown(1)) as shown:
        data = b"x" * (3 * LONGEST_LINE)
        with os.fdopen(os.dup(shown.workers[0]), "wb") as worker:
            worker.write(data + b"\nlast")
        os.close(shown.workers.pop())
        shown.sees(data + b"\nlast")


def unread(pipe: int) -> int:
    """How many bytes a pipe holds."""
    waiting = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, waiting)
    return waiting[0]


def test_a_full_console_that_does_not_block_gets_everything_later(pump: OutputPump) -> None:
    source, console = os.pipe()
    os.set_blocking(console, False)
    filled = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            filled += os.write(console, b"#" * 4096)
    stream, sink = pump.open(console, Route())
    os.write(sink, b"hello")

    wait_for("the pump to read what was written", lambda: not unread(sink))
    seen = b""
    while len(seen) < filled:
        seen += os.read(source, 65536)
    os.close(sink)
    assert stream.ended.wait(10)
    assert pump.flush()
    os.close(console)
    while piece := os.read(source, 65536):
        seen += piece
    os.close(source)
    assert seen[filled:] == b"hello"


def test_a_stream_that_is_not_shown_is_kept_in_a_directory_made_for_it(pump: OutputPump, tmp_path: Path) -> None:
    path = tmp_path / "made" / "log"
    matching = tmp_path / "matching"
    route = Route(console=False, path=path, filters=("b",), matching=matching, header="[h]:")
    assert shown(pump, route, b"a\nb\n") == b""
    assert path.read_bytes() == b"a\nb\n"
    assert matching.read_bytes() == b"[h]:b\n"


def test_files_that_cannot_be_written_are_mentioned_once(
    pump: OutputPump, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("elastic_launch"), "propagate", True)
    (tmp_path / "file").touch()
    for name in "ab":
        assert shown(pump, Route(path=tmp_path / "file" / name), b"x\n") == b"x\n"
    assert len([record for record in caplog.records if "not kept in files" in record.message]) == 1


def test_output_of_helper_processes_is_logged_by_the_launcher(
    pump: OutputPump, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("elastic_launch"), "propagate", True)
    descriptor = pump.open_log()
    os.write(descriptor, b"[elastic-launch] one\ntwo, with")
    os.write(descriptor, b"out end")
    os.close(descriptor)
    wait_for("both", lambda: len(caplog.messages) == 2)
    assert caplog.messages == ["one", "two, without end"]


def filled() -> tuple[int, int]:
    """A full pipe."""
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(sink, b"#" * 4096)
    os.set_blocking(sink, True)
    return source, sink


def test_a_console_that_cannot_be_written_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.closing(Consoles()) as consoles, open("/dev/full", "wb", buffering=0) as full:
        number = full.fileno()
        put = consoles.put_to(number, wait=True)
        put(b"one\n")
        put(b"two\n")
        assert consoles.flush()
    text = f"{number} cannot be written, and loses lines: [Errno 28] No space left on device (said once)"
    assert caplog.messages == [text]


def test_a_console_without_a_reader_needs_no_words(caplog: pytest.LogCaptureFixture) -> None:
    source, console = os.pipe()
    os.close(source)
    with contextlib.closing(Consoles()) as consoles:
        consoles.put_to(console, wait=True)(b"one\n")
        assert consoles.flush()
    os.close(console)
    assert not caplog.messages


def test_a_console_that_hangs_keeps_neither_workers_nor_their_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("elastic_launch"), "propagate", True)
    monkeypatch.setattr(console_module, "PATIENCE", 0.3)
    source, console = filled()
    with contextlib.closing(Consoles()) as consoles, contextlib.closing(OutputPump(consoles)) as pump:
        stream, sink = pump.open(console, Route(path=tmp_path / "log"))
        data = b"".join(b"%099d\n" % number for number in range(50_000))  # five times the data queued for a console
        with os.fdopen(sink, "wb") as worker:
            worker.write(data)
        assert stream.ended.wait(60)
        wait_for("the file", lambda: (tmp_path / "log").stat().st_size == len(data))
        assert (tmp_path / "log").read_bytes() == data
        # A reader that resumes finds the beginning, and the number of missing lines.
        os.set_blocking(source, False)
        seen = bytearray()

        def all_accounted_for() -> bool:
            with contextlib.suppress(BlockingIOError):
                while True:
                    seen.extend(os.read(source, 65536))
            told = [int(text.split()[0]) for text in caplog.messages if "lines were dropped here" in text]
            return sum(told) + seen.count(b"\n") == 50_000

        wait_for("what was dropped to be told", all_accounted_for)
    os.close(console)
    os.close(source)
    assert data.startswith(bytes(seen).lstrip(b"#"))


@pytest.mark.parametrize("prefix", ["", "[a:0] "])
def test_what_a_pump_has_not_read_at_the_end_because_of_a_slow_console_is_kept_and_shown(
    prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(console_module, "LIMIT", 40_000)
    monkeypatch.setattr(console_module, "PATIENCE", 60.0)
    source, console = filled()
    seen, data = b"", b""
    with contextlib.closing(Consoles()) as consoles:
        pump = OutputPump(consoles)
        _, sink = pump.open(console, Route(path=tmp_path / "log", prefix=prefix, rank=0))

        def is_taken() -> bool:
            deadline = time.monotonic() + 0.5
            while (waits := unread(sink)) and time.monotonic() < deadline:
                time.sleep(0.01)
            return not waits

        while not data or is_taken():
            piece = b"".join(b"%06d %s\n" % (len(data) + number, b"x" * 92) for number in range(100))
            os.write(sink, piece)
            data += piece
        os.close(sink)
        pump.close()
        os.set_blocking(source, False)

        def is_shown() -> bool:
            nonlocal seen
            with contextlib.suppress(BlockingIOError):
                seen += os.read(source, 65536)
            return seen.endswith(data.splitlines()[-1] + b"\n")

        wait_for("the last line on the console", is_shown)
    os.close(console)
    os.close(source)
    assert (tmp_path / "log").read_bytes() == data
    assert seen.lstrip(b"#").decode() == "".join(f"{prefix}{line}\n" for line in data.decode().splitlines())


def test_files_that_hang_keep_neither_workers_nor_the_console(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("elastic_launch"), "propagate", True)
    monkeypatch.setattr(output_module, "PATIENCE", 0.3)
    monkeypatch.setattr(output_module, "LIMIT", 100_000)
    log = tmp_path / "log"
    os.mkfifo(log)  # to open it hangs
    console = os.open(tmp_path / "console", os.O_WRONLY | os.O_CREAT)
    with contextlib.closing(Consoles()) as consoles, contextlib.closing(OutputPump(consoles)) as pump:
        stream, sink = pump.open(console, Route(path=log))
        data = b"".join(b"%099d\n" % number for number in range(5_000))
        with os.fdopen(sink, "wb") as worker:
            worker.write(data)
        assert stream.ended.wait(60)
        wait_for("the console", lambda: (tmp_path / "console").stat().st_size == len(data))
        assert not pump.kept.any
        reader = os.open(log, os.O_RDONLY)
        kept = b""
        while "lines are missing in log files" not in caplog.text or len(kept) < 100:
            kept += os.read(reader, 65536)
    os.close(console)
    os.close(reader)
    assert "is not written to files: the file system does not answer" in caplog.text
    assert pump.kept.complaint == "the file system did not answer"
    assert data.startswith(kept)


# The link.


def config(log_dir: Path, run_id: str) -> LaunchConfig:
    return LaunchConfig(Command(("x",), ("x",)), run_id=run_id, log_dir=log_dir)


def test_the_link_always_names_a_run_while_agents_change_it(tmp_path: Path) -> None:
    link_latest(config(tmp_path, "r0"))
    agents = [
        threading.Thread(target=lambda i=i: [link_latest(config(tmp_path, f"r{i}")) for _ in range(50)])
        for i in range(4)
    ]
    for agent in agents:
        agent.start()
    while any(agent.is_alive() for agent in agents):
        assert (tmp_path / "latest").resolve(strict=True).name in {"r0", "r1", "r2", "r3"}
    for agent in agents:
        agent.join()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "r0", "r1", "r2", "r3"]


def test_the_link_moves_with_the_directory(tmp_path: Path) -> None:
    link_latest(config(tmp_path / "a", "r"))
    (tmp_path / "a").rename(tmp_path / "b")
    assert (tmp_path / "b" / "latest").resolve() == tmp_path / "b" / "r"


def test_a_file_in_the_links_place_stays(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("mine")
    link_latest(config(tmp_path, "r"))
    assert (tmp_path / "latest").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "r"]


# The launcher's own lines.


@pytest.fixture
def logging_as_it_was() -> Iterator[None]:
    logger = logging.getLogger("elastic_launch")
    before = (logger.handlers[:], logger.propagate, logger.level)
    yield
    logger.handlers[:], logger.propagate = before[0], before[1]
    logger.setLevel(before[2])


@pytest.mark.usefixtures("logging_as_it_was")
def test_an_unknown_level_is_mentioned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LOGLEVEL", "loud")
    configure_logging("plain")
    announce(config(Path("/logs"), "r"))
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("[elastic-launch] LOGLEVEL=loud is not a level: INFO is used")
    assert said[1] == "[elastic-launch] run r, logs in /logs/r"


@pytest.mark.usefixtures("logging_as_it_was")
def test_a_run_without_an_id_is_named_by_what_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("plain")
    announce(config(Path("/logs"), LaunchConfig.run_id))
    assert capsys.readouterr().err == "[elastic-launch] run of x, logs in /logs/none\n"


@pytest.mark.usefixtures("logging_as_it_was")
def test_the_level_is_that_of_the_variable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LOGLEVEL", "warning")
    configure_logging("plain")
    logger = logging.getLogger("elastic_launch.agent")
    logger.info("low")
    logger.warning("high")
    assert capsys.readouterr().err == "[elastic-launch] high\n"


@pytest.mark.usefixtures("logging_as_it_was")
def test_lines_have_the_requested_form(capsys: pytest.CaptureFixture[str]) -> None:
    said = {}
    for form in LOG_FORMATS:
        configure_logging(form, node="a")
        logging.getLogger("elastic_launch.agent").warning("two\nlines of %s", "ä")
        said[form] = capsys.readouterr().err
    assert said["plain"] == "[elastic-launch] two\nlines of ä\n"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z \[elastic-launch\] two\nlines of ä\n", said["time"])
    assert said["json"].count("\n") == 1
    found = json.loads(said["json"])
    assert abs(time.time() - datetime.fromisoformat(found.pop("time")).timestamp()) < 60
    assert found == {"level": "WARNING", "node": "a", "message": "two\nlines of ä"}


@pytest.mark.usefixtures("logging_as_it_was")
def test_a_line_names_the_incident_that_it_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    """Which may be another one than the incident that is under way."""
    incidents = Incidents("a")
    incidents.now = 3
    configure_logging("plain")
    name_incidents(incidents)
    logger = logging.getLogger("elastic_launch.agent")
    logger.warning("round 3 broken")
    logger.warning("incident 2: crash", extra={"incident": 2})
    incidents.now = None
    logger.warning("done")
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "[elastic-launch] incident 3: round 3 broken",
        "[elastic-launch] incident 2: crash",
        "[elastic-launch] done",
    ]


# The termination message.


def test_a_root_cause_names_the_worker_its_node_and_the_error() -> None:
    text = root_cause(replace(FAILURE, detail=("Traceback", "ValueError: boom")))
    assert text.splitlines() == [
        "root cause: rank 5 on node a (host h7, pid 42, round 3) failed 2.0 s after its start: "
        "exit code 1: ValueError: boom",
        "    Traceback",
        "    ValueError: boom",
        "    its logs: /logs",
    ]


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"kind": "out of memory", "exit_code": -9}, "more memory"),
        ({"exit_code": -9}, "dmesg"),
        ({"exit_code": -7}, "/dev/shm"),
        ({"exit_code": -11}, "PYTHONFAULTHANDLER"),
        ({"error": "torch.OutOfMemoryError: CUDA out of memory."}, "device's memory"),
        ({"error": "MemoryError"}, "host's memory"),
        (
            {
                "error": "RuntimeError: Caught RuntimeError in DataLoader worker process 1.",
                "detail": ("RuntimeError: unable to allocate shared memory(shm) for file </torch_7>: No space left",),
            },
            "--shm-size",
        ),
        (
            {"error": "RuntimeError: It is possible that dataloader's workers are out of shared memory."},
            "--shm-size",
        ),
        ({}, ""),
        ({"error": "RuntimeError: can't start new thread"}, "pids.max"),
        ({"error": "RuntimeError: Resource temporarily unavailable"}, "pids.max"),
        ({"error": "BlockingIOError: [Errno 11] Resource temporarily unavailable"}, ""),
        ({"error": "OSError: [Errno 24] Too many open files: 'x'"}, "ulimit -n"),
        ({"exit_code": -15}, ""),
        ({"kind": "hang", "detail": ('File "/lib/threading.py", line 9, in _shutdown',)}, "daemon=True"),
        ({"kind": "hang", "exit_code": -9}, ""),
        ({"symptom": "broken connection"}, "see the other ranks' logs"),
        ({"symptom": "broken connection", "ended_before": (1,)}, "the same number of steps"),
    ],
)
def test_hints_fit_the_failure(changes: dict[str, object], hint: str) -> None:
    found = hint_on(replace(FAILURE, **changes))  # type: ignore[arg-type]
    assert hint in found
    assert bool(found) == bool(hint)


def test_last_words_hold_the_end_of_a_long_traceback() -> None:
    words = failure_summary(
        91, "the budget is spent", replace(FAILURE, detail=tuple(f"ä line {i}" for i in range(1000)))
    )
    assert len(words.encode()) <= LIMIT
    lines = words.splitlines()
    assert lines[0] == "exit code 91: the budget is spent"
    assert lines[1].startswith("root cause: rank 5")
    assert lines[2:4] == ["    its logs: /logs", "..."]
    assert lines[-1] == "ä line 999"
    assert len(words.encode()) > LIMIT - 20


def test_last_words_are_bounded_for_any_text() -> None:
    words = failure_summary(91, "ä" * 5000, FAILURE)
    assert LIMIT - 1 <= len(words.encode()) <= LIMIT


def test_without_a_failure_the_last_words_are_the_end() -> None:
    assert failure_summary(94, "below the minimum", None) == "exit code 94: below the minimum\n"


def test_the_termination_log_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "termination-log"
    path.write_text("something longer than what comes")
    monkeypatch.setenv("ELASTIC_LAUNCH_TERMINATION_LOG", str(path))
    write_termination_log("short")
    assert path.read_text() == "short"


def _missing(path: Path) -> None:
    """Create nothing."""


@pytest.mark.parametrize("make", [_missing, Path.mkdir, os.mkfifo])
def test_only_a_regular_file_is_used_as_termination_log(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "there"
    make(path)
    was = path.stat().st_mode if path.exists() else None
    monkeypatch.setenv("ELASTIC_LAUNCH_TERMINATION_LOG", str(path))
    write_termination_log("x")
    assert (path.stat().st_mode if path.exists() else None) == was


def test_a_disk_that_fills_up_in_a_write_is_complained_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The system takes a part of the data, and reports no error unless it is asked for the rest."""
    kept, write, path = Kept(), os.write, tmp_path / "stdout.log"

    def take(descriptor: int, data: bytes) -> int:
        if os.fstat(descriptor).st_size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:4])

    with contextlib.closing(Writer("logs", limit=1000, patience=60)) as writer, monkeypatch.context() as patch:
        patch.setattr(os, "write", take)
        file = Appended(path, writer, kept)
        file.write(b"a line\n")
        assert writer.flush()
        file.close()
        assert writer.flush()
    assert path.read_bytes() == b"a li"
    assert kept.any
    assert "the workers' output is not kept in files: [Errno 28] No space left on device" in caplog.text


def test_a_file_that_cannot_be_closed_stops_no_output(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Network file systems may report a full disk only then."""
    kept = Kept()
    with contextlib.closing(Writer("logs", limit=1000, patience=60)) as writer:
        file = Appended(tmp_path / "stdout.log", writer, kept)
        file.write(b"a line\n")
        assert writer.flush()
        assert file._file is not None
        os.close(file._file.fileno())
        file.close()
    assert kept.any
    assert kept.complaint
    assert "the workers' output is not kept in files" in caplog.text
