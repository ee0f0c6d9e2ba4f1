"""What a script registers after a training has begun, such as an average that starts late.

Until the script has registered it again after a restart, its restored state is kept, and saved again as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from elastic_launch.errors import UsageError
from elastic_launch.training.checkpoints.resumed import Resumed

_DELAY = 3
"""Boundaries after which each rank has heard at the latest what another one has noted at a boundary."""

_HINT = "Call run.register() on all ranks in the same step, and after a restart or a join in the process' first step."


class Late:
    """The objects that a script registers late, and restored states of those that it has not registered yet."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        """Of what was registered late, or will be."""
        self._kept: dict[str, Resumed] = {}
        self._new = self._touched = False  # whether something was registered anew, or at all, since the last boundary
        self._stepped = False  # whether this process has done a step, in which the script could register
        self._last: int | None = None  # the last step in which something was registered, or was not yet

    def keep(self, resumed: Resumed, state: Mapping[str, Any], names: Collection[str]) -> None:
        """Keep the states of these parts, which the script has not registered yet, and none that was kept before."""
        self.names |= {*names}
        self._kept = {name: replace(resumed, state={name: state[name]}, starts=()) for name in names}

    def registered(self, name: str) -> Resumed | None:
        """Note that a part was registered late; return its restored state, if there is one."""
        self.names.add(name)
        self._touched, self._new = True, self._new or name not in self._kept
        return self._kept.get(name)

    def left(self, parts: Collection[str]) -> dict[str, Any]:
        """Return the states that are kept, by part, but for those of these parts."""
        return {name: each.state[name] for name, each in self._kept.items() if name not in parts and each.state}

    def drop(self, parts: Collection[str]) -> None:
        """Free the states of these parts: a state that is taken from now on has the parts' own."""
        for name in self._kept.keys() & {*parts}:
            del self._kept[name]

    def noted(self, what: str) -> dict[str, Any]:
        """Return what the meta that the kept states came with has of them, such as their ``classes``."""
        return {
            key: value
            for name, each in self._kept.items()
            for key, value in getattr(each, what).items()
            if key.partition("/")[0] == name
        }

    def unsettled(self, step: int, parts: Collection[str]) -> bool:
        """Whether the other ranks must have registered something, too, or not yet, at the boundary after a step."""
        self.drop(parts)
        left, new = bool(self.left(parts)), self._new
        if left or self._touched:
            self._last = step
        self._new = self._touched = False
        return (left and self._stepped) or new

    def check_ranks(self, step: int) -> None:
        """Refuse that a rank was unsettled at the last boundary, as this one was not."""
        if self._last is None or step - self._last > _DELAY:
            raise UsageError("run.register() was called in the course of the training, but not on all ranks.", _HINT)

    def check_joined(self, parts: Collection[str]) -> None:
        """Refuse, after a step, that this process has not registered what those have that it has joined."""
        self._stepped = True
        for name in self.left(parts):
            if self._kept[name].last is not None and self._kept[name].late.get(name):
                raise UsageError(
                    f"This process has not registered {name!r}, which the processes that it joined have.", _HINT
                )
