"""``session()``: joins this process to a training run, and leaves it at the end."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_launch import faults, snapshot
from elastic_launch.batch import GlobalBatch
from elastic_launch.contract import ENV_START_REASON
from elastic_launch.error_file import do_not_retry
from elastic_launch.errors import UsageError
from elastic_launch.training.checkpoints.checkpoint import Checkpoint, Resumed, check_checkpoint
from elastic_launch.training.checkpoints.saving import Saver
from elastic_launch.training.checkpoints.schedules import forgotten, has_forgotten_average
from elastic_launch.training.checkpoints.state import Stateful, TrainingState
from elastic_launch.training.data.loader import Loader, check_loader
from elastic_launch.training.gradients.buffer_rules import checked_rules
from elastic_launch.training.link import AgentLink
from elastic_launch.training.loop import Loop, LoopOptions
from elastic_launch.training.ranks.agreement import Agreement, Wishes
from elastic_launch.training.ranks.determinism import Determinism
from elastic_launch.training.ranks.replicas import Named, ReplicaCheck, ReplicasDifferError
from elastic_launch.training.ranks.same_arguments import check_same
from elastic_launch.training.ranks.world import GROUP_TIMEOUT, World, environment, join, leave
from elastic_launch.training.steps import Step
from elastic_launch.training.stopping import Drained, Stop, Termination
from elastic_launch.training.together import as_part
from elastic_launch.training.trainings import Trainings
from elastic_launch.training.wrapped import check_not_sharded

__all__ = ["Run", "Stateful", "session"]

_log = logging.getLogger(__name__)

_LONGEST = 10 * 365 * 24 * 3600.0
"""Largest timeout in seconds; every clock's arithmetic can represent it."""


