"""The agent's side of the warm server: reads its messages, and requests forked processes that wait for work."""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial

from elastic_agents.child import started
from elastic_agents.warm import prefork
from elastic_agents.warm._import_watch import PER_WORKER
from elastic_agents.warm._record import Learned
from elastic_agents.warm.fork_bootstrap import SERVER, ServerLink
from elastic_agents.warm.prefork import Prefork
from elastic_agents.warm.server import OPEN_TIMEOUT, command, open_log, server_environment, server_settings
from elastic_agents.workers.processes import StartRequest
from elastic_agents.workers.sessions import kill_sessions, reap_orphans
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.system.threads import VitalThread
from elastic_launch.system.wake import Waker
from elastic_launch.system.writer_thread import Writer

_log = logging.getLogger("elastic_launch.warm")

PATIENCE = 120.0
"""Seconds that the first workers wait for the imports at most; then they import for themselves."""

QUIET = 2.0
"""Seconds without another import after which a worker is taken to be done with its imports."""

REST = 2.0
"""Seconds after workers start before the next processes are forked ahead: the workers need the CPU themselves."""

TRAINING_REST = 0.3
"""The same after workers have begun to train, if they report it."""


class WarmServer:
    """The server process; it is asked to fork once it is ready.

    Attributes:
        lost: whether it could fork or learn, and has died.
        learns: whether it imports what workers import.
        read: variables that its imports looked up.

    Args:
        link: to the server.
        env: a worker's environment.
        ahead: how many processes are forked ahead once workers have begun: as many as may begin together.
        learned: what workers import.
    """

    def __init__(self, link: ServerLink, env: Mapping[str, str], ahead: int, learned: Learned) -> None:
        self.env = server_environment(env)
        self._process = link.process
        self._orders = link.orders
        self._orders.settimeout(prefork.FORK_TIMEOUT)
        self._source = link.source
        self._lock = threading.Lock()
        self._known = False
        self.usable = False  # whether workers can be forked now
        self._importing = ""
        self.read: frozenset[str] = frozenset()
        self.lost = False
        self._closing = False
        self._deadline = time.monotonic() + PATIENCE  # for each import
        self._calls: list[Callable[[], None]] = []
        self._gone = False
        self._when_gone: Callable[[], None] = lambda: None
        self._wanted: list[Callable[[], None]] = []  # what to call, for each process that is wanted
        self._reaping = threading.Lock()
        self._reaped = False
        self._idle: list[Prefork] = []
        self._asked: list[Prefork] = []  # those that are being asked whether they run, and cannot begin meanwhile
        self._checked = threading.Condition(self._lock)
        self._ahead = ahead
        self._learned = learned
        self._grown, self._look_at = 0, 0.0  # how much there was to learn, and when to look again
        self._stale = False  # whether processes wait that were forked before the last imports
        self.learns = False
        self._ahead_at = 0.0
        self._waker = Waker()
        self._thread = VitalThread(self._listen, "warm")
        self._thread.start()

    @staticmethod
    def execute(
        config: LaunchConfig, env: Mapping[str, str], ahead: int, learned: Learned, files: Writer | None = None
    ) -> WarmServer:
        """Start a server that shares nothing with this process.

        Args:
            files: opens the file for the imports' output; None: the calling thread opens it, which may hang.

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
            with theirs, open(tell, "wb"), opened as output, open(learned.take().put(), "rb") as record:
                settings["record"] = record.fileno()
                streams = {"stdout": output, "stderr": output, "pass_fds": [theirs.fileno(), tell, record.fileno()]}
                server = started(command(settings), SERVER, env=server_environment(env), **streams)
            undo.pop_all()
        return WarmServer(ServerLink(server, orders, source), env, ahead, learned)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def waiting(self) -> list[int]:
        """The server and the processes that wait for work, all of which are reaped here; for any thread."""
        with self._lock:
            return [self._process.pid, *(one.pid for one in self._idle + self._asked)]

    def when_known(self, call: Callable[[], None]) -> None:
        """Call back once it is known whether workers can be forked; immediately or from another thread."""
        with self._lock:
            if not self._known:
                self._calls.append(call)
                return
        call()

    def when_gone(self, call: Callable[[], None]) -> None:
        """Call back once it has died after it was ready, unless it was closed; immediately or from another thread."""
        with self._lock:
            if not self._gone:
                self._when_gone = call
                return
        call()

    def prepare(self, count: int, call: Callable[[], None]) -> None:
        """Call back for each of this many processes once it waits for work, or will not be available; from any thread.

        Only the client's own thread waits for the server and the processes it forks: each of them may be stopped.
        """
        with self._lock:
            if not (self._known and not self.usable):
                self._wanted += [call] * count
                self._waker.wake()
                return
        for _ in range(count):
            call()

    def training(self) -> None:
        """The workers train: what they have imported is learned, and preparations for the next ones can soon begin."""
        self._grown, self._look_at = self._learned.length(), 0.0
        self._ahead_at = min(self._ahead_at, time.monotonic() + TRAINING_REST)
        self._waker.wake()

    def start(self, request: StartRequest, record: Sequence[int]) -> int:
        """Return the pid of a worker, which is a child of this process.

        Args:
            record: descriptor of the record of its imports, if it is to keep one.

        Raises:
            OSError: if no process is waiting for work.
        """
        try:
            while (one := self._take()) is not None:
                try:
                    return one.begin(request, record)
                except OSError as error:
                    _log.debug("a process that waited for work is gone: %s", error)
            raise OSError("no process waits for work")
        finally:
            self._rest()  # last: the woken thread sees how many are left

    def _take(self) -> Prefork | None:
        with self._checked:
            self._checked.wait_for(lambda: self._idle or not self._asked, prefork.ANSWER_TIMEOUT)
            return self._idle.pop() if self._idle else None

    def give_up(self) -> None:
        """Treat the server as lost: its pending requests must never produce a process."""
        with self._lock:
            self.usable, self.lost = False, True
        self._process.signal(signal.SIGKILL)
        self._dismiss()

    def close(self) -> None:
        """End the server; workers keep running."""
        if self._closing:
            return
        self._closing = True
        self._process.signal(signal.SIGKILL)
        self._dismiss()  # the thread may be waiting for them
        self._thread.join(10)
        self._reap()
        self._dismiss()
        self._orders.close()
        self._waker.close()

    def _listen(self) -> None:
        """Read the server's messages until its end, or until no newly forked process is left."""
        with os.fdopen(self._source, "rb", buffering=0) as source, selectors.DefaultSelector() as selector:
            selector.register(source, selectors.EVENT_READ, "server")
            selector.register(self._waker, selectors.EVENT_READ, "wake")
            pending = b""
            while True:
                ready = {key.data for key, _ in selector.select(self._wait())}
                if "wake" in ready:
                    self._waker.clear()
                if not ready:
                    self._on_time()
                if "server" in ready:
                    if not (data := source.read(65536)):
                        break
                    *lines, pending = (pending + data).split(b"\n")
                    for line in lines:
                        self._hear(json.loads(line))
                if self.usable:
                    self._provide()
        self._reap()
        self._dismiss()
        self.lost = self.lost or (self._known and (self.usable or self.learns))
        if not self._known and not self._closing:
            where = f" as it imported {self._importing}" if self._importing else ""
            _log.warning("workers import for themselves: the warm server has died%s", where)
        self._settle(usable=False)
        with self._lock:
            self._gone = self.lost and not self._closing
            call = self._when_gone if self._gone else None
        if call is not None:
            call()

    def _reap(self) -> None:
        """Reap the server, which is ending, and the processes that its imports have started."""
        with self._reaping:
            if self._reaped:
                return  # its pid may already belong to another process
            self._reaped = True
            self._process.reap()
            with suppress(OSError):  # processes cannot be listed
                kill_sessions({self._process.pid})
                reap_orphans({self._process.pid})

    def _wait(self) -> float | None:
        """Seconds until there is something to do; None if nothing is scheduled."""
        due = [self._deadline] if not self._known else []
        if self._known and self.usable and (self._stale or len(self._idle) < self._ahead):
            due.append(self._ahead_at)
        elif self._known and self.learns:
            due.append(self._look_at)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _on_time(self) -> None:
        if self._known:
            self._fork_ahead()
            # While the server imports, only processes that wait already can become workers.
            if (
                self.learns
                and time.monotonic() >= self._look_at
                and (not self.usable or len(self._idle) >= self._ahead)
            ):
                self._look()
            return
        _log.warning("workers import for themselves: the warm server's imports take more than %g s", PATIENCE)
        self._settle(usable=False)

    def _hear(self, message: dict[str, object]) -> None:
        self._deadline = time.monotonic() + PATIENCE
        if "warning" in message:
            _log.warning("%s", message["warning"])
        elif "cold" in message:
            _log.info("workers import for themselves: %s", message["cold"])
            self._settle(usable=False)
        elif "importing" in message:
            self._importing = str(message["importing"])
        elif "ignorant" in message:
            self._settle(usable=False, learns=True)
        else:
            read = message["ready"]
            assert isinstance(read, list)
            self.read = frozenset(read) - PER_WORKER
            if not self.usable:
                self._ahead_at = time.monotonic()  # in case no workers begin yet
            self._stale = self._stale or bool(message.get("loaded"))
            self._settle(usable=True, learns="loaded" in message)

    def _look(self) -> None:
        """Have the server import what workers have imported, if they seem to be done with that."""
        self._look_at = time.monotonic() + QUIET
        before, self._grown = self._grown, self._learned.length()
        if not self._grown or self._grown != before:
            return
        with self._lock:
            self._known = False
        self._deadline = time.monotonic() + PATIENCE
        self._grown = 0
        try:
            with open(self._learned.take().put(), "rb") as record:
                socket.send_fds(self._orders, [b"i"], [record.fileno()])
        except OSError:
            self.give_up()

    def _rest(self) -> None:
        """Postpone what is not urgent: workers are starting, and need the CPU."""
        self._ahead_at = time.monotonic() + REST
        self._waker.wake()

    def _provide(self) -> None:
        """Provide as many waiting processes as are wanted now, checking that each runs; call back for each."""
        with self._lock:
            calls, self._wanted = self._wanted, []
        if not calls:
            return
        told = 0
        self._ahead_at = time.monotonic() + REST
        try:
            if self._known:
                self._drop_stale()
            self._weed_out()
            for _ in range(min(len(self._idle), len(calls))):
                calls[told]()
                told += 1
            if not self._known:
                with self._lock:
                    self._wanted = calls[told:] + self._wanted
                return
            with closing(Prefork.fork(self._orders, len(calls) - told)) as forked:
                for one in forked:
                    self._keep(one)
                    calls[told]()
                    told += 1
        except OSError as error:
            if self.usable and not self._closing:
                why = "the warm server does not answer" if isinstance(error, TimeoutError) else error
                _log.warning("workers import for themselves: %s", why)
            self.give_up()
        for call in calls[told:]:
            call()

    def _weed_out(self) -> None:
        """End waiting processes that have died or are stopped."""
        with self._lock:
            self._asked, self._idle = self._idle, []
        for one in Prefork.running(tuple(self._asked)):
            with self._lock:
                if one in self._asked:  # else it was dismissed
                    self._asked.remove(one)
                    self._idle.append(one)
                    self._checked.notify_all()
        with self._lock:
            silent, self._asked = self._asked, []
            self._checked.notify_all()
        for one in silent:
            one.end()

    def _keep(self, one: Prefork) -> None:
        with self._lock:
            preforked = self.usable and not self._closing
            if preforked:
                self._idle.append(one)
        if not preforked:
            one.end()

    def _fork_ahead(self) -> None:
        """Fork one more process ahead, if some time has passed since workers began."""
        if not self.usable or self._closing or time.monotonic() < self._ahead_at:
            return
        self._drop_stale()
        if len(self._idle) < self._ahead:
            try:
                for one in Prefork.fork(self._orders, 1):
                    self._keep(one)
            except TimeoutError:
                self.give_up()  # the server hangs, and would delay a start that waits for it
            except OSError as error:
                _log.debug("no process could be forked ahead: %s", error)
                self._rest()

    def _drop_stale(self) -> None:
        """End the processes that wait for work and were forked before the server's last imports."""
        if self._stale:
            self._stale = False
            self._dismiss()

    def _dismiss(self) -> None:
        """End the processes that wait for work."""
        with self._lock:
            preforked, self._idle, self._asked = self._idle + self._asked, [], []
            self._checked.notify_all()
        for one in preforked:
            one.end()

    def _settle(self, *, usable: bool, learns: bool = False) -> None:
        with self._lock:
            self._known, self.usable, self.learns = True, usable, learns
            calls, self._calls = self._calls, []
            if not usable:
                calls += self._wanted
                self._wanted = []
        for call in calls:
            call()
