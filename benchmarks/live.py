"""What a change of membership costs those that train on: live rounds, beside rounds that start all workers anew.

A worker is killed, a node joins, or a node leaves, with scripts whose own start takes some seconds. A standstill and a
slowdown beside it are told apart: a new worker that prepares while the others train on takes processor time from them.

    python benchmarks/live.py --runs 5 --json live.json
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from jobs import Figures, Job, Record, descendants, life
from launchers import LIVE, LIVE_ON_GPUS, Nodes, start_alone
from tables import Goal, NewJob, Row, Scenario, parser, positive, run

SECTION = "live"

ENOUGH = 60
"""Steps before a change: by then the launcher has learned how long they take."""

AFTER = 30
"""Steps after the last change that are still watched."""

TIMEOUT = 120
"""Seconds for one measurement, in addition to eight starts of the script."""

COMPILER = "aot_eager"
"""The backend for the compiled model; it needs no compiler of the system's."""

PAUSE = 3.0
"""A gap between two steps of more than so many usual ones is a standstill, not a slow step."""


@dataclass(frozen=True)
class Change:
    """What happens, and to what kind of script.

    Attributes:
        kind: ``killed``, ``joins`` or ``leaves``.
        start: seconds that the script needs before its first step.
        busy: whether it computes during that time.
        compiled: whether its model is compiled.
        workers: number of workers of which one is killed.
    """

    kind: str
    start: float = 0.0
    busy: bool = False
    compiled: bool = False
    workers: int = 4

    @property
    def name(self) -> str:
        return f"{self.kind}-compiled" if self.compiled else f"{self.kind}-{self.start:g}"

    @property
    def title(self) -> str:
        what = {
            "killed": f"1 of {self.workers} workers killed",
            "joins": "node joins",
            "leaves": "node leaves",
        }[self.kind]
        return f"{what}, compiled model" if self.compiled else f"{what}, {self.start:g} s"

    @property
    def options(self) -> list[str]:
        """The script's."""
        options = ["--prepare", str(self.start)]
        options += ["--busy"] if self.busy else []
        return [*options, "--compile", COMPILER] if self.compiled else options

    def measure(self, new_job: NewJob, who: str) -> Figures:
        """Train, make the change, and train on until the world has its new size."""
        with new_job() as job:
            job.limit(TIMEOUT + 8 * self.start)
            return {"killed": self._killed, "joins": self._joins, "leaves": self._leaves}[self.kind](job, who)

    def _killed(self, job: Job, who: str) -> Figures:
        start_alone(job, who, self.workers, *self.options)
        victim = trained(job, self.workers)[-1]["pid"]

        def kill() -> None:
            os.kill(victim, signal.SIGKILL)

        return changed(job, kill, self.workers, {victim})

    def _joins(self, job: Job, who: str) -> Figures:
        nodes = Nodes(job, who)
        nodes.start("host", 1, *self.options)
        trained(job, 1)
        return changed(job, lambda: nodes.start("guest", 1, *self.options), 2, set())

    def _leaves(self, job: Job, who: str) -> Figures:
        nodes = Nodes(job, who)
        nodes.start("host", 1, *self.options)
        guest = nodes.start("guest", 1, *self.options)
        trained(job, 2)
        # Ranks follow the order in which the nodes have joined, and the guest may have been the first.
        gone = set(descendants(guest.pid))
        return changed(job, lambda: os.kill(guest.pid, signal.SIGTERM), 1, gone)


def trained(job: Job, world: int) -> list[Record]:
    """Wait until a world of this size trains, and return a step of each rank."""
    first = job.step(0, world)["step"]
    return [job.step(rank, world, first + ENOUGH) for rank in range(world)]


def changed(job: Job, change: Callable[[], object], world: int, gone: set[int]) -> Figures:
    """Make a change, wait until a world of this size has trained for a while, and return the figures.

    Args:
        gone: processes that the change ends.
    """
    before = {life(record) for record in job.steps.read()}
    stayed = {pid for pid, _round in before} - gone
    at = time.monotonic()
    change()
    first = job.until(
        f"a world of {world} after the change",
        lambda x: x["step"] > 0 and x["world"] == world and life(x) not in before,
    )
    job.until(f"{AFTER} steps after that", lambda x: x["step"] >= first["step"] + AFTER and x["clock"] > first["clock"])
    return figures(job.steps.read(), before, stayed, at, first)


