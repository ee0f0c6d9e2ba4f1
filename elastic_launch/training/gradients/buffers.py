"""Combines the buffers of micro-batches into those of the global batch.

Every micro-batch starts with the buffers of the step's start, and each buffer has a rule for its value after the step,
see ``buffer_rules``; no rule depends on which rank computed what. A mean is computed as the start plus the mean
difference from it, so that a value that no micro-batch changes stays as it is: the computed mean of equal numbers may
differ from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_launch.batch import BatchPlan
from elastic_launch.errors import UsageError
from elastic_launch.snapshot.format.dtypes import flat_bytes
from elastic_launch.training.gradients.buffer_rules import Buffer, advice, buffers_of, tensors_of
from elastic_launch.training.gradients.flat import together
from elastic_launch.training.ranks.mesh import ALL, RankGroup

BY_VALUE = 100
"""Interval in steps at which buffers without a rule are compared by their values."""


class Buffers:
    """One model's buffers during a step."""

    def __init__(
        self, model: nn.Module, world_size: int, rules: Mapping[str, str] | None = None, peers: RankGroup = ALL
    ) -> None:
        found = buffers_of(model, rules or {})
        self._model, self._names = model, set[str]()
        self._looked = False  # whether a micro-batch has shown which buffers the model has
        self._world_size = world_size
        self._peers = peers
        self._total = 1
        self._all = [buffer for buffer in found if buffer.rule != "ignore"]
        self._watched = [_Watched(buffer) for buffer in found if buffer.rule in (None, "error")]
        self._means = [x for x in found if x.rule == "mean" or (x.rule == "sum" and x.tensor.is_floating_point())]
        self._counts = [x for x in found if x.rule == "sum" and not x.tensor.is_floating_point()]
        self._last = [x for x in found if x.rule == "last"]
        self._extremes = [x for x in found if x.rule in ("min", "max")]
        self._ruled = [*self._means, *self._counts, *self._last, *self._extremes]
        self.summed = [x.tensor for x in self._means]  # their new values come from rounded sums over micro-batches
        self._starts: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}
        self._sums: list[Tensor] = []
        self._added: list[Tensor] = []
        self._keys: list[Tensor] = []
        self._undecided: list[_Watched] = []
        self._left: dict[str, Tensor] = {}  # what the step's last micro-batch has left, of those where that counts
        self._totals: list[Tensor] = []

    @property
    def outdated(self) -> bool:
        """Whether the script has removed a buffer, as by ``prune.remove``."""
        return any(name not in tensors_of(module, name) for x in self._all for module, name in x.homes)

    def begin(self, plan: BatchPlan) -> None:
        """Start a step."""
        self._total = plan.total
        if not self._looked:
            self._names = {name for name, _ in _saved(self._model)}
        if not self._all:
            return
        for buffer in self._all:
            _take_back(buffer)  # the script may have assigned another tensor since the last step
        tensors = [x.tensor for x in self._ruled]
        if not self._starts:
            self._starts = {x.name: x.tensor.detach().clone() for x in self._ruled}
            self._sums = [torch.zeros_like(tensor) for tensor in self.summed]
        elif tensors:
            torch._foreach_copy_(list(self._starts.values()), tensors)
        if self._sums:
            torch._foreach_zero_(self._sums)
        for watched in self._watched:
            watched.begin()
        self._versions.clear()
        self._added = [_zeros(x.tensor) for x in self._counts]
        self._keys = [_zeros(x.tensor).fill_(_MOST) for x in self._extremes]
        # A step with one micro-batch leaves one value, so no rule is needed.
        self._undecided = [x for x in self._watched if x.buffer.rule is None and x.buffer.saved and plan.total == 1]
        self._left = {}

    def take(self, index: int) -> list[Tensor]:
        """Collect the values that a micro-batch left, and return what it adds to each of ``summed``."""
        if not self._looked:
            self._looked = True
            if new := next((name for name, _ in _saved(self._model) if name not in self._names), None):
                raise UsageError(
                    f"The buffer {new!r} got its first value in a micro-batch: it would depend on the rank's data, and "
                    "a checkpoint would have what a new process lacks.",
                    "Call the model once before the loop, or give the buffer a value when you register it.",
                )
        if not self._all:
            return []
        for buffer in self._all:
            _take_back(buffer)
        for buffer, start in zip(self._ruled, self._starts.values(), strict=True):
            _check_shape(buffer, start)
        for watched in self._watched:
            if watched.changed():
                if watched not in self._undecided:
                    watched.refuse()
                _check_shape(watched.buffer, watched.start)
                self._left[watched.buffer.name] = _copied(watched.buffer.tensor)
        if index == self._total - 1:
            self._left |= {x.name: _copied(x.tensor) for x in self._last}
        for added, counted in zip(self._added, self._counts, strict=True):
            added.add_(counted.tensor.to(torch.int64) - self._starts[counted.name].to(torch.int64))
        for key, extreme in zip(self._keys, self._extremes, strict=True):
            torch.minimum(key, _key(extreme), out=key)
        return self._ways()

    def _ways(self) -> list[Tensor]:
        if self._total > 1 and self._means and not any(x.checked or x.rule == "sum" for x in self._means):
            starts = [self._starts[x.name] for x in self._means]
            ways = torch._foreach_sub([x.tensor.detach() for x in self._means], starts)
            torch._foreach_div_(ways, self._total)
            return list(ways)
        return [self._way(buffer) for buffer in self._means]

    def _way(self, buffer: Buffer) -> Tensor:
        value, start = buffer.tensor.detach(), self._starts[buffer.name]
        if self._total == 1 and buffer.rule == "mean":
            # The value itself, so that the result is the same as in plain PyTorch.
            return value.clone()
        share = self._total if buffer.rule == "mean" else 1
        if not buffer.checked:
            return (value - start) / share
        # If the start is infinite, which means that there was no value yet, the difference is the value itself.
        way = torch.where(torch.isfinite(start), value - start, value) / share
        return torch.where(value == start, torch.zeros((), dtype=way.dtype, device=way.device), way)

    def add(self, ways: Sequence[Tensor]) -> None:
        """Add a micro-batch's contribution, in the order of this rank's micro-batches."""
        if self._sums:
            torch._foreach_add_(self._sums, list(ways))

    def exchange(self, sums: Sequence[Tensor] | None = None) -> None:
        """Exchange with all ranks what :meth:`finish` needs; nothing changes until then.

        Args:
            sums: sums of the contributions of all micro-batches of all ranks; None: they are exchanged here.
        """
        if not self._all:
            return
        group = self._peers.group
        if sums is None:
            sums = self._sums
            if self._world_size > 1:
                together(self._sums, partial(dist.all_reduce, group=group))
        self._totals = list(sums)
        if self._world_size > 1:
            together(self._added, partial(dist.all_reduce, group=group))
            together(self._keys, partial(dist.all_reduce, op=dist.ReduceOp.MIN, group=group))
            decided = [*self._last, *(x.buffer for x in self._undecided)]
            self._left = {x.name: self._left.get(x.name, _copied(x.tensor)) for x in decided}
            # The last rank has the last micro-batch. As bytes: not every backend supports every dtype.
            last = self._peers.rank(self._world_size - 1)
            together([*map(flat_bytes, self._left.values())], partial(dist.broadcast, src=last, group=group))

    def finish(self) -> None:
        """Set every buffer to its new value, on all ranks; called after :meth:`exchange`.

        Raises:
            UsageError: on all ranks, if a mean is invalid, and then no buffer has changed; or if the script has changed
                a buffer since the last micro-batch.
        """
        if not self._all:
            return
        self._check_untouched()
        new = [self._mean(buffer, total) for buffer, total in zip(self._means, self._totals, strict=True)]
        with torch.no_grad():
            for buffer, value in zip(self._means, new, strict=True):
                buffer.tensor.copy_(value)
            for buffer, added in zip(self._counts, self._added, strict=True):
                buffer.tensor.copy_(self._starts[buffer.name].to(torch.int64) + added)
            for buffer in self._last:
                buffer.tensor.copy_(self._left[buffer.name])
            for buffer, key in zip(self._extremes, self._keys, strict=True):
                buffer.tensor.copy_(_from_key(key, buffer))
            for watched in self._undecided:
                if (left := self._left.get(watched.buffer.name)) is not None:
                    watched.set(left)

    def _mean(self, buffer: Buffer, total: Tensor) -> Tensor:
        start = self._starts[buffer.name]
        if self._total == 1 and buffer.rule == "mean":
            return total
        if not buffer.checked:
            return start + total
        value = torch.where(torch.isfinite(start) | (total == 0), start + total, total)
        # A value that does not change may be infinite.
        if bool((~torch.isfinite(value) & ~(value == start)).any()):
            raise UsageError(
                f"The mean of the buffer {buffer.name!r} over the micro-batches is not a finite number.",
                "Name another rule than mean by an argument of run.steps() or Trainer: "
                f'buffers={{"{buffer.name}": "min"}}, for example. See docs/training/exactness.md, Buffers.',
            )
        return value

    def restore(self) -> None:
        """Restore the values of the step's start."""
        if not self._all:
            return
        with torch.no_grad():
            if self._ruled:
                torch._foreach_copy_([x.tensor for x in self._ruled], list(self._starts.values()))
            for watched in self._watched:
                watched.restore()
        self._versions = {x.name: x.tensor._version for x in self._ruled}

    def _check_untouched(self) -> None:
        for buffer in self._ruled:
            if self._versions.get(buffer.name, buffer.tensor._version) != buffer.tensor._version:
                raise UsageError(
                    f"The buffer {buffer.name!r} was changed between a step's last micro-batch and step.update().",
                    "Change it in the forward pass, or after step.update().",
                )


