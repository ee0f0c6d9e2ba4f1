"""What may happen in an explored run."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FAULTS", "Bounds"]

FAULTS = (
    "crash",
    "ends by SIGTERM",
    "dies",
    "loses power",
    "loses its link",
    "freezes",
    "hangs",
    "is cut off",
    "leaves",
    "late",
    "dies after its write",
)


@dataclass(frozen=True)
class Bounds:
    """What may happen in a world.

    Attributes:
        nodes: the run's limits, as in ``--nnodes``.
        start: the ids of the nodes that start with the run.
        nproc: workers of each node.
        replica_size: workers of each replica.
        faults: how many faults may happen.
        kinds: which ones.
        comes_back: how many agents may start again.
        newcomers: ids of nodes that may come at any time.
        live: whether workers can be suspended, and start ahead of a place.
        formed: whether exploration begins with a round that trains.
        finishes: whether workers may finish while faults are left.
    """

    nodes: str = "1:2"
    start: str = "ab"
    nproc: int = 1
    faults: int = 1
    kinds: tuple[str, ...] = FAULTS
    comes_back: int = 1
    newcomers: str = ""
    live: bool = False
    formed: bool = False
    finishes: bool = True
    max_restarts: int = 3
    replica_size: int = 1
