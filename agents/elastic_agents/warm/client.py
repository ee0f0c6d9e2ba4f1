"""The agent's side of the warm server: worker processes that are forked where possible, and executed where not."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import selectors
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol

from elastic_agents.placing import shared_environment
from elastic_agents.processes import ExecProcesses, OnExit, StartRequest, WorkerProcesses
from elastic_agents.sessions import kill_sessions, reap_orphans
from elastic_agents.warm import parked as waiting
from elastic_agents.warm.anew import server_environment, server_settings, wants_server
from elastic_agents.warm.imports import differs_at_import
from elastic_agents.warm.parked import Parked
from elastic_agents.warm.server import command, open_log
from elastic_agents.warm.spying import PER_WORKER
from elastic_launch.config import LaunchConfig
from elastic_launch.descriptors import given_limit
from elastic_launch.threads import VitalThread
from elastic_launch.writer import Writer

if TYPE_CHECKING:
    from elastic_agents.warm.parting import Parted

__all__ = ["WarmProcesses", "WarmServer", "start_processes"]

_log = logging.getLogger("elastic_launch.warm")

OPEN_TIMEOUT = 3.0
"""Seconds that the file for what imports print may take to be opened."""

PATIENCE = 120.0
"""Seconds that the first workers wait for the imports at most; then they do their own."""

REST = 2.0
"""Seconds after the start of workers before the next ones are forked ahead: they need the processor themselves."""

TRAINING_REST = 0.3
"""The same after workers have begun to train, if they say so."""

MOST_REPLACED = 3
"""So often a server that died is replaced."""

PR_SET_CHILD_SUBREAPER = 36


def start_processes(config: LaunchConfig, parted: Parted | None, files: Writer) -> Callable[[OnExit], WorkerProcesses]:
    """Start what a node's workers will be started by, as early as can be, and return how to take it into use.

    Args:
        parted: a server that this process comes with.
        files: opens the file for what imports print, which may hang.
    """
    if config.command.forked:
        assert parted is not None
        _be_subreaper(True)
        forks = WarmServer(parted.server, parted.orders, parted.source, {}, config.nproc)
        return lambda on_exit: CallersForks(on_exit, forks, _no_other)
    if not wants_server(config):
        return ExecProcesses
    env = shared_environment(config)
    make = partial(WarmServer.execute, config, env, ahead=config.nproc, files=files)
    try:
        _be_subreaper(True)
        server = WarmServer(parted.server, parted.orders, parted.source, env, config.nproc) if parted else make()
    except OSError as error:
        _log.warning("workers import for themselves: there can be no warm server (%s)", error)
        if parted is not None:
            parted.end()
        return ExecProcesses
    return lambda on_exit: WarmProcesses(on_exit, server, make)


class Process(Protocol):
    """A server's process, executed or forked."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float) -> object: ...