class _Watched:
    """A buffer that may not change in a micro-batch.

    A change is detected by the tensor's version and, in every ``BY_VALUE``-th step of a process, beginning with the
    first, by its values: writing through ``.data`` leaves no other trace, but comparing values takes time, and has to
    wait for a GPU.
    """

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.start = buffer.tensor.detach()
        self._version = -1
        self._by_value = True
        self._steps = 0

    def begin(self) -> None:
        """Start a step."""
        self._by_value = self._steps % BY_VALUE == 0
        self._steps += 1
        if self._by_value or self.buffer.tensor._version != self._version:
            self.start = self.buffer.tensor.detach().clone()
            self._version = self.buffer.tensor._version

    def changed(self) -> bool:
        """Whether the current micro-batch has changed it."""
        if not self._by_value and self.buffer.tensor._version == self._version:
            return False
        return not torch.equal(flat_bytes(self.buffer.tensor), flat_bytes(self.start))

    def refuse(self) -> None:
        buffer = self.buffer
        if buffer.rule == "error":
            raise UsageError(
                f"The buffer {buffer.name!r} changed in a micro-batch.", 'buffers= gives it the rule "error".'
            )
        why = (
            "no rule says how to combine its values over a step's micro-batches"
            if buffer.saved
            else "it is not saved with the model"
        )
        raise UsageError(f"The buffer {buffer.name!r} changed in a micro-batch, and {why}.", advice(buffer, self.start))

    def restore(self) -> None:
        """Restore the value of the step's start."""
        if self.changed():
            self.set(self.start)

    def set(self, value: Tensor) -> None:
        """Set a value, which the next :meth:`begin` does not treat as a change."""
        self.buffer.tensor.copy_(value)
        self._version = self.buffer.tensor._version
        if value is not self.start:
            self.start = value


