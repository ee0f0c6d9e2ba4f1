"""The loop over a training's steps: restores the state, yields steps, saves, and stops by agreement."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from elastic_launch import snapshot
from elastic_launch.batch import BatchError, GlobalBatch, halved, settled
from elastic_launch.contract import Corrupt
from elastic_launch.errors import UsageError
from elastic_launch.shared_progress import Activity
from elastic_launch.system.threads import within
from elastic_launch.training.checkpoints.checkpoint import Checkpoint
from elastic_launch.training.checkpoints.memory import settled as stays_of
from elastic_launch.training.checkpoints.parts import Stateful
from elastic_launch.training.checkpoints.resumed import Outcome, Resumed
from elastic_launch.training.checkpoints.saving import Live, Trained
from elastic_launch.training.checkpoints.state import TrainingState, make_tensors
from elastic_launch.training.data.content import LATER
from elastic_launch.training.data.epochs import Epochs
from elastic_launch.training.durations import total_steps
from elastic_launch.training.engine import Engine
from elastic_launch.training.evaluations import evaluating, keeping_buffers, works_in_train
from elastic_launch.training.flips import Flips
from elastic_launch.training.gradients.accumulation import ExactGradients, Gradients
from elastic_launch.training.gradients.buffer_rules import buffers_of, ruled_names
from elastic_launch.training.gradients.means import cargo_size
from elastic_launch.training.gradients.parameters import OwnParameters, Parameters
from elastic_launch.training.live import resharding
from elastic_launch.training.live.rehearsal import graphs_fit_any_world, randomness_kept, unchanged
from elastic_launch.training.live.waits import on_host
from elastic_launch.training.loop_options import LoopOptions
from elastic_launch.training.passes import Share
from elastic_launch.training.positions import Positions
from elastic_launch.training.randomness import derive, seed_all
from elastic_launch.training.ranks import collectives
from elastic_launch.training.ranks.agreement import NOTHING
from elastic_launch.training.ranks.exchange import exchanging
from elastic_launch.training.ranks.pace import Pace
from elastic_launch.training.ranks.replicas import replicated
from elastic_launch.training.ranks.same_arguments import NOT_COMPARED, check_same, told
from elastic_launch.training.ranks.world import World
from elastic_launch.training.rounds import RoundOverError
from elastic_launch.training.steps import Step
from elastic_launch.training.stopping import DrainedExit
from elastic_launch.training.together import OptimizerSteps, as_model, as_optimizer
from elastic_launch.training.transaction import Recovered, Rehearsal, StepRules, Transaction
from elastic_launch.training.verification import CorruptionError, NotAgreedError
from elastic_launch.training.verifying import Verifier
from elastic_launch.training.wrapped import sharding_modules

_log = logging.getLogger(__name__)

OWN = "parameters"
"""Name of the part of the state that holds the optimizer's parameters that are not in the model."""

TENSOR_RANKS = "tensor ranks"
"""Name of the ranks that compute a micro-batch together, among what must not change in exact mode."""

LOADER = "loader"
"""Name of the part that the data have of the state."""


