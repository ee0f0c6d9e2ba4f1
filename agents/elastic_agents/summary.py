"""The final report on a failed run: the root cause, and what may help."""

from __future__ import annotations

import logging
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_launch.error_file import ErrorFile, read_error_file, write_error_file
from elastic_launch.events.sentences import how_failed
from elastic_launch.failure import Failure
from elastic_launch.system.descriptors import process_limit
from elastic_launch.system.termination_log import termination_message

if TYPE_CHECKING:
    from elastic_agents.outcome import NodeOutcome

_log = logging.getLogger("elastic_launch")

_SHARED_MEMORY = (
    "is /dev/shm full? Loaders pass samples through it; containers often have 64 MiB: give them more (docker run "
    "--shm-size, a pod's emptyDir in memory), or use fewer loader processes"
)

_ON_SIGNALS: dict[int, str] = {
    signal.SIGKILL: "sent by a user, or by the kernel for lack of memory outside this cgroup: see dmesg",
    signal.SIGBUS: _SHARED_MEMORY,
    signal.SIGSEGV: "PYTHONFAULTHANDLER=1 makes Python print where it was",
}

_ON_SYMPTOMS = {
    "broken connection": "another rank was gone, but none has reported why; see the other ranks' logs",
    "time-out": "another rank did not answer; it may hang, or be slower than the time-out allows; see its log",
}


def root_cause(failure: Failure) -> str:
    """Return the failure in several lines: rank, place, cause, the traceback or end of stderr, a hint, the logs."""
    lines = [_who(failure), *(f"    {line}" for line in failure.detail), *_where(failure)]
    return "\n".join(lines)


def failure_summary(code: int, cause: str, failure: Failure | None) -> str:
    """Return a shorter report for where there is little room, preceded by how the run ended."""
    end = f"exit code {code}: {cause}"
    if failure is None:
        return termination_message([end], ())
    return termination_message([end, _who(failure), *_where(failure)], failure.detail)


def leave_error(path: Path, outcome: NodeOutcome, worker: Path | None) -> None:
    """Write why the run ended to the error file of the launcher's own caller, as torchrun does.

    Args:
        worker: where the worker that failed first may have left its exception, if it is on this node.
    """
    failure, error = outcome.failure, read_error_file(worker) if worker is not None else None
    if failure is None:
        error = ErrorFile(outcome.cause, (), int(outcome.code), time.time())
    elif error is None:
        error = ErrorFile(how_failed(failure), failure.detail, failure.exit_code, time.time() - failure.ago)
    else:
        error = replace(error, exit_code=failure.exit_code)
    try:
        write_error_file(path, error)
    except OSError as problem:
        _log.warning("why the run ended cannot be written to %s: %s", path, problem)


def hint_on(failure: Failure) -> str:
    """Return what may help against a failure; empty if nothing is known."""
    if failure.symptom:
        if failure.ended_before:
            return "a rank that ends leaves the others without a peer: all ranks must make the same number of steps"
        return _ON_SYMPTOMS.get(failure.symptom, "")
    if failure.kind == "hang":
        waits = any(", in _shutdown" in line for line in failure.detail)
        return "a thread that is not a daemon still runs: end it, or start it with daemon=True" if waits else ""
    if failure.kind == "out of memory":
        return "give it more memory (the container's limit counts), fewer loader processes or smaller micro-batches"
    if failure.exit_code < 0:
        return _ON_SIGNALS.get(-failure.exit_code, "")
    if "OutOfMemoryError" in failure.error or "CUDA out of memory" in failure.error:
        return "the device's memory is full: smaller micro-batches need less"
    # A loader's process passes its exception on, with the text in one of several lines.
    said = "\n".join([failure.error, *failure.detail])
    if "unable to allocate shared memory" in said or "workers are out of shared memory" in said:
        return _SHARED_MEMORY
    # The second is what torch's own threads raise; of other types, a lock or a socket may be the cause.
    if "can't start new thread" in said or "RuntimeError: Resource temporarily unavailable" in failure.error:
        return process_limit()
    if "Too many open files" in failure.error:
        return "the limit of open files is reached: raise it (ulimit -n) for the launcher, whose workers inherit it"
    if "MemoryError" in failure.error:
        return "the host's memory or the process' limit (ulimit -v) is used up"
    return ""


def _who(failure: Failure) -> str:
    host = f"host {failure.host}, " if failure.host else ""
    what = "first failure, cause unknown" if failure.symptom else "root cause"
    who, where = f"rank {failure.rank}", f"round {failure.round}"
    if failure.rank is None:
        who, where = f"local rank {failure.local_rank}", "started ahead of a round"
    return (
        f"{what}: {who} on node {failure.node_id} ({host}pid {failure.pid}, {where}) "
        f"failed {failure.ran:.1f} s after its start: {how_failed(failure)}"
    )


def _where(failure: Failure) -> list[str]:
    hint = hint_on(failure)
    lines = [f"    hint: {hint}"] if hint else []
    return [*lines, f"    its logs: {failure.log}"] if failure.log else lines