class Run:
    """The training run, as seen by one of its processes; :func:`session` yields it.

    Attributes:
        world: this process' ranks and the world's sizes.
        device: the ``torch.device`` to train on.
        resumed_step: optimizer steps that were done when this process began; set once steps have begun.
        worlds: world sizes of all rounds of the training so far; the last one is this round's.
        state: what checkpoints hold besides model and optimizer.
        stopped: whether all ranks have agreed to stop before the training's end.
    """

    def __init__(
        self,
        world: World,
        device: torch.device,
        link: AgentLink | None = None,
        *,
        settings: Determinism | None = None,
        timeout: float = GROUP_TIMEOUT,
    ) -> None:
        self.world = world
        self.device = device
        self.resumed_step = 0
        self.worlds: list[int] = [world.world_size]
        self.state = TrainingState()
        self.stopped = False
        self._link = link
        self._termination = Termination()
        self._begun = False
        self._stop_wanted = Stop.NO
        self._stop_agreed = Stop.NO
        self._step = 0
        self._ended = False
        self._saver = Saver(world, link)
        self._restore_seconds = 0.0
        self._agreement: Agreement | None = None
        self._checkpoint: Checkpoint | None = None
        self._unchanging: dict[str, int] = {}
        self._replicas: ReplicaCheck | None = None
        self.trainings = Trainings()
        self._warned = self._warned_of_average = False
        self._settings = settings
        self._timeout = timeout
        self._unchecked = False

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def world_size(self) -> int:
        return self.world.world_size

    @property
    def restarts(self) -> int:
        """Restarts of the run so far."""
        return self.world.restarts

    @property
    def start_reason(self) -> str:
        """Why this process was started: ``first``, or what ended the last round (``restart`` under torchrun)."""
        return os.environ.get(ENV_START_REASON, "restart" if self.restarts else "first")

    @property
    def draining(self) -> bool:
        """Whether all ranks stopped so that other processes can continue the training: no results follow here."""
        return self._stop_agreed.drains and not self._ended

    def register(self, name: str, stateful: Stateful) -> None:
        """Save and restore a further object with every checkpoint.

        Args:
            name: the object's name in checkpoints.
            stateful: has ``state_dict()`` and ``load_state_dict(state)``.

        Raises:
            UsageError: if the name is taken, the object lacks ``state_dict`` or ``load_state_dict``, is a sharded
                model, or the state was restored already.
        """
        self.trainings.refuse_after_restoring(f"run.register({name!r})")
        if isinstance(stateful, torch.nn.Module):
            check_not_sharded(stateful)
        self.state.register(name, stateful)

    def on_save(self, function: Callable[[], None]) -> None:
        """Call ``function()`` on every rank before a checkpoint captures the state."""
        self.state.on_save(function)

    def on_restore(self, function: Callable[[], None]) -> None:
        """Call ``function()`` on every rank after a checkpoint was restored.

        Raises:
            UsageError: if the state was restored already.
        """
        self.trainings.refuse_after_restoring("run.on_restore()")
        self.state.on_restore(function)

    def on_checkpoint(self, function: Callable[[snapshot.WriteOutcome], None]) -> None:
        """Call ``function(outcome)`` at the first step boundary after a checkpoint was written or failed.

        It is called only on the ranks that write checkpoints.
        """
        self._saver.listen(function)

    def telling(self, function: Callable[[snapshot.WriteOutcome], None]) -> AbstractContextManager[None]:
        """Return a context in which the function is called as by :meth:`on_checkpoint`."""
        return self._saver.telling(function)

    def grad_accum(self, batch: GlobalBatch) -> int:
        """Return the number of this rank's micro-batches in a full global batch."""
        return batch.plan(self.world_size, self.rank).grad_accum

    def request_stop(self) -> None:
        """Make all ranks stop after the same step: the next one, or the one after it. One rank's request is enough."""
        self._stop_wanted = max(self._stop_wanted, Stop.SCRIPT)

    def steps(
        self,
        loader: Loader,
        model: torch.nn.Module | Mapping[str, torch.nn.Module],
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        *,
        until: int | str,
        checkpoint: Checkpoint | None = None,
        exact: bool = False,
        buffers: Mapping[str, str] | None = None,
        scheduler: Stateful | Mapping[str, Stateful] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        metrics: Sequence[str] = (),
    ) -> Iterator[Step]:
        """Restore the newest checkpoint, then yield the optimizer steps that remain.

        Args:
            loader: loads the training data; its micro-batches are divided among the ranks.
            model: an unwrapped module on its device; call ``step.model`` in the loop. Models that are trained together,
                such as those of a GAN, are given as a dict, by their names in checkpoints.
            optimizer: an optimizer, or a dict of several by name. With several, each pass over the micro-batches ends
                with ``step.update(optimizer=name)``, or with ``step.update()`` for all of them.
            until: length of the whole training: epochs (3 or ``"3ep"``) or steps (``"1000ba"``). To end it earlier and
                save its state, call :meth:`request_stop`; a ``break`` leaves the current step unsaved.
            checkpoint: where to save to and resume from.
            exact: whether the weights must be bitwise equal at every world size.
            buffers: rules for buffers that micro-batches change, by pattern of their names, such as
                ``{"*.queue": "last"}``: ``mean``, ``sum``, ``last``, ``min``, ``max``, ``ignore`` or ``error``; see
                docs/training.md.
            scheduler: a scheduler, or a dict of several by name; saved and restored with the rest. The script steps it.
            scaler: a gradient scaler; saved and restored with the rest.
            metrics: names of the metrics passed to ``step.backward``, which are averaged over the global batch.

        Raises:
            UsageError: if an argument has the wrong type, a step ends without ``update``, the checkpoint belongs to
                another training, or another loop over steps is running.
            BatchError: if the micro-batch size is ``"auto"``, which only a ``Trainer`` supports.
        """
        check_loader("run.steps(loader=...)", loader)
        if checkpoint is not None:
            check_checkpoint("run.steps(checkpoint=...)", checkpoint)
        loader.batch.micro_batches()
        parts: dict[str, Stateful | None] = {
            "scheduler": as_part("run.steps(scheduler=...)", scheduler),
            "scaler": as_part("run.steps(scaler=...)", scaler),
        }
        options = LoopOptions(
            exact=exact,
            buffers=checked_rules(buffers),
            parts={name: part for name, part in parts.items() if part is not None},
            scaler=scaler,
            metrics=metrics,
        )
        return iter(Loop(self, loader, model, optimizer, until=until, checkpoint=checkpoint, options=options))

    def resume(self, checkpoint: Checkpoint, unchanging: Mapping[str, int] | None = None) -> int:
        """Restore all registered objects from the newest checkpoint, for a script with its own training loop.

        Args:
            checkpoint: from now on, :meth:`boundary` saves to it, and leaving the session waits until it is written.
            unchanging: integers by name, such as the global batch size, that must be the same on every resume.

        Returns:
            The optimizer steps done.

        Raises:
            UsageError: if nothing was registered, or the checkpoint belongs to another training.
        """
        check_checkpoint("run.resume(checkpoint)", checkpoint)
        self.trainings.refuse_beside_steps("run.resume()")
        if self.state.holds_nothing:
            raise UsageError(
                "run.resume() came without run.register() before it: checkpoints would hold nothing.",
                'Before it: run.register("model", model), and likewise the optimizer and what else changes.',
            )
        self._unchanging = dict(unchanging or {})
        saved = {"checkpoint": checkpoint.arguments, "saved objects": self.state.described()}
        check_same(self.world, {**self._unchanging, **saved})
        resumed = self.restore(checkpoint, self._unchanging, self.state, (self.state,))
        self.trainings.resumed = True
        self.begin(resumed.step)
        self._step = resumed.step
        return resumed.step

    def boundary(self, step: int | None = None, *, end: bool = False) -> bool:
        """Mark a step boundary in the script's own training loop: save if it is due, and learn whether to stop.

        All ranks must call it equally often.

        Args:
            step: optimizer steps done in the whole training, if a step has just ended. None in loops without steps,
                such as an evaluation: nothing is saved, and True means that the next boundary with a step stops.
            end: whether the training ends here; its state is then always saved.

        Returns:
            Whether all ranks must stop here, because a rank called :meth:`request_stop` or a node joins or leaves. The
            state is saved. If :attr:`draining` is then set, leave the session: this ends the process, and the training
            continues in another one.

        Raises:
            UsageError: if ``step`` is lower than before, objects were registered but not restored by :meth:`resume`,
                or it is called within ``run.steps()`` or a ``Trainer``.
        """
        if step is not None:
            self.trainings.refuse_beside_steps(f"run.boundary({step})")
            self.trainings.refuse_before_restoring(f"run.boundary({step})", self.state.names)
            if self.trainings.resumed and step < self._step:
                raise UsageError(
                    f"run.boundary({step}) came after step {self._step}.",
                    "Give the steps done in the whole training, not in an epoch: run.resume() returns those before.",
                )
        self.begin(step or 0)
        if step is None:
            self._exchange(Wishes())
            return self.stopped
        return self.step_boundary(step, self._checkpoint, self._unchanging, self.state, end=end)

    def restore(
        self,
        checkpoint: Checkpoint | None,
        identity: Mapping[str, int],
        state: TrainingState,
        trained: Sequence[object],
    ) -> Resumed:
        """Restore a state from the node's memory, else from a checkpoint; called by all ranks.

        Args:
            identity: what must be equal in the saved state and in this training.
            trained: the models trained.
        """
        self.trainings.begin(trained, checkpoint)
        self._checkpoint = checkpoint
        began = time.monotonic()
        resumed = self._saver.restore(checkpoint, dict(identity), state)
        self.resumed_step = resumed.step
        self.worlds = [*resumed.worlds, self.world_size]
        self._restore_seconds += time.monotonic() - began
        # Checked now, and again once the optimizer has state: at the first save, hours of work may be lost.
        self._check(state)
        self._unchecked = True
        return resumed

    def _check(self, state: TrainingState) -> None:
        if self._checkpoint is None and self._link is None:
            return
        state.check()
        if self.rank == 0 and not self._warned_of_average and has_forgotten_average(state.parts):
            self._warned_of_average = True
            _log.warning(
                "an AveragedModel is not saved: after a restart it would begin anew; give it to "
                'run.register("average", averaged) before the loop'
            )
        if self.rank == 0 and not self._warned and forgotten(state.parts):
            self._warned = True
            _log.warning(
                "the learning-rate scheduler of the optimizer is not saved: after a restart it would begin anew; "
                "give it to run.steps(scheduler=...), Trainer(scheduler=...) or run.register()"
            )

    def step_boundary(
        self,
        step: int,
        checkpoint: Checkpoint | None,
        identity: Mapping[str, int],
        state: TrainingState,
        *,
        end: bool,
        stays: Callable[[Tensor], bool] | None = None,
        by_step: bool = False,
    ) -> bool:
        """Save a state if it is due or the training stops; return whether it stops.

        Args:
            stays: whether a tensor keeps its values until :meth:`settle` is called; None: :meth:`settle` is not called.
            by_step: whether wishes are sent together with the next step's losses.
        """
        self._step, self._ended = step, end
        if self._unchecked:
            self._unchecked = False
            self._check(state)
        if self._link is not None:
            self._link.step(step)
        faults.reached("step", step)
        self._saver.poll(step, checkpoint)
        wishes = self._saver.wishes(step, checkpoint)
        if self._replicas is not None:
            compare, checksum = self._replicas.wanted(), self._replicas.to_post(step)
            if compare or checksum is not None:
                wishes = replace(wishes, compare=compare, checksum=checksum)
        self._exchange(wishes, by_step=by_step)
        last, draining = self.stopped or end, self.draining
        if draining:
            faults.reached("drain", step)
        if self._replicas is not None and (last or self._saver.is_durable(step, checkpoint)):
            with self._none_differs(self._replicas):
                self._replicas.compare(step)
        self._saver.save(step, checkpoint, identity, state, self.worlds, last=last, draining=draining, stays=stays)
        return self.stopped

    def begin(self, step: int, total: int = 0) -> None:
        """Mark the training as begun or resumed; from now on it can be stopped.

        Args:
            step: optimizer steps done.
            total: steps of the whole training; 0: not known.
        """
        if self._begun:
            return
        self._begun, self._step = True, step
        self._termination.watch()
        if self._link is not None:
            self._link.ready(step, total, self._restore_seconds)

    def be_exact(self) -> None:
        """Make torch's results reproducible to the bit until the session ends."""
        if self._settings is not None:
            self._settings.exact()

    def leave_if_draining(self) -> None:
        """End the process, through the end of the session, if the training continues in other processes.

        Raises:
            Drained: if :attr:`draining` is set.
        """
        if self.draining:
            self.stopped = True
            # The agent relies on messages, not on the code; a sender of SIGTERM to this process expects the signal's.
            raise Drained(0 if self._link is not None or self._stop_agreed is Stop.AGENT else 128 + signal.SIGTERM)

    def finish_training(self) -> None:
        """Wait until the saved state is written, unless the agent writes it after a drain."""
        self._saver.finish(wait=not self.draining or self._link is None)

    def settle(self) -> None:
        """Wait until parameters and the optimizer's state, which may be being copied, may change."""
        self._saver.settle()

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
        if self._saver.failure is not None:
            if self.world.round:
                # Another start would resume from the state in memory, and could not save it either.
                do_not_retry(f"{self._saver.failure.message} {self._saver.failure.hint}".strip())
            raise self._saver.failure
        if self.draining and self._link is not None:
            faults.reached("leave", self._step)
            self._link.drained(self._step, self._saver.seconds)

    @property
    def agreement(self) -> Agreement:
        """The exchange of wishes among all ranks. All ranks must make the first access together."""
        if self._agreement is None:
            self._agreement = Agreement(self.world_size, self._timeout)
        return self._agreement

    def _exchange(self, wishes: Wishes, *, by_step: bool = False) -> None:
        """Send this rank's wishes, and receive what all ranks agreed on."""
        if (stop := self._wanted()) is not Stop.NO:
            wishes = replace(wishes, stop=stop)
        agreed = self.agreement.exchange_by_step(wishes) if by_step else self.agreement.exchange(wishes)
        self._stop_agreed = max(self._stop_agreed, agreed.stop)
        self.stopped = self._stop_agreed is not Stop.NO
        self._saver.agree(agreed)
        if self._replicas is not None:
            with self._none_differs(self._replicas):
                self._replicas.heard(agreed=agreed.compare, differs=agreed.differs)

    def compare_replicas(self, named: Named | None) -> None:
        """From now on, compare these tensors, which must be equal on all ranks, at step boundaries; None: stop."""
        self._replicas = None
        if named is not None and self.world_size > 1:
            self._saver.compares = True
            group = self.agreement.group
            assert group is not None
            self._replicas = ReplicaCheck(self.world_size, self.rank, group, named)

    @contextmanager
    def _none_differs(self, replicas: ReplicaCheck) -> Iterator[None]:
        """If the ranks differ, drop the snapshots in memory that were taken since they were last equal."""
        try:
            yield
        except ReplicasDifferError:
            self._saver.drop_unequal()
            with suppress(RuntimeError):  # A rank that is gone has its own error.
                # When the first process fails, the agent ends the others.
                dist.barrier(group=self._agreement.group if self._agreement is not None else None)
            raise
        if replicas.good is not None:
            self._saver.equal_after(replicas.good)

    def _wanted(self) -> Stop:
        asked = self._link is not None and bool(self._link.stop_asked())
        signalled = Stop.SIGNAL if self._termination.asked else Stop.NO
        return max(self._stop_wanted, Stop.AGENT if asked else Stop.NO, signalled)

    def release(self) -> None:
        """Restore the signal handler, and release the memory and the agent's socket."""
        self._termination.close()
        self._saver.close()
        if self._link is not None:
            self._link.close()

    def abandon(self) -> None:
        """After an error: let a checkpoint in progress finish, without communicating with other ranks."""
        self._saver.abandon()


