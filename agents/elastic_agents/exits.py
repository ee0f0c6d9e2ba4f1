"""What the ends of a node's workers mean: their events, their log lines, and the reports on their failures."""

from __future__ import annotations

import logging
import signal
from dataclasses import dataclass, field, replace

from elastic_agents import policy_types as v
from elastic_agents import reporting
from elastic_agents.node_state import NodeState
from elastic_agents.policy_types import WorkerExit
from elastic_agents.snapshots.snapshot_store import SnapshotStore
from elastic_agents.timers import StepTimer
from elastic_agents.workers.round_workers import RoundWorkers
from elastic_launch.events import types as ev
from elastic_launch.events.facts import TookMemory
from elastic_launch.events.sentences import ending, how_failed, why
from elastic_launch.failure import Failure
from elastic_launch.rendezvous.leader.verdict import kind_of
from elastic_launch.rendezvous.node.membership import Membership
from elastic_launch.snapshot.room import LEFT_OUT, MORE_MEMORY

_log = logging.getLogger("elastic_launch.agent")


@dataclass(eq=False, repr=False)
class Exits:
    """Records how workers end.

    Attributes:
        failed: by rank, the workers of this node that failed in its last round.
    """

    _state: NodeState
    _workers: RoundWorkers
    _step_timer: StepTimer
    _snapshot_store: SnapshotStore
    _events: ev.EventSink
    _membership: Membership
    failed: dict[int, WorkerExit] = field(default_factory=dict, init=False)

    def reaped(self, pid: int, exit_code: int) -> WorkerExit | None:
        """A process was reaped; return the end of the worker that it was, None if it was none."""
        exited = self._workers.reap(pid, exit_code)
        if exited is None:
            return None
        return self._ended(exited) if exited.round else self._ended_ahead(exited)

    def _ended(self, exited: WorkerExit) -> WorkerExit:
        view, rank, local_rank = self._state.view, exited.rank, exited.local_rank
        assert rank is not None
        takes_part = exited.round == view.round and local_rank in view.alive
        drained = local_rank in view.drained
        stopped = view.phase in (v.Phase.STOPPING, v.Phase.DRAINING) or drained or not takes_part
        self._emit(exited, rank, stopped=stopped)
        if not takes_part:
            if local_rank in view.suspended:
                failure = self.failure_of(local_rank) if exited.exit_code == -signal.SIGKILL else None
                how = ending(exited.exit_code) if failure is None else how_failed(failure)
                _log.warning("rank %d (pid %d), which was suspended, ended with %s", rank, exited.pid, how)
        elif exited.exit_code != 0 and not drained:
            if view.phase is not v.Phase.STOPPING:
                self.failed[rank] = exited
                text = "rank %d (pid %d) ended with %s in round %d"
                _log.warning(text, rank, exited.pid, ending(exited.exit_code), exited.round)
            elif view.leaving is None and (failure := self.failure_of(local_rank)):
                # It may have raised before it was stopped: the leader learns of it before it forms the next round.
                if not failure.supposed:
                    self.failed[rank] = exited
                reporting.late(failure)
                self._membership.report(failure)
        return exited

    def _ended_ahead(self, exited: WorkerExit) -> WorkerExit:
        ahead = self._state.view.ahead
        stopped = exited.local_rank not in ahead.coming | ahead.waiting
        self._emit(exited, None, stopped=stopped)
        unfit = False
        if exited.exit_code > 0 and not stopped and not self._step_timer.trained[0]:
            failure = self.failure_of(exited.local_rank)
            unfit = failure is not None and kind_of(failure).is_final
        return replace(exited, unfit=unfit)

    def _emit(self, exited: WorkerExit, rank: int | None, *, stopped: bool) -> None:
        where, ran = (exited.round, rank, exited.local_rank, exited.pid), round(exited.ran, 3)
        self._events.emit(ev.WorkerExited(*where, exited.exit_code, ran, stopped))

    def failure_of(self, local_rank: int) -> Failure | None:
        """Return the report on a reaped worker. If the node's snapshots took its memory, leave them out from now on."""
        view, failure = self._state.view, self._workers.failure(local_rank, self._step_timer)
        if failure is not None and failure.kind == "out of memory" and (used := self._snapshot_store.leave_out()):
            # A suspended worker may write a last snapshot, if no round follows.
            rests = view.phase in (v.Phase.WAITING, v.Phase.SUSPENDED) and not view.suspended - {local_rank}
            cause = why(TookMemory(failure.pid, failure.exit_code != -signal.SIGKILL, used, rests))
            remedy = f": {MORE_MEMORY}, or save more often. --no-snapshots leaves them out from the start"
            _log.warning(LEFT_OUT, cause, remedy)
            self._events.emit(ev.SnapshotsLeftOut(view.round, cause))
            if rests:
                self._snapshot_store.between_rounds()
        return failure