def _check_shape(buffer: Buffer, start: Tensor) -> None:
    if buffer.tensor.shape != start.shape:
        _refuse_shape(buffer)


def _refuse_shape(buffer: Buffer) -> NoReturn:
    hint = "Leave its shape and dtype as they are; call the model once before the first step if that sets them."
    if not buffer.saved:
        hint = f'If it is a cache, give it the rule "ignore": buffers={{"{buffer.name}": "ignore"}}.'
    raise UsageError(f"The buffer {buffer.name!r} got another shape or dtype in a step.", hint)


def _take_back(buffer: Buffer) -> None:
    """If a module has replaced a buffer's tensor, put the old tensor back, with the new values."""
    tensor = buffer.tensor
    for module, name in buffer.homes:
        own = tensors_of(module, name)
        current = own[name]
        if current is tensor:
            continue
        if current is None or current.shape != tensor.shape or current.dtype != tensor.dtype:
            _refuse_shape(buffer)
        with torch.no_grad():
            tensor.copy_(current)
        own[name] = tensor


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy that is contiguous, so that its bytes can be received in place."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())


_MOST = 2**63 - 1


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=torch.int64, device=like.device)


def _key(buffer: Buffer) -> Tensor:
    """Return integers, the least of which belongs to the value that the rule selects; NaN comes before all others."""
    value = buffer.tensor.detach()
    if value.is_floating_point():
        # As integers of their width, floats are in order but for the negative ones, which are in reverse.
        bits = value.contiguous().view(_SIGNED[value.element_size()]).to(torch.int64)
        width = 8 * value.element_size()
        lowest = -(2 ** (width - 1))
        key = torch.where(bits < 0, bits ^ (2 ** (width - 1) - 1), bits)
        key = torch.where(torch.isnan(value), lowest if buffer.rule == "min" else -1 - lowest, key)
    else:
        key = value.to(torch.int64)
    return key if buffer.rule == "min" else ~key


_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _from_key(key: Tensor, buffer: Buffer) -> Tensor:
    key = key if buffer.rule == "min" else ~key
    value = buffer.tensor
    if not value.is_floating_point():
        return key.to(value.dtype)
    bits = torch.where(key < 0, key ^ (2 ** (8 * value.element_size() - 1) - 1), key)
    return bits.to(_SIGNED[value.element_size()]).view(value.dtype)


def _saved(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of a model that are in its state, by name."""
    for path, module in model.named_modules():
        for name, tensor in module._buffers.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, tensor
