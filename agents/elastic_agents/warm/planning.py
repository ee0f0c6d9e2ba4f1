"""What a server is to import for a script, or why it had better import nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic_agents.warm.become import entry_point
from elastic_agents.warm.imports import Import, Reading, read
from elastic_agents.warm.loading import Loaded, meant_by_libraries
from elastic_agents.warm.spying import watched

__all__ = ["REMEDY", "Plan", "plan"]

HARMLESS = frozenset({"numpy", "elastic_launch"})
"""What a script may import before torch without a difference: torch imports the one, and the other is this project."""

REMEDY = "--preload names modules to load ahead all the same"


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

    def completes(self, package: str) -> bool:
        """Whether what comes with a package may be imported, too: the script's own imports of it find the same."""
        return not self.reading.stopped or package in {item.top for item in map(Import, self.asked)}

    @property
    def set_before(self) -> set[str]:
        """Variables that the script sets before an import; the name is empty for an unknown one."""
        return self.reading.set_before([*map(Import, self.asked)])

    def doubt(self, loaded: Loaded) -> str:
        """Return why what was imported may not be what the script would get; "" if it is."""
        if names := self.set_before & loaded.read:
            return f"the script sets {', '.join(sorted(names))}, which its imports read"
        if names := meant_by_libraries(self.first, loaded.missed):
            return f"{', '.join(sorted(names))} beside the script may be what libraries import by that name"
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
    found = Plan(first, reading, tuple(settings["preload"]), frozenset(settings["without"]))
    if "" in found.set_before:
        return "the script sets variables whose names are not literals before its imports"
    if found.wanted:
        return found
    if reading.stopped:
        return f"the script changes where imports look ({reading.stopped}) before it imports what takes long; {REMEDY}"
    return "the script imports nothing that takes long"
