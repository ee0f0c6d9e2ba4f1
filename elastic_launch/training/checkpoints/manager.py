"""Durable checkpoints: which one all ranks resume from, and when to save the next.

One rank reads and writes in each location, see ``shared_location``. The ranks choose the newest complete checkpoint by
(epoch, round, step); those that have it send it to the others. In a shared location, all nodes write large states
together.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elastic_launch import snapshot
from elastic_launch.contract import Copied, CopyJob
from elastic_launch.errors import FINAL_NOTE, UsageError
from elastic_launch.snapshot.format.manifest import DISTRIBUTED
from elastic_launch.snapshot.location import Place, Url, place
from elastic_launch.snapshot.room import MORE_MEMORY, below_peak, room
from elastic_launch.snapshot.stall import while_advancing
from elastic_launch.snapshot.storage.directory import check_writable
from elastic_launch.snapshot.storage.lineage import epoch_of, is_of_run, same_run
from elastic_launch.snapshot.storage.listing import positions
from elastic_launch.snapshot.storage.owner import OwnerMark, claim, look, owned_by, taken
from elastic_launch.snapshot.storage.reading import Taking
from elastic_launch.snapshot.storage.shares import OwnShare, nonce_of
from elastic_launch.snapshot.storage.url_storage import try_out
from elastic_launch.system.threads import within
from elastic_launch.training.checkpoints.branches import Branch, following
from elastic_launch.training.checkpoints.checkpoint import Checkpoint
from elastic_launch.training.checkpoints.resumed import Resumed, check_identity
from elastic_launch.training.checkpoints.sharded import StateGatherer, bytes_in
from elastic_launch.training.checkpoints.shared_location import LocationRead, Writers, read_together, writers
from elastic_launch.training.checkpoints.state import TrainingState
from elastic_launch.training.checkpoints.step_start import copied
from elastic_launch.training.link import AgentLink
from elastic_launch.training.ranks.digest import digest
from elastic_launch.training.ranks.exchange import numbers_of_all
from elastic_launch.training.ranks.world import World

_log = logging.getLogger(__name__)

Report = Callable[[snapshot.WriteOutcome], None]

FINAL_TIMEOUT = 600.0
"""Seconds that the end of training waits for the last checkpoint to be written."""

MOST_OF_FREE = 0.9
"""Fraction of the free memory that a copy of the state may take."""

LOOK_TIMEOUT = 10.0
"""Seconds that storage has to list its checkpoints if the training can also resume from memory."""

LOOK_AGAIN = 1.0
"""Seconds between two attempts to list them, if the storage reports an error."""

RESCUE_TIMEOUT = 5.0
"""Seconds that a failing process waits for a checkpoint that is being written."""


class CheckpointManager:
    """Decides when a training saves durably, has it written, and finds what it resumes from."""

    def __init__(self, settings: Checkpoint) -> None:
        self.settings = settings
        self.directory = settings.directory
        self.metrics: dict[str, float] = {}
        """Results of the last evaluation since the last save, if checkpoints are kept by them."""
        self._evaluated: int | None = None  # step at whose boundary all ranks have them
        self._taken_results: dict[str, float] = {}  # those in the last state that was to be saved
        self._stays = False  # whether that state is among the best
        self._scores: list[float] = []  # of the best states so far, the lowest first; negative if higher is better
        self.branch = Branch()
        """The branch of the training that checkpoints are saved under."""
        self._run = ""  # the number of the run
        self._taken = 0  # the highest epoch in the locations, as last seen
        self._mark: OwnerMark | None = None  # of this rank's location, as last seen
        self._sees = True  # whether it could be looked for
        self._owner = ""
        self.opened_before = False
        """Whether the run has opened the checkpoints before; on ranks that do not write, False."""
        self._link = AgentLink()
        self._highest = 0
        self._awaited = 0
        self._owed = 0  # step of a checkpoint that was put off
        self._lost: list[snapshot.WriteOutcome] = []
        self._copy_bytes = 0  # of the largest copy of the state so far
        self._step_bytes = 0  # that a step has needed for a while
        self._waits = False  # whether it was reported that training waits for checkpoints
        self._last_step = 0
        self._last_time = 0.0
        self.doubted = False
        """Whether the current state counts as not saved, even if a save has begun."""
        self._writer: snapshot.BackgroundWriter | None = None
        self._saved: int | None = None  # step of the newest state that is saved, if any
        self._unsaved = 0  # step of the newest that could not be saved
        self._error: snapshot.CheckpointError | None = None
        self._writers = Writers(True)
        self._workers = 1  # of this node

    def has_newer(self, world: World, position: tuple[int, int]) -> bool:
        """Whether there is a checkpoint above a (round, step) in memory, judged by its name; called by all ranks."""
        mine, self._mark, self._sees = [(0, 0)], None, True
        if world.rank == 0 or not isinstance(self.directory, Url):
            try:
                mine, self._mark = _looked(self.directory)
            except (snapshot.CheckpointError, TimeoutError) as error:
                self._sees = False
                _log.warning(
                    "it is not known whether there is a newer checkpoint; training goes on from memory: %s", error
                )
        everywhere = numbers_of_all(world, [*max(mine, default=(0, 0)), _epoch(self._mark, world.run)])
        newest, self._taken = max((round, step) for round, step, _ in everywhere), max(x[2] for x in everywhere)
        self._highest = max(self._highest, position[0], newest[0])
        return newest > position

    def open(
        self,
        world: World,
        identity: dict[str, int],
        *,
        parts: TrainingState,
        above: tuple[int, int] | None = None,
    ) -> Resumed | None:
        """Agree with all ranks on the checkpoint to resume from, and read it.

        Args:
            identity: what must be equal in the checkpoint and in this training, by the names used in errors.
            above: round and step of a state in memory; only newer checkpoints, made by this run, are considered.

        Returns:
            The state to resume from; None if no intact checkpoint is newer than the state in memory.

        Raises:
            UsageError: if the checkpoint belongs to another training; the message names what differs. Also if the run
                begins and its directory cannot be written to.
            CheckpointError: if the directory cannot be read or does not respond, or the URL cannot be used.
        """
        where = self.directory
        if isinstance(where, Url) and where.scheme == "memory" and world.round:
            raise UsageError(
                f"Checkpoints cannot be saved to {where} under elastic-launch: that is the memory of one process.",
                "Leave the checkpoint out: snapshots in the node's memory are taken anyway. Or give a directory.",
            )
        self._writers = writers(where, world)
        self._run = world.run or self._run or _drawn(world)

        # A read that is merely slow must not make the training resume from an older state.
        def met(mark: OwnerMark | None) -> None:
            self._mark = mark

        read = partial(_read, where, above, self._run, met, begins=world.round <= 1)
        found = read_together(world, where, read, parts.taking, reads=self._writers.reads)
        self._highest = max(self._highest, found.known, found.round, *(above or (0,))[:1])
        self._taken = found.taken
        if found.state is None and above is not None:
            return None
        if found.damaged:
            # Starting from scratch would eventually overwrite checkpoints that may be repairable.
            raise found.damaged
        if found.state is None:
            resumed = Resumed()
            if self.settings.start_from is not None:
                resumed = self.settings.start_from.begin(world, identity, parts)
                self._last_step = resumed.step
            # An earlier loop of the script may have begun here.
            self._begin(world, {"branch": self.branch.meta()} if self.branch.round else {})
        else:
            origin = f"The checkpoint of step {found.step} in {found.path}"
            check_identity(identity, found.meta, origin)
            base = found.step, found.path
            self._begin(world, found.meta, (found.round, found.step), base=base)
            self._last_step = found.step
            resumed = Resumed.of(found.step, found.state, found.meta, origin)
        # Last: a training that does not belong here must not take the location from one that does.
        self._take(found.digest)
        return resumed

    def standing(self, step: int, *, now: bool) -> tuple[int, float]:
        """Return the step of the last save and its age in seconds; ``(step, 0.0)`` if this step is being saved."""
        return (step, 0.0) if now else (self._last_step, time.monotonic() - self._last_time)

    def go_on(self, world: World, meta: dict[str, Any], standing: tuple[int, float], position: tuple[int, int]) -> None:
        """Start saving in a training that was resumed from memory; called by all ranks after :meth:`has_newer`.

        Args:
            standing: result of :meth:`standing` when that state was written, so that faults more frequent than saves do
                not postpone saving. Ranks whose round broke as they began to save may differ in it; then the oldest
                counts, so that all save together.
            position: round and step of that state.
        """
        self._run = world.run
        self._writers = writers(self.directory, world)
        self._begin(world, meta, position)
        mark, comes = self._mark, not self._owner
        if comes and self._sees:
            self._owner = self._as_owner(mark)
        late = comes and mark is not None and mark.token != self._run
        higher = mark is not None and mark.token == self._run and mark.epoch < self.branch.epoch
        # A process that has gone on before takes the location from no run that came since.
        if self.writes and (late or higher):
            # A node has joined with the files of another run. The first save reports an error.
            with suppress(snapshot.CheckpointError, TimeoutError):
                take = partial(claim, self.directory, self._owner, epoch=self.branch.epoch)
                within(LOOK_TIMEOUT, f"to write to {self.directory}", take)
        self._last_step = min(step for (step,) in numbers_of_all(world, [standing[0]]))
        self._last_time = time.monotonic() - standing[1]

    @property
    def distributed(self) -> bool:
        """Whether checkpoints have the format of torch.distributed.checkpoint."""
        return self.settings.format == DISTRIBUTED

    def divides(self, size: int) -> bool:
        """Whether several nodes write a state with that many bytes of tensors together, as they share one location."""
        return self._writers.drawn != 0 and size >= self.settings.split and not self.distributed

    def nonce(self, round: int, step: int) -> str:
        """Return the nonce in the name of a checkpoint that they write together."""
        return nonce_of(self._writers.drawn, round, step)

    @property
    def writes(self) -> bool:
        """Whether this rank writes: rank 0, and the first rank of each node that has its own directory."""
        return self._writers.me

    def record(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Note the results of an evaluation for the next checkpoint.

        Args:
            step: all ranks note them after this step, and save then; None: some may not.

        Raises:
            UsageError: if the metric is missing by which the best checkpoints are kept.
        """
        if self.settings.keep_best is None:
            return
        if self.settings.keep_best.metric not in metrics:
            has = ", ".join(map(repr, metrics)) or "nothing"
            raise UsageError(
                f"Checkpoint(keep_best={self.settings.keep_best}): the evaluation has {has}.", "Name one of these."
            )
        # A name may be of a subclass, as in an enum, which a checkpoint cannot hold.
        self.metrics = {str.__str__(name): float(value) for name, value in metrics.items()}
        self._evaluated = step

    def forget_results(self) -> None:
        """Forget the results of an evaluation for the next checkpoint: this process goes back to an earlier state."""
        self.metrics, self._evaluated, self._taken_results, self._scores = {}, None, {}, []

    def take_results(self) -> dict[str, float]:
        """Return the results for the state that is to be saved now, if any, and note whether it is among the best."""
        self._taken_results, self.metrics, self._stays = self.metrics, {}, False
        if (best := self.settings.keep_best) is not None and self._taken_results:
            score = self._taken_results[best.metric] * (1 if best.mode == "min" else -1)
            # Of equal ones, the newer one is kept.
            self._stays = sum(other < score for other in self._scores) < best.count and not math.isnan(score)
            self._scores = sorted([*self._scores, score])[: best.count] if self._stays else self._scores
        return self._taken_results

    def _give_back(self) -> None:
        """Have the results for the next state, as the one that has them is not saved."""
        self.metrics, self._taken_results = self.metrics or self._taken_results, {}
        self._scores = []

    def route(self, world: World, now: bool, job: CopyJob, size: int) -> CopyJob:
        """Complete the job to copy a snapshot, or a share of it, to this directory.

        A node that does not write gets a job, too: it stands by for those that do.
        """
        together = now and world.nodes > 1 and self.divides(size)
        stands_by = not together and not self.writes
        owner = self._owner or self._as_owner()
        job = replace(job, directory=str(self.directory), keep=self.settings.keep, owner=owner, stands_by=stands_by)
        job = replace(job, now=now and not stands_by, results=now and self._stays)
        job = replace(job, keep_every=self.settings.keep_every, keep_best=self.settings.keep_best)
        if not together:
            return job
        return replace(job, shares=world.nodes, share=world.node_rank, nonce=self.nonce(job.round, job.step))

    def due(self, step: int) -> bool:
        """Whether a save is due after a step.

        With an interval in steps the answer is the same on all ranks; with a duration it is this rank's view.
        """
        return self.settings.every.due(step - self._last_step, time.monotonic() - self._last_time)

    def due_everywhere(self, step: int) -> bool:
        """Whether a save is due after a step, as far as all ranks know it without asking each other."""
        return step == self._evaluated or (not self.by_clock and self.due(step))

    def wanted(self, step: int) -> bool:
        """Whether this rank knows of another reason to save."""
        return (self.by_clock and self.due(step)) or (bool(self.metrics) and step != self._evaluated)

    @property
    def by_clock(self) -> bool:
        """Whether the interval is a duration, so that ranks may differ on when a save is due."""
        return self.settings.every.seconds is not None

    def needs(self, step: int) -> bool:
        """Whether the state after a step is not saved yet."""
        return self.doubted or step != self._last_step

    def requested(self, step: int, link: AgentLink) -> None:
        """Record that the agent copies the state after a step once it is in memory."""
        self._restart_interval(step)
        self._link, self._awaited, self._owed = link, step, 0

    @property
    def owes(self) -> bool:
        """Whether a checkpoint was postponed and none was made since."""
        return self._owed > 0

    def lost(self, step: int, reason: str) -> None:
        """Record that the state after a step is not in memory after all and will not be copied."""
        if step in (self._awaited, self._owed):
            self._awaited = self._owed = 0
            self._give_back()
            self._lose(step, 0.0, snapshot.CheckpointWriteError(f"its snapshot is lost: {reason}"))

    def _lose(self, step: int, seconds: float, error: snapshot.CheckpointError) -> None:
        self._lost.append(snapshot.WriteOutcome(step, self.branch.round, seconds, error=error))

    def idle(self, timeout: float) -> bool:
        """Whether this process writes no checkpoint, or has written it after so many seconds."""
        return self._writer is None or self._writer.flush(timeout)

    def busy(self, step: int, *, last: bool) -> None:
        """Record that a state is not saved, as a node still writes an older one; called by all ranks."""
        if not last:
            self._owed = step
        elif self.writes:
            self._lose(step, FINAL_TIMEOUT, self._still_writing("and the last one waits for it"))

    def torn(self, step: int) -> None:
        """Record that the copy of the state after a step was given up; a later state will be saved instead."""
        if step == self._awaited:
            self._awaited, self._owed = 0, step
            self._give_back()

    def put_off(self, step: int) -> None:
        """Save a later state instead of the one after this step; the interval restarts, as on the other ranks."""
        self._restart_interval(step)
        self._owed = step
        self._give_back()

    def save(
        self,
        state: dict[str, Any] | OwnShare,
        step: int,
        meta: dict[str, Any],
        may_commit: Callable[[], bool] = lambda: True,
        own: Collection[int] = (),
    ) -> None:
        """Copy a state and write it in the background. Call it on all ranks, since each of them counts the interval.

        Args:
            state: used only on ranks that write; or this node's tensors of it, if all nodes write one checkpoint.
            may_commit: called from another thread before a checkpoint is committed; only the first call's is used.
            own: addresses of tensors that do not change, and need not be copied.
        """
        self._restart_interval(step)
        self._awaited = self._owed = 0  # an older state
        if not (self.writes if isinstance(state, dict) else state.index is not None):
            return
        if self._writer is None:
            self._writer = snapshot.BackgroundWriter(
                self.directory,
                keep=self.settings.keep,
                keep_every=self.settings.keep_every,
                keep_best=self.settings.keep_best,
                owner=self._owner or self._as_owner(),
                may_commit=may_commit,
            )
        if isinstance(state, dict):
            self._submit(self._writer, state, step, meta, frozenset(own))
        else:
            self._writer.submit(state, step=step, round=self.branch.round, meta=meta, stays=self._stays)

    def _restart_interval(self, step: int) -> None:
        self._last_step, self._last_time, self.doubted = step, time.monotonic(), False

    def _submit(
        self,
        writer: snapshot.BackgroundWriter,
        state: dict[str, Any],
        step: int,
        meta: dict[str, Any],
        own: frozenset[int],
    ) -> None:
        """Have a copy of the state written; if memory has no room for one, wait until the state itself is written.

        There must be room besides it for what the next step needs for a while, such as gradients, in each worker of
        the node as in this one.
        """
        too_many = writer.drop_waiting() and self._stays  # the copies would add up
        size, (free, where) = bytes_in(state, own), room()
        # The peak includes a copy that has been written and dropped since.
        self._step_bytes = max(self._step_bytes, below_peak() - self._copy_bytes)
        step_needs = self._workers * self._step_bytes
        if too_many or size + step_needs > MOST_OF_FREE * free:
            if not writer.flush(FINAL_TIMEOUT):
                why = "which has the only copy of the state that there is memory for"
                why = "and the results of two evaluations wait for it" if too_many else why
                self._lose(step, FINAL_TIMEOUT, self._still_writing(why))
                return
            free, where = room()
        if fits := size + step_needs <= MOST_OF_FREE * free:
            # A device may have no room for a copy.
            state = copied(state, lambda x: x.detach() if x.data_ptr() in own else x.detach().to("cpu", copy=True))
            self._copy_bytes = max(self._copy_bytes, size)
        elif not self._waits:
            self._waits = True
            _log.warning(
                "from step %d on training waits until a checkpoint is written, because there is no memory for a "
                "copy of the state: it needs %.2f GiB, a step needs %.2f GiB, and %.2f GiB are free %s. To avoid the "
                "wait, %s",
                step,
                size / 2**30,
                step_needs / 2**30,
                free / 2**30,
                where,
                MORE_MEMORY,
            )
        writer.submit(state, step=step, round=self.branch.round, meta=meta, stays=self._stays)
        if not fits and not writer.flush(FINAL_TIMEOUT):
            raise self._still_writing("and training waits for it, as there is no memory for a copy of the state")

    def _still_writing(self, why: str) -> snapshot.CheckpointError:
        message = f"A checkpoint in {self.directory} was still being written after {FINAL_TIMEOUT:g} s, {why}."
        return snapshot.CheckpointWriteError(message, "Check the storage that holds it.")

    def outcomes(self, report: Report = lambda outcome: None) -> list[snapshot.WriteOutcome]:
        """Return the writes that ended since the last call; does not wait.

        ``report`` is called with each that is not the agent's: the agent reports its own, and logs their errors.
        """
        own, self._lost = self._lost, []
        own += self._writer.poll() if self._writer is not None else []
        for outcome in own:
            if isinstance(outcome.error, snapshot.UnsupportedStateError):
                # Every later checkpoint would fail likewise, and at the end everything would be lost.
                raise outcome.error
            if outcome.error is not None:
                what = " is saved, but removing old ones failed" if outcome.info is not None else ""
                _log.error("checkpoint of step %d%s: %s Training goes on.", outcome.step, what, outcome.error)
            report(outcome)
        # Copies that an earlier process has requested may go to the directory of another training of the script.
        copied = [self._outcome(each) for each in self._link.copies() if each.directory == str(self.directory)]
        for outcome in [*own, *copied]:
            if outcome.info is not None:
                self._saved = max(self._saved or 0, outcome.step)  # also if old ones could not be removed
            else:
                self._error, self._unsaved = outcome.error or self._error, max(self._unsaved, outcome.step)
                self._scores = []  # which of the best are saved is not known
        return own + copied

    def finish(self, report: Report = lambda outcome: None, *, wait: bool = True) -> list[snapshot.WriteOutcome]:
        """Wait until the saved state is written, and return the outcomes not yet returned.

        ``report`` is as for :meth:`outcomes`; ``wait``: wait for the agent's copies, too.
        """
        if self._writer is not None:
            self._writer.flush(FINAL_TIMEOUT)
        if self._owed:
            self.lost(self._owed, "the agent did not answer")
        ended = self.outcomes(report)
        while wait and self._awaited:
            if not self._link.wait_copied(FINAL_TIMEOUT):
                self.lost(self._awaited, "the agent, which copies it, does not answer")
            ended += self.outcomes(report)
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        return ended

    def rescue(self) -> None:
        """Wait at most a few seconds for a checkpoint that is being written."""
        writer, self._writer = self._writer, None
        if writer is not None and writer.flush(RESCUE_TIMEOUT):
            with suppress(snapshot.CheckpointError):  # the process already fails with another error
                writer.close()

    def failed(self) -> snapshot.CheckpointError | None:
        """Return why the newest state could not be saved, else None; called at the end, when a save was due."""
        if self._error is None:
            return None
        saved, is_known = self._saved, True
        if saved is None or saved < self._unsaved:
            saved, is_known = self._saved_before()
        if saved is not None and saved >= self._unsaved:
            _log.error("not all checkpoints could be saved; the last error: %s", self._error)
            return None
        what = f"The last checkpoint, of step {self._unsaved}, could not be saved"
        if saved is None and self._saved is None and is_known:
            what = "No checkpoint of this run could be saved"
        return snapshot.CheckpointError(f"{what} in {self.directory}: {self._error.message}", self._error.hint)

    def withdraw_after(self, step: int) -> int | None:
        """Remove what this run has saved of later steps, which may be wrong; on ranks that do not write, do nothing.

        Returns:
            If anything was removed, the step of the newest checkpoint that is left, 0 if there is none; else None.
        """
        if not self.writes:
            return None
        mine = {"branch": self.branch.meta()}

        def withdraw() -> tuple[list[snapshot.CheckpointInfo], list[snapshot.CheckpointInfo]]:
            return snapshot.withdraw(self.directory, step, mine), snapshot.find(self.directory)

        try:
            gone, left = within(LOOK_TIMEOUT, "to remove them", withdraw)
        except (snapshot.CheckpointError, TimeoutError) as error:
            where = f"after step {step} in {self.directory}"
            _log.error("checkpoints %s may be wrong, and could not be removed: %s", where, error)
            return None
        if not gone:
            return None
        steps = ", ".join(str(info.step) for info in reversed(gone))
        _log.warning("removed from %s, since they may be wrong: the checkpoints of steps %s", self.directory, steps)
        if self._saved is not None and self._saved > step:
            self._saved = None
        return left[0].step if left else 0

    def described_newest(self) -> str:
        """Say which checkpoint in storage is the newest, unless another run may have saved it; reads storage."""
        mark = look(self.directory)
        if mark is not None and self._run in mark.before:
            return f"unknown, since run {mark.run!r:.80} has taken {self.directory}"
        found = max(positions(self.directory), default=None)
        return f"none yet in {self.directory}" if found is None else f"step {found[1]} in {self.directory}"

    def _saved_before(self) -> tuple[int | None, bool]:
        """Return the step of the newest checkpoint that this run has saved, if any, and whether that is known.

        It is not if another run has taken the directory and may have saved there, or the directory cannot be read.
        """
        try:
            mark = within(LOOK_TIMEOUT, f"to read {self.directory}", lambda: look(self.directory))
            if mark is not None and mark.token != self._run:
                return None, False
            found = within(LOOK_TIMEOUT, f"to list {self.directory}", lambda: snapshot.find(self.directory))
        except (snapshot.CheckpointError, TimeoutError):
            return None, False
        mine = {"branch": self.branch.meta()}
        return max((info.step for info in found if same_run(info.meta, mine)), default=None), True

    def _take(self, base: str) -> None:
        """Take the location that this rank writes to, so that a run that wrote there before stops writing.

        Args:
            base: digest of the checkpoint that the training begins with; empty if there is none.
        """
        if not self.writes:
            return
        self._owner = self._as_owner(self._mark)
        # The first save reports an error, unless there is room again by then.
        with suppress(snapshot.CheckpointError):
            take = partial(claim, self.directory, self._owner, epoch=self.branch.epoch, base=base)
            self.opened_before = while_advancing(self.directory, take)

    def _as_owner(self, mark: OwnerMark | None = None) -> str:
        """Return the ``owner`` for saves; ``mark``: what was in the location when this run came to it."""
        replaces = mark.token if mark is not None and self._run not in mark.before else ""
        return owned_by(self._run, run_id(), replaces=replaces)

    def _begin(
        self,
        world: World,
        meta: dict[str, Any],
        parent: tuple[int, int] | None = None,
        *,
        base: tuple[int, str] | None = None,
    ) -> None:
        highest, taken = self._highest, self._taken
        self.branch = following(world.round, self._run, meta, highest, parent=parent, base=base, taken=taken)
        self._last_time = time.monotonic()
        self._workers = world.local_world_size
        if not world.first_on_node:
            self._awaited = 0  # the agent tells the first worker of a node alone, which was this one before

    def _outcome(self, copied: Copied) -> snapshot.WriteOutcome:
        if copied.step >= self._awaited:
            self._awaited = 0
        info = error = None
        if copied.path:
            path = place(copied.path)
            info = snapshot.CheckpointInfo(path, copied.step, copied.round, copied.digest, copied.bytes, {})
        if copied.error:
            error = snapshot.CheckpointWriteError(copied.error, copied.hint)
        return snapshot.WriteOutcome(copied.step, copied.round, copied.seconds, info, error)


