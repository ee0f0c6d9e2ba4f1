"""The contents of a checkpoint: stateful objects by name, and functions to call when they are saved or restored."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any, NoReturn

import torch
from torch import nn

from elastic_launch.errors import UsageError
from elastic_launch.snapshot.format import tree
from elastic_launch.snapshot.format.plain import Path, show
from elastic_launch.snapshot.format.small_values import UnknownMember
from elastic_launch.training.checkpoints.frozen import Frozen
from elastic_launch.training.checkpoints.late import Late
from elastic_launch.training.checkpoints.matching import (
    class_of,
    differences,
    module_differences,
    other_dtype,
    reordered,
)
from elastic_launch.training.checkpoints.module_loading import load_module
from elastic_launch.training.checkpoints.optimizer_loading import load_optimizer
from elastic_launch.training.checkpoints.options import Given
from elastic_launch.training.checkpoints.parts import Collected, Gathered, Group, Stateful, flat, is_stateful
from elastic_launch.training.checkpoints.pruned import prune_alike
from elastic_launch.training.checkpoints.resumed import Resumed
from elastic_launch.training.checkpoints.sharded import (
    Cutting,
    StateGatherer,
    bytes_in,
    holds_shards,
    local_state,
    ungathered_state,
)
from elastic_launch.training.checkpoints.step_start import StepStart, copied, overlay
from elastic_launch.training.gradients.parameters import OwnParameters
from elastic_launch.training.kinds import found
from elastic_launch.training.ranks.world import World
from elastic_launch.training.wrapped import is_zero


class TrainingState:
    """The parts of a training's state."""

    def __init__(self) -> None:
        self._parts: dict[str, Stateful] = {}
        self.gathered: set[int] = set()
        """Addresses of the tensors that the last :meth:`capture` has gathered, which do not change."""
        self._frozen = Frozen()
        self.late = Late()
        """What the script registers after the training has begun."""
        self.given = Given()
        """The options that the script gives to optimizers and schedulers."""
        self._on_save: list[Callable[[], None]] = []
        self._on_restore: list[Callable[[], None]] = []
        self.start: StepStart | None = None
        """What the current step began with; while it is open, states are taken as they were then."""

    def register(self, name: str, stateful: Stateful, *, late: bool = False) -> None:
        """Add a part; if it is registered ``late``, it gets the state that was restored for it, if there is one."""
        if self._parts.get(name, stateful) is not stateful:
            raise UsageError(f"run.register({name!r}): the name is taken.", "Choose another.")
        if isinstance(stateful, type):
            raise UsageError(f"run.register({name!r}) got {found(stateful)}.", "Register an object.")
        if not is_stateful(stateful):
            raise UsageError(
                f"run.register({name!r}): {type(stateful).__name__} has no state_dict and load_state_dict.",
                "Give it both, or register an object that has them.",
            )
        if late and name not in self._parts and (kept := self.late.registered(name)) is not None:
            # A copy: until the step has ended, this process may have to hand on the state of its start.
            tensors, rest = tree.encode(kept.state)
            cut = Cutting({name: stateful}, {}, {}) if holds_shards(stateful) else lambda _, tensor: tensor.clone()
            saved = tree.decode(rest, tensors, cut)[name]
            saved = self._frozen.filled(name, stateful, saved, kept.origin, kept.frozen.get(name))
            _load(name, stateful, saved, kept.origin, kept.classes, {})
        self._parts[name] = stateful

    def extended(self, parts: dict[str, Stateful]) -> TrainingState:
        """Return a state with further parts and the same functions."""
        state = TrainingState()
        state._on_save, state._on_restore = self._on_save, self._on_restore
        state._frozen, state.given, state.late = self._frozen, self.given, self.late
        for name, part in [*self._parts.items(), *parts.items()]:
            state.register(name, part)
        return state

    def includes(self, other: TrainingState) -> bool:
        """Whether all parts of another state are parts of this one."""
        return all(self._parts.get(name) is part for name, part in other._parts.items())

    @property
    def calls_functions(self) -> bool:
        """Whether functions are called on all ranks as a state is taken or restored: they may exchange data."""
        return bool(self._on_save or self._on_restore) or any(isinstance(x, Gathered) for x in self._parts.values())

    def on_save(self, function: Callable[[], None]) -> None:
        self._on_save.append(function)

    def on_restore(self, function: Callable[[], None]) -> None:
        self._on_restore.append(function)

    def capture(self) -> dict[str, Any]:
        """Call the ``on_save`` functions, then return the states of all parts by name; called by all ranks."""
        self.begin_capture(keep=True)
        return self.captured(keep=True)

    def begin_capture(self, *, keep: bool) -> None:
        """Do what comes before the states are taken, once: call the ``on_save`` functions; called by all ranks."""
        for function in self._on_save:
            function()
        self.late.drop(self._parts)
        for part in self._parts.values():
            if isinstance(part, Gathered):
                part.gather(keep=keep)
        if keep or self.sharded:
            self._frozen.verify(self._parts)

    def collect(self, step: int, world: World) -> None:
        """Have the parts note what belongs to so many steps, if they must; called by all ranks."""
        for part in self._parts.values():
            if isinstance(part, Collected):
                part.collect(step, world)

    def captured(self, *, keep: bool) -> dict[str, Any]:
        """Return the states of all parts by name, on ranks that need them; called by all ranks."""
        self.gathered.clear()
        if self.sharded:
            gatherer = StateGatherer(keep=keep)
            states = self._gathered_by(gatherer)
            self.gathered |= gatherer.own
            return states if keep else {}
        return self._states() if keep else {}

    def captured_here(self) -> dict[str, Any] | None:
        """Return the states of all parts by name, for ranks that have the same shards, without communication.

        Take it over by what :meth:`taking` returns; None if such a rank could not.
        """
        self.begin_capture(keep=True)
        states = self.own()
        cut = self.taking({"orders": self.orders()})
        try:
            return states if cut is None else cut.as_sent(states)
        except LookupError:
            return None

    def own(self) -> dict[str, Any]:
        """Return the states of all parts by name as this rank has them, with DTensors."""
        return self._as_at_start(self._saved(ungathered_state))

    def _as_at_start(self, states: dict[str, Any]) -> dict[str, Any]:
        return self.start.put_back(states) if self.start is not None and self.start.open else states

    def captured_split(self, *, keep: bool) -> tuple[dict[str, Any], StateGatherer]:
        """Return the states of all parts by name, and the shards, for which stand-ins are in it; by all ranks."""
        self.gathered.clear()
        gatherer = StateGatherer(keep=keep, split=True)
        state = self._gathered_by(gatherer)
        self.gathered |= gatherer.own
        return state, gatherer

    @property
    def divisible(self) -> bool:
        """Whether each rank has shards of a model's parameters."""
        return any(isinstance(part, nn.Module) and holds_shards(part) for part in self._parts.values())

    @property
    def fixed_shards(self) -> str:
        """Why the state cannot be divided among other ranks in this process; empty if it can."""
        for name, part in self.members():
            if (holds_shards(part) and not isinstance(part, nn.Module | torch.optim.Optimizer)) or is_zero(part):
                return f"each rank has a share of {name}"
        return ""

    def whole_bytes(self) -> int:
        """Return the bytes of the tensors that :meth:`captured` returns on ranks that need them, without it."""
        return bytes_in(self._saved(ungathered_state))

    def _gathered_by(self, gatherer: StateGatherer) -> dict[str, Any]:
        states = {name: gatherer.state(part, partial(self._frozen.left, name)) for name, part in self._parts.items()}
        return states | self.late.left(self._parts)

    def _states(self) -> dict[str, Any]:
        return self._saved(local_state) if self.sharded else self._as_at_start(self._saved(lambda x: x.state_dict()))

    def _saved(self, state_of: Callable[[Stateful], Any]) -> dict[str, Any]:
        """Return what is saved of the parts' states, and the states of parts that are not registered yet."""
        states = {name: self._frozen.left(name, state_of(part)) for name, part in self._parts.items()}
        return states | self.late.left(self._parts)

    def follow_steps(self, unwatched: Collection[str] = ()) -> StepStart:
        """From now on, know what each step began with; ``unwatched`` is as for :class:`StepStart`."""
        for part in self.parts:
            if isinstance(part, torch.amp.GradScaler):
                # In a step, it would change the state; and a rank without a micro-batch never scales a loss.
                make_tensors(part)
        self.start = StepStart(self._parts, unwatched)
        return self.start

    def taking(self, meta: Mapping[str, Any]) -> Cutting | None:
        """Return what cuts this rank's shards out of a state's tensors; None if it needs all of them."""
        return Cutting(self._parts, self.orders(), meta.get("orders", {})) if self.sharded else None

    @property
    def sharded(self) -> bool:
        """Whether each rank has only a part of the state."""
        return any(map(holds_shards, self._parts.values()))

    def skip_frozen(self, skip: bool) -> None:
        """From now on, leave out the modules' parameters that are frozen now, or none; called before a restore."""
        self._frozen.begin(self._parts, skip=skip)

    def frozen(self) -> dict[str, int]:
        """Return a checksum of what is left out, by part."""
        return self._frozen.digests(self._parts)

    @property
    def parts(self) -> list[Stateful]:
        """The parts; instead of a group its members."""
        return [part for _, part in self.members()]

    @property
    def names(self) -> list[str]:
        return list(self._parts)

    def noted(self) -> dict[str, Any]:
        """Return what the meta of a saved state has of the parts, and of those that are not registered yet."""
        left = self.late.left(self._parts)
        return {
            "classes": {**self.late.noted("classes"), **self.classes()},
            "orders": {**self.late.noted("orders"), **self.orders()},
            "parts": [*self.names, *left],
            "late": {name: name in self._parts for name in sorted(self.late.names)},
        }

    @property
    def weights(self) -> list[str]:
        """Names of the parts that are models, or parameters of the optimizer besides them."""
        return [name for name, part in self._parts.items() if isinstance(part, nn.Module | OwnParameters)]

    @property
    def unregistered(self) -> list[str]:
        """Names of the parts that the script has not registered yet, whose restored states are saved again."""
        return [*self.late.left(self._parts)]

    @property
    def holds_nothing(self) -> bool:
        """Whether neither a part nor a function is registered."""
        return not (self._parts or self._on_save or self._on_restore)

    def check(self) -> None:
        """Check that a checkpoint can hold the states of all parts."""
        tree.encode(self._states())

    def orders(self) -> dict[str, list[list[str]]]:
        """Return the names of each optimizer's parameters by group; parameters of no part are numbered."""
        names = {
            id(parameter): f"{part}.{name}"
            for part, module in self._parts.items()
            if isinstance(module, nn.Module)
            for name, parameter in module.named_parameters()
        }

        def order(optimizer: torch.optim.Optimizer) -> list[list[str]]:
            others = count()
            return [
                [names[id(p)] if id(p) in names else f"other parameter {next(others)}" for p in group["params"]]
                for group in optimizer.param_groups
            ]

        return {name: order(part) for name, part in self.members() if isinstance(part, torch.optim.Optimizer)}

    def members(self) -> Iterator[tuple[str, Stateful]]:
        """Yield all parts by name; instead of a group its members, as ``part/member``."""
        return flat(self._parts)

    def described(self) -> str:
        """Return the names of all parts, with the class of those whose state fits no other class."""
        classes = self.classes()
        names = dict.fromkeys([*self._parts, *classes])
        return ", ".join(f"{name} ({classes[name]})" if name in classes else name for name in names)

    def classes(self) -> dict[str, str]:
        """Return the classes of those parts whose state fits no other class; members of groups as ``part/member``."""
        return {name: kind for name, part in self.members() if (kind := class_of(part))}

    def load(self, resumed: Resumed, *, again: bool) -> None:
        """Load the parts' states from one that was received or read, then call the ``on_restore`` functions.

        Args:
            again: whether it will be loaded once more. The parts then get a copy, and if it follows some passes of a
                step, what is small as it was at the step's start, which the script goes through.
        """
        assert resumed.state is not None
        state, origin, anew = resumed.state, resumed.origin, resumed.anew
        if again:
            state = copied(state)
            if resumed.starts and resumed.passes:
                overlay(state, copied(resumed.starts[0]))
        if lacking := sorted(self._parts.keys() - state.keys() - anew):
            names = ", ".join(lacking)
            raise UsageError(
                f"{origin} has no {names}, which this script has.",
                f"Leave out {names} to go on from it, or start in another directory: {_elsewhere(lacking)}.",
            )
        surplus = sorted(state.keys() - self._parts.keys() - anew)
        late = [name for name in surplus if name in resumed.late]
        if surplus := [name for name in surplus if name not in late]:
            names = ", ".join(surplus)
            raise UsageError(
                f"{origin} has {names}, which this script does not have.",
                f"Give {names} as an argument (scheduler=, scaler=) or by run.register(), as when it was made, or "
                f"start in another directory: {_elsewhere(surplus)}.",
            )
        state = {name: saved for name, saved in state.items() if name not in anew}
        _check_members(state, origin, ())
        self.late.keep(resumed, state, late)
        for name, part in self._parts.items():
            if isinstance(part, nn.Module) and name in state:
                prune_alike(part, state[name], origin)
        here, there = self.orders(), resumed.orders
        known = {name: (there[name], here[name]) for name in here.keys() & there.keys()}
        for name in [name for name in self._parts if name not in anew]:
            part = self._parts[name]
            saved = self._frozen.filled(name, part, state[name], origin, resumed.frozen.get(name))
            _load(name, part, saved, origin, resumed.classes, known)
        # Within autocast, torch keeps converted copies of the parameters.
        torch.clear_autocast_cache()
        for function in self._on_restore:
            function()


