"""What a checkpoint holds of a training: objects with a state, by name, and functions to be told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from elastic_launch.errors import UsageError
from elastic_launch.snapshot import tree

__all__ = ["Group", "Stateful", "TrainingState"]


class Stateful(Protocol):
    """What has a state to be saved, as torch's modules, optimizers and schedulers do."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


class Group:
    """Several objects with a state as one part of it, by name."""

    def __init__(self, members: Mapping[str, Stateful]) -> None:
        self.members = dict(members)

    def state_dict(self) -> dict[str, Any]:
        return {name: member.state_dict() for name, member in self.members.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, member in self.members.items():
            member.load_state_dict(state[name])


class TrainingState:
    """The parts of a training's state."""

    def __init__(self) -> None:
        self._parts: dict[str, Stateful] = {}
        self._on_save: list[Callable[[], None]] = []
        self._on_restore: list[Callable[[], None]] = []

    def register(self, name: str, stateful: Stateful) -> None:
        """Add a part.

        Raises:
            UsageError: if the name is taken by another object, or the object has no state.
        """
        if self._parts.get(name, stateful) is not stateful:
            raise UsageError(f"run.register({name!r}): the name is taken.", "Choose another.")
        if not hasattr(stateful, "state_dict") or not hasattr(stateful, "load_state_dict"):
            raise UsageError(
                f"run.register({name!r}): {type(stateful).__name__} has no state_dict and load_state_dict.",
                "Give it both, or register an object that has them.",
            )
        self._parts[name] = stateful

    def extended(self, parts: dict[str, Stateful]) -> TrainingState:
        """Return a state with further parts and the same functions.

        Raises:
            UsageError: if a name is taken.
        """
        state = TrainingState()
        state._on_save, state._on_restore = self._on_save, self._on_restore
        for name, part in [*self._parts.items(), *parts.items()]:
            state.register(name, part)
        return state

    def on_save(self, function: Callable[[], None]) -> None:
        self._on_save.append(function)

    def on_restore(self, function: Callable[[], None]) -> None:
        self._on_restore.append(function)

    def capture(self, *, keep: bool) -> dict[str, Any]:
        """Tell all that the state is about to be taken, and return it.

        Args:
            keep: whether this rank needs the state; without it the parts are not asked.
        """
        for function in self._on_save:
            function()
        return {name: part.state_dict() for name, part in self._parts.items()} if keep else {}

    def check(self) -> None:
        """Ask all parts for their state, and refuse what a checkpoint cannot hold.

        Raises:
            UnsupportedStateError: naming type and place.
        """
        tree.encode({name: part.state_dict() for name, part in self._parts.items()})

    def restore(self, state: dict[str, Any], step: int) -> None:
        """Give the parts their states, and tell all.

        Args:
            step: of the checkpoint, for errors.

        Raises:
            UsageError: naming the parts, if they are not the same.
        """
        if lacking := sorted(self._parts.keys() - state.keys()):
            raise UsageError(
                f"The checkpoint of step {step} has no {', '.join(lacking)}, which this script has.",
                "Resume with the parts that it was made with, or start in another directory.",
            )
        if surplus := sorted(state.keys() - self._parts.keys()):
            raise UsageError(
                f"The checkpoint of step {step} has {', '.join(surplus)}, which this script has not.",
                "Register what it was made with, or start in another directory.",
            )
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        for function in self._on_restore:
            function()
