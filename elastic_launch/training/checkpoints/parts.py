"""What a checkpoint can hold: objects with a state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from elastic_launch.training.ranks.world import World


class Stateful(Protocol):
    """An object whose state can be saved, such as torch's modules, optimizers and schedulers."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


@runtime_checkable
class Gathered(Protocol):
    """A part of which each rank has a piece."""

    def gather(self, *, keep: bool) -> None:
        """Put the pieces together on ranks that keep them, before ``state_dict``; called by all ranks."""


@runtime_checkable
class Collected(Protocol):
    """A part whose state all ranks note from time to time; in between, any rank can work it out."""

    def collect(self, step: int, world: World) -> None:
        """Note what belongs to so many steps, before ``state_dict``; called by all ranks."""


def is_stateful(part: object) -> bool:
    """Return whether ``part`` is an object, not a class, with ``state_dict`` and ``load_state_dict``."""
    return not isinstance(part, type) and hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def flat(parts: Mapping[str, Stateful]) -> Iterator[tuple[str, Stateful]]:
    """Yield all parts by name; instead of a group its members, as ``part/member``."""
    for name, part in parts.items():
        if isinstance(part, Group):
            yield from ((f"{name}/{key}", member) for key, member in part.members.items())
        else:
            yield name, part


class Group:
    """Several stateful objects by name, saved as one part."""

    def __init__(self, members: Mapping[str, Stateful]) -> None:
        self.members = dict(members)

    def state_dict(self) -> dict[str, Any]:
        return {name: member.state_dict() for name, member in self.members.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, member in self.members.items():
            member.load_state_dict(state[name])
