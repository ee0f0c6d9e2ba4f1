"""Worker processes that are forked from a warm server where possible, and executed where not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from elastic_agents.child import Child
from elastic_agents.prctl import become_subreaper
from elastic_agents.warm._import_watch import differs_at_import
from elastic_agents.warm._record import Learned
from elastic_agents.warm.client import WarmServer
from elastic_agents.warm.fork_bootstrap import ServerLink
from elastic_agents.warm.server import recorded, wants_server
from elastic_agents.workers.processes import ExecProcesses, OnExit, StartRequest
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.system.writer_thread import Writer

_log = logging.getLogger("elastic_launch.warm")

MOST_REPLACED = 3
"""How often a dead server is replaced at most."""


def start_processes(
    config: LaunchConfig, env: Mapping[str, str], begun: ServerLink | None, files: Writer
) -> Callable[[OnExit], ExecProcesses]:
    """Start a node's means of starting workers as early as possible, and return how to put it into use.

    Args:
        env: the variables that all workers share.
        begun: a server that this process already has.
        files: opens the file for the imports' output, which may hang.
    """
    if config.command.forked:
        assert begun is not None
        become_subreaper(True)
        learned = Learned()
        forks = WarmServer(begun, {}, config.nproc, learned)
        return lambda on_exit: CallersForks(on_exit, forks, _no_other, learned)
    if not wants_server(config):
        return ExecProcesses
    learned = Learned()
    make = partial(WarmServer.execute, config, env, config.nproc, learned, files)
    try:
        become_subreaper(True)
        server = WarmServer(begun, env, config.nproc, learned) if begun is not None else make()
    except OSError as error:
        _log.warning("workers import for themselves: there can be no warm server (%s)", error)
        if begun is not None:
            begun.end()
        learned.close()
        return ExecProcesses
    return lambda on_exit: WarmProcesses(on_exit, server, make, learned)


class WarmProcesses(ExecProcesses):
    """Forks workers from a warm server where possible, and executes all others.

    This process becomes a subreaper: workers' orphans, and the workers themselves, become its children.

    Attributes:
        forked: how many workers were forked.
    """

    def __init__(self, on_exit: OnExit, server: WarmServer, make: Callable[[], WarmServer], learned: Learned) -> None:
        become_subreaper(True)
        self._learned = learned
        self._records: dict[int, int] = {}  # of workers' imports, by pid
        self._server = server
        self._former: list[WarmServer] = []  # which have died, and are closed in the end
        self._make = make
        self._replaced = 0
        self._complained = False
        self._when_lost: Callable[[], None] = lambda: None
        self.forked = 0
        super().__init__(on_exit)

    def when_ready(self, call: Callable[[], None]) -> None:
        self.replace_lost()
        self._server.when_known(call)

    def prepare(self, count: int, call: Callable[[], None]) -> None:
        self.replace_lost()
        self._server.prepare(count, call)

    def training(self) -> None:
        self._server.training()

    def when_lost(self, call: Callable[[], None]) -> None:
        self._when_lost = call
        self._server.when_gone(call)

    def replace_lost(self) -> None:
        if not self._server.lost or self._replaced > MOST_REPLACED:
            return
        self._replaced += 1
        if self._replaced > MOST_REPLACED:
            text = "the warm server is gone, and was replaced %d times: from now on, workers import for themselves"
            _log.warning(text, MOST_REPLACED)
            return
        _log.warning("the warm server is gone; another one is started")
        try:
            server = self._make()
        except OSError as error:
            _log.warning("workers import for themselves: there can be no warm server (%s)", error)
            return
        self._former.append(self._server)
        self._server = server
        server.when_gone(self._when_lost)

    def _claimed(self) -> list[int]:
        return [pid for server in (self._server, *self._former) for pid in server.waiting]

    def start(self, request: StartRequest) -> int:
        if self._differs(request):
            return super().start(request)
        if not self._server.learns:
            return self._started(request, ())
        record = self._learned.begin()
        try:
            pid = self._started(request, [record])
        except OSError:
            self._learned.end(record)
            raise
        self._records[pid] = record
        if pid not in self._running:  # it has been reaped already
            self._end_record(pid)
        return pid

    def _reaped(self, child: Child) -> None:
        self._end_record(child.pid)
        super()._reaped(child)

    def _end_record(self, pid: int) -> None:
        if (record := self._records.pop(pid, None)) is not None:
            self._learned.end(record)

    def _started(self, request: StartRequest, record: Sequence[int]) -> int:
        if not self._server.usable:
            return super().start(recorded(request, *record) if record else request)
        try:
            pid = self._server.start(request, record)
        except OSError as error:
            _log.warning("a worker imports for itself: %s", error)
            return super().start(request)
        return self._forked(pid)

    def _forked(self, pid: int) -> int:
        self.forked += 1
        return self._watch(Child(pid, "a worker"))

    def close(self) -> None:
        for server in (self._server, *self._former):
            server.close()
        super().close()
        self._learned.close()
        become_subreaper(False)

    def _differs(self, request: StartRequest) -> bool:
        differing = differs_at_import(self._server.env, request.env, self._server.read)
        if differing and not self._complained:
            self._complained = True
            names = ", ".join(differing)
            _log.info("workers import for themselves: %s differs between them and matters at import", names)
        return bool(differing)


class CallersForks(WarmProcesses):
    """Forks workers from a copy of the calling process: nothing else can start them, and there is no other copy."""

    def start(self, request: StartRequest) -> int:
        return self._forked(self._server.start(request, ()))

    def replace_lost(self) -> None:
        pass


def _no_other() -> WarmServer:
    raise OSError("the copy of the caller has ended")
