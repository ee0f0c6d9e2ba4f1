"""Watches a node's workers in a thread of its own, and reports to the leader when all of them are late."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from elastic_agents.hangs.collectives import last_collectives, text_of_collectives
from elastic_agents.hangs.lateness import Lateness, Standstill
from elastic_agents.hangs.processes import (
    Usage,
    collectives_of,
    is_stopped,
    is_traced,
    moved,
    others_in_session,
    stacks_of,
    stopped_after,
    usage,
)
from elastic_agents.hangs.stacks import debugged, in_exchange, in_loader, prepares, reads_data, serves_loader, text_of
from elastic_agents.workers.frames import Stack, user_frame
from elastic_launch.errors import ProtocolError
from elastic_launch.failure import Doing
from elastic_launch.rendezvous.wire.messages import Collective, StacksTaken, Stalled, StalledWorker
from elastic_launch.shared_progress import FIRST_STEPS, Activity, WorkerProgress
from elastic_launch.system.plain_text import clipped, one_line
from elastic_launch.system.private_files import make_private, open_private
from elastic_launch.system.threads import ThreadDied, VitalThread

_log = logging.getLogger("elastic_launch.agent")

TICK = 0.5
"""Seconds between two looks at what workers report. A longer time counts as twice as much: the agent did not run."""

WINDOW = 2.0
"""Seconds for which a worker must not have done anything."""

AGAIN = 1.25
"""A node that stays late repeats its report whenever it has been so for so many times as long."""

FIRST_BATCH = 60.0
"""Seconds after which a worker that waits for its first batch is reported; again whenever it is twice as long."""

STILL = 5.0
"""Seconds after that at which it must still wait: it may have begun to read only now."""

AT_ONCE = 8
"""Workers whose stacks are taken at the same time."""

LONGEST_TEXT = 1024 * 1024
"""Bytes of the stacks that are reported on request."""

FRAMES, LONGEST = 20, 1000
"""Innermost frames of a stack that go into a report, and bytes of each."""

NO_STACK = "no stack could be read; py-spy reads those of any worker, if it is installed and permitted"


@dataclass(frozen=True, slots=True)
class WatchedWorker:
    """A worker of the node.

    Attributes:
        dumps: the directory to which it writes its stacks and collectives.
        log: the location of its log files.
        placed: whether it ran before this round, and has got its place in it.
    """

    rank: int
    local_rank: int
    pid: int
    dumps: Path
    log: str = ""
    placed: bool = False


@dataclass(frozen=True, slots=True)
class WatchedRound:
    """The workers of a round that run.

    Attributes:
        finishing: whether others have ended with 0. Those that are left may wait for a last checkpoint, so only those
            that report no steps are watched, for use of CPU and output.
    """

    round: int
    workers: tuple[WatchedWorker, ...]
    finishing: bool = False


class HangWatch:
    """Watches the workers that it is given.

    Args:
        progress: returns the last report of the worker of a local rank; called from this object's thread.
        report: sends a report to the leader; likewise.
        timeout: seconds without use of CPU and without output after which workers are late whose steps are not known;
            0: never; None: no workers are, and only first batches are watched.
    """

    def __init__(
        self,
        progress: Callable[[int], WorkerProgress | None],
        report: Callable[[Stalled | StacksTaken], object],
        timeout: float | None = 0.0,
    ) -> None:
        self._progress = progress
        self._report = report
        self._host = socket.gethostname()
        self._watched: WatchedRound | None = None
        self._found: tuple[int, str] = 0, ""  # the last round whose stacks were taken, and these
        self._timeout, self._hangs = timeout or 0.0, timeout is not None
        self._lateness = Lateness()
        self._idle = 0.0  # seconds for which workers whose steps are not known have done nothing
        self._unchecked, self._idle_round = 0.0, 0
        self._before: dict[int, Usage] = {}  # by pid, when this was last checked
        self._used: dict[int, Usage] = {}  # by pid, before the workers were late
        self._stood: tuple[StalledWorker, ...] = ()  # what the last look at workers that are not late yet has shown
        # A round, seconds since it began, those at which its first batches are due, and the ranks that wait for them:
        self._starting: tuple[int, float, float, set[int] | None] = 0, 0.0, 0.0, None
        self._stopped: dict[int, float] = {}  # by pid, the CPU that a stopped worker has used
        self._broken = False
        self._reported = 0  # the round that was reported as stalled
        self._next = 0.0  # seconds of standstill after which it is reported again
        self._taking: VitalThread | None = None
        self._stop = threading.Event()
        # The run can go on without it.
        died = "hangs are no longer noticed: %s"
        self._thread = VitalThread(self._run, "hang watch", owner=lambda end: _log.error(died, end.error))
        self._thread.start()

    def follow(self, watched: WatchedRound | None) -> None:
        """Watch these workers from now on; None: those of the last call are no longer to advance."""
        self._watched = watched

    def linked(self) -> None:
        """There is a new link to a leader, which knows nothing of earlier reports."""
        self._next = 0.0

    def broken(self) -> None:
        """A round was broken because it hung."""
        self._broken = True

    def stacks_of(self, round_number: int) -> str:
        """The stacks of a round's workers as text, if they have been taken; else empty."""
        number, text = self._found
        return text if number == round_number else ""

    def tell_stacks(self, round_number: int, workers: tuple[WatchedWorker, ...]) -> None:
        """Report where workers stand, from another thread; if one does so already, its report is the answer."""
        if self._taking is None or not self._taking.is_alive():

            def failed(died: ThreadDied) -> None:
                _log.error("the stacks of the workers could not be taken: %s", died.error)
                self._report(StacksTaken(round_number, f"the stacks could not be taken: {one_line(died.error)}\n"))

            self._taking = VitalThread(self._tell, "stacks", (round_number, workers), owner=failed)
            try:
                self._taking.start()
            except RuntimeError as error:  # no more threads: the run can go on without
                failed(ThreadDied(self._taking.name, str(error)))

    def _tell(self, round_number: int, workers: tuple[WatchedWorker, ...]) -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            taken = list(pool.map(_dumps, workers))
        found = [_text(_seen(worker, dumps, moves=False), dumps) for worker, dumps in zip(workers, taken, strict=True)]
        self._report(StacksTaken(round_number, clipped("\n".join(found), LONGEST_TEXT) or "no workers run\n"))

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(TICK):
            now = time.monotonic()
            self._look(min(now - last, 2 * TICK))
            last = now

    def _look(self, elapsed: float) -> None:
        watched = self._watched
        if watched is None:
            self._advances()
            return
        if self._broken:
            self._broken = False
            self._lateness.broken()
        reports = self._reports(watched)
        self._await_first_batches(watched, reports, elapsed)
        if not self._hangs:
            return
        steps = any(report is not None for report in reports.values())
        if watched.finishing:
            reports = dict.fromkeys(reports)
        found = self._lateness.look(watched.round, reports, elapsed, self._still_stopped(watched))
        suspect_in = self._lateness.suspect_in(reports)
        if found is None and self._timeout and not (watched.finishing and steps):
            found = self._idleness(watched, elapsed)
        if found is None or min(found.left, suspect_in) > WINDOW:
            self._advances()
        elif not self._used:
            self._used = {worker.pid: usage(worker.pid) for worker in watched.workers}
        elif min(found.left, suspect_in) <= 0 and found.seconds >= self._next:
            self._examine(watched, found)

    def _await_first_batches(
        self, watched: WatchedRound, reports: dict[int, WorkerProgress | None], elapsed: float
    ) -> None:
        """Log where workers stand that still wait for their first batch: no limit of a first step fits all data."""
        number, seconds, due, before = self._starting
        if number != watched.round:
            seconds, due, before = 0.0, FIRST_BATCH, None
        seconds += elapsed
        if seconds >= due + (0.0 if before is None else STILL) and not watched.finishing:
            begins = [
                x for x in watched.workers if _begins(watched.round, reports[x.local_rank]) and not is_traced(x.pid)
            ]
            with ThreadPoolExecutor(AT_ONCE) as pool:
                taken = [(worker, dumps) for worker, dumps in zip(begins, pool.map(_dumps, begins), strict=True)]
            waiting = [(x, dumps) for x, dumps in taken if dumps.stacks[0] and reads_data(dumps.stacks[0][-1])]
            if before is None:
                before = {worker.rank for worker, _ in waiting}
            else:
                self._tell_first_batches(watched.round, seconds, [x for x in waiting if x[0].rank in before])
                before, due = None, 2 * due
        self._starting = watched.round, seconds, due, before

    def _tell_first_batches(self, number: int, seconds: float, waiting: list[tuple[WatchedWorker, _Dumps]]) -> None:
        if waiting:
            worker, dumps = waiting[0]
            more = f" (and {len(waiting) - 1} more of this node)" if len(waiting) > 1 else ""
            processes = sum(serves_loader(each[-1]) for each in dumps.stacks[1:] if each)
            where = _seen(worker, dumps, moves=False).frame + (
                f"; processes of its loader: {processes}" if processes else ""
            )
            text = "rank %d%s has done no step %d s after round %d began, and waits for data; it stands at %s"
            _log.warning(text, worker.rank, more, seconds, number, where)

    def _still_stopped(self, watched: WatchedRound) -> list[int]:
        """Return the local ranks of workers that were stopped the last time, too, and have not run since."""
        before, self._stopped = self._stopped, {}
        for worker in watched.workers:
            if (used := stopped_after(worker.pid)) is not None:
                self._stopped[worker.pid] = used
        if self._stopped.keys() != before.keys():
            self._next = 0.0  # what was reported no longer holds
        return [x.local_rank for x in watched.workers if x.pid in before and self._stopped.get(x.pid) == before[x.pid]]

    def _idleness(self, watched: WatchedRound, elapsed: float) -> Standstill:
        """Return for how long none of the workers has used a CPU, read or written."""
        self._unchecked += elapsed
        if watched.round != self._idle_round or self._unchecked >= WINDOW:
            now = {worker.pid: usage(worker.pid) for worker in watched.workers}
            same = now.keys() == self._before.keys()  # one that has ended has done something
            idle = same and not any(moved(self._before[pid], used) for pid, used in now.items())
            self._idle = self._idle + self._unchecked if idle else 0.0
            self._before, self._unchecked, self._idle_round = now, 0.0, watched.round
        return Standstill(self._idle, self._timeout - self._idle, Doing(ends=watched.finishing))

    def _reports(self, watched: WatchedRound) -> dict[int, WorkerProgress | None]:
        found = {worker.local_rank: self._progress(worker.local_rank) for worker in watched.workers}
        for worker in watched.workers:
            report = found[worker.local_rank]
            if worker.placed and (report is None or report.round != watched.round):
                # It has only to read this: a worker that started with its round may still be importing.
                found[worker.local_rank] = WorkerProgress(watched.round, 0, 0.0, Activity.FORMING)
        return found

    def _advances(self) -> None:
        self._used, self._next = {}, 0.0
        self._take_back()

    def _take_back(self) -> None:
        self._stood = ()
        if self._reported:
            self._report(Stalled(self._reported))
            self._reported = 0

    def _examine(self, watched: WatchedRound, found: Standstill) -> None:
        """Find out where each worker stands, and report it.

        Workers that are not late yet are reported only if none of them does anything, twice at the same place.
        """
        early = found.left > 0
        self._next = found.seconds + WINDOW if early else found.seconds * AGAIN
        before = self._reports(watched)
        moves = {x.pid: x.pid not in self._used or moved(self._used[x.pid], usage(x.pid)) for x in watched.workers}
        if early and any(moves.values()):
            self._used = {worker.pid: usage(worker.pid) for worker in watched.workers}
            self._take_back()
            return
        seen: list[StalledWorker] = []
        texts: list[str] = []
        with ThreadPoolExecutor(AT_ONCE) as pool:
            taken = list(pool.map(_dumps, watched.workers))
        # From here on: what they use to write the dumps does not count.
        self._used = {worker.pid: usage(worker.pid) for worker in watched.workers}
        for worker, dumps in zip(watched.workers, taken, strict=True):
            if is_traced(worker.pid) or any(map(debugged, dumps.stacks)):
                return
            seen.append(_seen(worker, dumps, moves=moves[worker.pid]))
            texts.append(_text(seen[-1], dumps))
        if self._watched != watched or self._reports(watched) != before:
            return  # it has advanced meanwhile
        if early:
            if tuple(seen) != self._stood:
                self._take_back()
                self._stood = tuple(seen)
                return
            self._next = found.seconds * AGAIN
        self._reported = watched.round
        self._found = watched.round, "\n".join(texts)
        where = found.doing, self._host, tuple(seen)
        asked = self._idle >= self._timeout > 0
        self._report(Stalled(watched.round, round(found.seconds, 1), *where, asked=asked, early=early))


