"""Goodput under a schedule of faults: elastic-launch and torchrun one after the other, same seeds, same schedule.

Goodput is productive time / total time. Total is the time of the schedule, from the first step on. Productive is the
time in steps that were kept, each from the process' previous step. A process' first step in a round counts as long as
its median step. Steps that were repeated later do not count, and neither does the time between two rounds. The
definition is that of docs/reference/ledger.md, but measured from outside, from the lines that the script writes, for
both launchers alike.

    python benchmarks/goodput.py --seconds 300 --json goodput.json
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from jobs import Figures, Job, Record, life
from launchers import ALL, BOTH, Node, Nodes, start_alone
from tables import Goal, NewJob, Row, Scenario, parser, positive, run, say

SECTION = "goodput"
SEED = 0
OFF = 0.5
GOALS = {"kill-10": Goal(least=97), "kill-30": Goal(least=98.5)}
AWAY = 1 / 4
"""Fraction of the interval for which a lost node stays away."""
RECENT = 1.0
"""Seconds within which a training process must have done a step."""
Life = tuple[int, int]
LAST = 200
"""Number of steps whose mean loss is the final loss."""
SLACK = 120.0
"""Seconds for launch and shutdown, in addition to the schedule's."""


@dataclass(frozen=True)
class Schedule:
    """Faults at fixed times after the first step.

    Attributes:
        kind: ``kill``: a worker is killed, ranks 0 and 1 in turn; ``node``: one of two nodes is lost with all its
            processes, and restarted a quarter of the interval later; ``none``.
        every: seconds between faults.
    """

    kind: str
    every: float

    @property
    def name(self) -> str:
        return self.kind if self.kind == "none" else f"{self.kind}-{self.every:g}"

    @property
    def title(self) -> str:
        return {
            "none": "undisturbed",
            "kill": f"a worker killed every {self.every:g} s",
            "node": f"a node lost every {self.every:g} s, back {self.every * AWAY:g} s later",
        }[self.kind]

    @classmethod
    def parse(cls, text: str) -> Schedule:
        if text == "none":
            return cls("none", 0.0)
        found = re.fullmatch(r"(kill|node)-(\d+)", text)
        if not found or int(found[2]) < 1:
            raise argparse.ArgumentTypeError(f"must be none, kill-SECONDS or node-SECONDS, not {text!r}")
        return cls(found[1], float(found[2]))

    def times(self, began: float, until: float) -> list[float]:
        """Times of the faults: up to half a second off, alike for all launchers, to avoid the rhythm of snapshots."""
        number = int((until - began) / self.every - 1e-9) if self.every else 0
        source = random.Random(SEED)
        return [began + self.every * (n + 1) + source.uniform(-OFF, OFF) for n in range(number)]


def measure(new_job: NewJob, who: str, schedule: Schedule, seconds: float) -> Figures:
    """Train for this many seconds from the first step on, with the schedule's faults."""
    with new_job() as job:
        if schedule.kind == "node":
            nodes = Nodes(job, who)
            launched = nodes.start("host").began
            guests = [nodes.start("guest")]
            strike = partial(lose_node, job, nodes, guests, schedule.every * AWAY)
        else:
            launched = start_alone(job, who)[1]
            strike = partial(kill_worker, job)
        began = job.step(0, 2)["clock"]
        until = began + seconds
        struck = disturb(job, schedule.times(began, until), until, strike)
        job.sleep(until)
        if not job.running:
            say(f"{schedule.name}, {who}: the launcher ended {until - time.monotonic():.1f} s too early")
        noted = [record for record in job.steps.read() if record["rank"] == 0 and record["clock"] <= until]
    kept, productive = productive_steps(noted)
    done = sum(1 for record in noted if record["step"])
    return {
        "goodput": 100 * productive / seconds,
        "with launch": 100 * productive / (until - launched),
        "kept": float(len(kept)),
        "again": float(done - len(kept)),
        "faults": float(struck),
        "loss": statistics.fmean(record["loss"] for record in kept[-LAST:]),
    }


