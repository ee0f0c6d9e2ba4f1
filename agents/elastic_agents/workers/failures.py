"""What a dead worker left behind: its exception, or its signal and the end of its stderr."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from elastic_agents.workers.mistakes import mistake_in
from elastic_launch.clock import Clock
from elastic_launch.contract import NoPlacement, Placement
from elastic_launch.error_file import ErrorFile
from elastic_launch.errors import FINAL_NOTE, REPEATS_NOTE, ExitCode
from elastic_launch.failure import Failure
from elastic_launch.symptoms import BROKEN_CONNECTION, symptom_in, symptom_of_abort
from elastic_launch.system.memory_groups import memory_groups
from elastic_launch.system.plain_text import clipped, one_line, plain

# Bytes of JSON: a report must fit into one message, however long an exception is and whatever characters it has.
_DETAIL_LINES = 60
_DETAIL_BYTES = 128 * 1024
_LINE_BYTES = 4096

START = 60.0
"""Seconds after its start within which a script that cannot run at all fails."""

_RANK = re.compile(r"\[rank\d+\]: ")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(: |$)")
_USAGE_ERROR = re.compile(r"(^|: )error: ", re.IGNORECASE)
_UNREADABLE = re.compile(
    r".*: No module named \S+$"  # the message of python -m
    r"|SyntaxError: (Non-UTF-8 code |encoding problem|unknown encoding|\(unicode error\))"  # of a script, with no place
)
_LOST_PROCESS = re.compile(
    r"RuntimeError: DataLoader worker \(pid.*\) (is killed by signal: Killed|exited unexpectedly)"
    r"|.*BrokenProcessPool: |.*CalledProcessError: .* died with <Signals\.SIGKILL"
)
"""Exceptions of torch's loader, ``concurrent.futures`` and ``subprocess`` in a worker after a child was killed."""

_TRACEBACK, _GROUP = "Traceback (most recent call last)", "  + Exception Group Traceback (most recent call last)"

_IN_GROUP = re.compile(r"  \| (?=\S)")
"""What is before the exception's own line in the traceback of an ``ExceptionGroup``."""


ENDS = 30.0
"""Seconds from the count of a kill to the report on the end that it explains.

A process with much memory takes some to end, and a data loader misses its process only after 5 s.
"""

EXPLAINS = 2.0
"""Seconds for which others that were counted with it explain ends, too; later, they have ended other processes."""


class OutOfMemoryKills:
    """The kernel's out-of-memory kills in this process' cgroup, each of which explains the end of one worker.

    The kernel counts them in ``memory.events`` (cgroup v2) or ``memory.oom_control`` (v1) before the processes end, and
    does not say which these are, nor when it was. It may have counted several when the first end is looked at.
    Thread-safe.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._files = _event_files()
        self._lock = threading.Lock()
        self._counted = self._read()
        self._unexplained, self._until = 0, 0.0

    def look(self) -> None:
        """Date what was counted since the last look; to be called regularly, so that an old kill explains nothing."""
        with self._lock:
            before, self._counted, now = self._counted, self._read(), self._clock.now()
            if now > self._until:
                self._unexplained = 0
            if self._counted > before:
                self._unexplained, self._until = self._unexplained + self._counted - before, now + ENDS

    def explain_one(self) -> bool:
        """Whether the kernel has killed a process whose end is not explained yet; if so, that is this end."""
        self.look()
        with self._lock:
            explained = self._unexplained > 0
            if explained:
                self._unexplained, self._until = self._unexplained - 1, min(self._until, self._clock.now() + EXPLAINS)
            return explained

    def _read(self) -> int:
        for path in self._files:
            try:
                for line in path.read_text().splitlines():
                    name, _, value = line.partition(" ")
                    if name == "oom_kill":
                        return int(value)
            except (OSError, ValueError):
                continue
        return 0


def _event_files() -> list[Path]:
    """Files of this process' cgroups, and of those above: the first that exists counts the kills of its processes.

    Its own has none where the memory controller is not enabled for it, or if it is not visible in a container, where
    the root is often the container's own.
    """
    return [group.path / group.events for group in memory_groups()]


_QUIT = "bdb.BdbQuit"
"""The exception of a user who has quit Python's debugger, and would have to do so again after a restart."""


