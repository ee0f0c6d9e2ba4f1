"""The process that imports what workers need, and forks them. It computes nothing and starts no thread.

It imports the modules that the user names, and then, each time that it receives a worker's record, what that worker has
imported. Meanwhile it writes JSON lines to a pipe: ``{"importing": module}`` and ``{"warning": text}``; in the end
``{"ready": [variables that imports read], "loaded": number of modules}``, ``{"ignorant": true}`` if there was nothing
to import yet, or ``{"cold": why}`` before it exits. It forks a process for each descriptor that arrives over a socket
with ``f``; with ``i``, the descriptor is a record. A process that is forked gets the end of another socket, over which
it sends its pid, waits for a go, sends ``ready``, and later receives its orders: ``{"argv", "env"}`` with the
descriptors of the worker's standard output and error, and of a record if it is to keep one.

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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from elastic_agents.prctl import signal_at_parents_death
from elastic_agents.warm._import_watch import PER_WORKER, watched
from elastic_agents.warm._preload import Preload, first_of
from elastic_agents.warm._process_groups import outlive_users
from elastic_agents.warm._record import WorkerImports, read
from elastic_agents.warm.run_script import BLOCKED, leave_parent, run_script

if TYPE_CHECKING:
    from elastic_agents.workers.processes import StartRequest
    from elastic_launch.config.launch_config import LaunchConfig

OPEN_TIMEOUT = 3.0
"""Seconds that opening the file for the imports' output may take."""

MOST_RESTARTS = 5
"""How often this process begins again without the modules that must not be loaded ahead."""


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
    return serve_as(settings, None)


def serve_as(settings: dict[str, Any], torch: Preload | None) -> Callable[[], None]:
    """Import, and fork on demand; return only in a forked process, with the function that it is to run.

    Args:
        settings: ``orders`` and ``tell`` (descriptors of socket and pipe), ``argv`` (a worker's, with the interpreter
            and ``-u``), ``preload`` and ``without`` (modules that the user added, or that are left out), ``record``
            (descriptor of a record to begin with), ``restarts``, ``mask`` (signals that are blocked in a worker at its
            start) and ``reset`` (signals with their default action there, even if they are ignored now); ``log`` is
            where its starter sends its output to.
        torch: the import of torch, if this process has begun with it.
    """
    # If the agent is killed while imports run, the server must not be left behind.
    signal_at_parents_death(signal.SIGKILL)
    for number in settings["reset"]:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    sys.argv[:] = settings["argv"][2:]
    if torch is None and (reason := watched()):
        _be_cold(settings, reason)
    server = _Server(settings, torch)
    with socket.socket(fileno=settings["orders"]) as sock:
        agent = fork_on_demand(sock, server.learn)
    os.close(settings["tell"])
    return partial(run_script, agent, settings["mask"], server.preload.changed)


class _Server:
    """What this process has imported for the workers.

    Args:
        torch: see :func:`serve_as`.
    """

    def __init__(self, settings: dict[str, Any], torch: Preload | None) -> None:
        self._settings = settings
        self._torch_unasked = torch is not None  # no worker is known yet to import it first
        self.preload = torch or Preload(settings["preload"], settings["without"])
        for descriptor in (settings["orders"], settings["tell"]):
            os.set_inheritable(descriptor, False)
        self.learn(settings["record"])

    def learn(self, record: int) -> None:
        """Import what workers have imported, and what the user has added."""
        imported = read(record)
        os.close(record)
        wanted = [*self.preload.wanted(imported), *self._settings["preload"]]
        if self._torch_unasked:
            first = first_of(wanted)
            if first not in ("", "torch"):
                self._begin_again(imported)
            self._torch_unasked = first != "torch"
            if self._torch_unasked:
                wanted = []  # torch may follow
        self._import(imported, wanted)

    def _import(self, imported: WorkerImports, names: list[str]) -> None:
        before = len(sys.modules)
        self.preload.add(names, lambda name: _say(self._settings, {"importing": name}))
        if faults := self.preload.faults:
            for name, what in faults.items():
                if what:
                    text = f"{name} is not loaded ahead: its import {'; '.join(what)}"
                    _say(self._settings, {"warning": f"{text}; --no-preload {name} silences this warning"})
            if self._settings["restarts"] >= MOST_RESTARTS:
                _be_cold(self._settings, f"{', '.join(faults)} cannot be loaded ahead")
            self._settings["restarts"] += 1
            self._settings["without"] = sorted({*self._settings["without"], *faults})
            self._settings["preload"] = [name for name in self._settings["preload"] if name not in faults]
            self._begin_again(imported)
        if reason := self.preload.doubt(imported):
            _be_cold(self._settings, reason)
        outlive_users()
        ready = {"ready": sorted(self.preload.read), "loaded": len(sys.modules) - before}
        _say(self._settings, ready if names else {"ignorant": True})

    def _begin_again(self, imported: WorkerImports) -> NoReturn:
        """Restart this process, without what it has loaded."""
        self._settings["record"] = imported.put()
        for name in ("orders", "tell", "record"):
            os.set_inheritable(self._settings[name], True)
        os.execv(sys.executable, command(self._settings))


def _be_cold(settings: dict[str, Any], reason: str) -> NoReturn:
    """Report that workers cannot be forked, and exit."""
    _say(settings, {"cold": reason})
    os._exit(0)


def command(settings: dict[str, Any]) -> list[str]:
    """Return the command of a server; the end of it leaves room for a worker to show its own command instead."""
    code = entered("from elastic_agents.warm.server import serve", "serve(sys.argv[1])()")
    return [settings["argv"][0], "-u", "-c", code, json.dumps(settings), "warm server of", *settings["argv"]]


def recorded(request: StartRequest, record: int) -> StartRequest:
    """Return the start of a worker that records its imports, as it cannot be forked yet."""
    code = entered("from elastic_agents.warm.run_script import run_recorded", "run_recorded(sys.argv[1], sys.argv[2:])")
    argv = [request.argv[0], "-u", "-c", code, str(record), *request.argv]
    return replace(request, argv=argv, inherit=(*request.inherit, record))


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


def fork_on_demand(sock: socket.socket, learn: Callable[[int], None]) -> int:
    """Fork until the agent closes the socket; return only in a forked process, with its own socket's descriptor.

    Args:
        learn: called with each record that the agent sends.
    """
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
            if data == b"i":
                learn(agent)
                continue
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
