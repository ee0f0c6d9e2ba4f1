"""What the ends of a node's workers mean: their events, their log lines, and the reports on their failures."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable

from elastic_agents import policy_types as v
from elastic_agents import reporting
from elastic_agents.snapshots.snapshot_store import SnapshotStore
from elastic_agents.step_timer import StepTimer
from elastic_agents.workers.round_workers import Reaped, RoundWorkers
from elastic_launch.events import types as ev
from elastic_launch.events.sentences import ending, how_failed
from elastic_launch.failure import Failure
from elastic_launch.rendezvous.leader.verdict import kind_of
from elastic_launch.snapshot.room import LEFT_OUT, MORE_MEMORY

_log = logging.getLogger("elastic_launch.agent")


class Exits:
    """Records how workers end.

    Args:
        report: sends the leader a failure.

    Attributes:
        failed: by rank, the workers of this node that failed in its last round.
    """

    def __init__(
        self,
        workers: RoundWorkers,
        step_timer: StepTimer,
        snapshot_store: SnapshotStore,
        events: ev.EventSink,
        report: Callable[[Failure], None],
    ) -> None:
        self._workers = workers
        self._step_timer = step_timer
        self._snapshot_store = snapshot_store
        self._events = events
        self._report = report
        self.failed: dict[int, Reaped] = {}

    def ended(self, reaped: Reaped, view: v.View) -> v.WorkerGone:
        """A worker of a round has ended."""
        where, pid, exit_code = reaped.placement, reaped.pid, reaped.exit_code
        takes_part = reaped.round == view.round and where.local_rank in view.alive
        drained = where.local_rank in view.drained
        stopped = view.phase in (v.Phase.STOPPING, v.Phase.DRAINING) or drained or not takes_part
        self._events.emit(
            ev.WorkerExited(reaped.round, where.rank, where.local_rank, pid, exit_code, round(reaped.ran, 3), stopped)
        )
        if not takes_part:
            if where.local_rank in view.suspended:
                killed = exit_code == -signal.SIGKILL
                failure = self.failure_of(where.local_rank, view) if killed else None
                how = ending(exit_code) if failure is None else how_failed(failure)
                _log.warning("rank %d (pid %d), which was suspended, ended with %s", where.rank, pid, how)
        elif exit_code != 0 and not drained:
            if view.phase is not v.Phase.STOPPING:
                self.failed[where.rank] = reaped
                text = "rank %d (pid %d) ended with %s in round %d"
                _log.warning(text, where.rank, pid, ending(exit_code), reaped.round)
            elif view.leaving is None:
                self._had_failed(reaped, view)
        return v.WorkerGone(reaped.round, where.local_rank, exit_code)

    def ended_ahead(self, reaped: Reaped, view: v.View) -> v.AheadGone:
        """A worker that was started ahead of a round has ended without a place in one."""
        local_rank, code = reaped.placement.local_rank, reaped.exit_code
        stopped = local_rank not in view.ahead.coming | view.ahead.waiting
        self._events.emit(ev.WorkerExited(0, -1, local_rank, reaped.pid, code, round(reaped.ran, 3), stopped))
        unfit = False
        if code > 0 and not stopped and not self._step_timer.trained[0]:
            failure = self.failure_of(local_rank, view)
            unfit = failure is not None and kind_of(failure).is_final
        return v.AheadGone(local_rank, code, unfit)

    def _had_failed(self, reaped: Reaped, view: v.View) -> None:
        """A stopped worker may have raised before: the leader learns of it before it forms the next round."""
        if failure := self.failure_of(reaped.placement.local_rank, view):
            if not failure.supposed:
                self.failed[reaped.placement.rank] = reaped
            reporting.late(failure)
            self._report(failure)

    def failure_of(self, local_rank: int, view: v.View) -> Failure | None:
        """Return the report on a reaped worker. If the node's snapshots took its memory, leave them out from now on."""
        failure = self._workers.failure(local_rank, self._step_timer)
        if failure is not None and failure.kind == "out of memory" and (used := self._snapshot_store.leave_out()):
            killed = "a worker" if failure.exit_code == -signal.SIGKILL else "a child of a worker"
            # A suspended worker may write a last snapshot, if no round follows.
            rests = view.phase in (v.Phase.WAITING, v.Phase.SUSPENDED) and not view.suspended - {local_rank}
            freed = (
                "all but the newest of which are freed"
                if rests
                else "which are freed once the next round has restored the state"
            )
            cause = (
                f"the kernel killed {killed} (pid {failure.pid}) for lack of memory while they used "
                f"{used / 2**30:.2f} GiB, {freed}"
            )
            remedy = f": {MORE_MEMORY}, or save more often. --no-snapshots leaves them out from the start"
            _log.warning(LEFT_OUT, cause, remedy)
            self._events.emit(ev.SnapshotsLeftOut(view.round, cause))
            if rests:
                self._snapshot_store.between_rounds()
        return failure