def _check_members(saved: Any, origin: str, path: Path) -> None:
    """Refuse a state with an enum member that this script lacks or that has another value here."""
    if isinstance(saved, UnknownMember):
        raise UsageError(
            f"{origin} has {saved} at {show(path)}, and this script has no such member of an enum.",
            "Define the enum as when it was made, before the state is restored, or save the member's value.",
        )
    if isinstance(saved, Mapping):
        for key, item in saved.items():
            _check_members(item, origin, (*path, key))
    elif isinstance(saved, list | tuple | deque | set | frozenset):
        for index, item in enumerate(saved):
            _check_members(item, origin, (*path, index))


def _load(
    name: str,
    part: Stateful,
    saved: Any,
    origin: str,
    classes: Mapping[str, str],
    orders: Mapping[str, tuple[list[list[str]], list[list[str]]]],
) -> None:
    """Load a part's state; ``orders`` are names of an optimizer's parameters, when it was saved and now."""
    if isinstance(part, Group):
        there = list(saved) if isinstance(saved, Mapping) and "param_groups" not in saved else []
        if set(there) != part.members.keys():
            found = ", ".join(map(repr, there)) if there else "one without a name"
            _refuse(name, origin, f"it has {found}, and this script has {', '.join(map(repr, part.members))}")
        for key, member in part.members.items():
            _load(f"{name}/{key}", member, saved[key], origin, classes, orders)
        return
    if name in orders:
        saved, found = reordered(saved, *orders[name])
        if found:
            _refuse(name, origin, found)
    if found := differences(part, saved, classes.get(name, "")):
        _refuse(name, origin, found)
    if isinstance(part, nn.Module) and (found := other_dtype(part, saved)):
        # Torch would round the values without a message.
        _refuse(name, origin, found, "Convert the model before the training to what it was when this was saved.")
    if isinstance(part, torch.optim.Optimizer) and holds_shards(part) and "param_groups" not in saved:
        _refuse(name, origin, "it has its own format, whose sharding is unknown")
    try:
        if isinstance(part, torch.optim.Optimizer):
            load_optimizer(part, saved)
        elif isinstance(part, nn.Module):
            load_module(part, saved)
        else:
            part.load_state_dict(saved)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        found, hint = module_differences(part, saved) if isinstance(part, nn.Module) else ("", "")
        _refuse(name, origin, found or f"{type(error).__name__}: {error}", hint, error)
    if isinstance(part, torch.amp.GradScaler):
        make_tensors(part)  # a script may change its scale before it is first used


def make_tensors(scaler: torch.amp.GradScaler) -> None:
    """Have a scaler make its tensors, as otherwise when it is first used."""
    if scaler.is_enabled():
        scaler.scale(torch.zeros((), device=scaler._device))


def _elsewhere(names: Collection[str]) -> str:
    return f"Checkpoint(directory), with start_from= and allow={list(names)} to begin with the rest of it"


def _refuse(name: str, origin: str, found: str, hint: str = "", cause: Exception | None = None) -> NoReturn:
    raise UsageError(
        f"{origin} does not fit this script's {name}: {found}.",
        hint or f"Resume with the {name} that it was made with, or start in another directory: {_elsewhere([name])}.",
    ) from cause