@contextmanager
def session(
    *,
    threads: int | None = None,
    deterministic: bool | None = None,
    timeout: float | timedelta | None = None,
) -> Iterator[Run]:
    """Take part in a training run: join the world on entry, leave it on exit. Yields the :class:`Run`.

    Without a launcher, the world is this one process. A process group that was made before the session is used, and
    stays joined on exit.

    Args:
        threads: threads of each CPU operation; None: 1 in trainings with ``exact=True``, else torch's setting. Results
            are bitwise equal only for the same number.
        deterministic: whether torch uses deterministic algorithms, and warns where it has none; None: only in trainings
            with ``exact=True``. The previous settings are restored at the session's end.
        timeout: timeout of the process groups, in seconds or as a timedelta: a collective that not all ranks join
            fails after it; None: 600 s.

    Raises:
        UsageError: if an argument is invalid, the environment describes the world only in part, or ``timeout`` is given
            although the process group was made before the session.
        Drained: a ``SystemExit``, if the training continues in other processes.
        CheckpointError: on exit, if no checkpoint at all could be saved; under an agent of this project, ``SystemExit``
            with 93.
    """
    seconds = _seconds(timeout)
    settings = Determinism(threads, deterministic)
    try:
        world = environment()
        found = dist.is_initialized()
        if found and timeout is not None:
            raise UsageError(
                f"session(timeout={timeout}): the process group was made before the session, with its own timeout.",
                "Give it to init_process_group(timeout=...), or leave joining to the session.",
            )
        run = Run(world, join(world, seconds), AgentLink.connect(world), settings=settings, timeout=seconds)
        try:
            with _ended_in_order(run, found):
                yield run
                run.leave_if_draining()
        finally:
            run.release()
    finally:
        settings.close()


def _seconds(timeout: float | timedelta | None) -> float:
    if timeout is None:
        return GROUP_TIMEOUT
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < _LONGEST:
        raise UsageError(f"session(timeout={timeout!r}) is no timeout.", "Give seconds above 0, or a timedelta.")
    return float(seconds)


@contextmanager
def _ended_in_order(run: Run, found: bool) -> Iterator[None]:
    """Close the run at its end or after a drain; leave the world unless it was joined before the session."""
    drained: Drained | None = None
    try:
        yield
    except Drained as reason:
        drained = reason
    except BaseException:
        # No collectives: the other ranks may never join them, and this process is about to fail.
        run.abandon()
        raise
    run.close()
    if not found:
        leave()
    if drained is not None:
        raise drained
