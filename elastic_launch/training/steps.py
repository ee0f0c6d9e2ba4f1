"""The step as a transaction: micro-batches in, one optimizer step out.

Until :meth:`Step.update` succeeds, nothing has changed: parameters, buffers and optimizer are as they were when the
step began. All communication takes place in the iteration over the micro-batches. If it fails because the round is
over, the iteration begins again in the next round, with this rank's micro-batches there. With several optimizers, a
step may make several passes over the same micro-batches, each with an update. A round that begins between two of them
goes on with the later one: processes that have not made the earlier ones leave them out, and take over their results.
Only whole steps are saved.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elastic_launch.batch import BatchPlan, slice_of
from elastic_launch.errors import REPEATS_NOTE, ElasticLaunchError, UsageError
from elastic_launch.training.checkpoints.resumed import Outcome
from elastic_launch.training.data.batches import versions
from elastic_launch.training.data.loader import Position
from elastic_launch.training.engine import Engine
from elastic_launch.training.gradients.accumulation import ExactGradients, Gradients
from elastic_launch.training.gradients.bits import Bits
from elastic_launch.training.gradients.means import Means, MeanTable
from elastic_launch.training.live.rehearsal import unchanged
from elastic_launch.training.positions import Positions
from elastic_launch.training.purity import Outputs, StepWatch, differs, due
from elastic_launch.training.randomness import derive, drop_second_normal, kept, left_seeded, seed_all
from elastic_launch.training.ranks import collectives
from elastic_launch.training.ranks.agreement import Agreement
from elastic_launch.training.ranks.checksum import checksums
from elastic_launch.training.ranks.collectives import MicroBatchContext
from elastic_launch.training.together import Optimizers

_log = logging.getLogger(__name__)

_PLAIN = nullcontext()


class NonFiniteLossError(ElasticLaunchError):
    """A loss is NaN or infinite.

    The message names the step, the micro-batch, its samples, the rank, and the newest checkpoint.
    """


class RoundOverError(RuntimeError):
    """The round that this process trained in is over."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """How a step continues in another round."""

    plan: BatchPlan
    batches: Iterator[Any]
    gradients: Gradients
    agreement: Agreement | None
    done: Outcome | None = None  # of the step if other ranks have done it, so that this rank only receives the result
    passes: Sequence[Outcome] = ()  # that other ranks have done, if they are further in the same step than this one


class Step:
    """One optimizer step. Iterating over it yields this rank's micro-batches.

    ::

        for step in run.steps(loader, model, optimizer, until="3ep"):
            for x, y in step:
                step.backward(loss_fn(step.model(x), y))
            step.update()

    Attributes:
        position: the step's place in the training.
        plan: this rank's share of the global batch.
        loss: mean loss over the global batch in the last updated pass, the same on all ranks; NaN before
            :meth:`update`.
        metrics: means of the metrics passed to :meth:`backward`, by name, over the same pass; empty before
            :meth:`update`.
        updated: whether an optimizer has stepped and no pass has begun since.
        skipped: whether the scaler skipped the optimizer step because gradients overflowed.
        checking: whether the current micro-batch is given once more, with ``verify=True``; nothing of it counts.
        clipped_norm: 2-norm of the gradients before clipping, as a tensor with one element; None: they were not clipped
            by this rank.
    """

    def __init__(
        self,
        position: Position,
        plan: BatchPlan,
        batches: Iterator[Any],
        gradients: Gradients,
        optimizer: torch.optim.Optimizer | Optimizers,
        *,
        seed: int,
        samples: int,
        scaler: torch.amp.GradScaler | None = None,
        metrics: Sequence[str] = (),
        settle: Callable[[], None] = lambda: None,
        origin: Callable[[int, int], str] = lambda step, micro: "",
        agreement: Agreement | None = None,
        engine: Engine | None = None,
        recover: Callable[[RuntimeError, Sequence[Outcome]], Recovered] | None = None,
        positions: Positions | None = None,
        pass_updated: Callable[[int], None] = lambda passes: None,
        done: Sequence[Outcome] = (),
        spare: Callable[[], Any] = lambda: None,
        verify: bool = False,
    ) -> None:
        """Make the step; a loop over steps does this.

        Args:
            seed: the random state of each micro-batch derives from it.
            samples: number of samples in the global batch.
            metrics: names of the values averaged besides the loss.
            settle: called before parameters and the optimizer's state change.
            origin: ``(step, micro_batch) -> str``: which samples it has, and the newest checkpoint; for errors.
            agreement: its wishes are exchanged together with the losses.
            engine: knows when the round is over; None: the step cannot continue in another round.
            recover: takes part in the next round after an error, given the passes that are done.
            positions: knows what the script changes before and in a pass; None: it may change anything.
            pass_updated: called with the number of updated passes after the update of each, if there are several
                optimizers, or if other ranks have done it.
            done: loss and metrics of each pass that other ranks have done before this process joined them.
            verify: whether checked steps give a micro-batch twice.
            spare: returns a micro-batch for the passes of a sharded model that count nothing, if this rank has none.
        """
        self.position = position
        self.plan = plan
        self.loss = math.nan
        self.metrics: dict[str, float] = {}
        self.updated = False
        self.skipped = False
        self.clipped_norm: Tensor | None = None
        self.checking = False
        # For the loop and the trainer:
        self._too_large = False  # the step is repeated because a micro-batch did not fit into some rank's memory
        self._all_know = False  # all ranks know that; else it is repeated with micro-batches of the same size
        self._in_training_mode: bool | None = None  # the model, in the last backward pass
        self._data_s = self._exchange_s = 0.0  # seconds of waiting for data, and in exchanges with other ranks
        self._exchanged = False  # losses and gradients, so that all ranks have them
        # For itself alone:
        self._error: Exception | None = None  # that ended the last backward pass, exchange or update
        self._batches = batches
        self._gradients = gradients
        self._optimizers = optimizer.optimizers if isinstance(optimizer, Optimizers) else {"": optimizer}
        self._seed = seed
        self._samples = samples
        self._scaler = scaler
        self._current: int | None = None
        self._losses: list[tuple[Tensor, float | None]] = []
        self._metric_names = tuple(metrics)
        self._metric_values: list[list[float | Tensor]] = []
        self._settle = settle
        self._origin = origin
        self._agreement = agreement
        self._engine = engine
        self._recover = recover
        self._positions = positions
        self._pass_updated = pass_updated
        self._broken: RuntimeError | None = None  # the error that an exchange within backward() failed with
        self._done_elsewhere = False
        self._out_of_memory = False
        self._table: MeanTable | None = None
        self._told = False  # other ranks or the sums, of a backward pass that failed
        self._means: Means | None = None
        self._passes = 0
        self._pending = False  # a pass has begun and is not updated by
        self._done = list(done)
        self._spare = spare
        self._verify = verify
        self._bits: Bits | None = None  # of the micro-batch that is given once more
        self._exchanging_alone = MicroBatchContext(collectives.refuse if gradients.exact else collectives.warn)
        self._latest: Any = None
        self._empty = False  # whether the current pass counts nothing, and its backward() is to come
        self._moved = bool(done)  # a pass has begun in another round than one before it
        self._unscaled: set[int] = set()
        self._drawn: list[tuple[Any, list[tuple[int, int]]]] = []  # micro-batches and versions, for a second pass

    @property
    def number(self) -> int:
        """The step's number, from 1."""
        return self.position.step + 1

    @property
    def samples(self) -> int:
        """Number of samples in the step's global batch."""
        return self._samples

    @property
    def model(self) -> Any:
        """What the forward pass calls; with several models, ``step.model[name]``."""
        return self._gradients.model

    def __iter__(self) -> Generator[Any, None, None]:
        """Yield this rank's collated micro-batches.

        Raises:
            UsageError: if the last pass has not ended with :meth:`update`; if the step has one optimizer and was
                iterated over already; or if a micro-batch ended without :meth:`backward`.
        """
        self._begin_pass()
        while not self._left_out:
            try:
                yield from self._pass()
            except RuntimeError as error:
                if not self._goes_on(error):
                    raise
            else:
                return

    def _pass(self) -> Generator[Any, None, None]:
        if not self._gradients.passes(self.plan):
            drop_second_normal()  # as the micro-batches do on the other ranks, so that all draw the same afterwards
        else:
            with kept(devices=True):
                yield from self._samples_of_pass()
            if self._positions is not None and not self._too_large:
                self._positions.pass_ends(self.number, self._gradients.refuse_changes)
        self._current = None
        began = time.perf_counter()
        with self._noting_errors():
            self._exchange()
        self._exchange_s += time.perf_counter() - began
        if self._engine is not None:
            self._engine.note_exchanges()  # no other follows before the step's end

    @property
    def _left_out(self) -> bool:
        """Whether other ranks have done the current pass, and this one only receives its result."""
        return self._done_elsewhere or self._passes <= len(self._done)

    def _may_go_on(self, error: RuntimeError) -> bool:
        # Once within a step: a script whose later passes need something from its earlier ones fails in a process that
        # has left these out, and trains on after a restart, from the step's start.
        return self._engine is not None and not (self._passes > 1 and self._moved) and self._engine.caused(error)

    def _goes_on(self, error: RuntimeError) -> bool:
        """Continue the pass in another round, from its first micro-batch; return whether that is possible."""
        if self._engine is None or self._recover is None or not self._may_go_on(error):
            return False
        self._engine.groups.disconnect()  # so that no exchange that is under way is waited for
        if self._table is not None:
            self._table.give_up()
            self._table = None
        recovered = self._recover(error, self._done)
        self._error = self._broken = None
        self._drawn.clear()
        self._losses, self._metric_values, self._current = [], [], None
        self._moved |= self._passes > 1 or bool(recovered.passes)
        if recovered.done is not None:
            self._done_elsewhere = True
            self.loss, self.metrics = recovered.done
            return True
        self.plan, self._batches = recovered.plan, recovered.batches
        self._gradients, self._agreement = recovered.gradients, recovered.agreement
        if recovered.passes:
            self._done = list(recovered.passes)
        else:
            self._start_pass()
        return True

    def _samples_of_pass(self) -> Generator[Any, None, None]:
        watch = self._new_watch()
        for number, micro in enumerate(self.plan.micro_batches):
            if self._engine is not None and self._engine.is_over:
                raise RoundOverError("the round is over")
            began = time.perf_counter()
            with self._noting_errors(), left_seeded():
                try:
                    sample = self._sample(number)
                except Exception as error:
                    where = f"micro-batch {micro.index} of step {self.number} was loaded"
                    error.add_note(f"  It was raised when {where}. {self._origin(self.position.step, micro.index)}")
                    raise
            self._data_s += time.perf_counter() - began
            with self._gradients.micro_batch(number):
                seed_all(derive("micro-batch", self._seed, self.position.step, micro.index, *self._again), devices=True)
                self._current = number
                with self._exchanging_alone, watch.first(sample) if watch is not None and number == 0 else _PLAIN:
                    yield sample
                if self._broken is not None:
                    raise self._broken
                if len(self._losses) != number + 1:
                    raise self._misuse(
                        f"step {self.number}: micro-batch {micro.index} ended without step.backward(loss).",
                        "Call it once for each micro-batch.",
                    )
            self._latest = sample
        if watch is not None:
            yield from self._checked_by(watch)
        for number in range(self.plan.grad_accum, self._gradients.passes(self.plan)):
            if self.plan.grad_accum == 0:
                self._latest = self._spare()
            with self._gradients.empty_pass(number):
                seed_all(derive("empty pass", self._seed, self.position.step, number), devices=True)
                self._empty = True
                yield self._latest
                if self._empty:
                    raise self._misuse(
                        f"step {self.number}: a micro-batch ended without step.backward(loss).",
                        "Call it once for each micro-batch.",
                    )

    def _new_watch(self) -> StepWatch | None:
        """Return what checks the micro-batches of this pass; None in most steps."""
        if not isinstance(self._gradients, ExactGradients) or not self.plan.grad_accum:
            return None
        if not due(self._seed, self.position.step):
            return None
        return StepWatch(self._gradients, f"step {self.number}", repeats=self._verify)

    def _checked_by(self, watch: StepWatch) -> Generator[Any, None, None]:
        """Check what the micro-batches have left; if the script expects that, give it the first one once more."""
        watch.check()
        if not watch.repeats:
            return
        gradients = self._gradients
        assert isinstance(gradients, ExactGradients)
        watch.bits.loss = checksums([self._losses[0][0]])
        self.checking = True
        try:
            with unchanged(self.model):
                again = yield from self._given_again(watch, gradients)
            gradients.restore_buffers()
            if (which := watch.bits.differing(again)) is None:
                return
            one, two = Outputs(self.model), Outputs(self.model)
            for outputs in (one, two):
                with outputs.recorded():
                    yield from self._given_again(watch, gradients)
        finally:
            self.checking, self._bits = False, None
        what = "loss" if which < 0 else f"gradient of {gradients.parameters.reduced_names[which]}"
        raise differs(f"step {self.number}", what, one.culprit(two))

    def _given_again(self, watch: StepWatch, gradients: ExactGradients) -> Generator[Any, None, Bits]:
        index = self.plan.micro_batches[0].index
        bits = self._bits = Bits()
        with gradients.recording(bits, repeated=True):
            seed_all(derive("micro-batch", self._seed, self.position.step, index, *self._again), devices=True)
            with self._exchanging_alone:
                yield watch.sample()
        if bits.loss is None:
            raise self._misuse(
                f"step {self.number}: a micro-batch that is computed again (step.checking) ended without "
                "step.backward(loss).",
                "Compute its loss as that of any other, and leave out only what counts or logs.",
            )
        return bits

    def _begin_pass(self) -> None:
        if self._pending:
            raise self._misuse(
                f"step {self.number}: a second `for sample in step` began before step.update().",
                "Each pass over the micro-batches ends with an update.",
            )
        if self._passes and len(self._optimizers) == 1:
            raise UsageError(
                f"step {self.number} was gone through already, and has one optimizer.",
                "Give run.steps() a dict of optimizers to have a pass for each, by step.update(optimizer=name).",
            )
        self._passes += 1
        self._pending, self.updated = True, False
        if self._passes > 1 and self._engine is not None:
            self._engine.check_exchanges()
        if self._left_out:
            drop_second_normal()  # as the micro-batches do on the other ranks
            return
        if self._positions is not None:
            self._positions.pass_begins()
        self._start_pass()

    def _start_pass(self) -> None:
        self._losses, self._metric_values = [], []
        self._table, self._told, self._current = None, False, None
        self._exchanged, self._means = False, None
        self._unscaled.clear()
        self._gradients.begin(self.plan)

    def _sample(self, number: int) -> Any:
        """Return a micro-batch: a second pass has those of the first."""
        if len(self._optimizers) == 1:
            return next(self._batches)
        if number == len(self._drawn):
            drawn = next(self._batches)
            self._drawn.append((drawn, versions(drawn)))
        sample, before = self._drawn[number]
        if versions(sample) != before:
            index = self.plan.micro_batches[number].index
            raise UsageError(
                f"step {self.number}: the script changed micro-batch {index} in place in an earlier pass, and the next "
                "pass would get it so.",
                "Change a copy: x = x * 2, for example, and not x *= 2.",
            )
        return sample

    @property
    def _again(self) -> tuple[int, ...]:
        """Further seed values that give a later pass other random numbers than the first."""
        return (self._passes,) if self._passes > 1 else ()

    def backward(
        self, loss: Tensor, weight: float | None = None, metrics: Mapping[str, Tensor | float] | None = None
    ) -> None:
        """Run the backward pass of the current micro-batch. Call it once for each.

        Args:
            loss: mean loss over the micro-batch, or over what ``weight`` counts in it; a tensor with one element.
            weight: weight of the micro-batch in the mean over the global batch, for example its number of tokens; None:
                its number of samples. Give it for all micro-batches of a step, or for none.
            metrics: further means over the micro-batch, each a number or a tensor with one element, by the names given
                to ``run.steps(metrics=...)``.

        Raises:
            UsageError: if ``loss`` or a metric has more than one element, ``loss`` does not require a gradient, the
                metrics have other names, or no micro-batch is waiting for its backward pass.
        """
        if self._empty:
            self._empty = False
            loss.backward()  # type: ignore[no-untyped-call]
            return
        if self._bits is not None:
            self._bits.loss = checksums([loss.detach()])
            self._gradients.differentiate(self._weighted(loss, weight, 0))
            return
        if self._current is None or len(self._losses) != self._current:
            raise UsageError("step.backward() belongs once into each pass of `for sample in step`.")
        if self._told:
            raise self._misuse(
                "step.backward() cannot be tried again: other ranks or the gradients have a part of what failed.",
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
        self._in_training_mode = self.model.training
        values = self._checked(metrics or {})
        to_do = self._weighted(loss, weight, self._current)
        self._losses.append((loss.detach() if loss.dim() == 0 else loss.detach().reshape(()), weight))
        self._metric_values.append(values)
        last = self._current == self.plan.grad_accum - 1
        try:
            if last and self._gradients.talks_in_between and self._gradients.on_cpu:
                # Overlaps with the backward pass, which talks to other ranks anyway. Reading a GPU's loss would delay
                # it.
                self._table = self._posted()
            with self._gradients.backward(self._current):
                self._gradients.differentiate(to_do)
        except BaseException as error:
            # A script that catches this error has not done this micro-batch.
            self._losses.pop()
            self._metric_values.pop()
            self._told = self._table is not None or self._gradients.took
            if isinstance(error, RuntimeError) and self._may_go_on(error):
                self._broken = error  # the iteration goes on from here
                return
            if isinstance(error, Exception) and not isinstance(error, torch.OutOfMemoryError):
                self._error = error  # its traceback keeps the graph in memory, which a second try may need
            raise
        self._error = None

    def _weighted(self, loss: Tensor, weight: float | None, number: int) -> Tensor:
        # A weight is scaled to about the size of a sample's; update() divides by what they sum up to.
        share = self.plan.weights[number] if weight is None else weight / self._samples
        # Each operation counts in a small step, and again in its backward pass.
        scalar = loss if loss.dim() == 0 else loss.reshape(())
        scaled = scalar if share == 1 else scalar * share
        return scaled if self._scaler is None else self._scaler.scale(scaled)

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

    def _give_up(self) -> None:
        """Report, after an out-of-memory error, that this rank has no memory for its micro-batch.

        :meth:`update` then does nothing on any rank except to have the step repeated.

        Raises:
            UsageError: in default mode, where backward passes exchange gradients and the other ranks would wait for
                ever; it needs ``exact=True``.
        """
        if self._gradients.talks_in_between:
            raise UsageError(
                "A step cannot be given up: backward passes have sent gradients to other ranks.", "It needs exact=True."
            )
        self._out_of_memory = True
        self._error = None
        self._losses.clear()
        self._metric_values.clear()
        self._gradients.discard()

    def update(self, clip_norm: float | None = None, *, optimizer: str | None = None) -> None:
        """Step the optimizer. Call it once, after the loop over the step.

        When that loop has ended, ``.grad`` holds the gradients of the global batch on all ranks.

        Args:
            clip_norm: maximum 2-norm of all gradients together; None: no clipping. With several optimizers, the norm is
                taken over the parameters of those that step.
            optimizer: with several optimizers, the name of the one to step; None: all of them.

        Raises:
            UsageError: if micro-batches are left, only some have a weight, or no optimizer has this name.
            NonFiniteLossError: on all ranks, if a loss on any rank is NaN or infinite; nothing has changed then.
        """
        if isinstance(clip_norm, str):
            raise UsageError(f"step.update({clip_norm!r}): clip_norm comes first.", "Write step.update(optimizer=...).")
        chosen = self._chosen("update", optimizer)
        if self._left_out and self._pending:
            if not self._done_elsewhere:
                self.loss, self.metrics = self._done[self._passes - 1]
            self.updated, self._pending = True, False
            self._pass_updated(self._passes)
            return
        came = ""
        if not self._pending:
            came = "a second time" if self.updated else "before the loop over the step"
        elif len(self._losses) != self.plan.grad_accum and not self._out_of_memory:
            came = f"after {len(self._losses)} of {self.plan.grad_accum} micro-batches"
        if came:
            raise self._misuse(f"step.update() came {came}.", "Call it once, after the loop over the step.")
        with self._noting_errors():
            self._update(chosen, clip_norm)

    def _update(self, chosen: list[torch.optim.Optimizer], clip_norm: float | None) -> None:
        means = self._exchanged_means()
        if means is None:
            return
        self._check_losses()
        self._gradients.finish_buffers()
        if self._scaler is not None:
            self._unscale(self._scaler, chosen)
        if clip_norm is not None:
            self.clipped_norm = self._gradients.clip(self._parameters_of(chosen), clip_norm)
        if self.number == 1 and len(chosen) < len(self._optimizers):
            self._warn_without_gradients(chosen)
        self._step_optimizers(chosen)
        self.loss, *metrics = means.values
        self.metrics = dict(zip(self._metric_names, metrics, strict=True))
        self.updated, self._pending = True, False
        self._done.append((self.loss, self.metrics))
        if len(self._optimizers) > 1:
            self._pass_updated(len(self._done))

    def _warn_without_gradients(self, chosen: list[torch.optim.Optimizer]) -> None:
        if self._gradients.rank == 0 and all(p.grad is None for p in self._parameters_of(chosen)):
            name = next(name for name, each in self._optimizers.items() if each is chosen[0])
            _log.warning(
                "step.update(optimizer=%r): none of its parameters has a gradient in pass %d of the first step: is it "
                "the right optimizer for this pass, and is nothing detached that it trains?",
                name,
                self._passes,
            )

    def _exchanged_means(self) -> Means | None:
        """Return what the ranks have exchanged; None if the optimizers do not step here."""
        try:
            means = self._exchange()
        except RuntimeError as error:
            # A step that was given up is exchanged only here, as its iteration has ended early.
            if not self._out_of_memory or not self._goes_on(error):
                raise
            self._out_of_memory = False
            if self._done_elsewhere:
                self.updated, self._pending = True, False
            else:
                self._too_large, self._all_know = True, False
            return None
        return None if self._too_large else means

    def _chosen(self, call: str, name: str | None) -> list[torch.optim.Optimizer]:
        if name is None:
            return list(self._optimizers.values())
        if name not in self._optimizers or name == "":
            known = ", ".join(map(repr, self._optimizers)) if len(self._optimizers) > 1 else "one, without a name"
            raise UsageError(
                f"step.{call}(optimizer={name!r}): the optimizers of this loop are {known}.",
                f"Give run.steps() a dict of optimizers, and {call}() one of its names.",
            )
        return [self._optimizers[name]]

    def gradients(self, optimizer: str | None = None) -> dict[str, Tensor]:
        """Return the gradients of the global batch by parameter name; between the loop over the step and its update.

        They are the same on all ranks, and not scaled, also with a scaler. Changes in place take effect in
        :meth:`update`; make the same ones on all ranks. The names are those of ``model.named_parameters()``; a
        parameter that only an optimizer has is named by its place there. Parameters without a gradient are left out.
        The result is empty if other ranks have done this pass, and this one only receives its result. Copy what must
        outlive the step: its memory is used again.

        Args:
            optimizer: with several optimizers, the name of the one whose gradients to return; None: those of all.

        Raises:
            UsageError: if the loop over the step has not ended, the update is done, no optimizer has this name, or none
                of several is named and there is a scaler.
        """
        chosen, parameters = self._chosen("gradients", optimizer), self._gradients.parameters
        if not self._pending or not (self._exchanged or self._left_out or self._too_large):
            raise self._misuse(
                f"step {self.number}: step.gradients() or step.grad_norm() came too early or too late.",
                "Call it between the loop over the step and step.update().",
            )
        if self._left_out or self._too_large:
            return {}
        if self._scaler is not None:
            if len(chosen) > 1:
                raise UsageError(
                    "step.gradients() without a name: the scaler must know which optimizer steps next.",
                    'Name the one that step.update(optimizer="...") will name.',
                )
            self._unscale(self._scaler, chosen)
        own = set(map(id, self._parameters_of(chosen)))
        named = zip(parameters.trained_names, parameters.trained, strict=True)
        return {name: p.grad for name, p in named if p.grad is not None and id(p) in own}

    def grad_norm(self, optimizer: str | None = None) -> float:
        """Return the 2-norm of all :meth:`gradients` together: what ``update(clip_norm=...)`` limits.

        It is NaN if other ranks have done this pass, and this one only receives its result.

        Args:
            optimizer: as for :meth:`gradients`.

        Raises:
            UsageError: as :meth:`gradients`.
        """
        found = self.gradients(optimizer)
        return math.nan if self._left_out else float(self._gradients.norm(list(found.values())))

    def _parameters_of(self, chosen: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
        """Return the parameters whose gradients count towards the norm when these optimizers step."""
        if len(self._optimizers) == 1:
            return self._gradients.parameters.trained
        # Two optimizers may share a parameter.
        return list({id(p): p for each in chosen for group in each.param_groups for p in group["params"]}.values())

    def _unscale(self, scaler: torch.amp.GradScaler, chosen: list[torch.optim.Optimizer]) -> None:
        if not self._unscaled and (others := self._gradients.parameters.beside_optimizer()):
            # They count towards the norm of all gradients.
            torch._foreach_mul_([p.grad for p in others if p.grad is not None], 1 / scaler.get_scale())
        for each in chosen:
            if id(each) in self._unscaled:
                continue
            own = {id(p) for group in each.param_groups for p in group["params"]}
            if own & self._unscaled:
                raise UsageError(
                    f"step {self.number}: two optimizers with a parameter in common are to step after the same pass, "
                    "and the scaler would unscale its gradient twice.",
                    "Give each optimizer a pass of its own, or leave out the scaler.",
                )
            self._unscaled |= own | {id(each)}
            scaler.unscale_(each)

    def _step_optimizers(self, chosen: list[torch.optim.Optimizer]) -> None:
        self._settle()
        self._gradients.waiting = False
        if self._scaler is None:
            for each in chosen:
                each.step()
            return
        before = self._scaler.get_scale()
        for each in chosen:
            self._scaler.step(each)
        self._scaler.update()
        self.skipped = self._scaler.get_scale() < before

    def _posted(self) -> MeanTable:
        """Start sending the losses and metrics of this rank's micro-batches to all ranks."""
        carried = self._agreement.leave() if self._agreement is not None else ()
        table = MeanTable(self.plan.total, 1 + len(self._metric_names), carried)
        for micro, share, (loss, weight), metrics in zip(
            self.plan.micro_batches, self.plan.weights, self._losses, self._metric_values, strict=False
        ):
            table.fill(micro.index, [loss, *metrics], share, weight)
        table.sign(self._gradients.parameters.signature)
        if self._out_of_memory:
            table.mark()
        if self._gradients.whole:
            table.whole()
        self._gradients.post(table)
        return table

    def _exchange(self) -> Means:
        """Exchange losses and gradients with all ranks, once per pass; return the means over the global batch."""
        if self._means is not None:
            return self._means
        if self._table is None:
            if not self._gradients.on_cpu:
                # Keeps the order of ranks whose backward passes have already sent something.
                self._gradients.send()
            self._table = self._posted()
        table = self._table
        if not self._exchanged:
            self._gradients.wait(table)
            if self._agreement is not None:
                self._agreement.arrive(table.carried)
        if table.marked:
            self._too_large = self._all_know = True
            self._gradients.discard()
            self._means = Means([], 1.0)
            return self._means
        if self._exchanged:
            raise self._misuse(f"step {self.number}: the exchange of gradients failed.", "See the error before.")
        self._exchanged = True
        if not self._gradients.agreed(table):
            self._gradients.disagree(f"step {self.number}")
        self._gradients.finish(table.any_whole)
        self._gradients.exchange_buffers()
        if self._engine is not None and self._engine.confirms:
            self._engine.confirm(self._gradients.gpus)
        try:
            self._means = table.means(self._samples, f"step {self.number}")
        except UsageError:
            self._gradients.discard()
            raise
        if self._means.correction != 1:
            self._gradients.multiply(self._means.correction)
        return self._means

    def _check_losses(self) -> None:
        """Check that every loss is finite; raise a NonFiniteLossError on all ranks if one on any rank is not."""
        assert self._table is not None
        if (index := self._table.not_finite()) is None:
            return
        self._gradients.discard()
        world_size = self._gradients.world_size
        rank = next(r for r in range(world_size) if index < slice_of(self.plan.total, world_size, r)[1])
        reason = "Nothing was updated by it"
        if (name := self._gradients.parameters.not_finite()) is not None:
            reason += f", but {name} is not finite already: an earlier step's gradient was not"
        where = f"The loss is {self._table.value(index)} in step {self.number}, micro-batch {index}"
        error = NonFiniteLossError(
            f"{where}, on rank {rank}.",
            f"{reason}. {self._origin(self.position.step, index)} If it diverges, a lower learning rate helps, or "
            "clipping gradients: step.update(clip_norm=1.0) or Trainer(clip_norm=1.0); with fp16, bf16 instead.",
        )
        if isinstance(self._gradients, ExactGradients):
            error.add_note(f"{REPEATS_NOTE}{where}.")
        raise error

    def _checked(self, metrics: Mapping[str, Tensor | float]) -> list[float | Tensor]:
        if metrics.keys() != set(self._metric_names):
            raise UsageError(
                f"step.backward() got the metrics {sorted(metrics)}; the steps were told {sorted(self._metric_names)}.",
                "Name them all in run.steps(metrics=...): a rank that has no micro-batch must know them, too.",
            )
        for name, value in metrics.items():
            _check_scalar(f"metric {name!r}", value)
        ordered = [metrics[name] for name in self._metric_names]
        return [value.detach() if isinstance(value, Tensor) else value for value in ordered]


class RehearsedStep(Step):
    """A step before the process has a place in a round: each pass has one micro-batch, and an update does nothing."""

    def __iter__(self) -> Generator[Any, None, None]:
        self._begin_pass()
        with kept(devices=True), closing(self._samples_of_pass()) as samples:
            yield next(samples)

    def update(self, clip_norm: float | None = None, *, optimizer: str | None = None) -> None:
        self.updated, self._pending = True, False

    def _checked(self, metrics: Mapping[str, Tensor | float]) -> list[float | Tensor]:
        return []

    def gradients(self, optimizer: str | None = None) -> dict[str, Tensor]:
        return {}

    def grad_norm(self, optimizer: str | None = None) -> float:
        return math.nan


def _check_scalar(what: str, value: Tensor | float) -> None:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise UsageError(
            f"step.backward() got a {what} of shape {tuple(value.shape)}.", "Reduce it to one number, by its mean."
        )
