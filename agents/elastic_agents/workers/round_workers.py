"""The workers of one round on one node, and those that are started ahead of a place in one."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

from elastic_agents.inbox import ProcessEnding
from elastic_agents.policy_types import Reported, WorkerExit
from elastic_agents.timers import StepTimer
from elastic_agents.workers.failures import OutOfMemoryKills, about, disconnection, printed_last, raised_in, report
from elastic_agents.workers.guard import Guard
from elastic_agents.workers.logs import WorkerLogs, keep_error
from elastic_agents.workers.output import PAGE_LINES, TAIL_LINES, OutputPump, Stream
from elastic_agents.workers.processes import ExecProcesses, StartRequest, heeds
from elastic_agents.workers.sessions import are_tracked, empty_sessions, kill_sessions, reap_orphans, resume, session_of
from elastic_agents.workers.stuck import StuckDetector
from elastic_agents.workers.watchdog import TimerExpired
from elastic_launch.clock import Clock
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.contract import NoPlacement, Placement
from elastic_launch.error_file import ErrorFile, read_error_file
from elastic_launch.events.sentences import ending
from elastic_launch.failure import Failure
from elastic_launch.system.writer_thread import Writer

_log = logging.getLogger("elastic_launch.agent")

READ_TIMEOUT = 2.0
"""Seconds that reading a worker's error file may take."""

TICK = 0.02
"""Seconds by which a file's time may be early: the kernel takes it from a clock with this resolution."""


_LAST_LINES, _END_OF_STDERR = 0.03, 0.2
"""Seconds in which what a failed worker has written is read, and those in which its stderr ends."""

AT_ONCE, AT_LAST = 0.5, 5.0
"""Seconds that the processes of a failed worker get to die, and those left at the round's end.

The agent's main loop waits for this: an unkillable process must not block it once per worker.
"""


@dataclass(slots=True)
class _Worker:
    """A process; its logs remain those of the round in which it was started.

    Attributes:
        round, placement, placed: its present place, and since when it has it; round 0 if it was started ahead of one.
        suspends: when it was told to leave the round.
        stopped: when it was first told to end.
        ended_with: the code with which its script has ended.
        late: the expired timer because of which it was ended.
        alike, restoring, corrupt: see :class:`elastic_launch.rendezvous.wire.Failure`.
    """

    round: int
    placement: Placement | NoPlacement
    placed: float
    pid: int
    started: float
    logs: WorkerLogs
    stdout: Stream
    stderr: Stream
    suspends: float | None = None
    stopped: float | None = None
    ended_with: int | None = None
    late: str = ""
    alike: tuple[int, ...] = ()
    restoring: bool = False
    corrupt: bool = False

    @property
    def who(self) -> str:
        where = self.placement
        return f"local rank {where.local_rank}, started ahead" if where.rank is None else f"rank {where.rank}"


