"""Kills processes that write checkpoints, and checks what is left. Not a test itself: test_kill runs it.

Usage: kill_driver.py DIRECTORY METHOD..., with the methods ptrace, calls, torn, first, other, random, dcp. For each it
prints a line of JSON: its figures, or its ``error``. Where the kernel allows no tracing, ptrace does what calls does.
``first`` and ``other`` kill one of several nodes that write together, ``dcp`` one that
writes torch's format. One process forks all writers, because importing
torch takes seconds and forking it milliseconds.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from snapshot_helpers import commit, share

from elastic_launch.snapshot import CheckpointReadError, find, load, newest, prune, write
from elastic_launch.snapshot.storage import shares

# Dying before a call that changes nothing is dying before the next one.
CALLS = ("open", "write", "fsync", "close", "mkdir", "rename", "unlink", "rmdir")
TRACEME, SYSCALL, SETOPTIONS = 0, 24, 0x4200
EXITKILL, SYSGOOD = 0x100000, 1
KEEP = 2
NOT_ALLOWED = 77
"""Exit code of a process that may not be traced."""


class NotAllowedError(Exception):
    """The kernel allows no tracing."""


def state_of(step: int, round: int) -> dict[str, Any]:
    """Every part encodes step and round, so that no mixture of two states looks valid."""
    value = float(step * 1000 + round)
    moments = {0: {"exp_avg": torch.full((300,), value), "step": torch.tensor(value, dtype=torch.bfloat16)}}
    model = {"w": torch.full((20, 30), value), "b": torch.full((600,), value)}
    return {"model": model, "optimizer": {"state": moments}, "seen": [value] * 20}


def check_all(directory: Path, at_least: tuple[int, int]) -> tuple[int, int]:
    """Check that every checkpoint that can be found is correct; return (round, step) of the newest."""

    def refuse(error: CheckpointReadError) -> None:
        raise AssertionError(f"damaged after a kill: {error}")

    best = newest(directory, refuse)
    assert best is not None, "nothing is left"
    for loaded in (best, *(load(info) for info in find(directory, refuse))):
        expected = state_of(loaded.info.step, loaded.info.round)
        assert loaded.state["seen"] == expected["seen"]
        assert all(torch.equal(loaded.state["model"][name], expected["model"][name]) for name in "wb")
        for name, tensor in expected["optimizer"]["state"][0].items():
            assert torch.equal(loaded.state["optimizer"]["state"][0][name], tensor)
    assert (best.info.round, best.info.step) >= at_least, (
        f"{(best.info.round, best.info.step)} is older than {at_least}"
    )
    return best.info.round, best.info.step


def check_no_litter(directory: Path) -> None:
    """Check that the next writer cleans up, whatever the last one left."""
    write(directory, state_of(9, 1), step=9, round=1)
    prune(directory, KEEP, 1)
    names = sorted(os.listdir(directory))
    assert len(names) == KEEP, names
    assert all(name.startswith("step-") for name in names), names


def prepare(directory: Path) -> None:
    """Write two checkpoints, one more than is kept later, and leftovers of other processes."""
    for step in (1, 2):
        write(directory, state_of(step, 1), step=step, round=1)
    for name in (".writing-0123456789abcdef", ".removing-0123456789abcdef"):
        (directory / name).mkdir()
        (directory / name / "tensors.safetensors").write_bytes(b"x")


def write_and_prune(directory: Path, written: Callable[[], object], meta: dict[str, Any] | None = None) -> None:
    """The work of a writer that will be killed."""
    write(directory, state_of(3, 1), step=3, round=1, meta=meta)
    written()
    prune(directory, KEEP, 1)


def commit_and_prune(directory: Path, written: Callable[[], object]) -> None:
    """The work of the first of three nodes; one of the others has written its share."""
    commit(directory, state_of(3, 1), 3, step=3, round=1)
    written()
    prune(directory, KEEP, 1)


def write_share(directory: Path, written: Callable[[], object]) -> None:
    """The work of another node."""
    share(directory, state_of(3, 1), 3, 1, step=3, round=1)
    written()


def prepare_together(directory: Path) -> None:
    prepare(directory)
    share(directory, state_of(3, 1), 3, 2, step=3, round=1)


def forked(work: Callable[[int], None]) -> tuple[int, int]:
    """Fork a process for the work; return its id and the pipe on which it reports."""
    receive, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(receive)
            work(report)
            status = 0
        finally:
            os._exit(status)
    os.close(report)
    return pid, receive


def drained(receive: int) -> bytes:
    with os.fdopen(receive, "rb") as pipe:
        return pipe.read()


def die_before(count: int) -> None:
    """Kill this process right before its count-th call that changes files."""
    seen = 0

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*arguments: Any, **options: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return replacement

    for name in CALLS:
        setattr(os, name, wrapped(getattr(os, name)))
    fcntl.flock = wrapped(fcntl.flock)  # type: ignore[assignment]


def die_halfway(count: int) -> None:
    """Kill this process when half of its count-th write is done."""
    seen, write_whole = 0, os.write

    def replacement(descriptor: int, data: bytes) -> int:
        nonlocal seen
        seen += 1
        if seen == count:
            write_whole(descriptor, bytes(data)[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return write_whole(descriptor, data)

    os.write = replacement  # type: ignore[assignment]


def run_with(
    prepare_to_die: Callable[[int], None],
    directory: Path,
    count: int,
    writer: Callable[[Path, Callable[[], object]], None] = write_and_prune,
) -> tuple[bool, bytes]:
    """Return whether the writer was killed before it ended, and its report."""

    def work(report: int) -> None:
        send = os.write
        prepare_to_die(count)
        writer(directory, lambda: send(report, b"w"))

    pid, receive = forked(work)
    report = drained(receive)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or status == 0, f"the writer ended with {status}"
    return os.WIFSIGNALED(status), report


libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
libc.ptrace.restype = ctypes.c_long


def run_to_system_call(directory: Path, count: int) -> tuple[bool, bytes]:
    """Like run_with, but counting all entries to and exits from system calls."""

    def work(report: int) -> None:
        if libc.ptrace(TRACEME, 0, None, None) != 0:
            os._exit(NOT_ALLOWED)
        os.kill(os.getpid(), signal.SIGSTOP)
        write_and_prune(directory, lambda: os.write(report, b"w"))

    pid, receive = forked(work)
    try:
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == NOT_ALLOWED
            raise NotAllowedError
        libc.ptrace(SETOPTIONS, pid, None, EXITKILL | SYSGOOD)
        stops = 0
        while os.WIFSTOPPED(status) and stops < count:
            libc.ptrace(SYSCALL, pid, None, None)
            _, status = os.waitpid(pid, 0)
            stops += 1
        killed = os.WIFSTOPPED(status)
        if killed:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    finally:
        report = drained(receive)
    return killed, report


def kill_at_each(
    directory: Path,
    run: Callable[[Path, int], tuple[bool, bytes]],
    stride: int,
    prepare: Callable[[Path], None] = prepare,
    go_on: Callable[[Path], bool] = lambda directory: False,
) -> dict[str, int]:
    """Kill a writer at its first, second, ... call until one ends by itself.

    Args:
        go_on: does what the other nodes do then, and returns whether the newer checkpoint must exist.
    """
    figures = {"points": 0, "older": 0, "newer": 0}
    template = directory.with_name(f"{directory.name}-template")
    prepare(template)
    killed = True
    while killed:
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(template, directory)
        killed, report = run(directory, 1 + stride * figures["points"])
        newer = go_on(directory) or report
        _, step = check_all(directory, (1, 3) if newer else (1, 2))
        check_no_litter(directory)
        figures["points"] += killed
        figures["newer" if step == 3 else "older"] += 1
    assert report == b"w", "the last writer was to end by itself"
    return figures


def kill_at_random(directory: Path, rounds: int) -> dict[str, int]:
    """Repeatedly kill a writer, each time in another round that starts a few steps earlier."""
    random.seed(0)
    write(directory, state_of(5, 0), step=5, round=0)
    newest_known, written = (0, 5), 0
    for round in range(1, rounds + 1):
        first = newest_known[1] - 3

        def work(report: int, round: int = round, first: int = first) -> None:
            for step in range(first, first + 1000):
                if step == first + 1:
                    os.write(report, b"warm")
                write(directory, state_of(step, round), step=step, round=round)
                os.write(report, step.to_bytes(4, "big"))
                prune(directory, KEEP, round)

        pid, receive = forked(work)
        # Half of them from the start, half when the first write is done.
        if round % 2:
            os.read(receive, 4)
            os.read(receive, 4)
        time.sleep(random.uniform(0.0, 0.1))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        reported = drained(receive).replace(b"warm", b"")
        written += len(reported) // 4
        if reported:
            newest_known = (round, int.from_bytes(reported[-4:], "big"))
        newest_known = check_all(directory, newest_known)
    prune(directory, KEEP, rounds)
    assert len(os.listdir(directory)) <= KEEP
    return {"kills": rounds, "written": written}


def figures_of(method: str, directory: Path) -> dict[str, int]:
    if method == "random":
        return kill_at_random(directory, 20)
    if method == "first":
        return kill_at_each(directory, partial(run_with, die_before, writer=commit_and_prune), 1, prepare_together)
    if method == "other":

        def go_on(directory: Path) -> bool:
            commit(directory, state_of(3, 1), 3, step=3, round=1)
            return True

        return kill_at_each(directory, partial(run_with, die_before, writer=write_share), 1, prepare_together, go_on)
    if method == "dcp":
        writer = partial(write_and_prune, meta={"format": "dcp"})
        return kill_at_each(directory, partial(run_with, die_before, writer=writer), 1)
    if method == "ptrace":
        try:
            # Right after one system call is right before the next.
            return kill_at_each(directory, run_to_system_call, 2)
        except NotAllowedError:
            method = "calls"
    return kill_at_each(directory, partial(run_with, die_before if method == "calls" else die_halfway), 1)


def main() -> None:
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # So that forked processes do not copy the pages of imported modules.
    shares.Division.patience = -1e9  # A share that is missing at the first look will not arrive.
    for method in sys.argv[2:]:
        started = time.monotonic()
        try:
            found: dict[str, Any] = {**figures_of(method, Path(sys.argv[1], method))}
        except Exception:  # noqa: BLE001 - it fails the test of that method alone
            found = {"error": traceback.format_exc()}
        print(json.dumps({"method": method, "seconds": round(time.monotonic() - started, 1), **found}))


if __name__ == "__main__":
    main()
