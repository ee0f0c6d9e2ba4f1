"""What a checkpoint can hold: objects with a state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from elastic_launch.training.ranks.world import World


class Stateful(Protocol):
    """An object whose state can be saved, such as torch's modules, optimizers and schedulers.

    A state may contain, and gets back unchanged:

    - tensors, NumPy arrays and scalars, numbers (also ``complex``, ``Fraction``, and ``Decimal`` of up to 4000 digits),
      strings, ``bytes``, None, and torch's dtypes, devices and sizes;
    - dicts with strings or integers as keys, lists, tuples, named tuples, sets, ``frozenset``, ``deque``,
      ``OrderedDict``, ``Counter``, and ``defaultdict`` with None, a built-in type, ``Counter`` or ``OrderedDict`` as
      its factory;
    - ``range``, ``slice`` of integers, ``pathlib.Path``, and ``datetime``, ``date``, ``time`` and ``timedelta``, with a
      fixed offset from UTC if any (no ``zoneinfo``);
    - members of enums (``Enum``, ``IntEnum``, ``StrEnum``, ``Flag``, ``IntFlag``) that are found by their name in their
      module. They are restored if the script has defined the enum, with that member, by then; otherwise a training
      refuses to resume, and a program that only reads gets an ``UnknownMember`` with type, name and value.

    Any other value is an :class:`elastic_launch.UnsupportedStateError`: ``bytearray``, ``numpy.longdouble``, pure
    paths, dataclasses, functions, instances of other classes, also of subclasses of those above, and other keys. It is
    raised before the first step, after it, or at a save.
    """

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
