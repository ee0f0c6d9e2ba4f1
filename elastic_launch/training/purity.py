"""Exact mode: finds micro-batches whose result depends on those before them, which are others with other ranks.

Some steps are checked, the same on all ranks. Extra states (``get_extra_state``) must not change within a step. If
attributes of modules have changed, or what their code keeps elsewhere, the first micro-batch's calls of modules are
repeated: outputs and gradients must have the same bits. Where the script can be given a micro-batch twice, the whole
of it is computed again instead, with its loss and gradients. Nothing of a repetition remains.
"""

from __future__ import annotations

import copy
import logging
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from elastic_launch import snapshot
from elastic_launch.errors import UsageError
from elastic_launch.training import held
from elastic_launch.training.gradients.accumulation import Bits, ExactGradients
from elastic_launch.training.live.rehearsal import is_array, randomness_kept, unchanged
from elastic_launch.training.randomness import derive
from elastic_launch.training.ranks.checksum import checksums
from elastic_launch.training.ranks.collectives import exchanges, refuse
from elastic_launch.training.ranks.digest import digest
from elastic_launch.training.wrapped import is_sharded, tensors_in

_log = logging.getLogger(__name__)

FIRST = 3
"""Number of steps at a training's beginning that are checked: a moving average may be degenerate in the first one."""

EVERY = 64
"""One in so many later steps is checked."""

_LARGE = 2**20
"""Elements from which a tensor that is an attribute is known by its place and version alone."""

_LONG = 1000
"""Items from which a list or dict that is an attribute is known by its length alone."""

_STATE = 3
"""How much deeper than other values a generator's state is nested."""

_OF_TORCH = {*vars(nn.Module()), "_compiled_call_impl"}
"""Attributes that every module has."""


def due(seed: int, step: int) -> bool:
    """Whether the micro-batches of a step, which counts from 0, are checked."""
    return step < FIRST or derive("checked", seed, step) % EVERY == 0