class WarmServer:
    """The server's process, which is asked to fork once it is ready.

    Attributes:
        lost: whether it was ready and has died.
        read: variables that its imports asked for.

    Args:
        process: of the server.
        orders: the socket to it.
        source: descriptor of the pipe from it.
        env: a worker's environment.
        ahead: how many processes are forked ahead, once workers have begun: as many as may begin together.
    """

    def __init__(
        self, process: Process, orders: socket.socket, source: int, env: Mapping[str, str], ahead: int
    ) -> None:
        self.env = server_environment(env)
        self._process = process
        self._orders = orders
        self._orders.settimeout(waiting.FORK_TIMEOUT)
        self._source = source
        self._lock = threading.Lock()
        self._known = False
        self._usable = False
        self._importing = ""
        self.read: frozenset[str] = frozenset()
        self.lost = False
        self._closing = False
        self._deadline = time.monotonic() + PATIENCE  # of each import
        self._calls: list[Callable[[], None]] = []
        self._wanted: list[tuple[int, Callable[[], None]]] = []  # so many processes, and what to call for each
        self._reaping = threading.Lock()
        self._reaped = False
        self._parked: list[Parked] = []
        self._ahead = ahead
        self._ahead_at = 0.0
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = VitalThread(self._listen, "warm")
        self._thread.start()

    @staticmethod
    def execute(config: LaunchConfig, env: Mapping[str, str], ahead: int, files: Writer | None = None) -> WarmServer:
        """Start a server that shares nothing with this process.

        Args:
            files: opens the file for what imports print; None: this thread does, which may hang.

        Raises:
            OSError: if it cannot be executed.
        """
        orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        source, tell = os.pipe2(os.O_CLOEXEC)
        settings = {**server_settings(config), "orders": theirs.fileno(), "tell": tell}
        with ExitStack() as undo:
            undo.callback(os.close, source)
            undo.enter_context(orders)
            log = partial(open_log, str(settings["log"]))
            opened = log() if files is None else files.ask(log, OPEN_TIMEOUT)
            with theirs, open(tell, "wb"), opened as output, given_limit():
                process = subprocess.Popen(
                    command(settings),
                    env=server_environment(env),
                    stdout=output,
                    stderr=output,
                    pass_fds=[theirs.fileno(), tell],
                    start_new_session=True,
                )
            undo.pop_all()
        return WarmServer(process, orders, source, env, ahead)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def waiting(self) -> list[int]:
        """The server and the processes that wait for work, which are reaped here; for any thread."""
        return [self._process.pid, *(one.pid for one in self._parked)]

    @property
    def usable(self) -> bool:
        """Whether workers can be forked now."""
        return self._usable

    def when_known(self, call: Callable[[], None]) -> None:
        """Call once it is known whether workers can be forked; at once or from another thread."""
        with self._lock:
            if not self._known:
                self._calls.append(call)
                return
        call()

    def prepare(self, count: int, call: Callable[[], None]) -> None:
        """Call for each of so many processes once it waits for work, and runs, or there will be none; from any thread.

        Only the thread waits for the server, and for those that it forks: each of them may be stopped.
        """
        with self._lock:
            if not (self._known and not self._usable):
                self._wanted.append((count, call))
                os.eventfd_write(self._wake, 1)
                return
        for _ in range(count):
            call()

    def training(self) -> None:
        """The workers train: what the next ones need can soon be done."""
        self._ahead_at = min(self._ahead_at, time.monotonic() + TRAINING_REST)
        os.eventfd_write(self._wake, 1)

    def start(self, request: StartRequest) -> int:
        """Return the pid of a worker, which is a child of this process.

        Raises:
            OSError: if none waits for work.
        """
        try:
            while (one := self._take()) is not None:
                try:
                    return one.begin(request)
                except OSError as error:
                    _log.debug("a process that waited for work is gone: %s", error)
            raise OSError("no process waits for work")
        finally:
            self._rest()  # last: the thread, woken, sees how many are left

    def _take(self) -> Parked | None:
        with self._lock:
            return self._parked.pop() if self._parked else None

    def give_up(self) -> None:
        """Have it count as lost: what was asked of it last must never come to life."""
        with self._lock:
            self._usable, self.lost = False, True
        self._process.kill()
        self._dismiss()

    def close(self) -> None:
        """End the server; workers go on."""
        if self._closing:
            return
        self._closing = True
        self._process.kill()
        self._dismiss()  # the thread may be waiting for them
        self._thread.join(10)
        self._reap()
        self._dismiss()
        self._orders.close()
        os.close(self._wake)

    def _listen(self) -> None:
        """Hear the server until its end, or until no process is left that was forked this moment."""
        with os.fdopen(self._source, "rb", buffering=0) as source, selectors.DefaultSelector() as selector:
            selector.register(source, selectors.EVENT_READ, "server")
            selector.register(self._wake, selectors.EVENT_READ, "wake")
            pending = b""
            while True:
                ready = {key.data for key, _ in selector.select(self._wait())}
                if "wake" in ready:
                    os.eventfd_read(self._wake)
                if not ready:
                    self._on_time()
                if "server" in ready:
                    if not (data := source.read(65536)):
                        break
                    *lines, pending = (pending + data).split(b"\n")
                    for line in lines:
                        self._hear(json.loads(line))
                if self._usable:
                    self._provide()
        self._reap()
        self.lost = self.lost or self._usable
        if not self._known and not self._closing:
            where = f" as it imported {self._importing}" if self._importing else ""
            _log.warning("workers import for themselves: the warm server has died%s", where)
        self._settle(usable=False)

    def _reap(self) -> None:
        """Reap the server, which ends, and what its imports have started."""
        with self._reaping:
            if self._reaped:
                return  # its pid may be another one's by now
            self._reaped = True
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                _log.warning("the warm server, pid %d, does not end", self._process.pid)
            with suppress(OSError):  # processes cannot be looked at
                kill_sessions({self._process.pid})
                reap_orphans({self._process.pid})

    def _wait(self) -> float | None:
        """Seconds until there is something to do; None if there is nothing."""
        if self._known and (not self._usable or len(self._parked) >= self._ahead):
            return None
        return max(0.0, (self._ahead_at if self._known else self._deadline) - time.monotonic())

    def _on_time(self) -> None:
        if self._known:
            self._fork_ahead()
            return
        _log.warning("workers import for themselves: the warm server's imports take more than %g s", PATIENCE)
        self._settle(usable=False)

    def _hear(self, message: dict[str, object]) -> None:
        self._deadline = time.monotonic() + PATIENCE
        if "warning" in message:
            _log.warning("%s", message["warning"])
        elif "note" in message:
            _log.info("%s", message["note"])
        elif "cold" in message:
            _log.info("workers import for themselves: %s", message["cold"])
            self._settle(usable=False)
        elif "importing" in message:
            self._importing = str(message["importing"])
        else:
            read = message["ready"]
            assert isinstance(read, list)
            self.read = frozenset(read) - PER_WORKER
            self._ahead_at = time.monotonic()  # if no workers begin yet
            self._settle(usable=True)

    def _rest(self) -> None:
        """Put off what can be done any time: workers begin now, and need the processor."""
        self._ahead_at = time.monotonic() + REST
        os.eventfd_write(self._wake, 1)

    def _provide(self) -> None:
        """Have as many processes wait for work as are wanted by now, all of which run; tell of each."""
        with self._lock:
            wanted, self._wanted = self._wanted, []
        if not wanted:
            return
        calls = [call for count, call in wanted for _ in range(count)]
        told = 0
        self._ahead_at = time.monotonic() + REST
        try:
            self._weed_out()
            for _ in range(min(len(self._parked), len(calls))):
                calls[told]()
                told += 1
            with closing(Parked.fork(self._orders, len(calls) - told)) as forked:
                for one in forked:
                    self._park(one)
                    calls[told]()
                    told += 1
        except OSError as error:
            if self._usable and not self._closing:
                _log.warning("workers import for themselves: %s", error)
            self.give_up()
        for call in calls[told:]:
            call()

    def _weed_out(self) -> None:
        """End those that wait for work and have died, or are stopped."""
        with self._lock:
            parked = list(self._parked)
        asked = []
        for one in parked:
            with suppress(OSError):
                one.ask()
                asked.append(one)
        deadline = time.monotonic() + waiting.ANSWER_TIMEOUT
        answer = [one for one in asked if one.answers(deadline)]
        for one in parked:
            if one not in answer:
                with self._lock:
                    mine = one in self._parked
                    if mine:
                        self._parked.remove(one)
                if mine:
                    one.end()

    def _park(self, one: Parked) -> None:
        with self._lock:
            parked = self._usable and not self._closing
            if parked:
                self._parked.append(one)
        if not parked:
            one.end()

    def _fork_ahead(self) -> None:
        """Have one more process waiting, if workers have begun a while ago."""
        if not self._usable or self._closing or time.monotonic() < self._ahead_at:
            return
        if len(self._parked) < self._ahead:
            try:
                for one in Parked.fork(self._orders, 1):
                    self._park(one)
            except TimeoutError:
                self.give_up()  # it hangs, and would keep from a start whoever waits for it
            except OSError as error:
                _log.debug("no process could be forked ahead: %s", error)
                self._rest()

    def _dismiss(self) -> None:
        """End the processes that wait for work."""
        with self._lock:
            parked, self._parked = self._parked, []
        for one in parked:
            one.end()

    def _settle(self, *, usable: bool) -> None:
        with self._lock:
            self._known, self._usable = True, usable
            calls, self._calls = self._calls, []
            if not usable:
                calls += [call for count, call in self._wanted for _ in range(count)]
                self._wanted = []
        for call in calls:
            call()


