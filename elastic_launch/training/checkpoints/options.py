"""The options of optimizers, schedulers and scalers: those that the script gives, and those of a saved state.

A saved state contains options such as ``lr`` and ``T_max``, which replace the script's own when it is loaded. Some of
them change as the training goes on. To know whether the script has others than before, each saved state therefore has
the options that the script had given when the training began.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from elastic_launch.errors import UsageError
from elastic_launch.snapshot.format.arrays import is_scalar
from elastic_launch.training.checkpoints.parts import Gathered, Stateful

_log = logging.getLogger(__name__)

Options = dict[str, Any]
"""Values by their place: ``0/lr`` in the first group of an optimizer, ``T_max`` or ``_schedulers/1/T_max``."""

_FOLLOW = {"base_lrs", "_last_lr", "last_epoch", "_step_count", "_is_initial", "_get_lr_called_within_step"}
"""What a scheduler's state has besides its options: the steps that it has made, and the rates of its optimizer."""

_SHOWN = 10
"""Maximum number of groups, and of parts and groups that differ, in a message."""

_ROUNDING = 2**-24
"""Maximum relative rounding error of a float32: a rate may be given as a tensor."""


_NOT_PLAIN = object()


class Difference(NamedTuple):
    """An option that the script gives another value than a saved state has."""

    part: str  # of the state: ``optimizer``, ``scheduler/warm-up``
    place: str
    given: Any
    before: Any  # what was in effect when that training began
    saved: Any

    @property
    def name(self) -> str:
        """The option's name: the last word of its place."""
        return _name(self.place)