class StepWatch:
    """Compares what a step's micro-batches leave; made before the first one.

    Args:
        gradients: those of the step, which have the model.
        where: names the step in errors.
        repeats: whether a micro-batch is given to the script twice; if not, calls of the model may be repeated.
        callers: of the library, when the script asked for the step.
    """

    def __init__(self, gradients: ExactGradients, where: str, *, repeats: bool, callers: list[held.Caller]) -> None:
        self._gradients, self._model, self._where = gradients, gradients.model, where
        # Then passes exchange data.
        sharded = bool(gradients.parameters.sharded or gradients.parameters.parallel)
        self._exchanges = None if sharded or not dist.is_initialized() else exchanges()
        self._places = self._places_now()
        self._extra = _extra_states(self._model)
        self._repeats, self._replays = repeats and not sharded, not repeats and not sharded
        self._attributes = _attributes(self._model) if self._replays else {}
        self._held = self._held_now()
        self._drawing, beside = held.of_loop(callers) if self._replays else ([], [])
        self._drawn = self._drawn_now()
        self._calls = _Calls(self._model, beside) if self._replays and not _is_compiled(self._model) else None
        self._sample: Any = None
        self.bits = Bits()  # of the first micro-batch

    @contextmanager
    def first(self, sample: Any) -> Iterator[None]:
        """The context of the first micro-batch."""
        if self._repeats:
            try:
                self._sample = copy.deepcopy(sample)  # the script may change it in place
            except Exception as error:  # noqa: BLE001 - of the script's classes
                self._repeats = False
                _log.info("a micro-batch that cannot be copied is not computed again: %s", error)
        with ExitStack() as stack:
            if self._repeats:
                stack.enter_context(self._gradients.recording(self.bits))
            if self._calls is not None:
                stack.enter_context(self._calls.recorded())
            yield

    @contextmanager
    def loading(self) -> Iterator[None]:
        """The context in which a micro-batch is loaded: a loader may draw from generators that it saves."""
        before = self._drawn_now()
        yield
        after = self._drawn_now()
        self._drawn = [new if was == now else was for was, now, new in zip(self._drawn, before, after, strict=True)]

    @property
    def repeats(self) -> bool:
        """Whether the first micro-batch is to be computed again."""
        return self._repeats and self._untouched

    def sample(self) -> Any:
        """Return the first micro-batch as it was."""
        return copy.deepcopy(self._sample)

    @property
    def _untouched(self) -> bool:
        """Whether no parameter has changed: such a change is refused by its name elsewhere."""
        return self._places == self._places_now()

    def _held_now(self) -> dict[str, Any]:
        """Return what tells whether something has changed that the model's code keeps elsewhere."""
        places = held.of_modules(self._model.named_modules()) if self._replays else []
        return {place.name: _mark_of(place) for place in places}

    def _drawn_now(self) -> list[Any]:
        return [(_mark_of(place), place.seed()) for place in self._drawing]

    def _places_now(self) -> list[tuple[str, int, int]]:
        parameters, ruled = self._gradients.parameters, self._gradients.ruled
        named = parameters.all.items()
        return [(name, p.data_ptr(), p._version) for name, p in named if name not in ruled and not is_sharded(p)]

    def check(self) -> None:
        """Check the model after the last micro-batch.

        Raises:
            UsageError: naming what has changed, or the module with another output than before.
        """
        if self._exchanges is not None and exchanges() != self._exchanges:
            refuse("a collective")
        for path, before in self._extra.items():
            if _extra_state(self._model.get_submodule(path)) != before:
                raise _refusal(
                    f"{self._where}: the micro-batches changed the extra state (get_extra_state) of {_named(path)}",
                    "it is saved, and",
                )
        self._check_drawn()
        after = _attributes(self._model) if self._replays else {}
        changed = [
            f"{x} of {_named(path)}" for (path, x), m in after.items() if self._attributes.get((path, x), m) != m
        ]
        changed += [name for name, mark in self._held_now().items() if self._held.get(name, mark) != mark]
        beside = [] if self._calls is None else self._calls.changed_beside()
        if not (changed or beside) or not self._untouched:
            return
        names = ", ".join([*beside, *changed][:5])
        found = None if self._calls is None else self._calls.other_again(self._gradients.restore_buffers)
        self._gradients.restore_buffers()
        if found is None:
            self._warn(names)
        elif found:
            raise _refusal(f"{self._where}: {found}, and the micro-batches changed {names}", "the result")

    def _check_drawn(self) -> None:
        """Refuse a generator of the loop's code that has been drawn from, and not seeded."""
        for place, (state, seed), (now, seed_now) in zip(self._drawing, self._drawn, self._drawn_now(), strict=True):
            if now != state and (seed is None or seed == seed_now):
                raise UsageError(
                    f"exact=True: {self._where}: the micro-batches have drawn from the generator {place.name}, which "
                    "is not seeded for each. So what they draw depends on the number of ranks.",
                    "Draw from the global generators, which are seeded for each micro-batch, or make one where you "
                    "draw: torch.Generator().manual_seed(torch.initial_seed()).",
                )

    def _warn(self, names: str) -> None:
        global _warned
        if self._gradients.rank == 0 and not _warned:
            _warned = True
            _log.warning(
                "exact=True: the micro-batches of %s changed %s. If a result depends on it, the weights depend on the "
                "number of ranks: run.steps(verify=True) finds out",
                self._where,
                names,
            )


_warned = False


