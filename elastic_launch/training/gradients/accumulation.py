"""Accumulates the gradients of micro-batches to those of the global batch.

A hook on every parameter takes its gradient as soon as the backward pass has computed it, whether the forward pass ran
the whole model or a part of it. Backward passes that the script runs itself, as for adversarial inputs, leave theirs to
the script. ``Gradients`` adds them up in buckets that are reduced over the ranks during the last backward pass, see
``buckets``; ``ExactGradients`` adds them up in the fixed tree of ``reduction``. The gradient of a parameter stays None
if no micro-batch of any rank gave it one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from elastic_launch.batch import BatchPlan
from elastic_launch.errors import UsageError
from elastic_launch.training.gradients.buckets import BucketedReduction, LocalReduction
from elastic_launch.training.gradients.buffer_rules import ruled_names
from elastic_launch.training.gradients.buffers import Buffers
from elastic_launch.training.gradients.carried import CarriedStates
from elastic_launch.training.gradients.flat import Reduction, Values
from elastic_launch.training.gradients.means import MeanTable
from elastic_launch.training.gradients.parameters import Parameters
from elastic_launch.training.gradients.reduction import ExactReduction
from elastic_launch.training.gradients.sharded import (
    ShardSums,
    as_placed,
    check_meshes,
    clip,
    placed,
    same_on_tensor_ranks,
    total_norm,
)
from elastic_launch.training.randomness import derive
from elastic_launch.training.ranks.checksum import checksums
from elastic_launch.training.ranks.mesh import RankGroup, ReplicaMesh
from elastic_launch.training.wrapped import local

if TYPE_CHECKING:
    from elastic_launch.training.flips import Flips


def check_model(model: nn.Module) -> None:
    """Refuse modules whose results cannot be the same at every world size."""
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise UsageError(
                f"{name or 'the model'} is a SyncBatchNorm, whose statistics depend on the world size.",
                "Use BatchNorm, whose statistics here are per micro-batch at every world size.",
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UsageError(
                f"{name or 'the model'} makes sparse gradients, which cannot be added in a fixed order.",
                "Build it with sparse=False.",
            )
        if isinstance(module, torch.jit.ScriptModule):
            # How many calls a process has made depends on the world size. It refuses the hooks of the checks, too.
            raise UsageError(
                f"{name or 'the model'} is a TorchScript module, which torch optimizes after its first call: later "
                "calls compute other bits.",
                "Use the Python module that it was made from, or leave out exact=True.",
            )


@dataclass
class Bits:
    """Checksums of a micro-batch's loss and of its gradients, by parameter; each of these may come in several parts."""

    loss: Tensor | None = None
    gradients: dict[int, list[Tensor]] = field(default_factory=dict)

    def number(self) -> int:
        """Return one number for all of them; it waits for the device."""
        assert self.loss is not None
        parts = [self.loss, *(part for which in sorted(self.gradients) for part in self.gradients[which])]
        places = [f"{which}:{len(self.gradients[which])}" for which in sorted(self.gradients)]
        return derive("bits", *places, *torch.cat(parts).tolist())

    def differing(self, other: Bits, names: Sequence[str]) -> str | None:
        """Return what differs, the loss or the gradient of the first such parameter; None: nothing."""
        if self.loss is None or other.loss is None or not torch.equal(self.loss, other.loss):
            return "loss"
        for which, name in enumerate(names):
            mine, theirs = self.gradients.get(which, []), other.gradients.get(which, [])
            if len(mine) != len(theirs) or not all(map(torch.equal, mine, theirs)):
                return f"gradient of {name}"
        return None


