"""The state that a step began with: what a process hands on if its round breaks within the step.

The head of a loop body is the script's code between the start of a step, or of a later pass, and its first micro-batch.
It may change what is saved: a registered counter, a learning rate. A process whose round breaks goes on behind its
head, and a process that joins runs its own head. So the state that is handed on must be that of before the head.

What is small is copied at each start. What is large is watched: its tensors by address and version, and from time to
time also by a checksum, since a change through ``Tensor.data`` leaves no other trace. The same marks show what the
script changes between the micro-batches of a step, where the result would depend on the number of ranks.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from elastic_launch.snapshot.format.dtypes import flat_bytes
from elastic_launch.training.checkpoints.optimizer_loading import into
from elastic_launch.training.checkpoints.parts import Gathered, Stateful, flat
from elastic_launch.training.ranks.checksum import checksums
from elastic_launch.training.wrapped import is_sharded, is_zero

SMALL = 64 * 2**10
"""Bytes of all states together that are copied at each start."""

QUICK = 1e-3
"""Maximum seconds of a ``state_dict()`` that is called at each start."""

SHARE = 0.001
"""Fraction of the training's time that checksums may cost."""

AGAIN = 64
"""Starts after which it is decided anew what is small, if copying it takes long."""

_VALUE = 64
"""Bytes counted for a value that is not a tensor."""

MODEL = "model"
"""Name of the part whose buffers have rules."""

_PLAIN = frozenset((int, float, bool, str, bytes, complex, type(None)))

Start = dict[str, Any]
"""What was small at one start, in a form that a checkpoint can hold: by kind, then by part."""

_version = attrgetter("_version")
_values = methodcaller("values")  # a TorchScript module has its members in other types than dict