class Loop:
    """Iterates over the steps of one training; its arguments are those of :meth:`elastic_launch.Run.steps`."""

    def __init__(
        self,
        engine: Engine,
        epochs: Epochs,
        model: torch.nn.Module | Mapping[str, torch.nn.Module],
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        *,
        until: int | str,
        checkpoint: Checkpoint | None,
        options: LoopOptions,
    ) -> None:
        self.engine = engine
        self._rounds = engine.rounds
        self._epochs = epochs
        meshed = engine.rounds.mesh is not None
        self._model = as_model(model, meshed=meshed)
        self._optimizer = as_optimizer(optimizer) if options.stepper is None else options.stepper
        self._trained = tuple(model.values()) if isinstance(model, Mapping) else (model,)
        self._checkpoint = checkpoint
        self._options = options
        self._end = total_steps(until, epochs.steps_per_epoch)
        parts = {"model": self._model, "optimizer": self._optimizer, **options.parts, LOADER: epochs.part}
        self._parts: dict[str, Stateful] = {name: part for name, part in parts.items() if part is not None}
        own = OwnParameters(self._model, self._optimizer)
        if own.state_dict():
            self._parts[OWN] = own
        self._state: TrainingState = engine.state.extended(self._parts)
        unwatched = None if options.stepper is not None else {OWN, LOADER, *options.unwatched}
        self.positions = Positions(engine.rounds, self._state, exact=options.exact, unwatched=unwatched)
        engine.sharded = bool(sharding_modules(self._model))
        options.check(epochs, self._model, self._optimizer, several=isinstance(model, Mapping), meshed=meshed)
        optimizers = OptimizerSteps(self._optimizer, options.scaler)
        self._rules = StepRules(optimizers, tuple(options.metrics), options.verify)
        self._verifier: Verifier | None = None
        self._flips = Flips()
        self._step = options.start
        self._last: tuple[float, dict[str, float]] = math.nan, {}
        self._live = False
        # Before there is a place, micro="auto" has no size.
        self._rehearses = options.rehearse is not None and epochs.batch.micro != "auto"
        self._first = Activity.FIRST_STEP  # what the first step of a round is to this process
        self._has_state = False  # whether this process has the state of a step, restored or initial
        self._agreed = False  # whether it has once got what is not in the state, such as unsaved buffers, from rank 0
        self._given: dict[str, object] = {}
        self._trained_first: dict[str, bool] = {}  # whether each parameter needed a gradient as the loop began
        self._received: Resumed | None = None  # a state that takes effect when the step has ended
        self._samples_read = 0.0  # when, of those that ranks compare
        # What follows the last step, on all ranks:
        self._owes_snapshot = self._owes_evaluation = self._owes_boundary = False
        self._bounded = -1  # the last step whose boundary has begun
        self._reached = 0  # steps that this process has done at most; if it began later than others, that they had
        # Of the current round:
        self._gradients: Gradients | None = None
        self._batches: Generator[object] | None = None
        self._pace: Pace | None = None
        self._began_in_training_mode: bool | None = None
        self._owes_copy = False  # of a state that only one replica has

    def __iter__(self) -> Iterator[Step]:
        with closing(self.transactions()) as transactions:
            yield from map(Step, transactions)

    def transactions(self) -> Generator[Transaction]:
        """Yield the steps that remain."""
        with self.engine.trainings.looping(), collectives.watched():
            if self._options.exact:
                self.engine.be_exact()
            # Again, since the script may have registered something since it made the loop.
            self._follow(self.engine.state.extended(self._parts))
            self._epochs.check_lengths()
            yield from self._steps()

    def _steps(self) -> Iterator[Transaction]:
        if self._rehearses and self._rounds.is_ahead and not resharding.obstacle(self._model, within=True):
            self._rehearse()
        self._given = self._arguments()
        self.engine.meet(told(self._given))
        if self._rounds.is_built_ahead:
            resharding.reshard(self._model, self._optimizer, within=True)
        self._live = self._can_live()
        goes_back = self._live and (self._rounds.may_abort or bool(self._options.share))
        self._trained_first = self._trains() if goes_back else {}
        self._begin()
        try:
            self._complete()
            while self._step < self._end and not self.engine.stopped:
                step, pace, began = self._next_step(), self._pace, time.perf_counter()
                self.positions.begin(self._trains())
                self.engine.saver.step_begins()
                yield step
                self.engine.trainings.refuse_swapped("The step's end")
                self.positions.end()
                self._follow_registered()
                if pace is not None:  # if the round has changed meanwhile, it is not used any more
                    pace.add(time.perf_counter() - began, step.data_s, step.exchange_s, step.share.plan.grad_accum)
                self._watch_mode(step)
                if step.too_large:
                    if step.all_know:
                        self._halve(step)
                    self._close_batches()
                    continue
                step.check_complete(more_passes=self._is_midway)
                if self._received is not None:
                    self._take(self._received)
                else:
                    self._step += 1
                    self._reached = max(self._reached, self._step)
                    self._last = step.loss, step.metrics
                    if step.share.plan.grad_accum:  # a rank without samples compiles nothing
                        self._first = Activity.RESUMED_STEP
                    # Of the first group; a tensor may be on a GPU, and to read it would wait for the step.
                    groups = getattr(self._optimizer, "param_groups", None) or [{}]
                    lr = groups[0].get("lr")
                    lr = lr if isinstance(lr, int | float) else None
                    self._rounds.link.note(step.loss, self._epochs.batch.size, step.share.plan.grad_accum, lr)
                    self._end_step()
                self._complete()
        finally:
            self._rounds.link.watch(None)
            self._rounds.end_with_round()
            self._leave()
        self.engine.finish_training()
        self.engine.leave_if_draining()
        # Last: what the script draws next must not depend on which steps and evaluations this process has done itself.
        seed_all(derive("end", self._epochs.seed, self._step), devices=True)

    def _follow(self, state: TrainingState) -> None:
        self._state = state
        self.positions.follow(state)

    def _follow_registered(self) -> None:
        """From the end of a step on, what the script has registered in it is a part of the state."""
        self._include_registered()
        self._state.late.check_joined(self._state.names)

    def _include_registered(self) -> None:
        if not self._state.includes(self.engine.state):
            self._follow(self.engine.state.extended(self._parts))
            if self._live and (self._state.calls_functions or (self._rounds.shards and self._fixed)):
                self._rounds.end_with_round()

    def _rehearse(self) -> None:
        """Do a pass of which nothing remains, so that the others need not wait for all that is slow the first time."""
        rehearse, number, optimizers = self._options.rehearse, self._step, self._rules.optimizers
        assert rehearse is not None
        try:
            if optimizers.scaler is not None:
                make_tensors(optimizers.scaler)  # the script may unscale gradients by it
            epochs = self._epochs.apart()
            with (
                self.engine.rehearsing(),
                graphs_fit_any_world(),
                randomness_kept(),
                closing(self._new_gradients(World())) as gradients,
                unchanged(self._model, *gradients.parameters.all.values()),
                closing(epochs.epoch_from(number, 1, 0)) as batches,
            ):
                share = Share(epochs.plan(number, 1, 0), batches, gradients)
                step = Rehearsal(self, StepRules(optimizers), epochs, number, share)
                try:
                    rehearse(Step(step))
                    self._first = Activity.REHEARSED_STEP
                finally:
                    gradients.discard()
                    optimizers.complete()
                    resharding.let_go(self._model, within=True)
        except Exception as error:  # noqa: BLE001 - the script's; what fails in a step, too, is raised there
            text = "this process could not rehearse its first step, which may therefore take longer: %s: %s"
            _log.warning(text, type(error).__name__, error)
            error.__traceback__ = error.__context__ = error.__cause__ = None  # they may hold the loader's processes

    def _begin(self) -> None:
        """Enter the round in which this process begins, or the one after it if that breaks and this process can."""
        if not self._live:
            self._rounds.end_with_round()

        def enter() -> None:
            with self._rounds.link.forming():
                self._enter()

        if broken := self._rounds.attempt(enter):
            self._change_round(broken)
            if self._received is not None:
                self._take(self._received)

    def _enter(self, live: Live | None = None) -> None:
        """Take part in the current round: restore the newest state, and exchange with its ranks from now on."""
        engine, rounds, world = self.engine, self._rounds, self.engine.world
        # One that is kept has the content with which it began to train, whatever is in its files now.
        again = self._read_again if live is None else None
        check_same(world, self._given, rounds.link, goes_on=live is not None, again=again)
        in_place = live is not None and (live.in_doubt or rounds.shards)
        resumed = self._resume_in_place(live) if live is not None and in_place else self._resume(live)
        if rounds.is_built_ahead and resumed.state is None:
            rounds.start_again("no rank has a state, and it has built its model without the other ranks")
        self._has_state = True
        if live is None:
            self._step, self._last = resumed.step, resumed.last or self._last
            self._received = resumed if resumed.passes else None
            self._epochs.batch = settled(self._epochs.batch, world.world_size)
        elif resumed.state is not None:
            # At once: if this round breaks below, the state that this process has is that one.
            self._received = resumed
            self.positions.end()
        self._train_the_same(resumed.starts[0]["trained"] if resumed.starts and resumed.passes else resumed.trained)
        self._epochs.enter(world, resumed.step)
        _warn_of_idle_ranks(world, self._epochs.batch)
        if self._options.prepare is not None and self._received is None:
            with rounds.link.doing(Activity.RESTORE):
                self._options.prepare(self._step)
        all_agreed = self._agree(resumed.step)
        self._gradients = gradients = self._new_gradients(world, same=resumed.everywhere and all_agreed)
        self._agreed = True
        self._owes_copy = rounds.mesh is not None and rounds.mesh.across.size == 1 and len(engine.worlds) > 1
        self.positions.allowed = ruled_names(self._model, self._options.buffers)
        if gradients.parameters.apart() and world.rank == 0:
            _log.warning("the optimizer has none of the model's parameters: none of these is trained")
        ranks_own = [x.name for x in buffers_of(self._model, self._options.buffers) if x.rule == "ignore"]
        divided = rounds.mesh is not None
        engine.compare_replicas(replicated(self._model, self._optimizer, ranks_own, divided=divided))
        on_host, report = rounds.device.type == "cpu", rounds.report_straggler
        self._pace = Pace(world.rank, world.world_size, resumed.step, on_host=on_host, report=report)
        self._verifier = None
        if not self._options.share:
            engine.saver.agreed = None
        if (share := self._options.share) and world.world_size > 1:
            machines_at = None if all_agreed else resumed.step
            self._verifier = Verifier(self._epochs, world, share, machines_at, goes_on=live is not None)
        if (rounds.goes_back or share) and live is None and resumed.state is None and not resumed.step:
            # A process that is kept may have to go back to it. A checkpoint without any step would be of no use.
            beginning = replace(self._after(0, evaluated=not self._owes_evaluation), checkpoint=None)
            engine.saver.keep(beginning, stays_of(self._optimizer, self._model.parameters()))
        # Last: a process that is interrupted before has received only a part of the state.
        engine.begin(resumed.step, self._end, live=self._live, rehearses=self._rehearses, arguments=told(self._given))
        rounds.link.watch(resumed.step, self._first)

    def _agree(self, step: int) -> bool:
        """Agree with the other ranks, which may be at another point between two steps.

        Returns:
            Whether each of them has been in a round before with the values of its rank 0.
        """
        micro = len(self._epochs.batch.micro_batches()[0])
        aborts = self._rounds.may_abort and self._live
        numbers = [self._lacks_evaluation(step), self._bounded == step, -micro, aborts, not self._agreed, self._reached]
        if self.engine.world.world_size > 1:
            found = torch.tensor(numbers, dtype=torch.int64, device="cpu")
            on_host(dist.all_reduce, found, op=dist.ReduceOp.MAX)
            numbers = found.tolist()
        lacking, bounded, least = bool(numbers[0]), bool(numbers[1]), -numbers[2]
        self._rounds.agreed(aborts=self.engine.world.world_size > 1 and bool(numbers[3]))
        reached = numbers[5]
        if not self._agreed:
            self._reached = max(reached, step)
        if (again := reached - step) > 0 and self.engine.world.rank == 0:
            what = f"step {step + 1} is" if again == 1 else f"steps {step + 1} to {reached} are"
            _log.warning("training goes back to the state of step %d: %s done again", step, what)
        self._owes_evaluation = lacking
        self._options.evaluations.begin_round(step if lacking else None)
        # With evaluations done, the ranks do not know whether the others have begun the boundary: it is left out.
        self._owes_boundary = lacking and not bounded
        while len(self._epochs.batch.micro_batches()[0]) > least:
            # The others had the last exchange before the round broke, and have halved it.
            self._epochs.batch = halved(self._epochs.batch)
        return not numbers[4]

    def _leave(self) -> None:
        """Drop what belongs to the current round."""
        self._close_batches()
        if self._gradients is not None:
            self._gradients.close()
            self._gradients = None
        self.engine.compare_replicas(None)

    def _can_live(self) -> bool:
        """Whether this training can continue in another round: a process that begins must meet it at the same place."""
        alone = self._options.start == 0 and self._rounds.untouched and not self._state.calls_functions
        if alone and (bound := self._epochs.bound):
            if self._rounds.asked_live is not False and self.engine.world.rank == 0:
                _log.info("each process ends with its round: %s", bound)
            return False
        if not alone or not (self._state.sharded or self._rounds.mesh):
            return alone
        skips = self._checkpoint is not None and self._checkpoint.skip_frozen
        why = "Checkpoint(skip_frozen=True)" if skips else self._fixed
        if why and self._rounds.asked_live is not False and self.engine.world.rank == 0:
            _log.info("the model stays sharded over the ranks of one round, with which this process ends: %s", why)
        self._rounds.shards = not why
        return not why

    @property
    def _fixed(self) -> str:
        """Why the state cannot be divided among other ranks in this process; empty if it can."""
        mesh, rounds = self._rounds.mesh, self._rounds
        if mesh is not None and rounds.device.type != "cpu":
            return "run.mesh() on GPUs"
        if mesh is not None and mesh.inner.size() != self.engine.world.replica_size:
            return f"there is no --replica-size {mesh.inner.size()}"
        return self._state.fixed_shards or resharding.obstacle(self._model, self._state.parts, within=mesh is not None)

    def _change_round(self, error: RuntimeError | None, passes: Sequence[Outcome] = ()) -> None:
        """Continue in the next round, or in the one after it if that breaks, too.

        Args:
            passes: loss and metrics of each pass of the current step that is done.
        """
        again = self._enter_next(error, passes)
        while again is not None:
            again = self._enter_next(again, passes)

    def _enter_next(self, error: RuntimeError | None, passes: Sequence[Outcome]) -> RuntimeError | None:
        """Leave the round, and enter the next one; return the error if that breaks, too."""
        engine, received = self.engine, self._received
        self._leave()
        step, last, done = self._step, self._last, tuple(passes)
        shards = self._rounds.shards
        if shards:
            resharding.let_go(self._model, within=self._rounds.mesh is not None)
        in_doubt = self._rounds.in_doubt or (shards and not self._keeps_parts)
        spoiled = [] if in_doubt else self.positions.spoiled()
        if shards and spoiled:
            in_doubt, spoiled = True, []
        if received is not None:
            step, last, done = received.step, received.last or self._last, received.passes
        try:
            engine.suspend(error, spoiled=spoiled)
        except DrainedExit:
            if self._has_state and not done and not in_doubt and not shards:  # else it is a state within a step
                engine.keep_newer(self._after(step, evaluated=not self._owes_evaluation))
            raise

        def join() -> None:
            with self._rounds.link.forming():
                self._rounds.join()
                if self._rounds.shards:
                    resharding.reshard(self._model, self._optimizer, within=self._rounds.mesh is not None)
                live = Live(step, engine.worlds, last, done, self._trained_there(), received, in_doubt)
                self._enter(live if self._has_state else None)

        return self._rounds.attempt(join)

    @property
    def _keeps_parts(self) -> bool:
        """Whether this process can go on with its part of the state, which the same rank of each replica has.

        A step is not gone through again from a later pass on.
        """
        return self._rounds.mesh is not None and not self._rules.optimizers.several

    def recover(self, error: RuntimeError, passes: Sequence[Outcome], *, in_pass: bool) -> Recovered:
        """Take part in the next round after an error of a step, given its passes that are done.

        Args:
            in_pass: whether the script goes through the micro-batches, and can do so again.

        Raises:
            RuntimeError: the error, if this process is not to go on.
        """
        assert self._gradients is not None
        self._gradients.give_up()
        trained = self._trains()
        self._change_round(error, passes)
        while self._received is None and self._owes_evaluation:
            # This rank has begun a step, while others were still evaluating the one before.
            if broken := self._rounds.attempt(self._evaluate):
                self._change_round(broken)
        self._rounds.note_exchanges()
        if self._received is None and not in_pass:
            # The script has left the pass: the whole step is done again, after what it still does in this one.
            live = Live(self._step, self.engine.worlds, self._last, trained=self._trained_there())
            self._received = self.engine.saver.own(live, self._identity, self._state)
            self.positions.end()
        received, recovered = self._received, Recovered(self._share())
        if received is None or received.step <= self._step:  # else the step is done, and may have been the last one
            self.engine.saver.step_begins()
        if received is None:
            # The ranks have agreed on the step's start; this process is behind the head, where it may have changed.
            self._train_the_same(trained)
            self.positions.go_on()
            return recovered
        if self._is_midway:
            return replace(recovered, passes=received.passes)
        return replace(recovered, done=received.last or self._last, again=received.step <= self._step)

    def pass_updated(self, passes: int) -> None:
        """Note that so many passes of the current step are updated, here or by other ranks.

        Called if a step may have several, or if other ranks have done it.
        """
        received = self._received
        if received is not None and not self._is_midway:
            return  # the whole step was done by other ranks
        if received is not None and passes < len(received.passes):
            # The script's code up to the next pass finds what the other ranks' did.
            self.positions.load(received.starts[passes])
            self._train_the_same(received.starts[passes]["trained"])
            return
        if received is not None:
            self._state.load(received, again=False)
            self._received = None
            self._train_the_same(received.trained)
        self.positions.begin(self._trains(), passes)

    @property
    def _is_midway(self) -> bool:
        """Whether a state was received that follows a pass of the current step, and not its end."""
        received = self._received
        return received is not None and bool(received.passes) and received.step == self._step

    def _take(self, received: Resumed) -> None:
        """Take a state over from another process, after a step that this one has not done itself."""
        if newer := sorted(self._state.late.names & {*self._state.names} - {*(received.state or ())} - received.anew):
            why = f"it has registered {', '.join(newer)}, and goes back to a step before that"
            self._rounds.start_again(why)
            raise RoundOverError(why)
        with self._rounds.link.doing(Activity.RESTORE):
            # A second time, since the script may have changed its objects after the step, as it has there.
            self._state.load(received, again=bool(received.passes))
            self._step = received.step
            self._reached = max(self._reached, self._step)
            if not received.passes:
                self._received = None
            self._close_batches()
            if self._options.prepare is not None:
                self._options.prepare(self._step)

    def _trains(self) -> dict[str, bool]:
        known = self._gradients
        parameters = Parameters(self._model, self._optimizer) if known is None else known.parameters
        return {name: p.requires_grad for name, p in parameters.all.items()}

    def _trained_there(self) -> dict[str, bool]:
        """Return whether each parameter needs a gradient in the state that this process would hand on."""
        received = self._received
        return self.positions.trained or (self._trains() if received is None else dict(received.trained))

    def _train_the_same(self, trained: Mapping[str, bool]) -> None:
        """Freeze and unfreeze parameters as in the process that the state came from, which the script has changed."""
        if trained and trained != self._trains():
            parameters = Parameters(self._model, self._optimizer)
            for name, parameter in parameters.all.items():
                parameter.requires_grad_(trained.get(name, parameter.requires_grad))

    def _next_step(self) -> Transaction:
        epochs, number = self._epochs, self._step
        if epochs.position(number).step_in_epoch == 0:
            epochs.check_lengths()
            self._close_batches()
        self._rounds.note_exchanges()  # what the script exchanges from now on, in the head, is its own
        assert self._gradients is not None
        self._gradients.reshard()  # an evaluation may have gathered parameters
        self._flips.begin(number, self.engine.world.round, self._gradients, self._optimizer)
        seed_all(derive("step", epochs.seed, number), devices=True)
        done = self._received.passes if self._received is not None else ()
        return Transaction(self, self._rules, epochs, number, self._share(), done, again=number < self._reached)

    def _share(self) -> Share:
        """Return what this rank does of the current step; its micro-batches go on to the end of the epoch."""
        assert self._gradients is not None
        world, epochs = self.engine.world, self._epochs
        if self._batches is None:
            beside = None if self._verifier is None else self._verifier.beside
            self._batches = epochs.epoch_from(self._step, world.data_size, world.data_rank, beside)
        plan = epochs.plan(self._step, world.data_size, world.data_rank)
        return Share(plan, self._batches, self._gradients, self._verifier)

    def _close_batches(self) -> None:
        batches, self._batches = self._batches, None
        if batches is not None:
            batches.close()

    def _watch_mode(self, step: Transaction) -> None:
        """Warn if the model was left in evaluation mode: after a restart it would be in training mode."""
        if self._began_in_training_mode is None:
            self._began_in_training_mode = step.in_training_mode
        if self._began_in_training_mode and step.in_training_mode is False and self.engine.world.rank == 0:
            self._began_in_training_mode = False
            _log.warning(
                "step %d trained the model in evaluation mode, and those before in training mode: if that was not "
                "wanted, call model.train() after the evaluation; otherwise set the mode in each step, as a restart "
                "runs the script from its start",
                step.number,
            )

    def origin(self, step: int, micro: int) -> str:
        """Describe the samples of a micro-batch, and the newest checkpoint, for errors."""
        checkpoint, saved = self.engine.checkpoint, "none: checkpoint= was not given"
        if checkpoint is not None:
            try:
                saved = within(5.0, "listing them", checkpoint.described_newest)
            except (OSError, snapshot.CheckpointError) as error:
                saved = f"unknown: {error}"
        return f"The micro-batch has {self._epochs.contents(step, micro)}. Newest checkpoint: {saved}."

    def verified(self) -> None:
        """All ranks agree about the current step's micro-batches: compare the states that it begins with, too."""
        self.engine.compare(self._step)
        self.engine.saver.agree_after(self._step + 1)

    def corrupted(self, liars: Sequence[int]) -> NoReturn:
        """Leave the round, since ranks differ about the current step: these have computed wrong, if any are known.

        Raises:
            CorruptionError: if this rank is one of these; its process ends.
            RuntimeError: on the others, by which the round ends for them; the states since the last step in which all
                agreed are dropped.
        """
        engine, rounds, step = self.engine, self._rounds, self._step
        agreed = min(engine.saver.agreed or 0, step)
        if agreed < step or not liars or not rounds.lives:
            # A verified step does not cover its own update, after which one of the ranks may have another state.
            agreed = max(0, agreed - 1)
            engine.saver.drop_after(agreed)
            rounds.in_doubt = True
            with exchanging():
                dist.barrier()  # no rank ends the round before the others have dropped theirs
        where = f"step {step + 1}"
        witness = next((rank for rank in range(engine.world.world_size) if rank not in liars), 0)
        if engine.world.rank == witness:
            rounds.report_corruption(step + 1, liars, step - agreed)
        if engine.world.rank in liars:
            rounds.link.say_noted(Corrupt())
            raise CorruptionError(
                f"{where}: rank {engine.world.rank} computed another result for a micro-batch than two other ranks, or "
                "than itself.",
                "A core, the memory or the GPU of its node may compute wrong without an error. Its node is left out if "
                "there are enough others, except with --no-exclude-corrupt. Training goes on from step "
                f"{agreed}, or from a snapshot before it.",
            )
        if not liars:
            raise NotAgreedError(f"{where}: ranks computed different results for a micro-batch, and repeat them")
        with exchanging():
            dist.barrier()  # until those end, which breaks it
        raise NotAgreedError(f"{where}: a rank that computed a wrong result has not ended")

    @property
    def _identity(self) -> dict[str, int]:
        """What must be equal in a saved state and in this training."""
        tensor = self._rounds.mesh.tensor.size if self._rounds.mesh else 1
        return self._epochs.identity | ({TENSOR_RANKS: tensor} if self._options.exact and tensor > 1 else {})

    def _arguments(self) -> dict[str, object]:
        """Return what must be the same on all ranks, by the names used in errors."""
        options = self._options
        return {
            **self._identity,
            "micro-batch": self._epochs.batch.micro,
            "until, in steps": self._end,
            "exact": options.exact,
            "verify": options.share,
            "device": self._rounds.device.type,
            "run.mesh()": self._rounds.mesh and self._rounds.mesh.shape,
            "session(live=)": self._rounds.asked_live,
            "buffers": options.buffers,
            "metrics": list(options.metrics),
            "evaluations every": options.evaluations.every,
            "checkpoint": None if self._checkpoint is None else self._checkpoint.arguments,
            "saved objects": self._state.described(),
            "steps done": self._step,
            **self._content(),
        }

    def _content(self) -> dict[str, str]:
        rounds = self._rounds
        if not rounds.is_ahead and not rounds.link.present and rounds.world.world_size == 1:
            return {}  # nothing compares it
        with randomness_kept():
            found = self._epochs.content()
        self._samples_read = time.monotonic()
        return found

    def _read_again(self) -> dict[str, object]:
        """Read the samples that are compared again; if they have changed, as with the time, they are not compared."""
        time.sleep(max(0.0, self._samples_read + LATER - time.monotonic()))
        found = self._content()
        if any(self._given[name] != value for name, value in found.items()):
            _log.info("samples are not compared between ranks: they change between two readings in one process")
            self._given |= dict.fromkeys(found, NOT_COMPARED)
        return self._given

    def _new_gradients(self, world: World, *, same: bool = False) -> Gradients:
        world_size, rank = world.world_size, world.rank
        if self._options.gradients is not None:
            return self._options.gradients(world_size, rank)
        # An exchange between GPUs that is aborted may go unnoticed, see RoundGroups.confirm().
        how: dict[str, Any] = {"buffers": self._options.buffers, "same": same, "by_host": self._rounds.by_host}
        how |= {"outlives": self._rounds.shards, "mesh": self._rounds.mesh}
        if self._options.exact:
            return ExactGradients(self._model, self._optimizer, world_size, rank, **how)
        rows = len(self._epochs.batch.micro_batches())
        room = cargo_size(rows, 1 + len(self._options.metrics), len(NOTHING.counts()))
        overlap = not self._options.redo
        return Gradients(self._model, self._optimizer, world_size, rank, overlap=overlap, room=room, **how)

    def _resume_in_place(self, live: Live) -> Resumed:
        """Get a state that is not in doubt; a process that cannot take it ends, for a new one."""
        rounds, why = self._rounds, ""
        try:
            resumed = self._resume(live)
        except UsageError as error:
            why = error.message
        else:
            if resumed.last is not None:  # its own state, or that of another process
                self._bounded = min(self._bounded, resumed.step)
                return resumed
            if resumed.state is not None:
                self._bounded = -1
                if not resumed.trained:  # a checkpoint, from which new processes go on as the script has made them
                    self._train_the_same(self._trained_first)
                if self.engine.checkpoint is not None:
                    self.engine.checkpoint.forget_results()
                return resumed
            why = "there is no snapshot in memory"
        rounds.start_again(why)
        raise RoundOverError(why)

    def _resume(self, live: Live | None) -> Resumed:
        if live is None and self._step and self.engine.trainings.was_last(self._trained):
            return Resumed(self._step)
        identity = self._identity
        resumed = self.engine.restore(self._checkpoint, identity, self._state, self._trained, live)
        if live is not None:
            return resumed
        if self._options.exact and (there := resumed.identity.get(TENSOR_RANKS, 1)) > identity.get(TENSOR_RANKS, 1):
            raise UsageError(
                f"{resumed.origin} was made in exact mode with {TENSOR_RANKS} {there}, this training has none: results "
                "are bitwise equal only for the same number.",
                "Give run.mesh() the same tensor=, or leave out exact=True.",
            )
        if resumed.state is None:
            resumed = replace(resumed, step=self._step)
        else:
            self._epochs.go_on(resumed.identity)
        return resumed

    def _end_step(self) -> None:
        """Note what follows a step that was just done."""
        self._rounds.check_exchanges()
        gradients = self._gradients
        assert gradients is not None
        if gradients.parameters.extra and OWN not in self._parts:
            # The optimizer had none when the loop began.
            self._parts[OWN] = OwnParameters(self._model, self._optimizer)
            self._follow(self.engine.state.extended(self._parts))
        self._owes_evaluation, self._owes_boundary = self._lacks_evaluation(self._step), True
        self._owes_snapshot = self._owes_evaluation

    def _after(self, step: int, *, evaluated: bool = True) -> Trained:
        engine = self.engine
        trained = self._trains if self._rounds.goes_back or self._options.share else dict
        return Trained(step, engine.checkpoint, self._identity, self._state, engine.worlds, evaluated, trained)

    def _complete(self) -> None:
        """Do what follows the last step, in the next round if this one ends meanwhile."""
        evaluated = False
        while self._owes_evaluation or self._owes_boundary:
            error: RuntimeError | None = None
            try:
                if self._owes_snapshot:
                    # An evaluation may take longer than many steps: a fault within it must not cost those before.
                    self._owes_snapshot = False
                    stays = self._stays()
                    self.engine.step_done(self._after(self._step, evaluated=False), stays)
                    if works_in_train(self._model):
                        self.engine.saver.settle()  # before evaluation mode changes what is still being copied
                if self._owes_evaluation:
                    self._evaluate()
                    self._include_registered()  # an evaluation may begin an average
                    evaluated = True
                if not self._owes_boundary or not self._boundary(keep=evaluated or self._owes_copy):
                    return
            except RuntimeError as broken:
                if not self._rounds.caused(broken):
                    raise
                error = broken
            self._change_round(error)
            if self._received is not None:
                self._take(self._received)

    def _stays(self) -> Callable[[Tensor], bool]:
        """Return whether a tensor keeps its values until the next update: an average, too, is updated after one."""
        averages = (part.parameters() for part in self._state.parts if isinstance(part, AveragedModel))
        return stays_of(self._optimizer, chain(self._model.parameters(), *averages))

    def _lacks_evaluation(self, step: int) -> bool:
        return self._options.evaluations.due(step, end=step == self._end)

    def _evaluate(self) -> None:
        epoch = self._epochs.position(self._step).epoch
        with self._rounds.link.doing(Activity.EVALUATION), evaluating(self._model), self._rounds.in_pass():
            try:
                keeping = keeping_buffers(self._model, self._options.buffers)
                self._options.evaluations.evaluate(self._step, epoch, self.engine.checkpoint, keeping)
            except RuntimeError as broken:
                if self._gradients is not None and broken is self._gradients.failed:
                    broken.__traceback__ = None  # which has frames of the script, whose evaluation has used the model
                raise
        self._rounds.note_exchanges()
        self._owes_evaluation = False

    def _boundary(self, *, keep: bool) -> bool:
        """Save the state if it is due; the engine then knows whether all ranks must stop here.

        Args:
            keep: whether to take a snapshot in memory in any case.

        Returns:
            Whether this process leaves the round, to continue in another one.
        """
        self._owes_boundary, self._bounded = False, self._step
        end = self._step == self._end
        stays = self._stays()
        evaluations, engine = self._options.evaluations, self.engine
        # The first rank's clock decides for all.
        wanted = engine.world.rank == 0 and evaluations.wanted()
        after = self._after(self._step)
        engine.step_boundary(after, end=end, stays=stays, keep=keep, evaluate=wanted)
        self._owes_copy = False
        if engine.evaluates:
            engine.evaluates = False
            evaluations.agree(self._step + 1)
        if self._pace is not None and not end and not engine.stopped:
            self._pace.compare(self._step)
            self._rounds.note_exchanges()
        return engine.drains_live()

    def _halve(self, step: Transaction) -> None:
        before = self._epochs.batch
        try:
            self._epochs.batch = halved(before)
        except BatchError:
            raise MemoryError(f"step {step.number}: a rank has no memory even for a micro-batch of 1 sample") from None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if self.engine.world.rank == 0:
            _log.warning(
                "step %d: a micro-batch of %s samples did not fit into memory; it is done again with %s",
                step.number,
                before.micro,
                self._epochs.batch.micro,
            )


def _warn_of_idle_ranks(world: World, batch: GlobalBatch) -> None:
    idle = batch.idle_ranks(world.data_size) * world.tensor
    if idle and world.rank == 0:
        advised = batch.micro_for(world.data_size)
        remedy = f"micro={advised} would use all" if advised else "the global batch has fewer samples than ranks"
        _log.warning("%d of %d ranks have no micro-batch to compute; %s", idle, world.world_size, remedy)