def about(
    node_id: str,
    round_number: int,
    placement: Placement | NoPlacement,
    pid: int,
    *,
    ran: float,
    log: Path | None,
    trained: int | None,
) -> Failure:
    """Return what is known of a worker, however it failed.

    Args:
        trained: optimizer steps that the round has done; None if that is not known.
    """
    return Failure(
        node_id=node_id,
        kind="crash",
        rank=placement.rank,
        local_rank=placement.local_rank,
        pid=pid,
        exit_code=ExitCode.TRAINING_FAILED,  # the interpreter's, if an exception ends it
        ran=round(ran, 3),
        log="" if log is None else clipped(plain(str(log)), _LINE_BYTES),
        round=round_number,
        host=socket.gethostname(),
        trained=trained,
    )


def report(
    known: Failure,
    *,
    world_size: int,
    exit_code: int,
    ago: float,
    error: ErrorFile | None,
    stderr: Sequence[str],
    earlier: Sequence[str] = (),
    only_crashes: bool = False,
    fatal_codes: Collection[int] = (),
    stopped: bool,
    out_of_memory: Callable[[], bool],
    supposed: bool = False,
    done: Sequence[int] = (),
) -> Failure:
    """Build the report on a failed worker.

    Args:
        known: what :func:`about` returns.
        error: the content of its error file.
        only_crashes: whether each failure counts as a crash, unless the script calls ``do_not_retry``.
        fatal_codes: exit codes (128 + N for signal N) after which a restart would not help.
        stderr: the end of its stderr.
        earlier: what it had written to it before, where a long traceback may begin.
        stopped: it had failed, and was stopped before it ended; the exit code is that of the stop.
        out_of_memory: whether the kernel's kill of a process explains it; asked only if the worker or a child of it was
            killed.
        supposed: only :func:`printed_last` indicates that it had failed.
        done: ranks of its node that had ended with 0 before, which breaks the connections of the others.
    """
    text, detail, notes = _last_words(exit_code, error, stderr, stopped=stopped, supposed=supposed)
    asked = error.exit_code if error is not None else 0
    if stopped and exit_code < 0:
        exit_code = asked or ExitCode.TRAINING_FAILED  # the interpreter's exit code for it
    asks = asked == ExitCode.DO_NOT_RETRY or (exit_code == ExitCode.DO_NOT_RETRY and not only_crashes)
    named = not stopped and (exit_code if exit_code >= 0 else 128 - exit_code) in fatal_codes
    quits = not supposed and text.startswith(_QUIT)
    if asks or named or quits or (not supposed and FINAL_NOTE in notes):
        kind = "fatal"
    elif exit_code == -signal.SIGTERM and not only_crashes:
        kind = "preemption"
    elif (exit_code == -signal.SIGKILL or _LOST_PROCESS.match(text)) and out_of_memory():
        kind = "out of memory"
    elif supposed or only_crashes:
        kind = "crash"
    else:
        begins = known.trained is None and known.ran <= START
        kind = "startup" if begins and _cannot_start(exit_code, text, detail, stderr) else "crash"
    symptom = ""
    if kind == "crash" and world_size > 1:
        symptom = symptom_in(text) if exit_code != -signal.SIGABRT else symptom_of_abort("\n".join(stderr))
    mistake = None
    # The interpreter's own code for an exception; with any other, a script says something itself.
    if kind == "crash" and exit_code == ExitCode.TRAINING_FAILED and not (symptom or supposed or only_crashes):
        printed = [_RANK.sub("", line) for line in (*earlier, *stderr)]
        mistake = mistake_in(text, printed if error is None else error.traceback)
    return replace(
        known,
        kind=kind,
        exit_code=exit_code,
        error=_first_line(text),
        detail=_bounded(detail),
        ago=max(0.0, ago),
        symptom=symptom,
        ended_before=tuple(done) if symptom else (),
        stopped=stopped,
        supposed=supposed,
        named=named,
        repeats=next((clipped(line, _LINE_BYTES) for line in notes if line.startswith(REPEATS_NOTE)), ""),
        mistake=mistake,
    )


def disconnection(known: Failure, error: str, done: Sequence[int] = ()) -> Failure:
    """Build the report on a worker that lost its connection to another rank, and waits for orders.

    Args:
        known: what :func:`about` returns.
        error: its exception, as ``Type: message``.
        done: as for :func:`report`.
    """
    symptom = symptom_in(error) or BROKEN_CONNECTION
    said = _first_line(error) or BROKEN_CONNECTION
    return replace(known, error=said, symptom=symptom, ended_before=tuple(done), alive=True)