def copied(value: Any, tensor: Callable[[Tensor], Tensor] = lambda tensor: tensor.detach().clone()) -> Any:
    """Return a copy of a state that shares no container with it, and what ``tensor`` returns of each tensor."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return tensor(value)
    if kind is dict:
        return {key: item if type(item) in _PLAIN else copied(item, tensor) for key, item in value.items()}
    if isinstance(value, dict | deque):
        # A module's state_dict has attributes besides its items.
        found = copy.copy(value)
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            found[key] = copied(item, tensor)
        return found
    if kind is list:
        return [item if type(item) in _PLAIN else copied(item, tensor) for item in value]
    if isinstance(value, tuple):
        return getattr(kind, "_make", kind)([copied(item, tensor) for item in value])
    return copy.deepcopy(value)


def overlay(states: dict[str, Any], start: Start) -> None:
    """Replace what is small in the states of all parts by what it was at a start."""
    for name, state in start["states"].items():
        holder, key = _holder(states, name)
        holder[key] = state
    for name, groups in start["groups"].items():
        holder, key = _holder(states, name)
        then = [{**mine, **options} for mine, options in zip(holder[key]["param_groups"], groups, strict=True)]
        holder[key] = {**holder[key], "param_groups": then}
    for name, values in start["extra"].items():
        holder, key = _holder(states, name)
        holder[key].update(values)


@dataclass(frozen=True, slots=True)
class _Mark:
    """What the watched tensors were at one time."""

    names: list[str]  # as in StepStart
    tensors: list[Tensor]
    fixed: int
    addresses: list[int]
    versions: list[int]
    sums: list[int] | None  # checksums
    others: dict[str, tuple[list[Any], list[int]]]  # of other states: the values, and versions of their tensors


class StepStart:
    """The start of the current step, or of a later pass in it.

    The library alone changes the parts named in ``unwatched``, between steps.
    """

    def __init__(self, parts: Mapping[str, Stateful], unwatched: Collection[str] = ()) -> None:
        self.starts: list[Start] = []
        """What was small at the start of the step, and of each of its passes that has begun."""
        self.blind: list[str] = []
        """Names of states that cannot be watched."""
        self.hands_on = True
        """Whether this process may have to hand on the state, so that its start must be known."""
        self._modules: dict[str, nn.Module] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._scalers: dict[str, torch.amp.GradScaler] = {}
        self._small: dict[str, Stateful] = {}
        self._large: dict[str, Stateful] = {}
        self._extra: list[tuple[str, str, nn.Module]] = []
        # The structure: the modules' dicts of members, the members, and the optimizers' parameters.
        self._dicts: list[dict[str, Any]] = []
        self._filled: list[dict[str, Any]] = []
        self._count = -1
        self._members: list[Any] = []
        self._own: list[Tensor] = []
        self._tensors: list[Tensor] = []  # parameters, buffers of registered modules, then those of the model
        self._names: list[str] = []
        self._fixed = 0  # number of those that passes may not change: all but the model's buffers, which have rules
        self._sharded = False
        self._states: dict[str, tuple[list[Any], list[Tensor]]] = {}  # of the optimizers: values, those with a version
        self.open = False  # whether a step is under way
        self._at: _Mark | None = None  # at the start
        self._behind: _Mark | None = None  # behind the head
        self._then: dict[str, Any] = {}  # what was small behind the head
        self._away: dict[str, list[tuple[int, int]]] = {}  # its tensors that are not on the host
        self._with_tensors: set[str] = set()  # names of what is small and has tensors
        self._sums_at = -float("inf")
        self._cost = 0.0
        self._sums_now = False
        self._parts = {name: part for name, part in flat(parts) if name.partition("/")[0] not in unwatched}
        self._since = 0  # starts since the parts were divided
        self._divide_all()

    def _divide_all(self) -> None:
        for each in (self._modules, self._optimizers, self._scalers, self._small, self._large, self.blind):
            each.clear()
        room = SMALL
        for name, part in self._parts.items():
            room -= self._divide(name, part, room)
        self._since, self._count = 0, -1

    def _divide(self, name: str, part: Stateful, room: int) -> int:
        """Decide how a part is kept or watched; return the bytes that are copied at each start."""
        if isinstance(part, nn.Module):
            self._modules[name] = part
        elif is_zero(part):
            pass  # its state is in pieces, and its process ends with its round
        elif isinstance(part, torch.optim.Optimizer) and "param_groups" in part.state_dict():
            self._optimizers[name] = part
        elif isinstance(part, torch.amp.GradScaler) and part.is_enabled():
            self._scalers[name] = part  # its state_dict waits for the GPU; that of a disabled one is empty
        elif not isinstance(part, Gathered):
            seconds, first, second = _timed(part)
            size = _size(first)
            if seconds <= QUICK and size <= room:
                self._small[name] = part
                return size
            if seconds <= QUICK and _same_tensors(first, second):
                self._large[name] = part
            else:
                self.blind.append(name)
        return 0

    @property
    def trained(self) -> dict[str, bool]:
        """Whether each parameter needed a gradient at the start, by name."""
        return dict(self.starts[-1]["trained"])

    def take(self, trained: Mapping[str, bool], passes: int = 0) -> None:
        """Begin a step, or the pass that follows so many updated ones; ``trained``: which parameters are."""
        self._look()
        began, self._since = time.perf_counter(), self._since + 1
        start: Start = {"trained": dict(trained), "states": {}, "groups": {}, "extra": {}}
        for name, part in self._small.items():
            start["states"][name] = self._copied(name, part.state_dict())
        for name, optimizer in self._optimizers.items():
            groups = [_options(group) for group in optimizer.param_groups]
            start["groups"][name] = self._copied(f"{name}.param_groups", groups)
        for name, key, module in self._extra:
            start["extra"].setdefault(name, {})[key] = self._copied(f"{name}.{key}", module.get_extra_state())
        self.starts[passes:] = [start]
        if time.perf_counter() - began > QUICK and self._since > AGAIN:
            self._divide_all()  # something may have grown: it is watched from the next step on
            self._look()
        # Checksums only from time to time; at the first start, in any case.
        self._sums_now = (time.monotonic() - self._sums_at) * SHARE >= self._cost
        self.open, self._behind = True, None
        self._at = self._mark(others=True) if self.hands_on else None

    def _copied(self, name: str, value: Any) -> Any:
        """Return a copy of a small state, and note if it has tensors: comparing them by ``==`` waits for a GPU."""

        def tensor(each: Tensor) -> Tensor:
            self._with_tensors.add(name)
            return each.detach().clone()

        return copied(value, tensor)

    def go_on(self) -> None:
        """Continue the step in another round, with the state that this process has."""
        if not self.open:
            return
        self._sums_now = False
        self._look()
        self._at = self._mark(others=True) if self.hands_on else None
        if self._behind is not None:
            self._behind = self._at or self._mark(others=False)

    def close(self) -> None:
        """End the step: from now on, the state is that of its end."""
        self.open, self._at, self._behind = False, None, None

    def pass_begins(self, *, look: bool = True) -> list[str]:
        """Note that the head has ended; return the names of what it has changed and is not copied.

        Unless told to ``look`` at all of it, as :meth:`changed_in_pass` needs, only changed buffers of the model are
        seen: passes change them, too, so :meth:`spoiled` cannot see them later, as it does all else.
        """
        if not (look or self._sums_now) and self._at is not None and not self._buffers_changed(self._at):
            return []
        self._look()
        self._behind = self._mark(others=self._at is not None)
        before = _values_of(self.starts[-1])
        self._then, self._away = {}, {}
        for name, value in self._values().items():
            # Usually the head has changed nothing, and there is a copy already.
            same = name in before and self._equal(name, value, before[name])
            self._then[name] = before[name] if same else copied(value)
            if name in self._with_tensors:
                self._away[name] = _away(value)
        return [] if self._at is None else _differences(self._at, self._behind, buffers=True)

    def _buffers_changed(self, mark: _Mark) -> bool:
        buffers = mark.tensors[mark.fixed :]
        return bool(buffers) and self._marks(buffers)[1] != mark.versions[mark.fixed :]

    def changed_in_pass(self, allowed: Collection[str] = ()) -> list[str]:
        """Return the names of what has changed since the head ended, but for the model's buffers and allowed names.

        It is not known, and the result is empty, if :meth:`pass_begins` did not look.
        """
        if self._behind is None:
            return []
        self._look()
        found = _differences(self._behind, self._mark(others=False), buffers=False)
        for name, value in self._values().items():
            if not self._equal(name, value, self._then.get(name)) or _moved(self._away.get(name), value):
                found.append(self._called(name))
        return [name for name in found if name not in allowed]

    def spoiled(self) -> list[str]:
        """Return the names of what has changed since the start and is not copied: the state of the start is gone."""
        self._sums_now = False
        self._look()
        return [] if self._at is None else _differences(self._at, self._mark(others=True), buffers=False)

    def put_back(self, states: dict[str, Any]) -> dict[str, Any]:
        """Replace, in states just taken of all parts, what is small by what it was at the start."""
        overlay(states, self.starts[-1])
        return states

    def load(self, start: Start) -> None:
        """Set what is small to what it was at a start in another process."""
        self._look()
        for name, state in start["states"].items():
            self._parts[name].load_state_dict(copied(state))
        for name, groups in start["groups"].items():
            written: set[int] = set()
            for mine, then in zip(self._optimizers[name].param_groups, groups, strict=True):
                for key, value in then.items():
                    mine[key] = into(mine.get(key), _as(mine.get(key), copied(value)), written)
        for name, key, module in self._extra:
            if key in start["extra"].get(name, {}):
                module.set_extra_state(copied(start["extra"][name][key]))

    def _values(self) -> dict[str, Any]:
        """Return what is small as it is now."""
        found: dict[str, Any] = {name: part.state_dict() for name, part in self._small.items()}
        for name, optimizer in self._optimizers.items():
            found[f"{name}.param_groups"] = [_options(group) for group in optimizer.param_groups]
        for name, key, module in self._extra:
            found[f"{name}.{key}"] = module.get_extra_state()
        return found

    def _called(self, name: str) -> str:
        """Return the name of what is small, for a message."""
        part = self._small.get(name)
        if part is None:
            part = next((module for each, key, module in self._extra if f"{each}.{key}" == name), None)
        return name if part is None else f"{name} ({type(part).__name__})"

    def _equal(self, name: str, now: Any, then: Any) -> bool:
        """Whether a small state is what it was; of tensors that are not on the host this is not known."""
        if name not in self._with_tensors:
            try:
                if now == then:
                    return True
            except (RuntimeError, TypeError, ValueError):
                pass  # something in it cannot be compared so
            if any(isinstance(leaf, Tensor) for leaf in _leaves(now)):
                self._with_tensors.add(name)
        try:
            return _same(now, then)
        except RecursionError:  # an object of the script that refers to itself
            return True

    def _look(self) -> None:
        """Determine the modules' members and the optimizers' parameters again, if they have changed."""
        own = [p for x in self._optimizers.values() for group in x.param_groups for p in group["params"]]
        members = [*chain.from_iterable(map(_values, self._filled))]
        count = sum(map(len, self._dicts))
        if count == self._count and _identical(members, self._members) and _identical(own, self._own):
            return
        modules = [(name, path, x) for name, part in self._modules.items() for path, x in part.named_modules()]
        self._dicts = [each for *_, x in modules for each in (x._parameters, x._buffers, x._modules)]
        self._filled = [each for each in self._dicts if each]
        self._members = [*chain.from_iterable(map(_values, self._filled))]
        self._count, self._own = sum(map(len, self._dicts)), own
        parameters: dict[int, tuple[str, Tensor]] = {}
        of_model: dict[int, tuple[str, Tensor]] = {}
        of_others: dict[int, tuple[str, Tensor]] = {}
        self._extra = []
        for name, path, module in modules:
            prefix = f"{name}: " * (name != MODEL) + f"{path}." * bool(path)
            # What another module does not save is not a part of the state.
            caches = () if name == MODEL else module._non_persistent_buffers_set
            buffers = of_model if name == MODEL else of_others
            for found, each in ((parameters, module._parameters), (buffers, module._buffers)):
                for key, tensor in each.items():
                    if tensor is not None and key not in caches:
                        found.setdefault(id(tensor), (prefix + key, tensor))
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                key = f"{path}." * bool(path) + "_extra_state"
                began = time.perf_counter()
                size = _size(module.get_extra_state())
                # Some wait for a GPU.
                if size <= SMALL and time.perf_counter() - began <= 10 * QUICK:
                    self._extra.append((name, key, module))
                elif key not in self.blind:
                    self.blind.append(key)
        for number, parameter in enumerate(own):
            parameters.setdefault(id(parameter), (f"parameter {number} of the optimizer", parameter))
        # A registered module may be one of the model's, or have it.
        fixed = {**parameters, **{key: each for key, each in of_others.items() if key not in of_model}}
        found_all = [*fixed.values(), *of_model.values()]
        self._fixed = len(fixed)
        self._names, self._tensors = [name for name, _ in found_all], [tensor for _, tensor in found_all]
        self._sharded = any(map(is_sharded, self._tensors))

    def _mark(self, *, others: bool) -> _Mark:
        tensors = self._tensors
        addresses, versions = self._marks(tensors)
        known: dict[str, tuple[list[Any], list[int]]] = {}
        if others:
            for name, optimizer in self._optimizers.items():
                # An optimizer may have an entry beside those of the parameters, such as a count.
                each = (x.values() if isinstance(x, dict) else (x,) for x in optimizer.state.values())
                values: list[Any] = [*chain.from_iterable(each)]
                known[name] = self._of_optimizer(name, values)
            for name, scaler in self._scalers.items():
                # Its methods that return these wait for the GPU.
                known[name] = [], [x._version for x in (scaler._scale, scaler._growth_tracker) if x is not None]
            for name, part in self._large.items():
                leaves = [*_leaves(part.state_dict())]
                addresses_, versions_ = self._marks([x for x in leaves if isinstance(x, Tensor)])
                plain = [hash(x) for x in leaves if type(x) in _PLAIN]
                known[name] = [], [*addresses_, *versions_, *plain]
        sums = self._sums(tensors) if self._sums_now else None
        return _Mark(self._names, tensors, self._fixed, addresses, versions, sums, known)

    def _marks(self, tensors: list[Tensor]) -> tuple[list[int], list[int]]:
        """Return the addresses and the versions of tensors."""
        if self._sharded:
            tensors = [_local(each) for each in tensors]
        try:
            return [*map(Tensor.data_ptr, tensors)], [*map(_version, tensors)]
        except (RuntimeError, NotImplementedError):  # sparse tensors and those of inference mode have not got both
            plain = [_is_plain(each) for each in tensors]
            addresses = [x.data_ptr() if is_plain else id(x) for x, is_plain in zip(tensors, plain, strict=True)]
            return addresses, [x._version if is_plain else 0 for x, is_plain in zip(tensors, plain, strict=True)]

    def _of_optimizer(self, name: str, values: list[Any]) -> tuple[list[Any], list[int]]:
        before, tensors = self._states.get(name, ([], []))
        if not _identical(values, before):
            tensors = [value for value in values if isinstance(value, Tensor)]
            self._states[name] = before, tensors = values, tensors
        return before, self._marks(tensors)[1] if self._sharded else [*map(_version, tensors)]

    def _sums(self, tensors: Sequence[Tensor]) -> list[int]:
        began = time.monotonic()
        found: list[int] = checksums([_local(x) if _is_plain(x) else torch.empty(0) for x in tensors]).tolist()
        self._sums_at = time.monotonic()
        self._cost = 3 * (self._sums_at - began)  # at the start, behind the head, and behind the pass
        return found


def _holder(states: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """Return the dict that has the state of a part, or of a group's member, and its key there."""
    group, inner, member = name.partition("/")
    return (states[group], member) if inner and name not in states else (states, name)


