"""The workers of the node's round that hang, in training or at exit: which are watched, and how they end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from elastic_agents.hangs.hang_watch import HangWatch, WatchedRound, WatchedWorker, keep_stacks
from elastic_agents.node_state import NodeState
from elastic_agents.policy_types import Phase, View
from elastic_agents.workers.round_workers import RoundWorkers
from elastic_agents.workers.stuck import LOOK_EVERY
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.rendezvous.wire.messages import Break, StacksTaken, Stalled
from elastic_launch.shared_progress import WorkerProgress
from elastic_launch.system.writer_thread import Writer

_log = logging.getLogger("elastic_launch.agent")


class Hanging:
    """Has workers watched, and kills those that hang.

    Args:
        progress, report: see :class:`~elastic_agents.hangs.hang_watch.HangWatch`.
        later: puts an item into the agent's inbox after so many seconds.
        files: writes the stacks of workers.
    """

    def __init__(
        self,
        config: LaunchConfig,
        state: NodeState,
        workers: RoundWorkers,
        progress: Callable[[int], WorkerProgress | None],
        report: Callable[[Stalled | StacksTaken], object],
        later: Callable[[float, object], None],
        files: Writer,
    ) -> None:
        self._config = config
        self._state = state
        self._workers = workers
        self._later = later
        self._files = files
        self._watch = HangWatch(progress, report, config.hang_timeout)
        self._exiting = 0  # the round whose workers may hang at exit
        self.linked = self._watch.linked
        self.close = self._watch.close

    def follow(self) -> None:
        """Watch the workers that run now."""
        self._watch.follow(self._advancing())

    def end(self, order: Break) -> None:
        """Kill the workers that hang, since they would not react; keep the stacks of all."""
        self._watch.broken()
        for where, pid, _ in self._workers.running(order.round):
            if where.rank in order.hung and where.local_rank in self._state.view.alive:
                _log.error("rank %d (pid %d) hangs, and is killed", where.rank, pid)
                self._workers.kill({where.local_rank})
        if text := self._watch.stacks_of(order.round):
            directory = self._config.run_directory / self._config.output.round_directory(order.round)
            path = directory / f"stacks-{self._config.node_id}.txt"
            self._files.put(lambda data: keep_stacks(path, text))

    def tell_stacks(self, number: int) -> None:
        """Report where the workers of a round stand; of one that is over there are none."""
        view = self._state.view
        self._watch.tell_stacks(number, self._running(view) if number == view.round else ())

    def watch_exits(self, number: int) -> None:
        """From now on, end workers of this round that hang at exit: others have finished."""
        if self._exiting != number:
            self._exiting = number
            self._later(LOOK_EVERY, partial(self._look, number))

    def _look(self, number: int) -> None:
        view = self._state.view
        if number != view.round or view.phase is not Phase.RUNNING or not view.alive:
            return
        if not self._workers.held:
            self._workers.kill_stuck()
        self._later(LOOK_EVERY, partial(self._look, number))

    def _advancing(self) -> WatchedRound | None:
        """The round's workers that have not finished, as long as each of them is to advance or to end."""
        view = self._state.view
        # A drain with a limit ends when its time is up, so it needs no verdict.
        drains = view.phase is Phase.DRAINING and self._state.unlimited == view.round
        if not drains and view.phase is not Phase.RUNNING:
            return None
        if self._workers.held:  # by the guard, since this agent did not run
            return None
        # Those that have stopped advance no more, and have a limit of their own to exit.
        awaited = view.alive - view.drained - view.stopping if drains else view.alive
        workers = tuple(worker for worker in self._running(view) if worker.local_rank in awaited)
        if not workers or len(workers) != len(awaited):
            return None
        return WatchedRound(view.round, workers, bool(view.finished) if drains else view.alive != view.slots)

    def _running(self, view: View) -> tuple[WatchedWorker, ...]:
        return tuple(
            WatchedWorker(
                where.rank,
                where.local_rank,
                pid,
                logs.error_file.parent,
                str(logs.directory),
                where.local_rank in view.live - view.ready,
            )
            for where, pid, logs in self._workers.running(view.round)
        )