class Given:
    """The options that a script gives to the parts of a training's state."""

    def __init__(self) -> None:
        self._members: dict[str, Stateful] = {}
        self._now: dict[str, Options] = {}
        self._fresh: dict[str, dict[str, Any]] = {}
        self._in_effect: dict[str, Options] = {}  # what the training began with, or what has replaced it since

    def begin(self, members: Iterable[tuple[str, Stateful]], override: Sequence[str]) -> None:
        """Note what the script gives now, before a saved state is loaded.

        ``members`` are the parts by name, without groups. The script may want to replace the options and parts of a
        state that ``override`` names; a UsageError says which of the names nothing has.
        """
        self._members = {name: part for name, part in members if _has_options(name, part)}
        states = {name: _state_of(part) for name, part in self._members.items()}
        self._now = {name: _options_in(state) for name, state in states.items()}
        self._in_effect = dict(self._now)
        self._fresh = deepcopy(states) if override else {}
        known = [*dict.fromkeys(_name(place) for options in self._now.values() for place in options)]
        known += [*dict.fromkeys(name for part in self._now for name in (part.partition("/")[0], part))]
        if unknown := [name for name in override if name not in known]:
            raise UsageError(
                f"Checkpoint(override=...) names {unknown[0]!r}, but no option here has that name.",
                f"Known: {', '.join(map(repr, (name for name in known if not name.startswith('_'))))}.",
            )

    @property
    def in_effect(self) -> dict[str, Options]:
        """The options that the training began with, or that have replaced them since, by part, for a saved state.

        Of a group, those that are as in the first group are left out, but for one: some scripts have thousands.
        """
        return {part: dict(_without_repeats(options)) for part, options in self._in_effect.items()}

    def chosen(self, override: Sequence[str]) -> dict[str, object]:
        """Return what the script gives to the options that are to replace those of a state, by part and place."""
        return {
            f"{part} {place}": value
            for part, options in self._now.items()
            for place, value in options.items()
            if _is_named(override, part, _name(place))
        }

    def differences(
        self, state: Mapping[str, Any], before: Mapping[str, Options], override: Sequence[str], *, first: bool
    ) -> tuple[list[Difference], list[Difference]]:
        """Return what differs from a state that is to be loaded: what it keeps, and what the script is to replace.

        ``state`` lacks parts that are not compared; ``before`` is :attr:`in_effect` when it was saved; ``override``
        names what the script is to replace. Only if this run loads a state for the ``first`` time, options of
        optimizers are replaced that have changed in the training alone, and not in the script.
        """
        keeps, replaces = [], []
        for part, now in self._now.items():
            root, _, member = part.partition("/")
            saved = state.get(root)
            saved = _options_in(saved.get(member) if member and isinstance(saved, Mapping) else saved)
            is_optimizer = isinstance(self._members[part], torch.optim.Optimizer)
            then = _with_repeats(before[part], now) if part in before else saved if is_optimizer else {}
            both = [place for place in now if place in then and place in saved]
            changed = [place for place in both if not _same(now[place], then[place])]
            free = (
                first
                and is_optimizer
                and not any(_has_base(self._members[x]) for x in self._schedulers(self._members[part]))
            )
            moved = [x for x in both if free and x not in changed and not _same(now[x], saved[x])]
            named = [x for x in [*changed, *moved] if _is_named(override, part, _name(x))]
            if not is_optimizer and named:  # what a scheduler derives from its options belongs to them
                named += [x for x in changed if _is_derived(x) and x not in named]
            replaces += [Difference(part, x, now[x], then[x], saved[x]) for x in named]
            left = [x for x in changed if x not in named and not _same(now[x], saved[x])]
            left = [x for x in left if not _is_derived(x)] or left
            keeps += [Difference(part, x, now[x], then[x], saved[x]) for x in left]
        return keeps, replaces

    def loaded(self, before: Mapping[str, Options], replaced: Collection[Difference], anew: Collection[str]) -> None:
        """Record which options are in effect after a state was loaded.

        ``before`` are those when it was saved; ``replaced`` are those in which the script's values replace the state's;
        the parts in ``anew`` begin anew.
        """
        for part, now in self._now.items():
            if part not in anew and part.partition("/")[0] not in anew:
                self._in_effect[part] = {**now, **_with_repeats(before.get(part, {}), now)}
        for each in replaced:
            self._in_effect[each.part] = {**self._in_effect[each.part], each.place: each.given}

    def replace(self, keeps: Sequence[Difference], replaces: Sequence[Difference]) -> None:
        """Let the script's values replace those of the state that was loaded; see :meth:`differences`."""
        replayed: set[str] = set()
        for name, optimizer in self._members.items():
            if not replaces or not isinstance(optimizer, torch.optim.Optimizer):
                continue
            schedulers = self._schedulers(optimizer)
            based = [x for x in schedulers if _has_base(self._members[x])]
            own = [each for each in replaces if each.part == name]
            rates = [each for each in own if each.name == "lr"]
            fresh = self._fresh[name]["param_groups"]
            for each in own if not based else [each for each in own if each.name != "lr"]:
                number, key = each.place.split("/")
                optimizer.param_groups[int(number)][key] = fresh[int(number)][key]
            # A scheduler may have put options of its own into the groups, such as max_lr.
            moves = rates or any(each.name not in optimizer.defaults for each in own)
            if not based or not (moves or any(each.part in schedulers for each in replaces)):
                continue
            if len(schedulers) == 1 and isinstance(self._members[based[0]], LRScheduler):
                self._repeat(
                    schedulers[0], optimizer, fresh, [each for each in keeps if each.part in (name, *schedulers)]
                )
                replayed |= {*schedulers}
            elif rates:
                _scale(optimizer, fresh, rates)
                for scheduler in schedulers:
                    self._take(scheduler, lambda place: _name(place) == "base_lrs")
        for part in dict.fromkeys(each.part for each in replaces):
            if part not in replayed and not isinstance(self._members[part], torch.optim.Optimizer):
                self._take(part, {each.place for each in replaces if each.part == part}.__contains__)

    def _schedulers(self, optimizer: object) -> list[str]:
        return [name for name, part in self._members.items() if getattr(part, "optimizer", None) is optimizer]

    def _repeat(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        fresh: Sequence[Mapping[str, Any]],
        keeps: Sequence[Difference],
    ) -> None:
        """Set an optimizer's rates to what its only scheduler gives after as many steps as it has made.

        Most schedulers compute a rate from the one before: a new option would otherwise have effect only on what is
        left of the schedule, which may be nothing. ``fresh`` are the optimizer's groups as the script gave them; of the
        options in ``keeps`` the saved values are used.
        """
        scheduler: Any = self._members[name]
        loaded, start = scheduler.state_dict(), self._fresh[name]
        own = {each.place for each in keeps if each.part == name}
        rates = {each.place: each for each in keeps if each.part != name and each.name == "lr"}
        state = _merged(start, loaded, lambda place: place in own or (_name(place) == "base_lrs" and bool(rates)))
        for number, (group, first) in enumerate(zip(optimizer.param_groups, fresh, strict=True)):
            rate = rates.get(f"{number}/lr")
            factor = 1 if rate is None or not rate.given else rate.saved / rate.given
            for key in ("lr", "initial_lr"):
                group[key] = deepcopy(first[key]) if factor == 1 else first[key] * factor
        scheduler.load_state_dict(deepcopy(state))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the optimizer has not stepped before
            for _ in range(_steps(loaded) - _steps(start)):
                scheduler.step()

    def _take(self, name: str, takes: Callable[[str], bool]) -> None:
        """Load a part's present state with the script's values at some places."""
        part: Any = self._members[name]
        part.load_state_dict(deepcopy(_merged(part.state_dict(), self._fresh[name], takes)))