def _drawn(world: World) -> str:
    """Return a number for a run that no agent has given one; called by all ranks."""
    return f"{numbers_of_all(world, [secrets.randbits(62)])[0][0]:x}"


def _epoch(mark: OwnerMark | None, run: str) -> int:
    """Return how many trainings have taken a location; without those of a run that has taken it from this one."""
    return 0 if mark is None or run in mark.before else mark.epoch


def _looked(directory: Place) -> tuple[list[tuple[int, int]], OwnerMark | None]:
    """Return the positions of all checkpoints, and the mark.

    An error that passes must not have an older state win.
    """
    left = LOOK_TIMEOUT
    until = time.monotonic() + left
    while True:
        try:
            return within(left, f"to list {directory}", lambda: (positions(directory), look(directory)))
        except snapshot.CheckpointError:
            left = round(until - time.monotonic() - LOOK_AGAIN, 1)
            if left <= 0:
                raise
        time.sleep(LOOK_AGAIN)


def _read(
    where: Place,
    above: tuple[int, int] | None,
    run: str,
    met: Callable[[OwnerMark | None], None],
    taking: Taking,
    *,
    begins: bool,
) -> LocationRead:
    """Return the newest intact checkpoint above a position, and the highest round in any checkpoint's name.

    Args:
        above: round and step; None: consider all checkpoints.
        run: number of this run.
        met: called with the mark of the location.
        begins: whether the run begins: later, a directory that cannot be written to was writable before, and may
            become so again.

    Raises:
        UsageError: if there is no driver for a URL, or if the run begins and a directory cannot be written to.
        CheckpointError: if the location cannot be read, or a URL not written to, and ``above`` is None. Also, if
            another run has taken it from this one: what is there is that run's.
    """
    damaged: list[snapshot.CheckpointReadError] = []
    loaded = None
    known = epoch = own = 0
    try:
        if isinstance(where, Url) and above is None:
            try_out(where, size=16)
        elif isinstance(where, Path) and above is None and begins:
            check_writable(where)
        mark = look(where)
        met(mark)
        epoch = _epoch(mark, run)
        if mark is not None and run in mark.before:
            if above is None:
                refused = taken(where, mark, owned_by(run, run_id()))
                refused.add_note(FINAL_NOTE)
                raise refused
            _log.warning("training goes on from memory: %s was taken by run %r", where, mark.run[:80])
        else:
            last = mark.token if mark is not None and begins and above is None else run
            loaded = snapshot.newest(where, damaged.append, above=above, run=last, taking=taking)
            if loaded is None:
                for error in damaged:
                    error.add_note(FINAL_NOTE)  # a restart would read the same, unless the storage has failed
        if loaded is not None:
            epoch = max(epoch, epoch_of(loaded.info.meta) or 0)
            began = mark is not None and (mark.token, mark.base) == (run, "")
            if began and not is_of_run(loaded.info.meta, run):
                loaded = None  # the run has begun with none, so what is there came later, or was not to be resumed
        own = _belongs(None if loaded is None else loaded.info, mark, run, begins=begins)
        known = max((number for number, _ in positions(where)), default=0)
    except snapshot.CheckpointError as error:
        if above is None:
            raise
        _log.warning("a checkpoint is skipped: %s", error)
    return LocationRead(loaded, own, known, epoch, damaged[0] if damaged else None)