def disturb(job: Job, times: list[float], until: float, strike: Callable[[int, float], bool]) -> int:
    """Cause a fault at each time; return how many there were.

    If no process trains then, the fault comes as soon as one does; if the next fault is already due, it is skipped.
    """
    struck = 0
    for number, (at, following) in enumerate(pairwise([*times, until])):
        job.sleep(at)
        struck += strike(number, following)
    return struck


def kill_worker(job: Job, number: int, deadline: float) -> bool:
    victim = training(job, number % 2, deadline)
    if victim is not None:
        os.kill(victim["pid"], signal.SIGKILL)
    return victim is not None


def lose_node(job: Job, nodes: Nodes, guests: list[Node], away: float, _number: int, deadline: float) -> bool:
    """Kill the newest guest once it trains; start another one later."""
    if training(job, 1, deadline) is None:
        return False
    guests[-1].signal(signal.SIGKILL)
    job.sleep(time.monotonic() + away)
    guests.append(nodes.start("guest"))
    return True


def training(job: Job, rank: int, deadline: float) -> Record | None:
    """Wait for a rank to train in a world of two, and return its last step."""
    while job.running and time.monotonic() < deadline:
        steps = [record for record in job.steps.read() if record["rank"] == rank and record["step"]]
        if steps and steps[-1]["world"] == 2 and time.monotonic() - steps[-1]["clock"] < RECENT:
            return steps[-1]
        job.sleep(time.monotonic() + 0.05)
    return None


def productive_steps(noted: list[Record]) -> tuple[list[Record], float]:
    """Return rank 0's steps that were not repeated later, and the seconds spent in them."""
    steps = [record for record in noted if record["step"]]
    took: dict[Life, list[float]] = {}
    duration: dict[tuple[Life, int], float] = {}
    last: dict[Life, float] = {}
    for record in steps:
        who, clock = life(record), record["clock"]
        if who in last:
            duration[who, record["step"]] = clock - last[who]
            took.setdefault(who, []).append(clock - last[who])
        last[who] = clock
    kept: list[Record] = []
    for record in reversed(steps):
        if not kept or record["step"] < kept[-1]["step"]:
            kept.append(record)
    kept.reverse()
    usual = {who: statistics.median(values) for who, values in took.items()}
    productive = sum(duration.get((life(x), x["step"]), usual.get(life(x), 0.0)) for x in kept)
    return kept, productive


def rows(schedule: Schedule) -> tuple[Row, ...]:
    what = schedule.title
    return (
        Row("goodput", f"{what}: goodput", GOALS.get(schedule.name), "%", 1),
        Row("with launch", f"{what}: goodput from the launch on", None, "%", 1),
        Row("kept", f"{what}: steps kept", None, "", 0),
        Row("again", f"{what}: steps done again", None, "", 0),
        Row("faults", f"{what}: faults", None, "", 0),
        Row("loss", f"{what}: final loss", None, "", 4),
    )


def main() -> int:
    options = parser("Train under schedules of faults, and tell which share of the time counts.", runs=1, timeout=600)
    options.add_argument("--seconds", type=positive, default=300, help="of each schedule, from the first step on [300]")
    options.add_argument(
        "--schedule",
        type=Schedule.parse,
        action="append",
        metavar="KIND-S",
        help="kill-S: a worker is killed every S seconds; node-S: a node is lost, and back S/4 later; none; may be "
        "repeated [kill-10 kill-30 node-60]",
    )
    options.add_argument(
        "--who", choices=ALL, action="append", help="measure this one; may be repeated [ours torchrun]"
    )
    args = options.parse_args()
    args.timeout = args.seconds + SLACK
    args.cold = True  # after minutes, the files are cached anyway
    chosen = args.schedule or [Schedule("kill", 10), Schedule("kill", 30), Schedule("node", 60)]
    scenarios = {
        each.name: Scenario(partial(measure, schedule=each, seconds=args.seconds), ALL, rows(each)) for each in chosen
    }
    return run(scenarios, args, args.who or BOTH, SECTION)


if __name__ == "__main__":
    sys.exit(main())
