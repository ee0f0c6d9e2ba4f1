"""Starts a node's workers one after the other, each as soon as a process is available for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from elastic_agents.inbox import Inbox
from elastic_agents.policy_types import AheadOver, StartFailed, StartWorkers, WorkerExit
from elastic_agents.timers import StartTimer
from elastic_agents.workers.control import Control
from elastic_agents.workers.logs import LogPlaces, WorkerLogs
from elastic_agents.workers.logs_specs import LogsSpecsFailed
from elastic_agents.workers.placement import AHEAD, arguments, environment, environment_ahead, place_of
from elastic_agents.workers.processes import ExecProcesses
from elastic_agents.workers.round_workers import RoundWorkers
from elastic_launch.clock import Clock
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.contract import NoPlacement, Placement, Ready
from elastic_launch.errors import ExitCode
from elastic_launch.events.types import EventSink, WorkerAhead, WorkerKept, WorkerPlaced, WorkerStarted
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.system.descriptors import explained, lacks_processes, scarce

_log = logging.getLogger("elastic_launch.agent")

T = TypeVar("T")

AHEAD_YIELDS, AHEAD_RESTS = 0.5, 0.05
"""Seconds that workers which start ahead let others of the node enter their round, and then do their first step.

They would take processor time from these.
"""

SCARCE = 3.0
"""Seconds for which starting a worker is retried while no descriptors are left."""


@dataclass(slots=True)
class _Staggered:
    """Workers that are being started.

    Attributes:
        number: number of their round; 0 if they start ahead of one.
        left: placements of the workers that are not started yet, in order.
        failed: why none of them can be started.
        ahead: number of this start ahead; 0 in a round.
    """

    number: int
    cause: str
    left: list[Placement | NoPlacement]
    envs: Mapping[int, Mapping[str, str]]
    logs: Mapping[int, WorkerLogs]
    failed: LogsSpecsFailed | None = None
    ahead: int = 0

    def take(self, local_ranks: Collection[int] | None) -> list[int]:
        """Remove those of the given workers (None: all) that are not started yet; return their local ranks."""
        taken = [place for place in self.left if local_ranks is None or place.local_rank in local_ranks]
        self.left = [place for place in self.left if place not in taken]
        return [place.local_rank for place in taken]


@dataclass(frozen=True, slots=True)
class WorkersStarted:
    """All workers of a round run.

    Attributes:
        pids: of the new ones, by local rank.
    """

    round: int
    pids: Mapping[int, int]


@dataclass(eq=False, repr=False)
class WorkerStarts:
    """Starts the workers of rounds, and those that start ahead of one; gives places to those that run already.

    Attributes:
        logs: where the output goes of the round's workers, by local rank.
    """

    _config: LaunchConfig
    _shared: Mapping[str, str]
    _clock: Clock
    _events: EventSink
    _processes: ExecProcesses
    _workers: RoundWorkers
    _places: LogPlaces
    _control: Control
    _timer: StartTimer
    _inbox: Inbox[object]
    _round: _Staggered | None = field(default=None, init=False)
    _ahead: list[_Staggered] = field(default_factory=list, init=False)
    # Restarts so far, by local rank of the workers that yield to others.
    _put_off: dict[int, int] = field(default_factory=dict, init=False)
    # Places of workers that have not come yet.
    _late: dict[int, tuple[m.Form, Placement]] = field(default_factory=dict, init=False)
    _pids: dict[int, int] = field(default_factory=dict, init=False)  # of the round's new workers
    # The last round in which a new worker began whose like rehearse if they start ahead.
    _rehearse: int = field(default=0, init=False)
    logs: dict[int, WorkerLogs] = field(default_factory=dict, init=False)

    # The workers of a round.

    def prepare(self, start: StartWorkers, placed: Sequence[Placement]) -> list[Placement]:
        """Have processes made for those workers of a round that are not running; return their placements.

        This may take a while: what else a round needs can be prepared meanwhile.
        """
        running = (start.kept | start.waiting | start.coming) - set(self._withdrawn(start.coming))
        new = [placement for placement in placed if placement.local_rank not in running]
        if new:
            number = start.form.round.number
            self._processes.prepare(len(new), lambda: self._inbox.put(partial(self._start_in_round, number)))
        return new

    def begin(
        self, start: StartWorkers, placed: Sequence[Placement], new: Sequence[Placement]
    ) -> WorkersStarted | StartFailed | None:
        """Give running workers their places in the round; each of the others starts once there is a process for it.

        Returns:
            how it has ended; None: the inbox gets that later.
        """
        form, number = start.form, start.form.round.number
        self._late.clear()
        self._pids = {}
        for placement in [placement for placement in placed if placement not in new]:
            local_rank = placement.local_rank
            pid = self._workers.keep(number, placement)
            if local_rank in start.coming:
                self._late[local_rank] = form, placement
                continue
            if local_rank in start.kept:
                self._events.emit(WorkerKept(number, placement.rank, local_rank, pid))
            self._give(form, placement, pid, placed=local_rank in start.waiting)
        anew = {placement.local_rank for placement in new}
        logs = {rank: logs for rank, logs in {**self._to_come(), **self._workers.logs()}.items() if rank not in anew}
        try:
            self.logs, envs = self._places.prepare(number, placed, partial(self._environment, form), logs)
        except LogsSpecsFailed as error:
            return start_failed(str(error), new, error)
        if not new:
            return WorkersStarted(number, {})
        self._round = _Staggered(number, form.cause, list(new), envs, self.logs)
        return None

    def give(self, local_rank: int) -> None:
        """Give a worker that was started ahead the place in the round that was formed before it had come."""
        if (late := self._late.pop(local_rank, None)) is not None:
            self._give(*late, self._workers.keep(late[0].round.number, late[1]), placed=True)

    def _give(self, form: m.Form, placement: Placement, pid: int, *, placed: bool) -> None:
        local_rank = placement.local_rank
        if placed:
            self._events.emit(WorkerPlaced(form.round.number, placement.rank, local_rank, pid))
        if not self._control.place(local_rank, place_of(self._config, form, placement)):
            self._workers.kill({local_rank})  # it has just closed its connection, or does not read

    def no_more(self, local_ranks: Collection[int] | None) -> list[int]:
        """Workers of the round (None: all) are to end; return those that have not started yet: they never will."""
        ending = [] if self._round is None else self._round.take(local_ranks)
        if self._round is not None and not self._round.left:
            self._round = None
        return ending

    def _start_in_round(self, number: int) -> WorkersStarted | StartFailed | None:
        """There is a process for one more worker of a round."""
        start = self._round
        if start is None or start.number != number:
            return None
        placement = start.left.pop(0)
        try:
            self._pids[placement.local_rank] = self._start(start, placement)
        except OSError as error:
            self._round = None
            cause = f"worker {placement.rank} cannot be started: {explained(error)}"
            return start_failed(cause, (placement, *start.left), error)
        if start.left:
            return None
        self._round = None
        return WorkersStarted(number, self._pids)

    # Workers that start ahead of a round.

    def start_ahead(self, local_ranks: Collection[int], restarts: int, *, yields: bool = False) -> None:
        """Start workers ahead of a place in a round, each once there is a process for it.

        Args:
            yields: whether others of the node, which enter a round now, need the processor time first.
        """
        if not yields:
            self._begin_ahead(local_ranks, restarts)
            return
        self._put_off |= dict.fromkeys(local_ranks, restarts)
        self._inbox.put_later(AHEAD_YIELDS, self._begin_put_off)

    def training(self) -> None:
        """All workers of the round train."""
        if self._put_off:
            self._inbox.put_later(AHEAD_RESTS, self._begin_put_off)

    def _begin_put_off(self) -> None:
        put_off, self._put_off = self._put_off, {}
        if put_off:
            self._begin_ahead(put_off, max(put_off.values()))

    def _begin_ahead(self, local_ranks: Collection[int], restarts: int) -> None:
        placed = [NoPlacement(local_rank) for local_rank in sorted(local_ranks)]
        self._processes.prepare(len(placed), lambda: self._inbox.put(self._start_next_ahead))

        def env(placement: NoPlacement, error_file: str) -> dict[str, str]:
            where = {"error_file": error_file, "socket": self._control.address}
            return environment_ahead(self._config, self._shared, placement, restarts=restarts, **where)

        start = _Staggered(0, AHEAD, list(placed), {}, {})
        try:
            start.logs, start.envs = self._places.prepare(0, placed, env, {})
        except LogsSpecsFailed as error:
            start.failed = error
        start.ahead = self._places.ahead
        self._ahead.append(start)

    def kill_ahead(self, local_ranks: Collection[int]) -> None:
        """Kill workers that were started ahead; those that have not started yet never will."""
        self._withdrawn(local_ranks)
        self._workers.kill(local_ranks)

    def _withdrawn(self, local_ranks: Collection[int]) -> list[int]:
        put_off = [local_rank for local_rank in local_ranks if self._put_off.pop(local_rank, None) is not None]
        return put_off + [local_rank for start in self._ahead for local_rank in start.take(local_ranks)]

    def _to_come(self) -> dict[int, WorkerLogs]:
        """Return where the output goes of workers that are about to start ahead, by local rank."""
        left = [(start, place.local_rank) for start in self._ahead for place in start.left]
        return {local_rank: start.logs[local_rank] for start, local_rank in left if start.failed is None}

    def _start_next_ahead(self) -> WorkerExit | None:
        """There is a process for one more worker that starts ahead of a round.

        Returns:
            the end of a worker that cannot be started: at once, as an order in the inbox may form a round with it.
        """
        self._ahead = [start for start in self._ahead if start.left]
        if not self._ahead:
            return None
        start = self._ahead[0]
        placement = start.left.pop(0)
        try:
            if start.failed is not None:
                raise start.failed
            pid = self._start(start, placement)
        except (OSError, LogsSpecsFailed) as error:
            _log.warning("the worker of local rank %d cannot be started ahead: %s", placement.local_rank, error)
            return WorkerExit(0, placement.local_rank, ExitCode.STARTUP_FAILURE)
        self._inbox.put_later(self._config.timing.join_timeout, partial(self._over, pid))
        return None

    def _over(self, pid: int) -> AheadOver | None:
        """The time is over in which a worker had to come to its first use of the world."""
        local_rank = self._workers.ahead_of(pid)
        return None if local_rank is None else AheadOver(local_rank)

    # How long starts take.

    def came(self, local_rank: int) -> None:
        """A worker that was started ahead has come to its first use of the world."""
        if (age := self._workers.age_of(local_rank)) is not None:
            pid, took = age
            self._events.emit(WorkerAhead(local_rank, pid, round(took, 3)))
            text = "local rank %d (pid %d), started ahead, is ready for a round after %.1f s"
            _log.info(text, local_rank, pid, took)
            self._timer.ahead(took)

    def trains(self, number: int, local_rank: int, ready: Ready) -> None:
        """A worker of a round begins to train. If it was started with the round, learn from its start."""
        if (age := self._workers.age_of(local_rank, new=True)) is not None:
            self._timer.ready(max(0.0, age[1] - ready.restore_s))
            if ready.rehearses:
                self._rehearse = number

    def first_step_done(self, number: int) -> bool:
        """Learn by how much a round's first step was longer if new workers could have rehearsed it; return whether."""
        longer = self._control.step_timer.first_longer(number) if number == self._rehearse else None
        if longer is not None:
            self._timer.first_step(longer)
        return longer is not None

    # All workers.

    def _start(self, start: _Staggered, placement: Placement | NoPlacement) -> int:
        local_rank, began = placement.local_rank, self._clock.now()
        argv, env = arguments(self._config, placement), start.envs[local_rank]
        logs, inherit = start.logs[local_rank], self._config.command.inherit
        pid = while_scarce(
            lambda: self._workers.start(start.number, placement, argv, env, logs, inherit),
            self._clock,
        )
        took = round(self._clock.now() - began, 6)
        self._events.emit(WorkerStarted(start.number, placement.rank, local_rank, pid, start.cause, took, start.ahead))
        return pid

    def _environment(self, form: m.Form, placement: Placement, error_file: str) -> dict[str, str]:
        address = self._control.address
        return environment(self._config, self._shared, form, placement, error_file=error_file, socket=address)


def start_failed(cause: str, missing: Sequence[Placement | NoPlacement], error: Exception) -> StartFailed:
    """Return the event that a round cannot begin here, for want of workers."""
    lacking = lacks_processes(error) or (isinstance(error, OSError) and scarce(error))  # not the script's failure
    code = ExitCode.TRAINING_FAILED if lacking else ExitCode.STARTUP_FAILURE
    return StartFailed(cause, frozenset(placement.local_rank for placement in missing), code)


def while_scarce(start: Callable[[], T], clock: Clock) -> T:
    """Start a worker, or open what a round needs; retry for a moment while descriptors or processes are lacking.

    Raises:
        OSError: if that is impossible.
    """
    until = clock.now() + SCARCE
    while True:
        try:
            return start()
        except OSError as error:
            if not (scarce(error) or lacks_processes(error)) or clock.now() >= until:
                raise
            time.sleep(0.1)
