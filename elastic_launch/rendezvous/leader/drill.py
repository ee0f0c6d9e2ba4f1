"""The faults of a drill: each happens once in the run, as its leader remembers it."""

from __future__ import annotations

from elastic_launch.faults import MOST
from elastic_launch.rendezvous.wire import messages as m


class Drill:
    """What a leader knows of the faults that are planned, and of those that have happened.

    Attributes:
        planned: number of faults in the plan; 0 without a drill.
    """

    def __init__(self) -> None:
        self.planned = 0
        self._landed: set[int] = set()

    def joined(self, hello: m.Hello) -> None:
        """Learn what a node knows, perhaps from another leader."""
        self.planned = max(self.planned, min(hello.planned, MOST))
        self._landed.update(hello.landed)

    def lands(self, fault: int) -> bool:
        """Whether a fault that is due happens now: it is in the plan and has not happened before."""
        if not 0 <= fault < self.planned or fault in self._landed:
            return False
        self._landed.add(fault)
        return True

    @property
    def missing(self) -> tuple[int, ...]:
        """The planned faults that have not happened."""
        return tuple(fault for fault in range(self.planned) if fault not in self._landed)
