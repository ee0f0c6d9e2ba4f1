"""What a server is to import for a script, or why it had better import nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic_agents.warm.become import entry_point
from elastic_agents.warm.imports import Import, Reading, read
from elastic_agents.warm.loading import Loaded, hidden_by, modules_in
from elastic_agents.warm.spying import watched

__all__ = ["Plan", "plan"]

HARMLESS = frozenset({"numpy", "elastic_launch"})
"""What a script may import before torch without a difference: torch imports the one, and the other is this project."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to import.

    Attributes:
        first: what stands first on the script's ``sys.path``.
        reading: what the script says.
        asked: modules that the user adds, and insists on.
        without: modules that are left out.
    """

    first: str
    reading: Reading
    asked: tuple[str, ...]
    without: frozenset[str]

    @property
    def wanted(self) -> list[Import]:
        """Imports in the order of the script, then those that the user adds."""
        found = [item for item in self.reading.imports if not self.without & {item.top, item.module}]
        return [*found, *map(Import, self.asked)]

    @property
    def torch_comes_first(self) -> bool:
        """Whether torch may be imported before all else, as far as the script can tell."""
        return next((item.top for item in self.wanted if item.top not in HARMLESS), "") == "torch"

    def doubt(self, loaded: Loaded) -> str:
        """Return why what was imported may not be what the script would get; "" if it is."""
        if names := self.reading.before_imports & loaded.read:
            return f"the script sets {', '.join(sorted(names))}, which its imports read"
        before = {self.first, *self.reading.directories}
        for directory in (self.first, *self.reading.directories, *self.reading.behind):
            meant = loaded.missed & modules_in(directory).keys()
            if directory in before:
                meant |= hidden_by(directory)
            if meant:
                where = "beside the script" if directory == self.first else f"in {directory}"
                return f"{', '.join(sorted(meant))} {where} may be what libraries import by that name"
        return ""


def plan(settings: Mapping[str, Any], search: list[str]) -> Plan | str:
    """Read the script of a server's settings.

    Args:
        search: a worker's ``sys.path``, without what stands first for its script.

    Returns:
        why workers cannot be forked, if so.
    """
    try:
        return _plan(settings, search)
    except Exception as error:  # noqa: BLE001 - whatever a script has in store, nobody else is to fail of it
        return f"the script cannot be read ahead ({type(error).__name__}: {error})"


def _plan(settings: Mapping[str, Any], search: list[str]) -> Plan | str:
    if reason := watched():
        return reason
    path, first, module = entry_point(settings["argv"][2:])
    if not path:
        return "the script is of a kind that only a process of its own can run"
    reading = read(path, first, search, module)
    if reading.decisive:
        return f"the script sets {', '.join(reading.decisive)}, which matters before its imports"
    if "" in reading.before_imports:
        return "the script sets variables that are not written out before its imports"
    found = Plan(first, reading, tuple(settings["preload"]), frozenset(settings["without"]))
    return found if found.wanted else "the script imports nothing that takes long"