def report(origin: str, keeps: Sequence[Difference], replaces: Sequence[Difference]) -> None:
    """Log which options a saved state, named by ``origin``, replaces, and which of its own are replaced."""
    if keeps:
        _log.warning(
            "%s replaces options that the script gives: %s. To use the script's: Checkpoint(override=%s)",
            origin,
            _listed(keeps, lambda each: f"{each.name} {_show(each.saved)} (given: {_show(each.given)})"),
            list(dict.fromkeys(each.name for each in keeps)),
        )
    if replaces:
        text = _listed(replaces, lambda each: f"{each.name} {_show(each.given)} (saved: {_show(each.saved)})")
        _log.warning("options that the script gives replace those of %s: %s", origin[:1].lower() + origin[1:], text)


def _listed(differences: Sequence[Difference], text: Callable[[Difference], str]) -> str:
    """Return the differences by part and place as text; what several groups have alike is in it once."""
    places: dict[tuple[str, str], list[str]] = {}
    for each in [each for each in differences if not _is_derived(each.place)] or differences:
        places.setdefault((each.part, text(each)), []).append(each.place.rpartition("/")[0])
    texts: dict[str, list[str]] = {}
    for (part, option), where in places.items():
        kind = " group" if all(map(str.isdigit, where)) else ""
        texts.setdefault(f"{part}{kind} {_some(where, ', ')}".strip(), []).append(option)
    return _some([f"{place}: {', '.join(options)}" for place, options in texts.items()], "; ")


def _some(texts: Sequence[str], between: str) -> str:
    more = f"{between}and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return between.join(texts[:_SHOWN]) + more


def _has_options(name: str, part: object) -> bool:
    if isinstance(part, Gathered):
        return False
    kinds = (torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler)
    return isinstance(part, kinds) or name.partition("/")[0] == "scheduler"


def _state_of(part: Any) -> dict[str, Any]:
    """Return a part's state; of an optimizer, its groups alone."""
    if not isinstance(part, torch.optim.Optimizer):
        return dict(part.state_dict())
    return {"param_groups": [{key: group[key] for key in group if key != "params"} for group in part.param_groups]}


def _options_in(state: Any) -> Options:
    """Return the options in a part's state."""
    if not isinstance(state, Mapping):
        return {}
    found: Options = {}
    if "param_groups" in state:
        for number, group in enumerate(state["param_groups"]):
            # A scheduler moves lr, and keeps the script's value.
            named = {**group, "lr": group["initial_lr"]} if "initial_lr" in group else group
            found |= {
                f"{number}/{key}": named[key] for key in named if key not in ("params", "param_names", "initial_lr")
            }
    else:
        found = {place: value for place, value in _leaves(state, "") if _name(place) not in _FOLLOW}
    plain = {place: _plain(value) for place, value in found.items()}
    return {place: value for place, value in plain.items() if value is not _NOT_PLAIN}


def _of_group(place: str) -> tuple[str, str]:
    """Return number and key of an option of an optimizer's group; without a number, it is an option of its own."""
    number, _, key = place.partition("/")
    return (number, key) if number.isdigit() and key else ("0", place)


