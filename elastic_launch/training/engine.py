"""A process' part in a run: what happens between two steps.

All ranks agree on whether to save, compare or stop, and then do it after the same step. Scripts use it through
:class:`elastic_launch.Run`.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_launch import faults
from elastic_launch.contract import Ready, RestoreFailed
from elastic_launch.error_file import do_not_retry
from elastic_launch.training.checkpoints.checkpoint import Checkpoint
from elastic_launch.training.checkpoints.manager import CheckpointManager
from elastic_launch.training.checkpoints.resumed import Resumed
from elastic_launch.training.checkpoints.saving import Live, Saver, Trained
from elastic_launch.training.checkpoints.schedules import forgotten, has_forgotten_average, has_forgotten_scaler
from elastic_launch.training.checkpoints.state import TrainingState
from elastic_launch.training.children import Background
from elastic_launch.training.link import AgentLink
from elastic_launch.training.live.groups import RoundGroups
from elastic_launch.training.ranks.agreement import Agreement, Wishes
from elastic_launch.training.ranks.determinism import Determinism
from elastic_launch.training.ranks.exchange import is_of_exchange, telling
from elastic_launch.training.ranks.place import refuse_in_rehearsal, rehearsing
from elastic_launch.training.ranks.replicas import Named, ReplicaCheck, ReplicasDifferError
from elastic_launch.training.ranks.world import GROUP_TIMEOUT, World
from elastic_launch.training.rounds import AskedLive, WorkerRounds
from elastic_launch.training.stopping import DrainedExit, StopSource, Termination
from elastic_launch.training.trainings import Trainings

_log = logging.getLogger(__name__)


class Engine:
    """Restores, agrees, saves and stops for one process of a run.

    Args:
        world: this process' ranks and the world's sizes; None: it was started ahead of its place in a round.
    """

    def __init__(
        self,
        world: World | None,
        device: torch.device,
        link: AgentLink | None = None,
        *,
        groups: RoundGroups | None = None,
        settings: Determinism | None = None,
        timeout: float = GROUP_TIMEOUT,
        live: AskedLive = None,
    ) -> None:
        link, groups = link or AgentLink(), groups or RoundGroups()
        self.rounds = WorkerRounds(world, device, link, groups, timeout=timeout, live=live)
        self.resumed_step = 0  # steps done when this process joined the current round; set once steps have begun
        self.worlds: list[int] = [] if world is None else [world.world_size]  # of all rounds of the training so far
        self.state = TrainingState()  # what checkpoints hold besides model and optimizer
        self.evaluates = False  # whether all ranks have agreed to evaluate; the loop resets it
        self.sharded = False  # whether the model that is trained is sharded
        self.checkpoint: CheckpointManager | None = None  # where to save to, once a state was restored
        # By directory: the same one in every round, and for a loop that goes on with an earlier one's checkpoints.
        self._managers: dict[str, CheckpointManager] = {}
        self._trained_in: dict[str, int] = {}  # number of the last training that began with it
        self._unsaved = False  # whether a training so far has no Checkpoint
        self._warned_of_repeating = False
        self._continues: int | None = None  # number of the training that the current one goes on with
        self.saver = Saver(world or World(), link, self.rounds.confirm_state)
        self.trainings = Trainings()
        self.background = Background(lambda: self._termination.asked or self.rounds.link.ends(), self._report_drained)
        self._termination = Termination()
        self._stop_wanted = StopSource.NO
        self._stop_agreed = StopSource.NO
        self._ended = False
        self._restore_seconds = 0.0
        self._uncompared = 0
        self._agreement: Agreement | None = None
        self._replicas: ReplicaCheck | None = None
        self._warned: set[str] = set()
        self._settings = settings
        self._unchecked = False
        self._drained = False
        self.unconfirmed = False
        """Whether the agent has not confirmed the drain, see :meth:`AgentLink.drained`."""
        self._joining = threading.RLock()

    @property
    def world(self) -> World:
        """This process' ranks and the world's sizes; see :meth:`meet`."""
        if self.rounds.is_ahead:
            self.meet()
        return self.rounds.world

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """The context of a rehearsal: without a world, and a stop that is requested in it does not count."""
        wanted = self._stop_wanted
        with rehearsing(), self.rounds.rehearsing():
            try:
                yield
            finally:
                self._stop_wanted = wanted

    def meet(self, arguments: str = "") -> None:
        """Take part in a round: a process that was started ahead waits for its place, and joins the others.

        If that round breaks meanwhile, it waits for a place in another one.

        Args:
            arguments: see :class:`elastic_launch.contract.Ready`.

        Raises:
            Drained: if there is no place for this process.
            NoPlaceError: in a rehearsal.
        """
        rounds = self.rounds
        if rounds.is_ahead:
            refuse_in_rehearsal()
        with self._joining:
            if not rounds.is_ahead:
                return
            try:
                rounds.find_place(arguments)
            except DrainedExit:
                self._stop_agreed = StopSource.AGENT
                raise
            self.saver.move(rounds.world, rounds.link)
            broken = rounds.attempt(rounds.join)
            while broken is not None:
                self.suspend(broken)
                broken = rounds.attempt(rounds.join)
            self.worlds = [self.world.world_size]

    @property
    def stopped(self) -> bool:
        """Whether all ranks have agreed to stop before the training's end."""
        return self._stop_agreed is not StopSource.NO

    @property
    def draining(self) -> bool:
        """Whether all ranks stopped so that other processes can continue the training: no results follow here."""
        return self._stop_agreed.drains and not self._ended

    def restore(
        self,
        checkpoint: Checkpoint | None,
        identity: Mapping[str, int],
        state: TrainingState,
        trained: Sequence[object],
        live: Live | None = None,
    ) -> Resumed:
        """Restore a state from the node's memory, else from a checkpoint; called by all ranks.

        Args:
            identity: what must be equal in the saved state and in this training.
            live: see :meth:`Saver.restore`.
        """
        self.trainings.begin(trained, checkpoint)
        self.checkpoint = None
        if checkpoint is not None:
            where = str(checkpoint.directory)
            if where not in self._managers:
                self._managers[where] = CheckpointManager(checkpoint)
            self.checkpoint = self._managers[where]
            self.checkpoint.settings = checkpoint
        began = time.monotonic()
        with telling(self.rounds.link):
            try:
                resumed = self.saver.restore(self.checkpoint, dict(identity), state, live, self.rounds.mesh)
            except Exception as error:
                if live is None and not (isinstance(error, RuntimeError) and is_of_exchange(error)):
                    self.rounds.link.say_noted(RestoreFailed())
                raise
            self.rounds.step = self.resumed_step = resumed.step
            self.worlds = [*resumed.worlds, self.world.world_size]
            self._restore_seconds += time.monotonic() - began
            self._uncompared = resumed.uncompared
            self.rounds.in_doubt = False
            if live is None:
                self._continues = None if checkpoint is None else self._trained_in.get(where)
                if checkpoint is not None:
                    self._trained_in[where] = self.saver.training
                if self._unsaved:
                    self._warn_of_repeating()
                self._unsaved = self._unsaved or checkpoint is None
                # Checked now, and again once the optimizer has state: at the first save, hours of work may be lost.
                self._check(state)
                self._unchecked = True
        return resumed

    def _warn_of_repeating(self) -> None:
        """Processes of a further training do not outlive their round, and memory has states of the last one only."""
        if self.world.round and self.world.rank == 0 and not self._warned_of_repeating:
            self._warned_of_repeating = True
            _log.warning(
                "training %d of this script begins, and an earlier one has no Checkpoint: from here on a fault, or a "
                "node that joins or leaves, may repeat all of the script's steps. Give each run.steps() and "
                "Trainer.fit() a Checkpoint.",
                self.saver.training + 1,
            )

    def step_boundary(
        self,
        after: Trained,
        *,
        end: bool,
        stays: Callable[[Tensor], bool] | None = None,
        keep: bool = False,
        evaluate: bool = False,
    ) -> bool:
        """Save a state if it is due or the training stops; return whether it stops.

        Args:
            stays: whether a tensor keeps its values until :meth:`Saver.settle` is called. None: it is not called, and
                wishes are not sent together with the next step's losses.
            keep: whether to take a snapshot in memory even if none is due.
            evaluate: whether this rank wants an evaluation.
        """
        step = after.step
        self.rounds.step, self._ended = step, end
        if self._unchecked:
            self._unchecked = False
            self._check(after.state)
            if (left := after.state.unregistered) and self.world.rank == 0:
                _log.warning(
                    "%s: the restored state is kept and saved again until run.register() gets the object",
                    ", ".join(left),
                )
        self.rounds.link.step(step)
        faults.reached("step", step)
        self.saver.poll(step, self.checkpoint)
        wishes = self.saver.wishes(step, self.checkpoint)
        if self._replicas is not None:
            compare, checksum = self._replicas.wanted(), self._replicas.to_post(step)
            if compare or checksum is not None:
                wishes = replace(wishes, compare=compare, checksum=checksum)
        if evaluate:
            wishes = replace(wishes, evaluate=True)
        if after.state.late.unsettled(step, after.state.names):
            wishes = replace(wishes, late=True)
        if self._exchange(wishes, by_step=stays is not None).late:
            after.state.late.check_ranks(step)
        last = self.stopped or end
        if last:
            self.rounds.confirm_state()
        if self.draining:
            faults.reached("drain", step)
        if last or self.saver.is_durable(step, self.checkpoint):
            self.compare(step)
        keeps = self.draining and self.rounds.mesh is None
        goes_on = self._goes_on and not self.rounds.link.ends() if keeps else None
        self.saver.save(after, last=last, draining=self.draining, stays=stays, keep=keep, goes_on=goes_on)
        return self.stopped

    def step_done(self, after: Trained, stays: Callable[[Tensor], bool]) -> None:
        """Report a step and take a snapshot in memory, since something long comes before the step's boundary."""
        self.rounds.step = after.step
        self.rounds.link.step(after.step)
        self.saver.poll(after.step, self.checkpoint)
        self.saver.keep(after, stays)

    def request_stop(self) -> None:
        """Make all ranks stop after the same step: the next one, or the one after it."""
        self._stop_wanted = max(self._stop_wanted, StopSource.SCRIPT)

    def ask_whether_to_stop(self) -> bool:
        """Exchange wishes with all ranks outside of a step boundary; return whether all have agreed to stop."""
        self.rounds.count_exchange()
        self._exchange(Wishes())
        return self.stopped

    def begin(
        self, step: int, total: int = 0, *, live: bool = False, rehearses: bool = False, arguments: str = ""
    ) -> None:
        """Mark the training as begun or resumed; from now on it can be stopped.

        Args:
            total: steps of the whole training; 0: not known.
            live: whether this process can continue the training in another round, see :meth:`suspend`.
            rehearses: whether one that is started ahead would do a step before it takes its place.
            arguments: see :class:`elastic_launch.contract.Ready`.
        """
        training = self.saver.training
        if self.rounds.begun and training == self.rounds.link.training:
            return
        if not self.rounds.begun:
            self.meet()
            self._termination.watch()
            self.rounds.begin(step, live=live)
        ready = Ready(step, total, self._restore_seconds, self._uncompared, self.rounds.lives, rehearses=rehearses)
        base = None if self.checkpoint is None else self.checkpoint.branch.base
        if base is not None:
            ready = replace(ready, base=base[0], base_in=base[1])
        ready = replace(ready, arguments=arguments, checkpoints=self.checkpoint is not None, training=training)
        ready = replace(ready, continues=self._continues)
        self.rounds.link.begin(ready)
        self._restore_seconds = 0.0

    def suspend(self, error: RuntimeError | None, *, spoiled: Sequence[str] = ()) -> None:
        """Leave the current round, and wait for a place in the next one, with the training's objects as they are.

        Args:
            error: the error by which an exchange failed; None after a drain.
            spoiled: names of what the script has changed since the step's start, which other processes could not get as
                it was then: this process does not go on.

        Raises:
            RuntimeError: the error, if this process is not to be suspended: the error is its own.
            Drained: if this process gets no place in another round.
        """
        rounds = self.rounds
        if error is not None:
            rounds.break_off(error)
        if spoiled:
            rounds.start_again(f"the script changed {', '.join(spoiled[:4])} in the middle of a step")
        if error is not None:
            rounds.groups.disconnect()
        self.saver.settle()
        self._replicas = None
        if self._agreement is not None:
            self._agreement.give_up()
            self._agreement = None
        rounds.leave()
        if not rounds.enter_next(lambda: self._termination.asked):
            self._stop_agreed = max(self._stop_agreed, StopSource.AGENT)
            # Its place may be on the way: then the agent must not take this worker's end for that of the training.
            raise DrainedExit(128 + signal.SIGTERM if self._termination.asked else 0)
        self.saver.move(rounds.world, rounds.link)
        self._stop_agreed = StopSource.NO
        self.evaluates = self._ended = self._drained = False

    def keep_newer(self, after: Trained) -> None:
        """Before this process ends, take a snapshot in memory if the node has none of this step: the agent saves it."""
        self.rounds.step = after.step
        self.saver.keep_newer(after)

    def be_exact(self) -> None:
        """Make torch's results reproducible to the bit until the session ends."""
        if self._settings is not None:
            self._settings.exact(strict=self.rounds.device.type == "cuda")

    @property
    def _goes_on(self) -> bool:
        """Whether this process can continue in another round, if its node takes part in that."""
        return self.rounds.lives and not self._termination.asked

    def drains_live(self) -> bool:
        """Report that the round is drained, if this process is to continue in another one; return whether it is."""
        if not self.draining or not self._goes_on:
            return False
        if self._agreement is not None:
            self._agreement.settle()
        self.saver.settle()
        self._report_drained()
        return True

    def _report_drained(self) -> None:
        if not self._drained:
            self._drained = True
            faults.reached("leave", self.rounds.step)
            self.unconfirmed = not self.rounds.link.drained(self.rounds.step, self.saver.seconds)

    def leave_if_draining(self) -> None:
        """End the process, through the end of the session, if the training continues in other processes."""
        if self.draining:
            raise DrainedExit(self._stop_agreed.exit_code(agent=self.rounds.link.present))

    def finish_training(self) -> None:
        """Wait until the saved state is written, unless the agent writes it after a drain."""
        self.saver.finish(wait=not self.draining or not self.rounds.link.present)

    def compare(self, step: int) -> None:
        """Compare the ranks' copies of the state after a step at once; called by all ranks."""
        if self._replicas is not None:
            with self._none_differs(self._replicas):
                self._replicas.compare(step)

    def compare_replicas(self, named: Named | None) -> None:
        """From now on, compare these tensors, which must be equal on all ranks, at step boundaries; None: stop."""
        self._replicas = None
        if named is not None and self.world.world_size > 1:
            self.saver.compares = True
            agreement = self.agreement
            self._replicas = ReplicaCheck(self.world, lambda: agreement.group, named, self.rounds.mesh)

    @property
    def agreement(self) -> Agreement:
        """The exchange of wishes among all ranks."""
        if self._agreement is None:
            self._agreement = Agreement(self.world.world_size, self.rounds.timeout, forming=self.rounds.forming)
        return self._agreement

    def close(self) -> None:
        """Wait for the last checkpoint and for outstanding messages to other ranks.

        Raises:
            CheckpointError: if no checkpoint at all could be saved. It is raised only here, so that the script reaches
                its results.
            SystemExit: instead, under an agent of this project: with 93, which ends the run.
        """
        self.finish_training()
        if self._agreement is not None:
            self._agreement.settle()
        if self.saver.failure is not None:
            if self.world.round:
                # Another start would resume from the state in memory, and could not save it either.
                do_not_retry(f"{self.saver.failure.message} {self.saver.failure.hint}".strip())
            raise self.saver.failure
        if self.draining and self.rounds.link.present:
            self._report_drained()

    def release(self) -> None:
        """Restore the signal handler, and release the memory and the agent's socket."""
        self.trainings.over = True
        self._termination.close()
        self.rounds.close()
        self.saver.close()
        self.rounds.link.close()
        self.rounds.groups.release()  # the link has just ended: no order disconnects them any more

    def _check(self, state: TrainingState) -> None:
        if self.checkpoint is None and not self.rounds.link.present:
            return
        state.check()
        first = self.world.rank == 0
        # To look for them takes some ten milliseconds. Those whom this process has joined have looked.
        if not first and (not self.rounds.lives or self.saver.joins_live):
            return
        found = {}
        if has_forgotten_average(state.parts):
            found["an AveragedModel"] = 'run.register("average", averaged) when it is made'
        if has_forgotten_scaler(state.parts):
            found["a GradScaler"] = "run.steps(scaler=...), Trainer(scaler=...) or run.register()"
        if forgotten(state.parts):
            where = "run.steps(scheduler=...), Trainer(scheduler=...) or run.register()"
            found["the learning-rate scheduler of the optimizer"] = where
        if found:
            # A process that joins would begin with another one than those that are kept.
            self.rounds.barred = True
            self.rounds.end_with_round()
        for what, where in found.items():
            if first and what not in self._warned:
                self._warned.add(what)
                _log.warning("%s is not saved: after a restart it would begin anew; give it to %s", what, where)

    def _exchange(self, wishes: Wishes, *, by_step: bool = False) -> Wishes:
        """Send this rank's wishes, and return what all ranks agreed on."""
        stop = max(self._stop_wanted, self._termination.wanted(self.rounds.link.stop_asked()))
        if stop is not StopSource.NO:
            wishes = replace(wishes, stop=stop)
        agreed = self.agreement.exchange_by_step(wishes) if by_step else self.agreement.exchange(wishes)
        self._stop_agreed = max(self._stop_agreed, agreed.stop)
        self.evaluates = self.evaluates or agreed.evaluate
        self.saver.agree(agreed)
        if self._replicas is not None:
            with self._none_differs(self._replicas):
                self._replicas.heard(agreed=agreed.compare, differs=agreed.differs)
        return agreed

    @contextmanager
    def _none_differs(self, replicas: ReplicaCheck) -> Iterator[None]:
        """If the ranks differ, drop the snapshots in memory that were taken since they were last equal."""
        try:
            yield
        except ReplicasDifferError:
            self.saver.drop_unequal()
            with suppress(RuntimeError):  # A rank that is gone has its own error.
                # When the first process fails, the agent ends the others.
                dist.barrier(group=self.agreement.group)
            raise
        if replicas.good is not None:
            self.saver.equal_after(replicas.good)
