"""The last words on a run that failed: whose fault it was, and what may help."""

from __future__ import annotations

import signal

from elastic_launch.rendezvous.messages import Failure
from elastic_launch.termination import termination_message

__all__ = ["hint_on", "last_words", "root_cause"]

_ON_SIGNALS: dict[int, str] = {
    signal.SIGKILL: "if nobody sent it, the kernel may have, for lack of memory outside this cgroup: see dmesg",
    signal.SIGBUS: "is /dev/shm full? Loaders pass samples through it; containers often have 64 MiB",
    signal.SIGSEGV: "PYTHONFAULTHANDLER=1 makes Python print where it was",
}

_ON_SYMPTOMS = {
    "broken connection": "another rank was gone, but none has reported why; see the other ranks' logs",
    "time-out": "another rank did not answer; it may hang, or be slower than the time-out allows; see its log",
}


def root_cause(failure: Failure) -> str:
    """Return the failure in several lines: who, where, how, the traceback or stderr's end, a hint, the logs."""
    lines = [_who(failure), *(f"    {line}" for line in failure.detail), *_where(failure)]
    return "\n".join(lines)


def last_words(code: int, cause: str, failure: Failure | None) -> str:
    """Return the same for where there is little room, with the run's end before it."""
    end = f"exit code {code}: {cause}"
    if failure is None:
        return termination_message([end], ())
    return termination_message([end, _who(failure), *_where(failure)], failure.detail)


def hint_on(failure: Failure) -> str:
    """Return what may help against a failure, or nothing."""
    if failure.symptom:
        return _ON_SYMPTOMS.get(failure.symptom, "")
    if failure.kind == "out of memory":
        return "give it more memory (the container's limit counts), fewer loader processes or smaller micro-batches"
    if failure.exit_code < 0:
        return _ON_SIGNALS.get(-failure.exit_code, "")
    if "OutOfMemoryError" in failure.message or "CUDA out of memory" in failure.message:
        return "the device's memory is full: smaller micro-batches need less"
    if "MemoryError" in failure.message:
        return "the host's memory or the process' limit (ulimit -v) is used up"
    return ""


def _who(failure: Failure) -> str:
    host = f"host {failure.host}, " if failure.host else ""
    what = "first failure, of which the cause is not known" if failure.symptom else "root cause"
    return (
        f"{what}: rank {failure.rank} on node {failure.node_id} ({host}pid {failure.pid}, round {failure.round}) "
        f"failed {failure.ran:.1f} s after its start: {failure.message}"
    )


def _where(failure: Failure) -> list[str]:
    hint = hint_on(failure)
    lines = [f"    hint: {hint}"] if hint else []
    return [*lines, f"    its logs: {failure.log}"] if failure.log else lines