class RoundWorkers:
    """Owns the processes of the current round, suspended ones included, their sessions and their output.

    It owns workers ahead, too, which have no place in a round yet. What is done to all workers spares these.

    Attributes:
        kills: explain ends of workers; something has to look at them regularly.

    Args:
        files: reads and copies the files that workers leave, which may hang.
    """

    def __init__(
        self,
        config: LaunchConfig,
        processes: ExecProcesses,
        pump: OutputPump,
        guard: Guard,
        clock: Clock,
        files: Writer,
    ) -> None:
        self._config = config
        self._files = files
        self._processes = processes
        self._pump = pump
        self._guard = guard
        self._clock = clock
        self.kills = OutOfMemoryKills(clock)
        self._alive: dict[int, _Worker] = {}
        self._reaped: dict[int, tuple[_Worker, WorkerExit]] = {}  # by local rank
        self._sessions: set[int] = set()
        self._failed: set[int] = set()  # sessions of failed workers, to be ended
        self._watch = StuckDetector()
        self._held: set[int] = set()  # processes that the guard has stopped

    @property
    def held(self) -> bool:
        """Whether the guard has stopped workers, or processes of theirs: that they stand still is not their fault."""
        return any(session_of(pid) in self._alive for pid in self._held)

    def hold(self, pids: Collection[int]) -> None:
        """Record that the guard has stopped processes."""
        self._held.update(pids)

    def resume(self) -> bool:
        """Resume what the guard has stopped; return whether any of it still runs."""
        held, self._held = self._held, set()
        return resume(held, self._sessions)

    def start(
        self,
        round_number: int,
        placement: Placement | NoPlacement,
        argv: Sequence[str],
        env: Mapping[str, str],
        logs: WorkerLogs,
        inherit: Sequence[int] = (),
    ) -> int:
        """Start one worker and return its pid.

        Args:
            round_number: 0 to start it ahead of a place in a round.

        Raises:
            OSError: if its command cannot be executed.
        """
        stdout, out = self._pump.open(1, logs.stdout)
        try:
            stderr, err = self._pump.open(2, logs.stderr)
        except OSError:
            os.close(out)
            raise
        began = self._clock.now()
        try:
            pid = self._processes.start(StartRequest(argv, env, out, err, inherit))
        finally:
            os.close(out)
            os.close(err)
        self._guard.add(pid)
        self._sessions.add(pid)
        self._alive[pid] = _Worker(round_number, placement, began, pid, began, logs, stdout, stderr)
        return pid

    def keep(self, round_number: int, placement: Placement) -> int:
        """Give the worker of the same local rank, suspended or ahead, a place in another round; return its pid."""
        worker = self._chosen({placement.local_rank})[-1]
        worker.round, worker.placement, worker.placed = round_number, placement, self._clock.now()
        worker.suspends, worker.alike, worker.restoring, worker.corrupt = None, (), False, False
        return worker.pid

    def logs(self) -> dict[int, WorkerLogs]:
        """Return where the output goes of the workers that run, also ahead, by local rank."""
        return {worker.placement.local_rank: worker.logs for worker in self._alive.values()}

    def output(self, rank: int) -> list[str]:
        """Return the last lines that the newest worker of a rank has printed; may be called by any thread."""
        workers = [*(worker for worker, _ in list(self._reaped.values())), *list(self._alive.values())]
        found = [worker for worker in workers if worker.placement.rank == rank]
        if not found:
            return []
        newest = max(found, key=lambda worker: worker.round)
        lines = sorted(newest.stdout.tail(PAGE_LINES) + newest.stderr.tail(PAGE_LINES), key=itemgetter(0))
        return [line for _, line in lines[-PAGE_LINES:]]

    def age_of(self, local_rank: int, *, new: bool = False) -> tuple[int, float] | None:
        """Return the pid of a worker, and the seconds since it was started; None if it does not run.

        Args:
            new: only if it was started with its round.
        """
        for worker in reversed(self._chosen({local_rank})):
            begun = not new or worker.placed == worker.started
            return (worker.pid, self._clock.now() - worker.started) if begun else None
        return None

    def ahead_of(self, pid: int) -> int | None:
        """Return the local rank of a worker that has no place in a round yet; None if the process is none."""
        worker = self._alive.get(pid)
        return None if worker is None or worker.round else worker.placement.local_rank

    def running(self, round_number: int) -> list[tuple[Placement, int, WorkerLogs]]:
        """The workers of a round that have not been reaped: placement, pid and logs."""
        of_round = [(w.placement, pid, w.logs) for pid, w in self._alive.items() if w.round == round_number]
        return [(place, pid, logs) for place, pid, logs in of_round if isinstance(place, Placement)]

    def suspends(self, local_ranks: Collection[int]) -> None:
        """Record that workers are told to leave the round: from now on they may fail because of that."""
        for worker in self._chosen(local_ranks):
            worker.suspends = self._clock.now()

    def failing(
        self,
        round_number: int,
        local_rank: int,
        *,
        alike: tuple[int, ...] = (),
        restoring: bool = False,
        corrupt: bool = False,
    ) -> None:
        """Record what a worker reports before it fails."""
        for worker in self._chosen({local_rank}):
            if worker.round == round_number:
                worker.alike, worker.restoring, worker.corrupt = alike, restoring, corrupt

    def ending(self, ending: ProcessEnding) -> Reported | None:
        """Record the code that a worker is about to exit with; None if the process is not a running worker."""
        worker = self._alive.get(ending.pid)
        if worker is None:
            return None
        worker.ended_with = ending.report.exit_code
        return Reported(worker.round, worker.placement.local_rank, ending.report)

    def reap(self, pid: int, exit_code: int) -> WorkerExit | None:
        """Record an exit; None if the process was not a worker of the current round, nor one ahead.

        If it was killed after its script had ended, the script's exit code counts.

        Processes started by a failed worker are killed by :meth:`end_failed`; those of a finished worker may run to the
        round's end.
        """
        worker = self._alive.pop(pid, None)
        if worker is None:
            return None
        now = self._clock.now()
        if exit_code == -signal.SIGKILL and worker.ended_with is not None:
            exit_code = worker.ended_with
            text = "%s (pid %d) was killed after its script had ended with exit code %d"
            _log.warning(text, worker.who, pid, exit_code)
        if worker.stopped is None and (exit_code > 0 or exit_code == -signal.SIGTERM):
            worker.stopped = worker.suspends  # a worker that cannot leave its round ends itself by SIGTERM
        if exit_code != 0:
            self._failed.add(pid)
        elif not self._alive:
            self._leave_empty_sessions()
        self._files.put(lambda data: keep_error(worker.logs))
        where, ran = worker.placement, now - worker.started
        found = WorkerExit(worker.round, where.local_rank, exit_code, rank=where.rank, pid=pid, ran=ran, ended=now)
        self._reaped[where.local_rank] = (worker, found)
        return found

    def end_failed(self) -> None:
        """Kill what failed workers have left behind; to be called once the others have their orders."""
        failed, self._failed = self._failed, set()
        if failed:
            self._end_sessions(failed, AT_ONCE)
            if not self._alive:
                self._leave_empty_sessions()

    def reaped(self, local_rank: int) -> WorkerExit | None:
        """Return a worker's end; None if there was none in this round."""
        return self._reaped[local_rank][1] if local_rank in self._reaped else None

    def failure(self, local_rank: int, step_timer: StepTimer) -> Failure | None:
        """Build the report on a reaped worker.

        Returns:
            None if it was stopped, and nothing indicates that it had failed before.
        """
        worker, reaped = self._reaped[local_rank]
        self.end_failed()  # they may hold its stderr open
        # A resource tracker writes to it, too, and ends some time after the worker.
        if worker.stopped is None and not worker.stderr.ended.wait(_LAST_LINES) and not are_tracked({worker.pid}):
            worker.stderr.ended.wait(_END_OF_STDERR - _LAST_LINES)
        written = [line for line in worker.stderr.tail(PAGE_LINES) if line[0] >= worker.placed]
        stderr, earlier = written[-TAIL_LINES:], written[:-TAIL_LINES]
        lines = tuple(line for _, line in stderr)
        now, error = self._clock.now(), self._read(worker.logs)
        index = raised_in(lines, stopped=worker.stopped is not None)
        # A stopped worker's exception, without proof that it had ended the worker.
        supposed = worker.stopped is not None and error is None and index is None
        if supposed:
            index = printed_last(lines)
        failed = reaped.ended
        if error is not None:
            failed = now - max(0.0, time.time() - error.at)
        elif index is not None:
            failed = stderr[index][0]
        failed = min(max(failed, worker.placed), reaped.ended)
        if worker.stopped is not None and (
            (error is None and index is None) or failed > worker.stopped - TICK or not reaped.exit_code
        ):
            return None
        found = report(
            self._about(worker, failed, step_timer),
            world_size=worker.placement.world_size,
            exit_code=reaped.exit_code,
            ago=now - failed,
            error=error,
            stderr=lines,
            earlier=[line for _, line in earlier],
            only_crashes=self._config.torchrun,
            fatal_codes=self._config.fatal_exit_codes,
            stopped=worker.stopped is not None,
            out_of_memory=self.kills.explain_one,
            supposed=supposed,
            done=self._done(worker.round),
        )
        if worker.late and found.kind == "crash" and reaped.exit_code < 0:
            return replace(found, kind="hang", timer=worker.late)
        return found

    def disconnected(self, local_rank: int, error: str, step_timer: StepTimer) -> Failure:
        """Build the report on a worker that still runs, and whose connection to another rank broke."""
        worker = self._chosen({local_rank})[-1]
        return disconnection(self._about(worker, self._clock.now(), step_timer), error, self._done(worker.round))

    def _done(self, round_number: int) -> list[int]:
        """The ranks of a round that have ended with 0 by themselves."""
        return [
            reaped.rank
            for worker, reaped in self._reaped.values()
            if reaped.round == round_number and not reaped.exit_code and worker.stopped is None
            if reaped.rank is not None
        ]

    def _about(self, worker: _Worker, failed: float, step_timer: StepTimer) -> Failure:
        steps = step_timer.of_round(worker.round) if worker.round else None
        found = about(
            self._config.node_id,
            worker.round,
            worker.placement,
            worker.pid,
            ran=failed - worker.started,
            log=worker.logs.directory if self._pump.kept.useful else None,
            trained=None if steps is None else steps[1],
        )
        return replace(found, alike=worker.alike, restoring=worker.restoring, corrupt=worker.corrupt)

    def _read(self, logs: WorkerLogs) -> ErrorFile | None:
        if logs.kept_error is not None:
            return read_error_file(logs.error_file)  # a local file
        try:
            return self._files.ask(partial(read_error_file, logs.error_file), READ_TIMEOUT)
        except TimeoutError:
            return None

    def terminate(self, local_ranks: frozenset[int] | None = None, number: int = signal.SIGTERM) -> None:
        """Ask workers (None: all that are left) to end, see :meth:`ExecProcesses.terminate`."""
        for worker in self._chosen(local_ranks):
            self._stop(worker)
            self._processes.terminate(worker.pid, number)

    def forward(self, number: int) -> list[int]:
        """Forward a signal to the workers that it does not end; return the ranks of the others."""
        spared = []
        for worker in self._chosen(None):
            if heeds(worker.pid, number):
                self._processes.signal(worker.pid, number)
            else:
                spared.append(worker.placement)
        return [place.rank for place in spared if place.rank is not None]

    def kill(self, local_ranks: Collection[int] | None = None, *, ending: bool = False) -> None:
        """Kill workers (None: all that are left) with their entire sessions; their exits are reported as usual.

        Args:
            ending: whether they seem to end by themselves, for a reason that is to be found.
        """
        for worker in self._chosen(local_ranks):
            if not ending:
                self._stop(worker)
            self._processes.signal(worker.pid, signal.SIGKILL)

    def end_late(self, expired: TimerExpired) -> None:
        """Send the requested signal to the process whose timer has expired, if it belongs to a worker."""
        try:
            sid = os.getsid(expired.pid)
        except ProcessLookupError:
            return
        worker = self._alive.get(sid)
        if worker is None:
            return
        about = f"{worker.who} (pid {expired.pid}): its timer {expired.scope!r} has expired"
        if not expired.number:
            _log.warning("%s; it asked for no signal", about)
            return
        _log.error("%s; it gets %s", about, ending(-expired.number))
        worker.late = expired.scope
        if expired.pid == sid:
            self._processes.signal(sid, expired.number)
        else:
            with suppress(OSError):
                os.kill(expired.pid, expired.number)

    def kill_stuck(self) -> None:
        """Kill the remaining workers if all of them are deadlocked on their interpreter's lock."""
        workers = [worker.pid for worker in self._chosen(None)]
        stuck = self._watch.look(workers)
        if len(stuck) < len(workers):
            return  # a worker that still runs may need the others
        for pid in stuck:
            text = "%s (pid %d) hangs in its interpreter's lock, and is killed: others have finished"
            _log.error(text, self._alive[pid].who, pid)
            self._processes.signal(pid, signal.SIGKILL)

    def end_round(self, spared: Collection[int] = ()) -> list[int]:
        """Kill everything that the round's workers left behind; return the processes that could not be killed.

        Args:
            spared: local ranks of the workers that are suspended, whose sessions go on.
        """
        stay = {pid for pid, w in self._alive.items() if not w.round or w.placement.local_rank in spared}
        stuck = self._end_sessions(self._sessions - stay, AT_LAST)
        self._reaped.clear()
        return stuck

    def release(self) -> set[int]:
        """Stop ending what workers have left behind that ended with 0; return their sessions.

        Under plain Python such processes go on, too, such as an upload in the background.
        """
        ended = {found.pid for _, found in self._reaped.values() if not found.exit_code}
        released = {sid for sid in ended if sid in self._sessions}
        self._forget(released)
        return released

    def close(self) -> None:
        """Kill all workers, those ahead too, and everything that they left behind."""
        for pid in self._alive:
            self._processes.signal(pid, signal.SIGKILL)
        self._end_sessions(set(self._sessions), AT_LAST)

    def _stop(self, worker: _Worker) -> None:
        if worker.stopped is None:
            worker.stopped = self._clock.now()

    def _chosen(self, local_ranks: Collection[int] | None) -> list[_Worker]:
        workers = self._alive.values()
        if local_ranks is None:
            return [worker for worker in workers if worker.round]
        return [worker for worker in workers if worker.placement.local_rank in local_ranks]

    def _leave_empty_sessions(self) -> None:
        """Stop tracking sessions that are empty: their numbers may soon be reused by other processes."""
        with suppress(OSError):  # checked again at the round's end
            self._forget(empty_sessions(self._sessions))

    def _end_sessions(self, sids: set[int], timeout: float) -> list[int]:
        try:
            stuck = kill_sessions(sids, timeout)
            reap_orphans(sids)
        except OSError as error:
            _log.warning("processes that workers have started may still run: %s", error)
            return []  # retried at the next round's end, or by the guard
        if not stuck or timeout >= AT_LAST:
            self._forget(sids)
        return stuck

    def _forget(self, sids: set[int]) -> None:
        self._sessions -= sids
        for sid in sids:
            self._guard.remove(sid)