class WarmProcesses:
    """Forks from a warm server what can be forked, and executes everything else.

    This process becomes a subreaper: workers' orphans, and the workers themselves, become its children.

    Attributes:
        forked: how many workers were.
    """

    def __init__(self, on_exit: OnExit, server: WarmServer, make: Callable[[], WarmServer]) -> None:
        _be_subreaper(True)
        self._server = server
        self._former: list[tuple[WarmServer, VitalThread]] = []  # and who closes it
        self._make = make
        self._replaced = 0
        self._exec = ExecProcesses(on_exit, self._claimed)
        self._complained = False
        self.forked = 0

    def when_ready(self, call: Callable[[], None]) -> None:
        self._replace_lost()
        self._server.when_known(call)

    def prepare(self, count: int, call: Callable[[], None]) -> None:
        self._replace_lost()
        self._server.prepare(count, call)

    def training(self) -> None:
        self._server.training()

    def _replace_lost(self) -> None:
        if not self._server.lost or self._replaced >= MOST_REPLACED:
            return
        self._replaced += 1
        _log.warning("the warm server is gone; another one is started")
        try:
            server = self._make()
        except OSError as error:
            _log.warning("workers import for themselves: there can be no warm server (%s)", error)
            return
        # It may take a while: what it has forked may be stopped.
        closer = VitalThread(self._server.close, "former warm server")
        self._former.append((self._server, closer))
        self._server = server
        closer.start()

    def _claimed(self) -> list[int]:
        return [pid for server in (self._server, *(server for server, _ in self._former)) for pid in server.waiting]

    def start(self, request: StartRequest) -> int:
        if not self._server.usable or self._differs(request):
            return self._exec.start(request)
        try:
            pid = self._server.start(request)
        except OSError as error:
            _log.warning("a worker imports for itself: %s", error)
            self._server.give_up()
            return self._exec.start(request)
        self._exec.adopt(pid)
        self.forked += 1
        return pid

    def signal(self, pid: int, number: int) -> None:
        self._exec.signal(pid, number)

    def signal_group(self, pid: int, number: int) -> None:
        self._exec.signal_group(pid, number)

    def close(self) -> None:
        self._server.close()
        for _, closer in self._former:
            closer.join(30)
        self._exec.close()
        _be_subreaper(False)

    def _differs(self, request: StartRequest) -> bool:
        differing = differs_at_import(self._server.env, request.env, self._server.read)
        if differing and not self._complained:
            self._complained = True
            names = ", ".join(differing)
            _log.info("workers import for themselves: %s differs between them and matters at import", names)
        return bool(differing)


class CallersForks(WarmProcesses):
    """Forks workers from a copy of the process that has called: there is no other way, and no other copy."""

    def start(self, request: StartRequest) -> int:
        pid = self._server.start(request)
        self._exec.adopt(pid)
        self.forked += 1
        return pid

    def _replace_lost(self) -> None:
        pass


def _no_other() -> WarmServer:
    raise OSError("the copy of the caller has ended")


def _be_subreaper(yes: bool) -> None:
    """prctl(2), PR_SET_CHILD_SUBREAPER."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this process cannot become a subreaper")
