"""The step as a transaction: micro-batches in, one optimizer step out.

Until :meth:`Transaction.update` succeeds, nothing has changed: parameters, buffers and optimizer are as they were when
the step began. All communication takes place in the iteration over the micro-batches. If it fails because the round is
over, the iteration begins again in the next round, with this rank's micro-batches there. With several optimizers, a
step may make several passes over the same micro-batches, each with an update. A round that begins between two of them
goes on with the later one: processes that have not made the earlier ones leave them out, and take over their results.
Only whole steps are saved.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from elastic_launch.errors import REPEATS_NOTE, ElasticLaunchError, UsageError
from elastic_launch.training.checkpoints.resumed import Outcome
from elastic_launch.training.data.batches import NotedBatch
from elastic_launch.training.data.epochs import Epochs
from elastic_launch.training.gradients.accumulation import Bits, ExactGradients
from elastic_launch.training.gradients.means import Means
from elastic_launch.training.held import callers
from elastic_launch.training.live.rehearsal import unchanged
from elastic_launch.training.passes import Pass, Share
from elastic_launch.training.purity import Outputs, StepWatch, differs, due
from elastic_launch.training.randomness import derive, kept, left_seeded, seed_all
from elastic_launch.training.ranks import collectives
from elastic_launch.training.ranks.checksum import checksums
from elastic_launch.training.ranks.collectives import MicroBatchContext
from elastic_launch.training.together import OptimizerSteps
from elastic_launch.training.verification import Digests, compared, culprit
from elastic_launch.training.verifying import StepCheck, digest_of
from elastic_launch.training.wrapped import whole

if TYPE_CHECKING:
    from elastic_launch.training.loop import Loop

_PLAIN = nullcontext()


class NonFiniteLossError(ElasticLaunchError):
    """A loss is NaN or infinite.

    The message names the step, the micro-batch, its samples, the rank, and the newest checkpoint.
    """


@dataclass(frozen=True, slots=True)
class Recovered:
    """How a step continues in another round."""

    share: Share
    done: Outcome | None = None  # of the step if other ranks have done it, so that this rank only receives the result
    passes: Sequence[Outcome] = ()  # that other ranks have done, if they are further in the same step than this one
    again: bool = False  # whether the step is not done, but will be done again from its head, or from an earlier step's


@dataclass(frozen=True, slots=True)
class StepRules:
    """What all steps of a loop have in common."""

    optimizers: OptimizerSteps
    metrics: Sequence[str] = ()  # names of the values averaged besides the loss
    verify: bool = False  # whether checked steps give a micro-batch twice


class Transaction:
    """One optimizer step of a loop. The script gets a :class:`elastic_launch.Step` of it.

    Args:
        epochs: has the samples of the step, and the seed from which all randomness derives.
        number: the step, counted from 0.
        done: loss and metrics of each pass that other ranks have done before this process joined them.
        again: whether this process has done the step before, or others had when it began.

    Attributes:
        broken_off: whether it has changed nothing, and will be done again.
        loss, metrics, updated, skipped, checking, clipped_norm: see :class:`elastic_launch.Step`.
        too_large: whether the step is repeated, because a micro-batch did not fit into some rank's memory.
        all_know: whether all ranks know that; otherwise it is repeated with micro-batches of the same size.
        in_training_mode: whether the model was, in the last backward pass; None: there was none.
        data_s, exchange_s: seconds of waiting for data, and in exchanges with other ranks.
    """

    def __init__(
        self,
        loop: Loop,
        rules: StepRules,
        epochs: Epochs,
        number: int,
        share: Share,
        done: Sequence[Outcome] = (),
        *,
        again: bool = False,
    ) -> None:
        self.position = epochs.position(number)
        self.samples = epochs.samples_in(number)  # in the global batch
        self.share = share
        self.loss = math.nan
        self.metrics: dict[str, float] = {}
        self.checking = False
        self._skips: Sequence[Tensor | bool] = ()  # one is not zero if the optimizer did not step
        self.clipped_norm: Tensor | None = None
        self.too_large = self.all_know = False
        self.in_training_mode: bool | None = None
        self.data_s = self.exchange_s = 0.0
        self.broken_off = False
        watched = isinstance(share.gradients, ExactGradients) and due(epochs.seed, number)
        self._callers = callers() if watched else None
        self._again = again
        self._loop = loop
        self._rounds = loop.engine.rounds
        self._rules = rules
        self._epochs = epochs
        self._pass = Pass(share, len(rules.metrics))
        self._passes = 0
        self._open = False  # a pass has begun and is not updated by
        self._done = list(done)
        self._done_elsewhere = False
        self._moved = bool(done)  # a pass has begun in another round than one before it
        self._error: Exception | None = None  # that ended the last backward pass, exchange or update
        self._bits: Bits | None = None  # of the micro-batch that is given once more
        self._factor = 1.0  # its weight, unless the script gives one
        self._check: StepCheck | None = None  # if the current pass is verified
        self._empty = False  # whether the current pass counts nothing, and its backward() is to come
        self._alone = MicroBatchContext(collectives.refuse if share.gradients.exact else collectives.warn)
        self._drawn: list[NotedBatch] = []  # micro-batches, for a second pass

    @property
    def number(self) -> int:
        """The step's number, from 1."""
        return self.position.step + 1

    @property
    def repeated(self) -> bool:
        """See :attr:`elastic_launch.Step.repeated`."""
        return self._again or self.broken_off

    @property
    def model(self) -> Any:
        """What the forward pass calls."""
        return self.share.gradients.model

    @property
    def updated(self) -> bool:
        """Whether an optimizer has stepped and no pass has begun since."""
        return self._passes > 0 and not self._open

    @property
    def skipped(self) -> bool:
        """See :attr:`elastic_launch.Step.skipped`. Reading it may wait for a GPU."""
        return any(map(bool, self._skips))

    @property
    def exchanged(self) -> bool:
        """Whether all ranks have the losses and gradients of the current pass."""
        return self._pass.exchanged

    def micro_batches(self) -> Generator[Any, None, None]:
        """Begin a pass, and yield this rank's collated micro-batches; see :meth:`elastic_launch.Step.__iter__`."""
        self._begin_pass()
        while not self._left_out:
            try:
                with self._rounds.in_pass():
                    yield from self._go_through()
            except RuntimeError as error:
                if not self._goes_on(error):
                    raise
            else:
                break
        # A rank draws what its micro-batches do; what the script draws afterwards must not depend on them.
        self._seed("after", self._passes)

    def _go_through(self) -> Generator[Any, None, None]:
        gradients = self.share.gradients
        if gradients.passes(self.share.plan):
            yield from self._samples_of_pass()
            gradients.reshard()  # the script may have left parameters gathered, which are other objects
            if not self.too_large:
                self._loop.positions.pass_ends(self.number, gradients.refuse_changes)
        self._pass.current = None
        if self._check is not None:
            yield from self._judged(self._check)
        began = time.perf_counter()
        with self._noting_errors():
            self.exchange()
        self.exchange_s += time.perf_counter() - began
        self._rounds.note_exchanges()  # no other follows before the step's end

    @property
    def _left_out(self) -> bool:
        """Whether other ranks have done the current pass, and this one only receives its result."""
        return self._done_elsewhere or self._passes <= len(self._done)

    def _may_go_on(self, error: RuntimeError) -> bool:
        # Once within a step: a script whose later passes need something from its earlier ones fails in a process that
        # has left these out, and trains on after a restart, from the step's start.
        return not (self._passes > 1 and self._moved) and self._rounds.caused(error)

    def _goes_on(self, error: RuntimeError, *, in_pass: bool = True) -> bool:
        """Continue the pass in another round, from its first micro-batch; return whether that is possible.

        If the script has left the pass, the step is done again after it.
        """
        if not self._may_go_on(error):
            return False
        self._rounds.groups.disconnect()  # so that no exchange that is under way is waited for
        self._pass.abandon()
        recovered = self._loop.recover(error, self._done, in_pass=in_pass)
        self._error = None
        self._drawn.clear()
        self._moved |= self._passes > 1 or bool(recovered.passes)
        self.share = recovered.share
        self._pass = Pass(self.share, len(self._rules.metrics))
        self.broken_off |= recovered.again
        if recovered.done is not None:
            self._done_elsewhere = True
            self.loss, self.metrics = recovered.done
        elif recovered.passes:
            self._done = list(recovered.passes)
        else:
            self._start_pass()
        return True

    def _samples_of_pass(self) -> Generator[Any, None, None]:
        plan, gradients, watch, check = self.share.plan, self.share.gradients, self._new_watch(), self._check
        sample: Any = None
        for number, micro in enumerate(plan.micro_batches):
            self._rounds.check_over()
            began = time.perf_counter()
            with self._noting_errors(), left_seeded(), _PLAIN if watch is None else watch.loading():
                try:
                    sample = self._sample(number)
                except Exception as error:
                    where = f"micro-batch {micro.index} of step {self.number} was loaded"
                    origin = self._loop.origin(self.position.step, micro.index)
                    error.add_note(f"  It was raised when {where}. {origin}")
                    raise
            self.data_s += time.perf_counter() - began
            with gradients.micro_batch(number):
                self._seed("micro-batch", micro.index)
                self._pass.current = number
                checked = check is not None and check.micro == micro.index
                with (
                    self._alone,
                    watch.first(sample) if watch is not None and number == 0 else _PLAIN,
                    check.recorded(sample) if check is not None and checked else _PLAIN,
                ):
                    yield sample
                if self._pass.broken is not None:
                    raise self._pass.broken
                if self._pass.done != number + 1:
                    raise self._without_backward(f"micro-batch {micro.index}")
            if check is not None and checked:
                check.computed(self._pass.loss_of(number))
        if watch is not None:
            yield from self._checked_by(watch)
        if check is not None and (author := check.assignment.authors.get(gradients.rank)) is not None:
            with self._noting_errors(), left_seeded():
                sample = next(self.share.batches)
            check.again = yield from self._digested(sample, check.assignment.micros[author])
        for number in range(plan.grad_accum, gradients.passes(plan)):
            if plan.grad_accum == 0:
                sample = self._epochs.spare(self.position.step)
            with gradients.empty_pass(number):
                self._seed("empty pass", number)
                self._empty = True
                yield sample
                if self._empty:
                    raise self._without_backward("a micro-batch")

    def _seed(self, what: str, number: int) -> None:
        later = (self._passes,) if self._passes > 1 else ()  # so that it draws other numbers than the first pass
        seed_all(derive(what, self._epochs.seed, self.position.step, number, *later), devices=True)

    def _without_backward(self, which: str) -> Exception:
        return self._misuse(
            f"step {self.number}: {which} ended without step.backward(loss).", "Call it once for each micro-batch."
        )

    def _new_watch(self) -> StepWatch | None:
        """Return what checks the micro-batches of this pass; None in most steps."""
        gradients = self.share.gradients
        if not isinstance(gradients, ExactGradients) or not self.share.plan.grad_accum or self._callers is None:
            return None
        return StepWatch(gradients, f"step {self.number}", repeats=self._rules.verify, callers=self._callers)

    def _checked_by(self, watch: StepWatch) -> Generator[Any, None, None]:
        """Check what the micro-batches have left; if the script expects that, give it the first one once more."""
        watch.check()
        if not watch.repeats:
            return
        gradients = self.share.gradients
        assert isinstance(gradients, ExactGradients)
        watch.bits.loss = checksums([self._pass.loss_of(0)])
        self.checking = True
        try:
            with unchanged(self.model):
                again = yield from self._given_again(watch, gradients)
            gradients.restore_buffers()
            if (what := watch.bits.differing(again, [*gradients.parameters.reduced])) is None:
                return
            one, two = Outputs(self.model), Outputs(self.model)
            for outputs in (one, two):
                with outputs.recorded():
                    yield from self._given_again(watch, gradients)
        finally:
            self.checking, self._bits = False, None
        raise differs(f"step {self.number}", what, one.culprit(two))

    def _new_check(self) -> StepCheck | None:
        """Return what verifies this pass; None in most steps."""
        verifier, gradients = self.share.verifier, self.share.gradients
        if verifier is None or not isinstance(gradients, ExactGradients):
            return None
        assignment = verifier.assignment(self.position.step)
        return StepCheck(assignment, gradients.rank, gradients) if assignment.authors else None

    def _digested(self, sample: Any, micro: int) -> Generator[Any, None, Digests]:
        """Give the script a micro-batch of any rank, of which nothing remains; return what comes out."""
        gradients = self.share.gradients
        assert isinstance(gradients, ExactGradients)
        samples, self.checking = digest_of(sample), True
        try:
            with unchanged(self.model):
                bits = yield from self._computed_again(sample, micro, gradients)
            gradients.restore_buffers()
        finally:
            self.checking, self._bits = False, None
        return Digests(samples, bits.number())

    def _judged(self, check: StepCheck) -> Generator[Any, None, None]:
        """Compare what the ranks have found; if they differ, some compute it again, and all know who is at fault."""
        verifier, step, assignment = self.share.verifier, self.position.step, check.assignment
        assert verifier is not None
        with self._noting_errors():
            own, again = verifier.exchange(check)
        comparison = compared(assignment, own, again)
        if comparison.data:
            micro = comparison.data[0]
            raise _data_differ(f"step {self.number}, micro-batch {micro}", self._loop.origin(step, micro))
        if not comparison.disputes:
            with self._noting_errors():
                self._loop.verified()
            return
        if assignment.machines:
            with self._noting_errors():
                verifier.refuse_machines(f"step {self.number}", assignment, again, self._rounds.link)
        mine: dict[int, int] = {}
        for place, dispute in enumerate(comparison.disputes):
            if verifier.world.rank in dispute.ranks:
                found = yield from self._digested(self._epochs.spare(step, dispute.micro), dispute.micro)
                mine[place] = found.result
        with self._noting_errors():
            second = verifier.exchange_second(comparison.disputes, mine)
            liars = set()
            for dispute, results in zip(comparison.disputes, second, strict=True):
                first = {dispute.author: own[dispute.author].result, dispute.checker: again[dispute.checker].result}
                liars.add(culprit(dispute, first, results))
            self._loop.corrupted(sorted(rank for rank in liars if rank is not None))

    def _given_again(self, watch: StepWatch, gradients: ExactGradients) -> Generator[Any, None, Bits]:
        return self._computed_again(watch.sample(), self.share.plan.micro_batches[0].index, gradients)

    def _computed_again(self, sample: Any, micro: int, gradients: ExactGradients) -> Generator[Any, None, Bits]:
        self._rounds.check_over()
        bits = self._bits = Bits()
        self._factor = self._epochs.plan(self.position.step, 1, 0).weights[micro]
        with gradients.recording(bits, repeated=True):
            self._seed("micro-batch", micro)
            with self._alone:
                yield sample
        if bits.loss is None:
            raise self._misuse(
                f"step {self.number}: a micro-batch that is computed again (step.checking) ended without "
                "step.backward(loss).",
                "Compute its loss as that of any other, and leave out only what counts or logs.",
            )
        return bits

    def _begin_pass(self) -> None:
        if self._open:
            raise self._misuse(
                f"step {self.number}: a second `for sample in step` began before step.update().",
                "Each pass over the micro-batches ends with an update.",
            )
        if self._passes and not self._rules.optimizers.several:
            raise UsageError(
                f"step {self.number} was already iterated over, and has only one optimizer.",
                "Give run.steps() a dict of optimizers to have a pass for each, by step.update(optimizer=name).",
            )
        self._passes += 1
        self._open = True
        self._rounds.check_exchanges()
        if self._left_out:
            self._rules.optimizers.complete()
            return
        self._loop.positions.pass_begins()
        self._start_pass()

    def _start_pass(self) -> None:
        self._pass = Pass(self.share, len(self._rules.metrics))
        self._check = self._new_check()
        self.share.gradients.begin(self.share.plan)

    def _sample(self, number: int) -> Any:
        """Return a micro-batch: a second pass has those of the first."""
        if not self._rules.optimizers.several:
            return next(self.share.batches)
        if number == len(self._drawn):
            self._drawn.append(NotedBatch(next(self.share.batches)))
        noted, index = self._drawn[number], self.share.plan.micro_batches[number].index
        if not noted.shows:
            try:
                return copy.deepcopy(noted.batch)
            except Exception as error:  # noqa: BLE001 - of the script's classes
                raise UsageError(
                    f"step {self.number}: micro-batch {index} cannot be copied ({type(error).__name__}: {error}), and "
                    "each pass must get it unchanged.",
                    "Have the loader give tensors, numbers and strings, and lists and dicts of them.",
                ) from None
        if not noted.is_as_it_was():
            raise UsageError(
                f"step {self.number}: the script changed micro-batch {index} in place in an earlier pass, and the next "
                "pass would get the changed values.",
                "Change a copy: x = x * 2, for example, and not x *= 2.",
            )
        return noted.batch

    def backward(self, loss: Tensor, weight: float | None, metrics: Mapping[str, Tensor | float]) -> None:
        """Run the backward pass of the current micro-batch; see :meth:`elastic_launch.Step.backward`."""
        self._loop.engine.trainings.refuse_swapped("step.backward()")
        this, plan, gradients = self._pass, self.share.plan, self.share.gradients
        if self._empty:
            self._empty = False
            gradients.differentiate(loss, empty=True)
            return
        if self._bits is not None:
            gradients.refuse_own()
            self._bits.loss, gradients.void = checksums([loss.detach()]), weight == 0
            gradients.differentiate(self._weighted(loss, weight, self._factor))
            return
        if this.current is None or this.done != this.current:
            raise UsageError("Call step.backward() exactly once in each pass of `for sample in step`.")
        if this.told:
            raise self._misuse(
                "step.backward() cannot be retried: the failed call has already reached other ranks or the gradients.",
                "Let the error end this process.",
            )
        if not isinstance(loss, Tensor):
            raise UsageError(f"step.backward() got a loss of type {type(loss).__name__}.", "Give a tensor.")
        _check_scalar("loss", loss)
        if not loss.requires_grad:
            raise UsageError(
                "step.backward(loss): no gradient leads from this loss to a parameter.",
                "Compute it without detach(), item() and torch.no_grad(), from parameters that require gradients.",
            )
        self._rules.optimizers.refuse_scaled(loss)
        self.in_training_mode = self.model.training
        values = self._checked(metrics)
        to_do, gradients.void = self._weighted(loss, weight, plan.weights[this.current]), weight == 0
        this.add(whole(loss), weight, values)
        try:
            if this.current == plan.grad_accum - 1 and gradients.talks_in_between and gradients.on_cpu:
                # Overlaps with the backward pass, which talks to other ranks anyway. Reading a GPU's loss would delay
                # it.
                this.post(self._loop.engine)
            with gradients.backward(this.current):
                gradients.differentiate(to_do)
        except BaseException as error:
            # A script that catches this error has not done this micro-batch.
            this.fail()
            if isinstance(error, RuntimeError) and self._may_go_on(error):
                this.broken = error  # the iteration goes on from here
                return
            if isinstance(error, Exception) and not isinstance(error, torch.OutOfMemoryError):
                self._error = error  # its traceback keeps the graph in memory, which a second try may need
            raise
        self._error = None

    def _weighted(self, loss: Tensor, weight: float | None, by_samples: float) -> Tensor:
        # A weight is scaled to about the size of a sample's; update() divides by what they sum up to.
        share = by_samples if weight is None else weight / self.samples
        # Each operation counts in a small step, and again in its backward pass.
        scalar = loss if loss.dim() == 0 else loss.reshape(())
        scaled = scalar if share == 1 else scalar * share
        scaler = self._rules.optimizers.scaler
        return scaled if scaler is None else scaler.scale(scaled)

    def _misuse(self, message: str, hint: str) -> Exception:
        """Return the error to raise if a step is not gone through as it must be.

        If the script has caught an error of the step, it is that one: the step is incomplete because of it. A rank that
        was killed, for example, breaks the others' exchange, and a restart helps.
        """
        if self._error is None and self._moved:
            # Not a UsageError, by which the run would end: a restart does the whole step again.
            why = "This step's passes were made in different rounds, which end and begin when the world changes."
            rule = "A pass can use nothing from an earlier one but step.loss, step.metrics and what is saved."
            return ElasticLaunchError(message, f"{hint} {why} {rule}")
        if self._error is None:
            return UsageError(message, hint)
        self._error.add_note(f"  The script caught this error and went on: {message}")
        return self._error

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._error = error
            raise

    def give_up(self) -> None:
        """Report, after an out-of-memory error, that this rank has no memory for its micro-batch.

        :meth:`update` then does nothing on any rank except to have the step repeated.

        Raises:
            UsageError: in default mode, where backward passes exchange gradients and the other ranks would wait for
                ever; it needs ``exact=True``.
        """
        if self.share.gradients.talks_in_between:
            raise UsageError(
                "A step cannot be given up: backward passes have sent gradients to other ranks.", "It needs exact=True."
            )
        self._error = None
        self._pass.clear()

    def update(self, clip_norm: float | None, optimizer: str | None) -> None:
        """Step the optimizers; see :meth:`elastic_launch.Step.update`."""
        self._loop.engine.trainings.refuse_swapped("step.update()")
        if isinstance(clip_norm, str):
            raise UsageError(f"step.update({clip_norm!r}): clip_norm comes first.", "Write step.update(optimizer=...).")
        chosen = self._rules.optimizers.chosen("update", optimizer)
        if self._left_out and self._open:
            if not self._done_elsewhere:
                self.loss, self.metrics = self._done[self._passes - 1]
            self._open = False
            self._loop.pass_updated(self._passes)
            return
        came, hint, accum = "", "Call it once, after the loop over the step.", self.share.plan.grad_accum
        if not self._open:
            came = "a second time" if self.updated else "before the loop over the step"
        elif self._pass.out_of_memory:
            pass  # whose iteration has ended early
        elif self._pass.done != accum:
            came = f"after {self._pass.done} of {accum} micro-batches"
        elif not (self._pass.exchanged or self.too_large):
            # All that follows the last micro-batch was left out, such as the means of its buffers.
            came = "before the loop over the step had ended"
            hint += " Do not leave that loop by break, next() or zip()."
        if came:
            raise self._misuse(f"step.update() came {came}.", hint)
        with self._noting_errors():
            self._update(chosen, clip_norm)

    def _update(self, chosen: list[torch.optim.Optimizer], clip_norm: float | None) -> None:
        try:
            self.exchange()
        except RuntimeError as error:
            # A step that was given up is exchanged only here, as its iteration has ended early.
            if not self._pass.out_of_memory or not self._goes_on(error):
                raise
            self._open = not self._done_elsewhere
            self.too_large = self._open
            return
        if self.too_large:
            return
        means, gradients, optimizers = self._pass.means, self.share.gradients, self._rules.optimizers
        assert means is not None
        self._check_losses()
        if means.correction:
            self._rounds.updates()
            optimizers.unscale(chosen, gradients, f"step {self.number}")
        try:
            if means.correction and clip_norm is not None:
                with self._rounds.exchanging():
                    self.clipped_norm = gradients.clip(optimizers.parameters(chosen, gradients), clip_norm)
            self._rounds.meet_replica()
        except RuntimeError as error:  # as in grad_norm()
            if not self._goes_on(error, in_pass=False):
                raise
            self._open = False
            self._loop.pass_updated(self._passes)
            return
        if not means.correction:
            gradients.discard()
            self._skips = [True]
            self._end_pass(means)
            return
        gradients.finish_buffers()
        if self.number == 1:
            optimizers.warn_without_gradients(chosen, gradients, f"pass {self._passes} of the first step")
        self._loop.engine.saver.settle()
        gradients.waiting = False
        self._skips = optimizers.step(chosen)
        self._end_pass(means)

    def _end_pass(self, means: Means) -> None:
        self.loss, *metrics = means.values
        self.metrics = dict(zip(self._rules.metrics, metrics, strict=True))
        self._open = False
        self._done.append((self.loss, self.metrics))
        if self._rules.optimizers.several:
            self._loop.pass_updated(len(self._done))

    def exchange(self) -> None:
        """Exchange losses and gradients with all ranks, once per pass."""
        this = self._pass
        if this.means is not None or this.too_large:
            return
        if this.exchanged:
            raise self._misuse(f"step {self.number}: the exchange of gradients failed.", "See the error before.")
        this.exchange(self._loop.engine, self.samples, f"step {self.number}")
        self.too_large = self.all_know = this.too_large
        self._rules.optimizers.complete()

    def _check_losses(self) -> None:
        """Check that every loss is finite; raise a NonFiniteLossError on all ranks if one on any rank is not."""
        if (found := self._pass.not_finite()) is None:
            return
        (index, loss, rank), gradients = found, self.share.gradients
        gradients.discard()
        reason = "Nothing was updated by it"
        if (name := gradients.parameters.not_finite()) is not None:
            reason += f", but {name} is not finite already: an earlier step's gradient was not"
        where = f"The loss is {loss} in step {self.number}, micro-batch {index}"
        error = NonFiniteLossError(
            f"{where}, on rank {rank}.",
            f"{reason}. {self._loop.origin(self.position.step, index)} If it diverges, a lower learning rate helps, "
            "or clipping gradients: step.update(clip_norm=1.0) or Trainer(clip_norm=1.0); with fp16, bf16 instead.",
        )
        if gradients.exact:
            error.add_note(f"{REPEATS_NOTE}{where}.")
        raise error

    def gradients(self, optimizer: str | None) -> dict[str, Tensor]:
        """Return the gradients of the global batch by parameter name; see :meth:`elastic_launch.Step.gradients`."""
        gradients, optimizers = self.share.gradients, self._rules.optimizers
        chosen = optimizers.chosen("gradients", optimizer)
        if not self._open or not (self._pass.exchanged or self._left_out or self.too_large):
            raise self._misuse(
                f"step {self.number}: step.gradients() or step.grad_norm() came too early or too late.",
                "Call it between the loop over the step and step.update().",
            )
        if self._left_out or self.too_large:
            return {}
        if optimizers.scaler is not None and len(chosen) > 1:
            raise UsageError(
                "step.gradients() without a name: the scaler must know which optimizer steps next.",
                'Name the one that step.update(optimizer="...") will name.',
            )
        optimizers.unscale(chosen, gradients, f"step {self.number}")
        own, parameters = set(map(id, optimizers.parameters(chosen, gradients))), gradients.parameters
        return {name: p.grad for name, p in parameters.trained.items() if p.grad is not None and id(p) in own}

    def grad_norm(self, optimizer: str | None) -> float:
        """Return the 2-norm of all gradients together; see :meth:`elastic_launch.Step.grad_norm`."""
        found = self.gradients(optimizer)
        if self._left_out:
            return math.nan
        try:
            with self._rounds.exchanging():
                return float(self.share.gradients.norm(list(found.values())))
        except RuntimeError as error:  # of a sharded model's ranks, which exchange their parts of it
            if not self._goes_on(error, in_pass=False):
                raise
            return math.nan

    def check_complete(self, *, more_passes: bool) -> None:
        """Check that the script has gone through the step.

        Args:
            more_passes: whether other ranks make another pass in it.
        """
        if not self.updated:
            raise self._misuse(
                f"step {self.number} ended without step.update().",
                "Call it once for each step. After an error in a step that the script catches, it must not go on to "
                "the next one.",
            )
        if more_passes:
            raise self._misuse(
                f"step {self.number} ended, and other ranks make another pass in it.",
                "Make the same passes on all ranks: they may depend on step.number, for example.",
            )

    def _checked(self, metrics: Mapping[str, Tensor | float]) -> list[float | Tensor]:
        names = self._rules.metrics
        if metrics.keys() != set(names):
            raise UsageError(
                f"step.backward() got the metrics {sorted(metrics)}; run.steps(metrics=...) names {sorted(names)}.",
                "Name them all in run.steps(metrics=...): a rank that has no micro-batch must know them, too.",
            )
        for name, value in metrics.items():
            _check_scalar(f"metric {name!r}", value)
        ordered = [metrics[name] for name in names]
        return [whole(value) if isinstance(value, Tensor) else value for value in ordered]


class Rehearsal(Transaction):
    """A step before the process has a place in a round: each pass has one micro-batch, and an update does nothing."""

    def micro_batches(self) -> Generator[Any, None, None]:
        self._begin_pass()
        with kept(devices=True), closing(self._samples_of_pass()) as samples:
            yield next(samples)
        self._rules.optimizers.complete()

    def update(self, clip_norm: float | None, optimizer: str | None) -> None:
        self._open = False

    def _checked(self, metrics: Mapping[str, Tensor | float]) -> list[float | Tensor]:
        return []

    def gradients(self, optimizer: str | None) -> dict[str, Tensor]:
        return {}

    def grad_norm(self, optimizer: str | None) -> float:
        return math.nan


def _data_differ(where: str, origin: str) -> ElasticLaunchError:
    """Return the error that two ranks were given other samples for a micro-batch."""
    return ElasticLaunchError(
        f"verify=: {where}: the loaders of two ranks gave different samples.",
        f"{origin} The dataset must return the same sample for an index on all nodes and at any time.",
    )


def _check_scalar(what: str, value: Tensor | float) -> None:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise UsageError(
            f"step.backward() got a {what} of shape {tuple(value.shape)}.", "Reduce it to one number, by its mean."
        )