def figures(noted: list[Record], before: set[tuple[int, int]], stayed: set[int], at: float, first: Record) -> Figures:
    """Compute the figures of one change.

    Args:
        noted: all lines of the scripts.
        before: processes and rounds until then.
        stayed: the processes that the change need not end.
        at: when it was made.
        first: first step in a world of the new size.
    """
    steps = sorted((record for record in noted if record["step"]), key=lambda record: record["clock"])
    later = [record for record in steps if life(record) not in before]
    last = max(record["step"] for record in steps if life(record) in before)
    usual = statistics.median(durations([record for record in steps if record["clock"] <= at]))
    moments = [*(record["clock"] for record in steps if life(record) in before)][-1:]
    moments += [record["clock"] for record in later]
    gaps = [end - begin for begin, end in pairwise(sorted(moments))]
    meanwhile = [x for x in durations([x for x in steps if at < x["clock"] < first["clock"]]) if x < PAUSE * usual]
    begun = [record for record in noted if record.get("mark") == "begin" and record["clock"] > at]
    found = {
        "next": later[0]["clock"] - at,
        "standstill": max(0.0, max(gaps) - usual),
        "paused": sum(gap - usual for gap in gaps if gap > PAUSE * usual),
        "whole": first["clock"] - at,
        "lost": float(max(0, last + 1 - later[0]["step"])),
        "kept": 100.0 * len(stayed & {record["pid"] for record in later}) / len(stayed),
        "starts": float(len(begun)),
        "usual": 1000 * usual,
    }
    return found | ({"slower": statistics.median(meanwhile) / usual} if len(meanwhile) >= ENOUGH // 4 else {})


def durations(steps: list[Record]) -> list[float]:
    """Seconds between two steps of a process, in the same round."""
    last: dict[tuple[int, int], float] = {}
    found = []
    for record in steps:
        if life(record) in last:
            found.append(record["clock"] - last[life(record)])
        last[life(record)] = record["clock"]
    return found


def rows(change: Change) -> tuple[Row, ...]:
    what = change.title
    quick, planned = Goal(most=0.1), change.kind != "killed"
    after = () if planned else (Row("next", f"{what} -> next step of any worker", quick, digits=3),)
    return (
        *after,
        Row("standstill", f"{what}: longest standstill", quick if planned else None, digits=3),
        Row("slower", f"{what}: a step until the world is whole", None, "times as long", 2),
        Row("whole", f"{what} -> first step of the new world", None),
        Row("lost", f"{what}: steps lost", Goal(most=0), "", 0),
        Row("kept", f"{what}: processes kept", Goal(least=100), "%", 0),
    )


def chosen(kinds: list[str], starts: list[float], busy: bool, workers: int) -> dict[str, Scenario]:
    """The scenarios of these kinds, each for every start, and one with a compiled model."""
    changes = [Change(kind, start, busy, workers=workers) for kind in kinds if kind != "compiled" for start in starts]
    if "compiled" in kinds:
        changes.append(Change("killed", compiled=True, workers=workers))
    who = LIVE_ON_GPUS if "WORKLOAD_GPU" in os.environ else LIVE
    return {each.name: Scenario(each.measure, who, rows(each)) for each in changes}


KINDS = ("killed", "joins", "leaves", "compiled")


def main() -> int:
    options = parser("Measure what changes of membership cost those that train on.", runs=5, timeout=TIMEOUT)
    options.add_argument("--only", choices=KINDS, action="append", help="measure this one; may be repeated")
    options.add_argument("--who", choices=LIVE_ON_GPUS, action="append", help="measure this one; may be repeated")
    options.add_argument(
        "--start",
        type=float,
        action="append",
        metavar="S",
        help="seconds of the script's own start; may be repeated [0 3 10]",
    )
    options.add_argument("--busy", action="store_true", help="the start takes a core, instead of sleeping")
    options.add_argument("--workers", type=positive, default=4, help="of which one is killed [4]")
    args = options.parse_args()
    scenarios = chosen(args.only or [*KINDS], args.start or [0.0, 3.0, 10.0], args.busy, args.workers)
    return run(scenarios, args, args.who or LIVE, SECTION)


if __name__ == "__main__":
    sys.exit(main())
