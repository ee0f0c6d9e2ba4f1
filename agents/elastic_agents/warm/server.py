"""The process that imports what workers need, and forks them. It computes nothing and starts no thread.

It writes JSON lines to a pipe: ``{"importing": module}``, ``{"warning": text}`` and ``{"note": text}``, and finally,
once, ``{"ready": [variables that imports read]}`` or ``{"cold": why}``. Then it forks a process for each descriptor
that arrives over a socket. The descriptor is the end of another socket, over which the new process sends its pid,
waits for a go, sends ``ready``, and later receives its orders: ``{"argv", "env"}`` with the descriptors of the worker's
standard output and error.

A worker is forked by an intermediate process that exits at once. So the worker becomes a child of the agent, which is a
subreaper (prctl(2), PR_SET_CHILD_SUBREAPER), and its exit status outlives this server.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from elastic_agents.prctl import signal_at_parents_death
from elastic_agents.warm._import_watch import PER_WORKER
from elastic_agents.warm._preload import REMEDY, Loaded, Loading, Plan, plan
from elastic_agents.warm._process_groups import outlive_users
from elastic_agents.warm.run_script import BLOCKED, leave_parent, run_script

if TYPE_CHECKING:
    from elastic_launch.config.launch_config import LaunchConfig

MOST_RESTARTS = 3


def server_settings(config: LaunchConfig) -> dict[str, object]:
    """Return the server settings of a launch, see :func:`serve_as`."""
    return {
        "argv": config.command.argv,
        "preload": config.preload,
        "without": config.no_preload,
        "restarts": 0,
        "mask": None,
        "reset": config.signals.reset,
        "log": str(config.run_directory / f"imports-{config.node_id}.log"),
    }


def server_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return a worker's environment without the variables that differ between workers."""
    return {name: value for name, value in env.items() if name not in PER_WORKER}


def wants_server(config: LaunchConfig) -> bool:
    """Whether a node's workers can be forked: they are Python processes like this one."""
    python, *rest = config.command.argv
    if not config.warm or config.foreign is not None or config.options.numa_binding is not None:
        return False
    if config.command.function or config.command.display[0] == "--no-python":
        return False
    return python == sys.executable and rest[0] == "-u"


def serve(argument: str) -> Callable[[], None]:
    """Import, then fork on demand, in a process that was executed for this purpose; see :func:`serve_as`.

    Args:
        argument: settings as JSON.
    """
    settings = json.loads(argument)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    if settings["mask"] is None:
        settings["mask"] = sorted(before)
    return serve_as(settings, plan(settings, sys.path), None)


def serve_as(settings: dict[str, Any], planned: Plan | str, loading: Loading | None) -> Callable[[], None]:
    """Import, then fork on demand; return only in a forked process, with the function that it is to run.

    Args:
        settings: ``orders`` and ``tell`` (descriptors of socket and pipe), ``argv`` (a worker's, with the interpreter
            and ``-u``), ``preload`` and ``without`` (modules that the user added, or that are left out), ``restarts``,
            ``mask`` (signals that are blocked in a worker at its start) and ``reset`` (signals with their default
            action there, even if they are ignored now); ``log`` is where its starter sends its output to.
        planned: what to import, or why not to.
        loading: imports that have already begun.
    """
    # If the agent is killed while imports run, the server must not be left behind.
    signal_at_parents_death(signal.SIGKILL)
    for number in settings["reset"]:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for descriptor in (settings["orders"], settings["tell"]):
        os.set_inheritable(descriptor, False)
    loaded = planned if isinstance(planned, str) else _import(settings, planned, loading)
    if isinstance(loaded, str):
        _say(settings, {"cold": loaded})
        os._exit(0)
    outlive_users()
    _say(settings, {"ready": sorted(loaded.read)})
    with socket.socket(fileno=settings["orders"]) as sock:
        agent = fork_on_demand(sock)
    os.close(settings["tell"])
    return partial(run_script, agent, settings["mask"], loaded.changed)


def command(settings: dict[str, Any]) -> list[str]:
    """Return the command of a server; the end of it leaves room for a worker to show its own command instead."""
    code = entered("from elastic_agents.warm.server import serve", "serve(sys.argv[1])()")
    return [settings["argv"][0], "-u", "-c", code, json.dumps(settings), "warm server of", *settings["argv"]]


def open_log(path: str) -> BinaryIO:
    """Open the file for the imports' output, or the null device: a full disk must not stop training."""
    try:
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "ab")
    except OSError:
        return open(os.devnull, "ab")


def entered(imports: str, call: str) -> str:
    """Return the code of a process that has this package in its path only until its imports are done."""
    root = str(Path(__file__).resolve().parents[2])
    return (
        "import sys; sys.flags.safe_path or sys.path.pop(0); "  # drop the directory that python -c puts first
        f"sys.path.append({root!r}); {imports}; sys.path.pop(); {call}"
    )


def _import(settings: dict[str, Any], planned: Plan, loading: Loading | None) -> str | Loaded:
    """Do the imports; return why workers cannot be forked, if they cannot."""
    sys.argv[:] = settings["argv"][2:]
    loading = loading or Loading(planned.asked, planned.without)
    loaded = loading.finish(planned.wanted, planned.completes, lambda name: _say(settings, {"importing": name}))
    if loaded.faults:
        _begin_again(settings, loaded.faults)
        return f"{', '.join(loaded.faults)} cannot be loaded ahead"
    if stopped := planned.reading.stopped:
        text = (
            f"only what the script imports before it changes where imports look ({stopped}) is loaded ahead; {REMEDY}"
        )
        _say(settings, {"note": text})
    return planned.doubt(loaded) or loaded


def _begin_again(settings: dict[str, Any], faults: dict[str, str]) -> None:
    """Restart this process without some modules; return if that has been done too often."""
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
    os.execv(sys.executable, command(settings))


def fork_on_demand(sock: socket.socket) -> int:
    """Fork until the agent closes the socket; return only in a forked process, with its own socket's descriptor."""
    asked = select.poll()
    asked.register(sock, select.POLLIN)
    intermediate: list[int] = []
    while True:
        if not asked.poll(0):  # otherwise the next fork overlaps with the second fork of the previous process
            while intermediate:
                os.waitpid(intermediate.pop(), 0)
        data, received, _, _ = socket.recv_fds(sock, 1, 1)
        if not data:
            os._exit(0)
        for agent in received:
            between = _fork(agent)
            if between == 0:
                return agent
            if between is not None:
                intermediate.append(between)
            os.close(agent)


def _fork(agent: int) -> int | None:
    """Fork a process; return 0 in it, otherwise the pid of the intermediate process, which must be reaped.

    If that is impossible the result is None, and the agent sees its socket closed.
    """
    with contextlib.suppress(OSError, ValueError):  # an import may have replaced the streams, and the disk may be full
        sys.stdout.flush()
        sys.stderr.flush()
    try:
        between = os.fork()
    except OSError:
        return None
    if between:
        return between
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
    return 0


def _say(settings: dict[str, Any], message: dict[str, Any]) -> None:
    try:
        os.write(settings["tell"], json.dumps(message).encode() + b"\n")
    except OSError:
        os._exit(0)  # the agent is gone