def _belongs(found: snapshot.CheckpointInfo | None, mark: OwnerMark | None, run: str, *, begins: bool) -> int:
    """Return ``own`` of :class:`LocationRead`, for the newest checkpoint of a location with that mark.

    When a run begins, the last one of each location counts. Later only this one does: what is in a location that a node
    has brought must not take the place of what this run began with, even if that is nothing.
    """
    if found is not None and is_of_run(found.meta, run):
        return 2
    if found is None:
        return int(mark is not None and (mark.token, mark.base) == (run, ""))
    if mark is None:
        return int(begins)
    last = found.digest == mark.base or is_of_run(found.meta, mark.token)
    last = last or (mark.base is None and is_of_run(found.meta, mark.run))  # as earlier versions have named runs
    return int(last and (begins or mark.token == run))


def run_id() -> str:
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def weights_sha256(model: nn.Module) -> str:
    """Return the SHA-256 of all tensors in a model's ``state_dict``, over their names, dtypes, shapes and bytes.

    Call it on all ranks if the model is sharded. What ``get_extra_state`` of a module returns counts, too; an
    UnsupportedStateError names an object in it that cannot be pickled.
    """
    state = StateGatherer(keep=True).state(model)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    others = {name: torch.tensor([*digest(value).encode()]) for name, value in state.items() if name not in tensors}
    return snapshot.state_sha256({**tensors, **others})
