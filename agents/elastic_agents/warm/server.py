"""The process that has imported what workers need, and forks them. It computes nothing and starts no thread.

Into a pipe it says, as JSON lines, ``{"ready": [variables that imports read]}`` or ``{"cold": why}`` once, before
that ``{"importing": module}`` and ``{"warning": text}``; then it forks a process for each descriptor that comes over a
socket: the end of another socket, over which the process itself tells its pid, waits for a go, says ``ready``, and
some time takes its orders: ``{"argv", "env"}`` with the descriptors of the worker's standard output and error.

A worker is forked by an intermediate process that exits at once: so it becomes a child of the agent, which is a
subreaper (prctl(2), PR_SET_CHILD_SUBREAPER), and its exit status outlives this server.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from elastic_agents.warm.become import BLOCKED, become, entry_point, leave_parent
from elastic_agents.warm.imports import Import, read
from elastic_agents.warm.loading import Loaded, hidden_by, load, modules_in
from elastic_agents.warm.spying import tasks

__all__ = ["serve"]

MOST_RESTARTS = 3


def serve(argument: str) -> Callable[[], None]:
    """Import, then fork on demand; return only in a forked process, with what it has to run.

    Args:
        argument: JSON with ``orders`` and ``tell`` (descriptors of socket and pipe), ``argv`` (of a worker, after
            interpreter and ``-u``), ``preload`` and ``without`` (modules that the user added, or are left out),
            ``restarts`` and ``mask`` (signals that a worker finds blocked; null: as now).
    """
    settings = json.loads(argument)
    _die_with_parent()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    if settings["mask"] is None:
        settings["mask"] = sorted(before)
    for descriptor in (settings["orders"], settings["tell"]):
        os.set_inheritable(descriptor, False)
    loaded = _prepare(settings)
    if isinstance(loaded, str):
        _say(settings, {"cold": loaded})
        os._exit(0)
    _say(settings, {"ready": sorted(loaded.read)})
    with socket.socket(fileno=settings["orders"]) as sock:
        agent = _fork_on_demand(sock)
    os.close(settings["tell"])
    return partial(become, agent, settings["mask"], loaded.changed)


def _prepare(settings: dict[str, Any]) -> str | Loaded:
    """Do the imports; return why workers cannot be forked, if so."""
    if reason := _watched():
        return reason
    path, first, module = entry_point(settings["argv"])
    if not path:
        return "the script is of a kind that only a process of its own can run"
    reading = read(path, first, sys.path, module)
    if reading.decisive:
        return f"the script sets {', '.join(reading.decisive)}, which matters before its imports"
    if "" in reading.before_imports:
        return "the script sets variables that are not written out before its imports"
    without = set(settings["without"])
    wanted = [item for item in reading.imports if item.top not in without and item.module not in without]
    wanted += [Import(name) for name in settings["preload"]]
    if not wanted:
        return "the script imports nothing that takes long"
    sys.argv[:] = settings["argv"]
    loaded = load(wanted, set(settings["preload"]), without, lambda name: _say(settings, {"importing": name}))
    if loaded.faults:
        _begin_again(settings, loaded.faults)
        return f"{', '.join(loaded.faults)} cannot be loaded ahead"
    if names := reading.before_imports & loaded.read:
        return f"the script sets {', '.join(sorted(names))}, which its imports read"
    before = {first, *reading.directories}
    for directory in (first, *reading.directories, *reading.behind):
        meant = loaded.missed & modules_in(directory).keys()
        if directory in before:
            meant |= hidden_by(directory)
        if meant:
            where = "beside the script" if directory == first else f"in {directory}"
            return f"{', '.join(sorted(meant))} {where} may be what libraries import by that name"
    return loaded


def _watched() -> str:
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    if sys.gettrace() or sys.getprofile() or any(monitoring and monitoring.get_tool(tool) for tool in range(6)):
        return "a debugger or profiler watches each process from its start"
    if tasks() > 1:
        return "the interpreter has threads from its start"
    return ""


def _begin_again(settings: dict[str, Any], faults: dict[str, str]) -> None:
    """Start this process anew without some modules; return if that has been done too often."""
    for name, what in faults.items():
        if not what.startswith("raises"):
            text = f"{name} is not loaded ahead: its import {what}; --no-preload {name} says that this is known"
            _say(settings, {"warning": text})
    if settings["restarts"] >= MOST_RESTARTS:
        return
    settings["restarts"] += 1
    settings["without"] = sorted({*settings["without"], *faults})
    settings["preload"] = [name for name in settings["preload"] if name not in faults]
    for descriptor in (settings["orders"], settings["tell"]):
        os.set_inheritable(descriptor, True)
    code, *rest = sys.orig_argv[sys.orig_argv.index("-c") + 1 :]
    rest[0] = json.dumps(settings)
    os.execv(sys.executable, [sys.executable, "-u", "-c", code, *rest])


def _fork_on_demand(sock: socket.socket) -> int:
    """Fork until the agent hangs up; return only in a forked process, with the descriptor of its own socket."""
    while True:
        data, received, _, _ = socket.recv_fds(sock, 1, 1)
        if not data:
            os._exit(0)
        for agent in received:
            if _fork(agent):
                return agent
            os.close(agent)


def _fork(agent: int) -> bool:
    """Fork a process; return True in it. Where that is impossible the agent sees its socket closed."""
    with contextlib.suppress(OSError, ValueError):  # an import may have replaced them, and the disk may be full
        sys.stdout.flush()
        sys.stderr.flush()
    try:
        between = os.fork()
    except OSError:
        return False
    if between:
        os.waitpid(between, 0)
        return False
    between = os.getpid()
    left, leave = os.pipe()
    try:
        worker = os.fork()
    except OSError:
        os._exit(1)
    if worker:
        os.close(leave)
        os.close(agent)
        if not os.read(left, 1):
            os.waitpid(worker, 0)
        os._exit(0)
    os.close(left)
    leave_parent(between, leave, agent)
    return True


def _die_with_parent() -> None:
    """prctl(2), PR_SET_PDEATHSIG: an agent that is killed leaves no server that still imports."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def _say(settings: dict[str, Any], message: dict[str, Any]) -> None:
    try:
        os.write(settings["tell"], json.dumps(message).encode() + b"\n")
    except OSError:
        os._exit(0)  # the agent is gone