def _first_line(text: str) -> str:
    """Return an exception's first line; if that is its type alone, with the first line of the message that has text."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])
    return clipped(one_line(said), _LINE_BYTES)


def raised_in(stderr: Sequence[str], *, stopped: bool) -> int | None:
    """Return which line of a worker's last output is that of the exception that ended it; None if none is.

    Args:
        stopped: it was stopped, so a traceback there may belong to an exception that it had handled. Once there is a
            process group, torch writes the rank before the lines of an unhandled exception.
    """
    lines = [_RANK.sub("", line) for line in stderr]
    marked = [index for index, line in enumerate(stderr) if not stopped or _RANK.match(line)]
    begins = [index for index in marked if lines[index].startswith((_TRACEBACK, _GROUP, '  File "'))]
    if not begins:
        return None
    group = next((index for index in reversed(begins) if lines[index].startswith(_GROUP)), None)
    if group is not None and not any(lines[index].startswith(_TRACEBACK) for index in begins if index > group):
        return next((index for index in marked if index > group and _IN_GROUP.match(lines[index])), None)
    return next((index for index in reversed(marked) if lines[index] and not lines[index].startswith((" ", "["))), None)


def printed_last(stderr: Sequence[str]) -> int | None:
    """Return which line is that of the exception whose traceback a stopped worker printed last; None if there is none.

    Without a process group and an error file, it is unknown whether that exception had ended the worker.
    """
    index = raised_in(stderr, stopped=False)
    if index is None or index == 0 or any(stderr[index + 1 :]) or not stderr[index - 1].startswith("  "):
        return None
    return index if _EXCEPTION.match(stderr[index]) else None


def _last_words(
    exit_code: int, error: ErrorFile | None, stderr: Sequence[str], *, stopped: bool, supposed: bool
) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Return the exception, if there was one, its traceback (else the last output), and its notes.

    Notes are the lines that follow an exception's own in each traceback, whether printed or recorded.
    """
    if error is not None:
        places = [number for number, line in enumerate(error.traceback) if line.startswith('  File "')]
        return error.message, error.traceback, error.traceback[places[-1] + 1 if places else 0 :]
    if supposed and (last := printed_last(stderr)) is not None:
        return stderr[last], tuple(stderr), ()
    raised = exit_code > 0 or exit_code == -signal.SIGINT or stopped  # Python ends by SIGINT on a KeyboardInterrupt
    index = raised_in(stderr, stopped=stopped) if raised else None
    if index is None:
        return "", tuple(stderr), ()
    notes = tuple(_RANK.sub("", line) for line in stderr[index + 1 :])
    text = _IN_GROUP.sub("", _RANK.sub("", stderr[index]))
    return "\n".join([text, *notes]) if text.endswith((":", ": ")) else text, tuple(stderr), notes


def _cannot_start(exit_code: int, text: str, detail: Sequence[str], stderr: Sequence[str]) -> bool:
    """Whether the script cannot run at all: a syntax error, a module that is not installed, wrong arguments."""
    if exit_code == ExitCode.USAGE:
        usage = any(line.lower().startswith("usage:") for line in stderr)
        return usage and any(_USAGE_ERROR.search(line) for line in stderr)
    name = text.partition(":")[0]
    if name in ("SyntaxError", "IndentationError", "TabError"):
        places = [line for line in detail if line.lstrip().startswith('File "')]
        return bool(places) and not places[-1].lstrip().startswith('File "<')  # evaluated code may be data
    if not text:  # a worker that a signal has ended had another reason
        return exit_code > 0 and any(_UNREADABLE.match(line) for line in stderr[-1:])
    return name == "ModuleNotFoundError"


def _bounded(detail: Sequence[str]) -> tuple[str, ...]:
    """Return as much of the end of a traceback or of output as fits into a report."""
    kept: list[str] = []
    left = _DETAIL_BYTES
    for line in reversed(detail[-_DETAIL_LINES:]):
        # A progress bar overwrites itself: keep the text that was visible last.
        line = clipped(plain(line.rstrip("\r").rpartition("\r")[2]), _LINE_BYTES)
        left -= len(json.dumps(line))
        if left < 0:
            break
        kept.append(line)
    if kept and len(kept) < len(detail):
        kept.append(f"[... {len(detail) - len(kept)} more lines]")
    return tuple(reversed(kept))
