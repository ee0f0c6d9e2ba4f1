"""The worlds that are explored: what may happen in each, and after how many states the search stops."""

from __future__ import annotations

from dataclasses import replace

from explore.bounds import FAULTS, Bounds
from explore.voting import VoterBounds

__all__ = ["MOST", "QUICK", "QUICK_BESIDE", "QUICK_VOTERS", "ROUND", "SOAK", "SOAK_BESIDE", "SOAK_VOTERS"]

MOST = 10**9
"""No limit."""

SOME = 250
"""States of a world that is not visited whole, in ``make test``."""

ROUND = Bounds(comes_back=0, formed=True, finishes=False)
"""Two nodes of one worker train in a round."""

DEATHS = ("crash", "dies", "loses power", "dies after its write")

QUICK: dict[str, tuple[Bounds, int]] = {
    "a run begins": (Bounds(faults=0, comes_back=0), MOST),
    "a process dies in a round": (replace(ROUND, kinds=DEATHS), MOST),
    "a node leaves a round": (replace(ROUND, kinds=("leaves",)), MOST),
    "a process dies as the run begins": (Bounds(comes_back=0, kinds=DEATHS), SOME),
    "an agent dies and comes back": (replace(ROUND, kinds=("dies",), comes_back=1), SOME),
    "a link breaks": (replace(ROUND, kinds=("loses its link",)), SOME),
    "a host freezes": (replace(ROUND, kinds=("freezes",)), SOME),
    "a worker ends by SIGTERM": (replace(ROUND, kinds=("ends by SIGTERM",)), SOME),
    "no restart is allowed": (replace(ROUND, kinds=("crash",), max_restarts=0), SOME),
    "no restart is allowed, and reports are late": (
        replace(ROUND, kinds=("crash", "late"), faults=2, max_restarts=0),
        SOME,
    ),
    "a host is cut off": (replace(ROUND, kinds=("is cut off",)), SOME),
    "an agent hangs, and its workers go on": (replace(ROUND, kinds=("hangs",)), SOME),
    "the only member's agent hangs": (replace(ROUND, nodes="1:1", kinds=("hangs",)), SOME),
    "both nodes are needed": (replace(ROUND, nodes="2:2", kinds=("dies",), comes_back=1), SOME),
    "all is late": (replace(ROUND, kinds=("late",)), SOME),
    "a process dies, live": (replace(ROUND, live=True, kinds=DEATHS), SOME),
    "a process dies, in replicas of two workers": (
        replace(ROUND, live=True, nproc=4, replica_size=2, kinds=("crash",)),
        SOME,
    ),
    "a newcomer starts ahead": (
        replace(ROUND, live=True, nodes="1:3", newcomers="c", faults=0, kinds=()),
        SOME,
    ),
}
"""By name, with the most states."""

# A state that waits keeps the one before it, of some 50 KiB.
SOAK: dict[str, tuple[Bounds, int]] = {
    "one fault at any time": (Bounds(), 60_000),
    "one fault at any time, live": (Bounds(live=True), 60_000),
    "two nodes are needed": (Bounds(nodes="2:2"), 60_000),
    "three nodes, two workers, two faults": (Bounds(nodes="2:3", start="abc", nproc=2, faults=2, formed=True), 30_000),
    "a host is cut off, and another fault": (replace(ROUND, faults=2, kinds=("is cut off", *DEATHS)), 30_000),
    "an agent hangs, and another fault": (replace(ROUND, faults=2, kinds=("hangs", *DEATHS)), 30_000),
    "no restart is allowed, and reports are late": (
        replace(ROUND, kinds=("crash", "late"), faults=2, max_restarts=0),
        30_000,
    ),
    "replicas of two workers, two faults, live": (
        replace(ROUND, live=True, nproc=4, replica_size=2, faults=2, kinds=("is lost ahead", *DEATHS)),
        30_000,
    ),
    "one replica on each node, two faults, live": (
        replace(ROUND, live=True, nproc=2, replica_size=2, faults=2, kinds=("is lost ahead", *DEATHS)),
        30_000,
    ),
    "a newcomer starts ahead, and the leader changes": (
        replace(ROUND, live=True, nodes="1:3", newcomers="c", kinds=("dies", "is lost ahead", "crash"), comes_back=1),
        30_000,
    ),
    "three nodes, two workers, two faults, live": (
        Bounds(nodes="1:3", start="abc", nproc=2, faults=2, formed=True, live=True),
        30_000,
    ),
}

SWITCH = replace(ROUND, live=True, nodes="1:3", newcomers="c")

QUICK_BESIDE: dict[str, tuple[Bounds, int]] = {
    "a process dies at each point of a switch": (replace(SWITCH, kinds=("dies",)), 2),
}
"""Worlds of which only the fair schedule is visited, and so many states after each fault at each of its points."""

SOAK_BESIDE: dict[str, tuple[Bounds, int]] = {
    "a fault at each point of a switch": (replace(SWITCH, kinds=(*FAULTS, "is lost ahead")), 300),
    "a fault at each point of a run of three nodes": (
        Bounds(nodes="2:3", start="abc", nproc=2, comes_back=1, finishes=False),
        300,
    ),
    "a fault at each point of a live run of three nodes": (
        Bounds(nodes="1:3", start="abc", nproc=2, comes_back=1, finishes=False, live=True),
        300,
    ),
}

QUICK_VOTERS: dict[str, tuple[VoterBounds, int]] = {
    "the run begins": (VoterBounds(founded=False, faults=0), SOME),
    "two candidates": (VoterBounds(faults=0), MOST),
    "two candidates, and no lease": (VoterBounds(faults=0, tried=True), 1000),
    "two candidates, and a voter is lost": (VoterBounds(), 1000),
    "one candidate, and a file is lost": (VoterBounds(candidates="a", lost_files=1), 1000),
    "an end that only one voter has": (VoterBounds(candidates="abc", faults=0, ends=True, tried=True), 1000),
}

SOAK_VOTERS: dict[str, tuple[VoterBounds, int]] = {
    "two candidates, and no lease": (VoterBounds(faults=0, tried=True), 100_000),
    "two candidates, and a file is lost": (VoterBounds(lost_files=1), 100_000),
    "the run begins, and a voter is lost": (VoterBounds(founded=False), 100_000),
    "a message is lost": (VoterBounds(faults=0, lost_messages=1, gives_up=1), 100_000),
    "an end that only one voter has": (VoterBounds(candidates="abc", faults=0, ends=True, tried=True), 100_000),
}