@dataclass(frozen=True, slots=True)
class _Dumps:
    """What a worker and its processes have written of where they stand.

    Attributes:
        stacks: of the threads of each process, the worker's first.
    """

    stacks: list[list[Stack]]
    collectives: tuple[Collective, ...]


def _dumps(worker: WatchedWorker) -> _Dumps:
    """Take the dumps of a worker and, if it waits for them, the stacks of its data loader's processes."""
    own = stacks_of(worker.pid, worker.dumps)
    others = others_in_session(worker.pid) if own and in_loader(own[-1]) else []
    stacks = [own, *(stacks_of(pid, worker.dumps) for pid in others)]
    try:
        return _Dumps(stacks, last_collectives(collectives_of(worker.pid, worker.dumps)))
    except ProtocolError as error:
        _log.warning("rank %d (pid %d): %s", worker.rank, worker.pid, error)
        return _Dumps(stacks, ())


def _seen(worker: WatchedWorker, dumps: _Dumps, *, moves: bool) -> StalledWorker:
    """Return what is reported of a worker."""
    stacks = dumps.stacks
    main: Stack = stacks[0][-1] if stacks[0] else ()
    shown = main
    if is_stopped(worker.pid):
        state = "stopped"
    elif not main:
        state = "unknown"
    elif in_exchange(main):
        state = "exchange"
    elif in_loader(main):
        state = "loader"
        # A process of the loader that has nothing to do waits in torch's own code.
        mains = [those[-1] for those in stacks[1:] if those]
        loading = [each for each in mains if serves_loader(each) and not in_loader(each)]
        shown = next(iter(loading), main)
    else:
        state = "code"
    frame = one_line(str(user_frame(shown) or ""))
    lines = (f'File "{x.file}", line {x.line}, in {x.function}' for x in reversed(shown[:FRAMES]))
    stack = tuple(clipped(one_line(line), LONGEST) for line in lines)
    where = worker.rank, worker.local_rank, worker.pid
    frame, begins = clipped(frame, LONGEST), prepares(main)
    return StalledWorker(*where, state, moves, frame, stack, worker.log, dumps.collectives, begins)


def _begins(round_number: int, report: WorkerProgress | None) -> bool:
    """Whether a worker has done no step in a round, as far as is known."""
    return report is None or report.round != round_number or report.activity in FIRST_STEPS


def _text(seen: StalledWorker, dumps: _Dumps) -> str:
    head = f"rank {seen.rank} (pid {seen.pid}): {seen.state}{', moves' if seen.moves else ''}"
    processes = [text_of(those) or f"  {NO_STACK}" for those in dumps.stacks]
    collectives = text_of_collectives(seen.collectives)
    return "\n".join(filter(None, [head, "\n\nanother process of this worker:\n".join(processes), collectives])) + "\n"


def keep_stacks(path: Path, text: str) -> None:
    """Write the stacks of a round's workers to a file; may hang."""
    try:
        make_private(path.parent)
        with open(open_private(path, os.O_WRONLY | os.O_TRUNC), "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        _log.warning("the stacks of the workers are not kept: %s", error)
    else:
        _log.info("the stacks of this node's workers are in %s", path)