def _values_of(start: Start) -> dict[str, Any]:
    """Return what was small at a start, by the names that :meth:`StepStart._values` has."""
    found = dict(start["states"])
    found |= {f"{name}.param_groups": groups for name, groups in start["groups"].items()}
    found |= {f"{name}.{key}": value for name, values in start["extra"].items() for key, value in values.items()}
    return found


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _as(mine: Any, value: Any) -> Any:
    return value.to(mine.device) if isinstance(mine, Tensor) and isinstance(value, Tensor) else value


def _timed(part: Stateful) -> tuple[float, Any, Any]:
    """Return the shortest time of a few calls of ``state_dict()``, in seconds, and two of the results."""
    seconds, states = [], []
    for _ in range(3):
        began = time.perf_counter()
        states.append(part.state_dict())
        seconds.append(time.perf_counter() - began)
        if seconds[-1] > 100 * QUICK:
            break
    return min(seconds), states[0], states[-1]


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the values of a state."""
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple | set | frozenset | deque):
        yield value
        return
    for item in value:
        yield from _leaves(item)


def _size(state: Any) -> int:
    """Return the bytes of a state, about."""
    return sum(int(getattr(leaf, "nbytes", _VALUE)) for leaf in _leaves(state))


def _same_tensors(first: Any, second: Any) -> bool:
    """Whether two states, of one part at different times, have the same tensors, so that these can be watched."""
    pairs = zip(_leaves(first), _leaves(second), strict=False)
    return all(x.data_ptr() == y.data_ptr() for x, y in pairs if isinstance(x, Tensor) and isinstance(y, Tensor))


def _same(now: Any, then: Any) -> bool:
    if isinstance(now, Tensor) and isinstance(then, Tensor):
        if now.device.type != "cpu" or not _is_plain(now) or not _is_plain(then):
            return True
        if (now.dtype, now.shape) != (then.dtype, then.shape):
            return False
        return torch.equal(flat_bytes(now.detach()), flat_bytes(then))
    if isinstance(now, Mapping) and isinstance(then, Mapping):
        return now.keys() == then.keys() and all(_same(now[key], then[key]) for key in now)
    if isinstance(now, list | tuple | deque) and isinstance(then, list | tuple | deque):
        return len(now) == len(then) and all(map(_same, now, then))
    if type(now) in _PLAIN:
        return type(now) is type(then) and bool(now == then or (now != now and then != then))
    if type(now) is not type(then):
        return False
    if hasattr(now, "tobytes"):  # NumPy's arrays and numbers
        return (now.dtype, now.shape) == (then.dtype, then.shape) and bool(now.tobytes() == then.tobytes())
    if getattr(type(now), "__eq__", None) is not object.__eq__:
        with suppress(RuntimeError, TypeError, ValueError):
            return bool(now == then)
    return _same(getattr(now, "__dict__", None), getattr(then, "__dict__", None))


def _away(state: Any) -> list[tuple[int, int]]:
    """Return identity and version of a state's tensors on other devices, where reading them would wait."""
    tensors = [x for x in _leaves(state) if isinstance(x, Tensor) and x.device.type != "cpu" and _is_plain(x)]
    return [(id(tensor), tensor._version) for tensor in tensors]


