"""Keeps a node's snapshots: in slots, which outlive the workers, and as copies in durable storage."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from elastic_agents.snapshots.copier import Copier
from elastic_agents.snapshots.slots import HeldSlot, SlotTable
from elastic_agents.snapshots.transfer import ENDING, TransferClient, TransferServer
from elastic_launch.contract import SLOTS, CommitAnswer, Copied, Copying, CopyJob, Fetched, Save, SnapshotSlots, Stored
from elastic_launch.rendezvous.wire.messages import SnapshotSource
from elastic_launch.snapshot.location import Url, place
from elastic_launch.snapshot.memory.slot import Header, Slot
from elastic_launch.system.threads import VitalThread

_log = logging.getLogger("elastic_launch.agent")

ATTEMPTS = 4
"""Attempts at a copy before its error is reported."""

PAUSE = 0.5
"""Seconds before the second attempt; doubled before each further one."""

COPYING_EVERY = 10.0
"""Seconds after which workers are informed again that a copy is still in progress."""

CATCH_UP = 60.0
"""Seconds for which a late copy waits for the next snapshot that is marked for copying."""


class SnapshotStore:
    """One node's snapshots, through all rounds; its thread copies one at a time, the newest available.

    Workers compare their states only before a snapshot that is marked for copying. So a node that was too busy to
    copy it and now has a newer one asks its workers for another compared snapshot. If there are no workers, the newest
    snapshot is copied, and its meta says that it was not compared. What several nodes copy together is always the
    marked snapshot; nodes other than the first skip their share if they are late.

    A snapshot with results that ``keep_best`` wants is copied before newer ones, and again if that fails. There is a
    slot for one that waits while another is copied; the log has the steps of those that were replaced.

    Args:
        may_commit: whether this node is still a member of the run; called, from any thread, before a copy appears, and
            before a checkpoint that a worker writes itself.
        tell: called from the thread with the result of a copy (None if there was nothing to copy), with the news that a
            copy is in progress, or with a request to the workers. Returns whether it reached any worker.
        may_add: whether it may commit although it is not, without removing anything; called likewise.
        stderr: opens the file that copying processes write to; None: they share this process' stderr.
        writes: whether workers write snapshots, until :meth:`leave_out`.
        split: whether those of sharded states are to be split among the nodes.
    """

    def __init__(
        self,
        may_commit: Callable[[], bool],
        tell: Callable[[Copied | Copying | Save | None], bool],
        stderr: Callable[[], int] | None = None,
        *,
        writes: bool = True,
        split: bool = False,
        may_add: Callable[[], bool] = lambda: False,
    ) -> None:
        self.may_commit, self._may_add = may_commit, may_add
        self._stderr = stderr
        self._tell = tell
        self._book = SlotTable()
        self._writes = writes
        self._split = split
        self._restored: int | None = None  # snapshots of trainings up to this number are not needed; None: all may be
        self._slots: list[Slot] = []
        self._changed = threading.Condition()
        self._target: CopyJob | None = None  # for the last copy, of whatever snapshot is the newest then
        self._job: CopyJob | None = None  # the next one
        self._later: CopyJob | None = None  # the one after it, if that one has results
        self._current: CopyJob | None = None  # the one that is carried out
        self._copied = 0
        self._given_up = 0  # the highest sequence number that could not be copied, after all attempts
        self._forgets = False  # whether what is being copied has been dropped since
        self._reading = False  # the pinned snapshot is being copied
        self._closing = False
        self._ended = False  # the thread has ended
        self._copier: Copier | None = None
        self._failing_until = 0.0  # by a drill
        self._next_word = 0.0
        self._server: TransferServer | None = None
        self._fetch: TransferClient | None = None
        self._last_fetch: TransferClient | None = None  # after its end, too; an abandoned one may still write
        self._thread = VitalThread(self._run, "copier")
        self.failed = ""
        """Why the last copy failed, and how to fix it; empty if it did not."""

    def start(self) -> None:
        """Create the slots, which use no memory while they are empty."""
        for number in range(SLOTS):
            self._slots.append(Slot.make(f"elastic-launch-slot-{number}"))
        self._thread.start()

    def offer(self) -> tuple[SnapshotSlots, list[int]]:
        """Return the description of the slots for a worker, and their descriptors."""
        with self._changed:
            self._look()
            descriptors = [number for slot in self._slots for number in (slot.tensors, slot.head)]
            use = None if self._fetch is not None else self._book.use
            offered = SnapshotSlots(len(self._slots), use, self._book.sequence, self._fetch is not None)
            slots = replace(offered, writes=self._writes, split=self._split)
            return slots, descriptors

    def stored(self, stored: Stored) -> int:
        """Record a snapshot, and queue a copy if it is marked for one; return the slot to write next."""
        job = stored.job
        with self._changed:
            self._book.stored(HeldSlot(stored.slot, job.sequence, job.step, job.round))
            stands_by = job.stands_by or job.share > 0
            target = replace(job, sequence=0, shares=1, share=0, stands_by=stands_by, results=False)
            self._target = target if job.directory else None
            if job.now and job.directory:
                if self._queue(job) and not self._reading:
                    self._book.pin()
                elif self._job is job and job.results:
                    self._book.awaits = self._book.newest
            return self._book.use

    def _queue(self, job: CopyJob) -> bool:
        """Queue a job instead of those that wait, or after one with results; return whether it is the next."""
        self._changed.notify_all()
        if self._job is not None and self._job.results and self._there(self._job):
            self._give_up(self._later)
            self._later = job
            return False
        self._give_up(self._job)
        self._job, self._later = job, None
        return True

    def _there(self, job: CopyJob) -> bool:
        kept = (self._book.newest, self._book.pinned, self._book.awaits)
        return job.sequence in [held.sequence for held in kept if held is not None]

    def _give_up(self, job: CopyJob | None) -> None:
        if job is not None and job.results and not job.share:
            text = "the evaluation after step %d has no checkpoint: its snapshot was replaced before it was copied"
            _log.warning(text, job.step)

    def agreed(self) -> None:
        """Keep the newest snapshot until this is called again: all ranks agree about the state so far."""
        with self._changed:
            self._book.agreed()

    def leave_out(self) -> int:
        """Have workers of later rounds write no snapshots, and copy the newest to durable storage before it is
        freed.

        Return the bytes that are freed thereby, if this is new.
        """
        with self._changed:
            used = sum(slot.allocated for slot in self._slots) if self._writes else 0
            self._writes = self._writes and not used
            if used:
                self.secure()
            return used

    def between_rounds(self) -> None:
        """If snapshots are left out, free all but the newest of each training.

        No worker of the node is in a round, and one that is suspended is given a place before it writes a snapshot.
        """
        self.restored(-1)

    def forget(self) -> None:
        """Drop the snapshots; no worker of the node writes any. A copy in progress is ended."""
        with self._changed:
            self._look()
            newest = self._book.newest
            if newest is None:
                return
            _log.warning("the state of step %d in this node's memory is dropped: the run has begun anew", newest.step)
            self._job = self._later = None
            self._forgets = self._current is not None
            if self._copier is not None:
                self._copier.kill()
            for slot in self._slots:
                slot.free()
            self._look()

    def restored(self, training: int) -> None:
        """Free the snapshots of trainings up to this one: all of the node's workers have restored it and write none.

        One that is being copied to durable storage is freed after that.
        """
        with self._changed:
            if not self._writes:
                self._restored = training
                self._free()

    def _free(self) -> None:
        if self._restored is None or self._fetch is not None or self._server is not None:
            return
        self._look()
        found = sorted(self._headers(), key=lambda pair: (pair[1].round, pair[1].step, pair[1].sequence))
        needed = {header.training: number for number, header in found if header.training > self._restored}
        pinned, awaits = self._book.pinned, self._book.awaits
        newest = None if self._at_rest or (pinned is not None and self._job is None) else self._book.newest
        kept = {*needed.values(), *(held.slot for held in (pinned, awaits, newest) if held is not None)}
        for number, slot in enumerate(self._slots):
            if number not in kept:
                slot.free()
        self._look()

    def fail_copies(self, seconds: float) -> bool:
        """For a drill: have copies fail for some seconds; return whether this node makes any to a directory."""
        with self._changed:
            job = self._job or self._target
            if job is None or job.stands_by or isinstance(place(job.directory), Url):
                return False
            self._failing_until = max(self._failing_until, time.monotonic() + seconds)
            if self._copier is not None and seconds > 0:
                self._copier.fail()
            return True

    def secure(self, *, stands_in: bool = False) -> None:
        """Queue a copy of the newest snapshot if there is none: its memory is lost or needed.

        ``stands_in``: do so even if saving is another node's task, or a copy was refused before: no other node can.
        """
        with self._changed:
            self._look()
            newest = self._book.newest
            target = self._target
            if newest is None or target is None or (target.stands_by and not stands_in):
                return
            header = self._slots[newest.slot].header()
            there = header is not None and header.sequence == newest.sequence
            current = self._current if self._book.pinned == newest else None
            # A share alone is not a checkpoint, as the node that would commit it may be gone.
            jobs = [job for job in (self._job, self._later, current) if job is not None and not job.share]
            under_way = any(not job.results or job.sequence == newest.sequence for job in jobs)
            done = self._copied if stands_in else max(self._copied, self._given_up)
            if there and newest.sequence > done and not under_way:
                self._queue(replace(target, last=True))

    def has_saved(self, training: int, step: int) -> bool:
        """Whether the newest snapshot is of that step of a training, and in durable storage."""
        with self._changed:
            newest = self._book.newest
            if newest is None or newest.step != step or newest.sequence != self._copied:
                return False
            header = self._slots[newest.slot].header()
            return header is not None and header.training == training

    @property
    def saves(self) -> bool:
        """Whether this node is responsible for copying snapshots to durable storage."""
        with self._changed:
            return self._target is not None and not self._target.stands_by

    @property
    def newest(self) -> HeldSlot | None:
        """The newest snapshot."""
        with self._changed:
            self._look()
            return self._book.newest

    @property
    def newest_step(self) -> int | None:
        """Steps in the newest snapshot; None without one."""
        newest = self.newest
        return None if newest is None else newest.step

    @property
    def newest_position(self) -> tuple[int, int] | None:
        """Training and steps of the newest snapshot; None without one."""
        with self._changed:
            newest = self.newest
            header = None if newest is None else self._slots[newest.slot].header()
            return None if header is None else (header.training, header.step)

    @property
    def idle(self) -> bool:
        """Whether no copy is queued or running, and no node fetches what is served."""
        served = self._server is not None and self._server.busy
        with self._changed:
            return self._at_rest and not served

    @property
    def _at_rest(self) -> bool:
        return self._job is None and self._current is None

    def serve(self, listener: socket.socket, key: bytes | None) -> int:
        """Serve the newest snapshot to other nodes from now on; workers no longer write. Return the port.

        The listener is taken over; the key is that of the connections, None without a token.
        """
        newest = self.newest
        assert newest is not None
        self._server = TransferServer(listener, self._slots[newest.slot], key, lambda: self._tell(None))
        return self._server.port

    def fetch(self, sources: Sequence[SnapshotSource], key: bytes | None, tell: Callable[[Fetched], None]) -> None:
        """Begin to fetch a snapshot that no member of the round has; without sources, end a fetch in progress.

        ``tell`` is called from a thread with the result for the workers: the snapshot has arrived, or is unavailable.
        """
        with self._changed:
            before, newest = self._fetch, self._book.newest
            wanted = [x for x in sources if newest is None or (x.round, x.step) > (newest.round, newest.step)]
            if before is not None and before.sources == tuple(wanted) and not before.cancelled:
                return
            if before is not None:
                before.cancel()
            if not wanted:
                return
            slot = self._book.use
            after = self._last_fetch

            def done(header: Header | None) -> None:
                self._fetched(slot, fetch, header, tell)

            fetch = self._fetch = TransferClient(wanted, self._slots[slot], self._book.sequence + 1, key, done, after)
            self._last_fetch = fetch
            try:
                fetch.start()
            except RuntimeError as error:  # no more threads; workers restore from what they find
                self._fetch = None
                _log.warning("the newest snapshot is not fetched: %s", error)

    def _fetched(
        self, slot: int, fetch: TransferClient, header: Header | None, tell: Callable[[Fetched], None]
    ) -> None:
        with self._changed:
            if self._fetch is not fetch:
                return  # another fetch follows, into the same slot
            self._fetch = None
            if header is not None:
                self._book.stored(HeldSlot(slot, header.sequence, header.step, header.round))
            fetched = Fetched(self._book.use, self._book.sequence)
        tell(fetched)

    def wait(self, timeout: float) -> bool:
        """Wait until nothing is left to copy; return whether that happened in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._at_rest or self._ended, timeout) and self._at_rest

    def close(self) -> None:
        """Give up what is not yet copied, and free the memory."""
        with self._changed:
            self._closing = True
            if self._copier is not None:
                self._copier.kill()
            self._changed.notify_all()
            fetch = self._last_fetch
        if fetch is not None:
            fetch.cancel()
        # Their descriptors must not become other files' while a fetch still writes there.
        free = fetch is None or fetch.join(ENDING)
        if self._server is not None:
            self._server.close()
        if self._thread.ident is not None:
            self._thread.join(10)
        slots, self._slots = self._slots, []
        for slot in slots:
            if free:
                slot.close()

    def _look(self) -> None:
        """Record changes that workers have not reported.

        A snapshot is complete well before it is reported. Workers drop one silently if the ranks differ.
        """
        self._book.seen(HeldSlot(number, x.sequence, x.step, x.round) for number, x in self._headers())

    def _headers(self) -> list[tuple[int, Header]]:
        return [(number, header) for number, slot in enumerate(self._slots) if (header := slot.header()) is not None]

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                copied = self._copy(self._caught_up(job))
                with self._changed:
                    self._let_go()
                    self._current = None
                    if self._forgets:
                        copied, self._forgets = None, False
                    self._free()
                    closing = self._closing
                    if copied is not None and not closing:
                        self.failed = "" if copied.path else f"{copied.error} {copied.hint}".strip()
                    self._changed.notify_all()
                if not closing:
                    self._tell(copied)
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _next(self) -> CopyJob | None:
        with self._changed:
            self._changed.wait_for(lambda: self._job is not None or self._closing)
            job, self._job, self._later = self._job, self._later, None
            self._current = None if self._closing else job
            return self._current

    def _caught_up(self, job: CopyJob) -> CopyJob:
        """Return a job whose snapshot is still available, if possible."""
        newest = self.newest
        with self._changed:
            job = self._replaced(job)
            there = self._there(job)
        if job.share or job.last or newest is None or there or not self._writes:
            return job
        if not self._tell(Save()):
            return job
        with self._changed:
            self._changed.wait_for(lambda: self._job is not None or self._closing, CATCH_UP)
            return self._replaced(job)

    def _replaced(self, job: CopyJob) -> CopyJob:
        """Return the queued job, which replaces the current one from now on, or the current one if there is none.

        One with results is not replaced as long as its snapshot is there.
        """
        if self._job is not None and not (job.results and self._there(job)):
            self._give_up(job)
            job, self._job, self._later = self._job, self._later, None
        self._current = job
        return job

    def _take(self, job: CopyJob) -> HeldSlot | None:
        """Pin the snapshot of a job while it is copied, or the newest if that one is gone."""
        with self._changed:
            awaits, pinned = self._book.awaits, self._book.pinned
            if awaits is not None and awaits.sequence == job.sequence:
                self._book.pin_awaited()
            elif pinned is None or pinned.sequence != job.sequence:
                self._book.pin()
            if self._job is not None and self._job.results:
                next_ones = [held for held in (pinned, self._book.newest) if held is not None]
                found = next((held for held in next_ones if held.sequence == self._job.sequence), None)
                self._book.awaits = found or self._book.awaits
            self._reading = self._book.pinned is not None
            return self._book.pinned

    def _let_go(self) -> None:
        """A copy has ended: unpin its snapshot, unless the next job is to copy it."""
        self._reading = False
        pinned = self._book.pinned
        if pinned is not None and (self._job is None or pinned.sequence != self._job.sequence):
            self._book.unpin()

    def _copy(self, job: CopyJob) -> Copied | None:
        """Try until a copy succeeds, or the attempts are used up; each copies the newest snapshot."""
        pause = PAUSE
        for attempt in range(1, ATTEMPTS + 1):
            job = self._caught_up(job) if attempt > 1 else job
            held = self._take(job)
            if job.share:
                # Once: the first node writes any share that is missing.
                late = held is None or held.sequence != job.sequence
                if held is not None and not late and (error := self._ask(job, held).error):
                    _log.warning("a share of the checkpoint of step %d: %s", held.step, error)
                return None
            if held is None:
                return None
            if held.sequence != job.sequence:
                self._give_up(job)
                job = replace(job, results=False)
            together = job.shares > 1 and attempt == 1 and held.sequence == job.sequence
            copied = self._ask(job if together else replace(job, shares=1), held)
            ended = copied.path or copied.final or attempt == ATTEMPTS or self._closing or self._forgets
            with self._changed:
                if ended or not job.results:
                    self._let_go()
            if copied.path:
                self._copied = held.sequence
            if ended:
                self._given_up = self._given_up if copied.path else held.sequence
                return copied
            _log.warning("checkpoint of step %d: %s Tried again in %.1f s.", held.step, copied.error, pause)
            with self._changed:
                self._changed.wait_for(lambda: self._closing, pause)
            pause *= 2
        return None

    def _ask(self, job: CopyJob, held: HeldSlot) -> Copied:
        """Have a process copy a snapshot."""
        slot = self._slots[held.slot]
        url = isinstance(place(job.directory), Url)
        job = replace(job, sequence=held.sequence, step=held.step, round=held.round)
        header = slot.header()
        training = 0 if header is None else header.training
        nothing = Copied(held.step, held.round, directory=job.directory, training=training)
        with self._changed:
            if self._closing:
                return replace(nothing, error="the agent ends")
            try:
                copier = self._copier = Copier(job, (slot.tensors, slot.head), url=url, stderr=self._stderr)
            except OSError as error:
                return replace(nothing, error=f"The process that copies it cannot be started: {error}.")
            if time.monotonic() < self._failing_until:
                copier.fail()
        try:
            return replace(copier.hear_out(self._permit, self._progress), training=training)
        finally:
            with self._changed:
                self._copier = None

    def _permit(self) -> CommitAnswer:
        member = self.may_commit()
        return CommitAnswer(0, member or self._may_add(), adds=not member)

    def _progress(self) -> None:
        """Inform the workers that a copy is in progress: at the end of the training they wait for it."""
        if time.monotonic() >= self._next_word:
            self._next_word = time.monotonic() + COPYING_EVERY
            self._tell(Copying())