class Outputs:
    """Records checksums of what each module of a model is given and returns."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[tuple[str, Any, Any]] = []  # path, of what it was given, of what it returned
        self.attributes: dict[tuple[str, str], Any] = {}  # before
        self._model = model
        self._given: list[Any] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        self.attributes = _attributes(self._model)
        with ExitStack() as hooks:
            for path, module in self._model.named_modules():
                hooks.enter_context(module.register_forward_pre_hook(self._called, with_kwargs=True, prepend=True))
                hooks.enter_context(module.register_forward_hook(partial(self._returned, path), with_kwargs=True))
            yield

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._given.append(_sums((args, kwargs)))

    def _returned(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and self._given:
            self.calls.append((path, self._given.pop(), _sums(output)))

    def culprit(self, other: Outputs) -> str:
        """Name the first module that has returned something else than in another recording; "" if there is none."""
        for (path, given, returned), (their_path, their_given, theirs) in zip(self.calls, other.calls, strict=False):
            if path != their_path or given != their_given:
                return ""
            if returned != theirs:
                marks = self.attributes, other.attributes
                changed = [x for p, x in marks[1] if p == path and marks[0].get((p, x)) != marks[1][p, x]]
                return _named(path) + (f", whose {', '.join(changed)} has changed," if changed else "")
        return ""


def differs(where: str, what: str, found: str) -> UsageError:
    """Return the error for a micro-batch that came out differently when it was computed again.

    Args:
        what: what was different.
        found: the module, by :meth:`Outputs.culprit`.
    """
    because = (
        f"The first difference is in the output of {found} for equal inputs"
        if found
        else "No module of the model gives another output for equal inputs: it is the data, or the loop's own code"
    )
    return _refusal(f"{where}: a micro-batch gave another {what} when it was computed again. {because}", "the result")


def _refusal(what: str, then: str) -> UsageError:
    return UsageError(
        f"exact=True: {what}. The ranks compute the micro-batches at the same time: {then} depends on their number.",
        "Change such values after step.update(), or keep them in a buffer with a rule (buffers=): see "
        "docs/training/exactness.md, Pure micro-batches.",
    )


def _named(path: str) -> str:
    return f"the module {path!r}" if path else "the model"


def _extra_states(model: nn.Module) -> dict[str, str]:
    own = nn.Module.get_extra_state
    found = ((path, module) for path, module in model.named_modules() if type(module).get_extra_state is not own)
    return {path: state for path, module in found if (state := _extra_state(module))}


def _extra_state(module: nn.Module) -> str:
    try:
        return digest(module.get_extra_state())
    except snapshot.UnsupportedStateError:
        return ""  # refused where it is saved


def _attributes(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Return what tells whether the attributes of a model's modules have changed, by path and name."""
    return {
        (path, name): _mark(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in _OF_TORCH
    }


def _mark_of(place: held.HoldingPlace) -> Any:
    return _mark(place.read(), 0 if place.generator is None else -_STATE)


def _mark(value: Any, depth: int = 0) -> Any:
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        return type(value), repr(value)
    if isinstance(value, Tensor):
        if value.numel() < _LARGE and (sums := _sums(value)) is not None:
            return value.shape, sums
        return id(value), 0 if value.is_inference() else value._version
    if is_array(value):
        return (value.shape, str(value.dtype), hash(value.tobytes())) if value.size < _LARGE else id(value)
    if isinstance(value, list | tuple | deque | Mapping | set) and depth < 3:
        if len(value) > _LONG:
            return len(value)
        items = value.items() if isinstance(value, Mapping) else value
        return [_mark(item, depth + 1) for item in items]
    return type(value)


def _sums(value: Any) -> list[int] | None:
    """Return checksums of the tensors in a value; None if one cannot be read."""
    found = [*tensors_in(value)]
    if any(is_functorch_wrapped_tensor(each) for each in found):
        return None
    with suppress(NotImplementedError, RuntimeError):
        return [*map(int, checksums(found))]
    return None


def _is_compiled(model: nn.Module) -> bool:
    return any(
        getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
        for module in model.modules()
    )


@dataclass(frozen=True)
class _Call:
    """A call of a module by the script."""

    module: nn.Module
    args: Any
    kwargs: Any
    versions: list[int]
    places: list[int]  # of its parameters, then of its buffers if they are put back
    state: dict[str, Any]  # of random generators, and of what torch does with all operations
    returned: list[Any] = field(default_factory=list)

    def again(self) -> Any:
        with ExitStack() as stack:
            torch.set_rng_state(self.state["torch"])
            random.setstate(self.state["random"])
            if self.state["numpy"] is not None:
                sys.modules["numpy"].random.set_state(self.state["numpy"])
            if self.state["cuda"] is not None:
                torch.cuda.set_rng_state_all(self.state["cuda"])
            stack.enter_context(torch.set_grad_enabled(self.state["grad"]))
            for kind, dtype in self.state["autocast"].items():
                stack.enter_context(torch.autocast(kind, dtype))
            return self.module(*self.args, **self.kwargs)

    def slopes(self) -> list[int] | None:
        """Return checksums of the gradients of one more call's output; None if there are none."""
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        try:
            outputs = [x for x in tensors_in(self.again()) if x.requires_grad]
            if not outputs or not parameters:
                return None
            found = torch.autograd.grad(outputs, parameters, [*map(torch.ones_like, outputs)], allow_unused=True)
        except RuntimeError:  # such as of a checkpoint with use_reentrant=True
            return None
        return _sums([x for x in found if x is not None])


class _Calls:
    """The first call of each module that the script calls itself, in one micro-batch: of the model's, and of others."""

    def __init__(self, model: nn.Module, beside: list[nn.Module]) -> None:
        self._model = model
        self._own = set(model.modules())
        self._others = {x for each in beside if not _is_compiled(each) for x in each.modules()} - self._own
        self._first: dict[int, _Call] = {}
        self._depth = 0
        self._beside: dict[int, dict[tuple[str, str], Any]] = {}  # what modules that are not of the model had before

    @contextmanager
    def recorded(self) -> Iterator[None]:
        with ExitStack() as hooks:
            for module in (*self._own, *self._others):
                hooks.enter_context(module.register_forward_pre_hook(self._called, with_kwargs=True, prepend=True))
                hooks.enter_context(module.register_forward_hook(self._returned, with_kwargs=True, always_call=True))
            yield
        self._depth = 0

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth += 1
        if self._depth == 1 and id(module) not in self._first:
            given = [*tensors_in((args, kwargs))]
            if not any(map(is_functorch_wrapped_tensor, given)):
                places = _places(module)
                if module in self._others:
                    self._beside[id(module)] = _all_of(module)
                    # Its buffers stay replaced, if the forward pass does that.
                    places = places[: len([*module.parameters()])]
                self._first[id(module)] = _Call(module, args, kwargs, _versions(given), places, _surroundings())

    def _returned(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth -= 1
        call = self._first.get(id(module))
        if self._depth == 0 and call is not None and not call.returned:
            call.returned.append(_sums(output))
            trains = any(each.requires_grad for each in tensors_in(output)) or [*module.parameters()]
            if module in self._others and not trains:
                del self._first[id(module)]  # a metric, for example

    def changed_beside(self) -> list[str]:
        """Return the names of what the micro-batches have changed in modules that are not of the model."""
        return [
            f"{f'{path}.{name}' if path else name} of the {type(call.module).__name__} outside the model"
            for call in self._first.values()
            for (path, name), mark in _all_of(call.module).items()
            if self._beside.get(id(call.module), {}).get((path, name), mark) != mark
        ]

    def other_again(self, restart: Callable[[], None]) -> str | None:
        """Say what comes out differently when calls are repeated; None if none can be repeated, "" if nothing does.

        Args:
            restart: sets the model's buffers to those that each micro-batch begins with.
        """
        calls = [*filter(_is_repeatable, self._first.values())]
        if not calls:
            return None
        modules = dict.fromkeys([self._model, *(call.module for call in calls)])
        places = held.of_modules((str(number), x) for number, each in enumerate(modules) for x in each.modules())
        with unchanged(*modules), held.kept(places), randomness_kept():
            for call in calls:
                if call.returned != [_sums(call.again())]:
                    name = self._culprit(calls, restart) or self._called_as(call.module)
                    return f"{name} gave another output when it was called once more with the first micro-batch"
            slopes = []
            for _ in range(2):
                restart()
                slopes.append([call.slopes() for call in calls])
            for call, one, two in zip(calls, *slopes, strict=True):
                if one != two:
                    name = self._called_as(call.module)
                    return f"{name} gave other gradients when it was called twice more with the first micro-batch"
        return ""

    def _called_as(self, module: nn.Module) -> str:
        return "the model" if module in self._own else f"the {type(module).__name__} outside the model"

    def _culprit(self, calls: list[_Call], restart: Callable[[], None]) -> str:
        """Name the module of the model whose output changes from call to call."""
        one, two = Outputs(self._model), Outputs(self._model)
        for each in (one, two):
            restart()
            with each.recorded():
                for call in calls:
                    call.again()
        return one.culprit(two)


def _all_of(module: nn.Module) -> dict[tuple[str, str], Any]:
    """Return what tells whether attributes, parameters and buffers of a module have changed, by path and name."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return _attributes(module) | {("", name): _mark(tensor) for name, tensor in tensors}


def _versions(tensors: list[Tensor]) -> list[int]:
    return [0 if each.is_inference() else each._version for each in tensors]


def _places(module: nn.Module) -> list[int]:
    return [id(each) for each in (*module.parameters(), *module.buffers())]


def _is_repeatable(call: _Call) -> bool:
    """Whether a call's arguments are as they were, and its module has its own parameters, not those of a function."""
    given = [*tensors_in((call.args, call.kwargs))]
    has_sums = bool(call.returned) and call.returned[0] is not None
    return has_sums and call.versions == _versions(given) and call.places == _places(call.module)[: len(call.places)]


def _surroundings() -> dict[str, Any]:
    numpy, cuda = sys.modules.get("numpy"), torch.cuda.is_available()
    kinds = ["cpu", *(["cuda"] if cuda else [])]
    return {
        "torch": torch.get_rng_state(),
        "random": random.getstate(),
        "numpy": None if numpy is None else numpy.random.get_state(),
        "cuda": torch.cuda.get_rng_state_all() if cuda else None,
        "grad": torch.is_grad_enabled(),
        "autocast": {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)},
    }