def _moved(before: list[tuple[int, int]] | None, state: Any) -> bool:
    """Whether a tensor on another device was changed, as far as the object keeps its tensors."""
    if not before:
        return False
    return any(x == y and was != now for (x, was), (y, now) in zip(before, _away(state), strict=False))


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_meta or tensor.is_inference())


def _local(tensor: Any) -> Tensor:
    with torch.no_grad():
        local: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
        return local


def _identical(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return len(first) == len(second) and all(map(is_, first, second))


def _differences(before: _Mark, now: _Mark, *, buffers: bool) -> list[str]:
    """Return the names of what differs between two marks."""
    found: list[str] = []
    if before.tensors is not now.tensors:
        counts = [len(mark.names) if buffers else mark.fixed for mark in (before, now)]
        there = dict(zip(before.names[: counts[0]], map(id, before.tensors), strict=False))
        here = dict(zip(now.names[: counts[1]], map(id, now.tensors), strict=False))
        found = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    elif (before.addresses, before.versions, before.sums) != (now.addresses, now.versions, now.sums):
        count = len(now.tensors) if buffers else now.fixed
        sums = zip(before.sums, now.sums, strict=True) if before.sums and now.sums else repeat((0, 0))
        marks = zip(now.names[:count], before.addresses, now.addresses, before.versions, now.versions, strict=False)
        seen = zip(marks, sums, strict=False)
        found = [name for (name, at, to, was, now_), (x, y) in seen if (at, was, x) != (to, now_, y)]
    for name, (values, versions) in before.others.items() if now.others else ():
        values_now, versions_now = now.others[name]
        if versions != versions_now or (values is not values_now and (values or values_now)):
            found.append(f"the state of {name}")
    return found