def _without_repeats(options: Options) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for place, value in options.items():
        number, key = _of_group(place)
        if number == "0" or number not in seen or options.get(f"0/{key}", _NOT_PLAIN) != value:
            yield place, value
        seen.add(number)


def _with_repeats(options: Options, places: Iterable[str]) -> Options:
    """Return options with those that :func:`_without_repeats` left out of the groups, as far as there are places."""
    groups = {_of_group(place)[0] for place in options}
    left_out = {place: f"0/{key}" for place in places for number, key in [_of_group(place)] if number in groups}
    return {place: options[first] for place, first in left_out.items() if first in options} | options


def _plain(value: Any) -> Any:
    """Return an option's value as a plain one, which a saved state's meta can have."""
    if is_scalar(value):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # without a subclass, such as an enum's
    if isinstance(value, int | float):
        return float(value) if isinstance(value, float) else int(value)
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, Counter):
        value = sorted(value.items())
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return _NOT_PLAIN if _NOT_PLAIN in items else items
    return _NOT_PLAIN


def _inner(value: Any) -> Iterator[tuple[Any, Any]] | None:
    """Return the places and values within a state; None if it is a value itself."""
    if type(value) is dict:
        return iter(value.items())
    if isinstance(value, list) and any(type(item) is dict for item in value):
        return enumerate(value)
    return None


def _leaves(state: Any, place: str) -> Iterator[tuple[str, Any]]:
    if (inner := _inner(state)) is None:
        yield place, state
        return
    for key, value in inner:
        yield from _leaves(value, f"{place}/{key}" if place else str(key))


def _merged(state: Any, other: Any, takes: Callable[[str], bool], place: str = "") -> Any:
    """Return a state with the values of another one at those places that ``takes`` names."""
    if (inner := _inner(state)) is None or type(other) is not type(state):
        return other if takes(place) else state
    theirs = dict(_inner(other) or ())
    merged = {
        key: _merged(value, theirs[key], takes, f"{place}/{key}" if place else str(key)) if key in theirs else value
        for key, value in inner
    }
    return merged if isinstance(state, dict) else list(merged.values())


def _name(place: str) -> str:
    """Return the name of the option at a place: its last word that is not a number."""
    words = [word for word in place.split("/") if not word.isdigit()]
    return words[-1] if words else place


def _is_derived(place: str) -> bool:
    """Whether a scheduler has computed the value at a place from its options, such as the phases of a OneCycleLR."""
    return any(word.startswith("_") and word != "_schedulers" for word in place.split("/"))


def _show(value: Any) -> str:
    return f"{value:.7g}" if isinstance(value, float) else repr(value)  # a rate may have been a float32


def _is_named(names: Collection[str], part: str, option: str) -> bool:
    return not {option, part, part.partition("/")[0]}.isdisjoint(names)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if float in (type(one), type(other)) and all(isinstance(value, int | float) for value in (one, other)):
        return math.isclose(one, other, rel_tol=_ROUNDING) or bool(one != one and other != other)
    return bool(one == other)


def _steps(state: Mapping[str, Any]) -> int:
    """Return how many steps a scheduler has made; a chained one has the number in its members."""
    return int(state["last_epoch"] if "last_epoch" in state else state["_schedulers"][0]["last_epoch"])


def _has_base(scheduler: object) -> bool:
    """Whether a scheduler has the script's rates itself, from which it computes those of each step."""
    return not isinstance(scheduler, ReduceLROnPlateau)


def _scale(optimizer: torch.optim.Optimizer, fresh: Sequence[Mapping[str, Any]], rates: Collection[Difference]) -> None:
    """Scale an optimizer's rates, if several schedulers have moved them, or one by the results of evaluations."""
    for each in rates:
        number = int(each.place.partition("/")[0])
        group, first = optimizer.param_groups[number], fresh[number]
        group["lr"] = group["lr"] * (each.given / each.before) if each.before else deepcopy(first["lr"])
        if "initial_lr" in first:
            group["initial_lr"] = deepcopy(first["initial_lr"])