class Gradients:
    """The gradients of a model's and an optimizer's parameters.

    Args:
        optimizer: the optimizer; it may have parameters that are not the model's.
        overlap: whether backward passes send finished gradients to other ranks. Without it, a step can be given up on
            one rank.
        room: number of elements of the tables that are sent with gradients, see :meth:`post`; the same on all ranks.
        buffers: rules for buffers, by pattern of their names.
        same: whether the ranks have the same parameters and buffers already; otherwise they get rank 0's.
        by_host: whether they get these through the hosts' memory, also for GPUs.
        outlives: whether this process goes on after an exchange of a sharded model that has failed.
        mesh: that of this rank's replica; None: the script has asked for none.
    """

    exact = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        world_size: int,
        rank: int,
        *,
        overlap: bool = True,
        room: int = 0,
        buffers: Mapping[str, str] | None = None,
        same: bool = False,
        by_host: bool = False,
        outlives: bool = False,
        mesh: ReplicaMesh | None = None,
    ) -> None:
        self.model = model  # what the script calls for the forward pass
        self.world_size = world_size
        self.rank = rank
        self.peers = RankGroup(world_size, rank) if mesh is None else mesh.data  # with micro-batches of their own
        self.speaks = mesh is None or mesh.tensor.place == 0  # for the ranks that have the same micro-batches
        self._mesh = mesh
        self.parameters = Parameters(model, optimizer)
        check_meshes(self.parameters, mesh, world_size)
        self._overlap = overlap
        self._room = room
        self._rules = buffers
        self._buffers = self._new_buffers()
        self._plan = BatchPlan((), 1, ())
        self._new: list[str] = []
        self._changes: list[str] = []
        self.gpus: set[torch.device] = set()  # those of parameters and buffers
        self.on_cpu = True  # all parameters; their exchange then shares its order with that of other values
        self.waiting = False  # whether gradients are complete but the optimizer has not stepped yet
        self._hooks: list[Any] = []
        self._step_hooks = [
            each.register_step_pre_hook(self._before_step)
            for each in getattr(optimizer, "optimizers", {"": optimizer}).values()
            if hasattr(each, "_optimizer_step_pre_hooks")  # an optimizer that only wraps others lacks it
        ]
        self.spoiler: Flips | None = None  # flips bits, as a plan of faults says
        self._taking = False  # whether a backward pass that counts is under way: others are the script's own
        self._recorded: tuple[Bits, ...] = ()
        self._repeats = False  # whether gradients are only recorded
        self.took = False  # whether the last backward pass has computed any gradient
        self.void = False  # whether the micro-batch has a weight of 0: its gradients count as 0 even if they are NaN
        self._totals: Values | None = None  # autograd adds to these in place
        self._hooked = False  # whether the script has hooks of its own for complete gradients
        self._carried = False  # whether the step's table is sent with gradients
        if world_size > 1:
            self.parameters.agree(rank, same=same, by_host=by_host, mesh=mesh)
        self._shards: ShardSums | None = None
        if self.parameters.sharded:
            how: dict[str, Any] = {"exact": self.exact, "outlives": outlives, "mesh": mesh}
            self._shards = ShardSums(model, self.parameters, world_size, rank, **how)
        self._follow()
        self._carrier = self._reduction

    def _follow(self) -> None:
        """Install hooks on all parameters that need gradients now."""
        self.on_cpu = all(parameter.device.type == "cpu" for parameter in self.parameters.trained.values())
        self.gpus = {each.device for each in (*self.parameters.all.values(), *self.model.buffers()) if each.is_cuda}
        self._reduction = self._new_reduction()
        self._install_hooks()

    def _install_hooks(self) -> None:
        """Install the hooks that take gradients, after those of the script."""
        self._remove_hooks()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._take_gradient, which))  # type: ignore[no-untyped-call]
            for which, parameter in enumerate(self.parameters.reduced.values())
        ]

    def _new_buffers(self) -> Buffers:
        return Buffers(self.model, self.peers.size, self._rules, self.peers)

    def _new_reduction(self) -> Reduction:
        parameters = self.parameters
        if self.peers.size == 1 or not parameters.reduced:
            return LocalReduction(len(parameters.reduced))
        return BucketedReduction(
            {name: local(parameter) for name, parameter in parameters.reduced.items()},
            parameters.sparse,
            # Beside a mesh's own collectives they would not come in the same order on all ranks.
            overlap=self._overlap and self._shards is None and self._mesh is None,
            room=self._room if self.on_cpu else 0,
            peers=self.peers,
        )

    def begin(self, plan: BatchPlan) -> None:
        """Start a step."""
        self._plan = plan
        self.waiting = False
        self._changes = []
        # The other ranks may not have changed: they learn of it from a bucket of the size that they expect.
        self._carrier = self._reduction
        if self.parameters.changed() or self._buffers.outdated:
            known = set(map(id, self.parameters.all.values()))
            self._changes = self.parameters.follow()
            self._new = [name for name, parameter in self.parameters.all.items() if id(parameter) not in known]
            self._buffers = self._new_buffers()  # model.to(dtype) replaces their tensors
            self._follow()
            self._reduction.reset()
        for parameter in self.parameters.all.values():
            parameter.grad = None
        self._carrier.reset()  # which uses the memory of these again
        hooks = [p._post_accumulate_grad_hooks or {} for p in self.parameters.reduced.values()]
        self._hooked = any(len(each) > 1 for each in hooks)
        if self._hooked and {next(reversed(each), -1) for each in hooks} != {hook.id for hook in self._hooks}:
            self._install_hooks()
        self._buffers.begin(plan)
        if self._shards is not None:
            self._shards.begin(plan)

    def reshard(self) -> None:
        """Let each rank have only its shards of the parameters that FSDP has sharded."""
        if self._shards is not None:
            self._shards.reshard()

    @property
    def failed(self) -> RuntimeError | None:
        """The error by which an exchange of a sharded model's passes has failed."""
        return None if self._shards is None else self._shards.failed

    def passes(self, plan: BatchPlan) -> int:
        """Return the number of passes in a step: those for this rank's micro-batches, then :meth:`empty_pass`."""
        return plan.grad_accum if self._shards is None else self._shards.passes(plan)

    @contextmanager
    def empty_pass(self, number: int) -> Iterator[None]:
        """Context for a pass that counts nothing, which this rank makes because another one has more micro-batches."""
        assert self._shards is not None
        with self._shards.going_through():
            self._shards.begin_pass(number)
            try:
                yield
            finally:
                for parameter in self.parameters.reduced.values():
                    parameter.grad = None
            self._shards.end_pass()
        self._buffers.restore()

    @contextmanager
    def micro_batch(self, number: int) -> Iterator[None]:
        """Context for forward and backward of this rank's number-th micro-batch; restores the buffers on exit."""
        index = self._plan.micro_batches[number].index
        self._reduction.begin(index)
        with nullcontext() if self._shards is None else self._shards.going_through():
            yield
        self._add_buffers(self._buffers.take(index))
        self._reduction.end()
        self._buffers.restore()

    def _add_buffers(self, moved: Sequence[Tensor]) -> None:
        """Add what a micro-batch has added to buffers that are averaged."""
        self._buffers.add(moved)

    @contextmanager
    def backward(self, number: int) -> Iterator[None]:
        """Context for the backward pass of this rank's number-th micro-batch."""
        self.took = False
        self.refuse_own()
        self._reduction.begin_pass(last=number == self._plan.grad_accum - 1)
        if self._shards is not None:
            self._shards.begin_pass(number, void=self.void)
        trained = self.parameters.reduced.values()
        # autograd may give DTensors another placement, in which it cannot add in place. A hook of the script's would
        # get the sum of this rank's micro-batches, and their number depends on the world size.
        in_place = number and not self.void and not self.parameters.parallel and not self._hooked
        self._totals = self._reduction.totals() if in_place else None
        try:
            for parameter, total in zip(trained, self._totals or [], strict=False):
                parameter.grad = total
        except RuntimeError:  # a sum of another dtype
            self.refuse_changes()
            raise
        try:
            yield
        finally:
            if self._totals is not None:
                self._totals = None
                for parameter in trained:
                    parameter.grad = None
        self._reduction.end_pass()
        if self._shards is not None:
            self._shards.end_pass()

    def differentiate(self, loss: Tensor, *, empty: bool = False) -> None:
        """Run the backward pass of a weighted loss, within :meth:`backward`; ``empty``: within :meth:`empty_pass`."""
        self._taking = not empty
        try:
            with nullcontext() if self._shards is None else self._shards.differentiating():
                loss.backward()  # type: ignore[no-untyped-call]
        finally:
            self._taking = False

    def refuse_own(self) -> None:
        """Clear gradients of zeros that the script has left; refuse others, of which it may expect that they count.

        Raises:
            UsageError: naming a parameter that has one.
        """
        for name, parameter in self.parameters.reduced.items():
            if parameter.grad is None:
                continue
            own = local(parameter.grad)
            if (own.coalesce().values() if own.is_sparse else own).any():
                raise UsageError(
                    f"A backward pass that the script has run itself has left a gradient in {name}, beside that of "
                    "step.backward(loss).",
                    "If it is not to be trained on, use torch.autograd.grad(), or call zero_grad() of the model or the "
                    "optimizer right after it. Otherwise add its loss to that of step.backward().",
                )
            parameter.grad = None

    def _take_gradient(self, which: int, parameter: Tensor) -> None:
        """Take a parameter's gradient as soon as the backward pass has computed it."""
        gradient = parameter.grad
        if not self._taking or gradient is None:
            return
        self.took = True
        if self.parameters.parallel:
            gradient = placed(parameter, gradient)
        if self.void:
            gradient = torch.zeros_like(gradient)
        if self.spoiler is not None:
            self.spoiler.spoil_gradient(which, gradient, len(self.parameters.reduced))
        if self._recorded:
            found = checksums([gradient])
            for bits in self._recorded:
                bits.gradients.setdefault(which, []).append(found)
            if self._repeats:
                parameter.grad = None
                return
        if self._totals is not None and (total := self._totals[which]) is not None:
            if gradient is not total:
                # One of the script's hooks has replaced it.
                total.copy_(gradient)
                parameter.grad = total
            self._reduction.added(which)
            return
        parameter.grad = None
        self._reduction.put(which, gradient)

    def post(self, table: MeanTable) -> None:
        """Start sending a table to all ranks; call :meth:`wait` before reading it.

        If buckets of gradients are sent early, the table is sent with the first one, without a separate collective.
        """
        self._carried = self._carrier.room > 0
        if self._carried:
            self._carrier.load(table.cargo(changed=self._carrier is not self._reduction))
        else:
            table.post(self.world_size)

    def wait(self, table: MeanTable) -> None:
        """Wait for a posted table."""
        if self._carried:
            self._reduction.send()
            table.unload(self._carrier.delivered())
            self._carrier = self._reduction
        else:
            table.wait()

    def agreed(self, table: MeanTable) -> bool:
        """Whether all ranks train the same parameters, according to the received table; called by all ranks."""
        if not self._carried:
            return table.agreed
        return not table.any_changed or (table.all_changed and self.parameters.same_everywhere())

    @property
    def whole(self) -> bool:
        """Whether this rank has a gradient of each parameter, so that the others need not report which they have."""
        if self._shards is None:
            return self._reduction.whole
        return self._shards.whole and (self._reduction.whole or not self.parameters.reduced)

    def finish(self, whole: bool = False) -> None:
        """Set every parameter's gradient to that of the global batch, on all ranks; exchange what buffers need.

        Raises:
            UsageError: naming a parameter that was frozen, unfrozen, converted or added since the step began, or that
                is new and differs between ranks.
        """
        sums = self._reduce(whole)
        if self.spoiler is not None:
            self.spoiler.spoil_sums([p.grad for p in self.parameters.trained.values() if p.grad is not None])
        self._buffers.exchange(sums if self.exact else None)
        self.waiting = True

    def _reduce(self, whole: bool) -> list[Tensor]:
        """Set every parameter's gradient; return the sums of what was reduced besides."""
        self.refuse_changes()
        self.refuse_own()
        if self._new and self.world_size > 1:
            self.parameters.check_new(self._new)
        self._new = []
        sums = self._reduction.finish(self._plan.total, whole=whole)
        for parameter, gradient in zip(self.parameters.reduced.values(), sums, strict=False):
            parameter.grad = gradient if gradient is None else as_placed(parameter, gradient)
        if self._shards is not None:
            self._shards.finish(whole=whole)
        if self._mesh is not None:
            same_on_tensor_ranks(self.parameters.trained.values(), self._mesh)
        return [value for value in sums[len(self.parameters.reduced) :] if value is not None]

    def refuse_changes(self) -> None:
        """Refuse parameters that were frozen, unfrozen, converted or added since the step began.

        Raises:
            UsageError: naming one.
        """
        if self.parameters.changed():
            names = ", ".join(self.parameters.follow())
            raise UsageError(
                f"The parameters that are trained changed in the middle of a step: {names}.",
                "Freeze, unfreeze, convert and add parameters between steps, before `for sample in step`.",
            )

    def finish_buffers(self) -> None:
        """Set every buffer to its new value, without communication."""
        self._buffers.finish()

    def send(self) -> None:
        """Send everything that can be sent before the end of the step and was not sent yet."""
        self._reduction.send()

    def multiply(self, factor: float) -> None:
        """Multiply all gradients."""
        for parameter in self.parameters.trained.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def disagree(self, where: str) -> NoReturn:
        """Raise the error that the ranks do not train the same parameters, naming those that changed on this rank."""
        changed = (
            f"on rank {self.rank} these changed: {', '.join(self._changes)}"
            if self._changes
            else (f"on rank {self.rank} nothing changed, on another one something did")
        )
        raise UsageError(
            f"{where}: the ranks do not train the same parameters any more; {changed}.",
            "Freeze, unfreeze and add parameters on all ranks before the same step.",
        )

    def discard(self) -> None:
        """Undo the step: drop gradients and restore buffers. Call it on all ranks, or before the step is reduced."""
        self._reduction.abandon()
        self._undo()

    def give_up(self) -> None:
        """Undo the step after a failed exchange, once all others fail, too; these gradients are of no further use."""
        for each in (self._carrier, self._reduction):
            each.give_up()
        self._undo()
        self.close()

    def _undo(self) -> None:
        self.waiting = False
        for parameter in self.parameters.all.values():
            parameter.grad = None
        if self._shards is not None:
            self._shards.reset()
        self._buffers.restore()

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the 2-norm of some of the gradients together; called by all ranks."""
        return total_norm(gradients, exact=self.exact, meshed=self._mesh is not None)

    def clip(self, parameters: Sequence[Tensor], most: float) -> Tensor:
        """Limit the 2-norm of the gradients of some parameters, and return it as it was; called by all ranks."""
        return clip(parameters, most, exact=self.exact, meshed=self._mesh is not None)

    @property
    def talks_in_between(self) -> bool:
        """Whether backward passes communicate with other ranks, so that no rank can leave one out."""
        return self._reduction.early

    def close(self) -> None:
        """Remove the hooks."""
        self._remove_hooks()
        for hook in self._step_hooks:
            hook.remove()

    def _before_step(self, optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None:
            raise UsageError(
                f"The script called {type(optimizer).__name__}.step(closure): a closure's gradients would be those of "
                "one rank, and the step would not be saved.",
                "Call step.backward(loss) in the loop over the step, and step.update() after it.",
            )
        if self.waiting:
            raise UsageError(
                "The script called the optimizer's step() between a step's micro-batches and step.update(): the "
                "gradients would be applied twice.",
                "Leave it out, and call step.update() alone.",
            )

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class ExactGradients(Gradients):
    """Gradients added in the fixed tree: bitwise equal at every world size."""

    exact = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        world_size: int,
        rank: int,
        **how: Any,
    ) -> None:
        check_model(model)
        super().__init__(model, optimizer, world_size, rank, **how)
        self._states = CarriedStates(model)

    def begin(self, plan: BatchPlan) -> None:
        super().begin(plan)
        self._states.begin_step()

    @contextmanager
    def micro_batch(self, number: int) -> Iterator[None]:
        self._states.begin_micro_batch()
        with super().micro_batch(number):
            yield

    @contextmanager
    def recording(self, bits: Bits, *, repeated: bool = False) -> Iterator[None]:
        """Within this context, checksums of a micro-batch's gradients are recorded.

        Args:
            repeated: whether it is computed once more, after all others, and nothing else remains of it. Afterwards
                call :meth:`restore_buffers`.
        """
        before, self._recorded, self._repeats = self._recorded, (*self._recorded, bits), repeated
        if repeated:
            self._states.begin_micro_batch()
        try:
            yield
        finally:
            self._recorded, self._repeats = before, False

    def restore_buffers(self) -> None:
        """Set buffers, and frozen parameters with a rule, to their values at the step's start."""
        self._buffers.restore()

    @property
    def ruled(self) -> set[str]:
        """Names of the buffers and frozen parameters that have a rule by which micro-batches may change them."""
        return ruled_names(self.model, self._rules or {})

    def close(self) -> None:
        super().close()
        self._states.close()

    def _new_reduction(self) -> ExactReduction:
        like, peers = [*map(local, self.parameters.reduced.values()), *self._buffers.summed], self.peers
        return ExactReduction(like, peers.size, peers.place, names=[*self.parameters.reduced], peers=peers)

    def _add_buffers(self, moved: Sequence[Tensor]) -> None:
        for which, value in enumerate(moved, len(self.parameters.reduced)):
            self._reduction.put(which, value)
