"""Tells consequences of another rank's failure from a worker's own failure, by the worker's last output.

When a rank ends, the others' collectives break; when it hangs, they time out. Often these end first. Their errors show
that something is wrong elsewhere, so they are never the root cause while another error is known.

The texts are those of torch 2.13 (gloo, NCCL, TCPStore) and of Python; the tests make real processes print them.
"""

from __future__ import annotations

import re

__all__ = ["BROKEN_CONNECTION", "TIME_OUT", "symptom_in", "symptom_of_abort"]

BROKEN_CONNECTION, TIME_OUT = "broken connection", "time-out"

_TYPES = {
    "ConnectionError": BROKEN_CONNECTION,
    "ConnectionResetError": BROKEN_CONNECTION,
    "ConnectionAbortedError": BROKEN_CONNECTION,
    "ConnectionRefusedError": BROKEN_CONNECTION,
    "BrokenPipeError": BROKEN_CONNECTION,
    "TimeoutError": TIME_OUT,
}
"""Exception types that are symptoms."""

_SPEAKERS = {"RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}
"""Exceptions of torch.distributed; the same words in other exceptions mean something else."""

_TIME_OUTS = re.compile(
    r"Timed out (waiting \d+ms|after \d+ seconds waiting for clients)"
    r"|[Ww]ait timeout|Timeout waiting for key|(Connect|Read|Write) timeout|Socket Timeout|Operation timed out"
    r"|socket has timed out|Application timeout caused pair closure"
    r"|failed to pass monitoredBarrier|timed out in monitoredBarrier"
    r"|Watchdog caught collective operation timeout|collective operation timeout"
)

_BROKEN = re.compile(
    r"Connection (closed|reset) by (remote )?peer|Remote peer closed the connection|Connection was likely closed"
    r"|Connection (refused|aborted)|Broken pipe|Socket (closed|is not connected)|socket was closed"
    r"|connectFullMesh failed|remote process exit(ed|ing)|ncclRemoteError|NCCL communicator was aborted"
    r"|typically caused by a remote worker"
)


def symptom_in(error: str) -> str:
    """Return what an exception, as ``Type: message``, is a symptom of; empty if it is not a symptom."""
    kind, _, message = error.partition(":")
    name = kind.strip().rpartition(".")[2]
    if name in _TYPES:
        return _TYPES[name]
    if name not in _SPEAKERS:
        return ""
    return _said(message) or (BROKEN_CONNECTION if name == "DistNetworkError" else "")


def symptom_of_abort(stderr: str) -> str:
    """Return what an abort is a symptom of, by its output: NCCL's watchdog ends a process without an exception."""
    return _said(stderr) if "DistBackendError" in stderr or "Watchdog" in stderr else ""


def _said(text: str) -> str:
    if _TIME_OUTS.search(text):
        return TIME_OUT
    return BROKEN_CONNECTION if _BROKEN.search(text) else ""
