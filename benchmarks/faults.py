"""Measures what launches, faults and changes of the world cost: elastic-launch and torchrun in turn, on one machine.

Prints medians as Markdown tables, and a breakdown of the time from a fault to the next step. Asserts
nothing.

    python benchmarks/faults.py --runs 5 --json faults.json
"""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial

import footprint
from jobs import Figures
from launchers import ALL, BOTH, Nodes, start_alone
from recovery import Before, launched, recovered
from tables import Goal, NewJob, Row, Scenario, parser, positive, run

SOON = 35
"""Steps before an early fault: by then snapshots are regular, and the plain script's last checkpoint is five steps old.
"""

ENOUGH = 505
"""Steps before other faults: some ten seconds more, in which the warm server imports what the first workers have."""

FROZEN_LIMIT = 40.0
"""Seconds within which a launcher must have detected that a node is frozen."""

SECTION = "faults"


def measure_launch(new_job: NewJob, who: str) -> Figures:
    """One node, two workers, timed from just before the launcher starts."""
    with new_job() as job:
        _pid, began = start_alone(job, who)
        return launched(job, began)


def measure_worker_killed(new_job: NewJob, who: str, steps: int = ENOUGH) -> Figures:
    """SIGKILL of rank 1 after a number of steps, sent from outside."""
    with new_job() as job:
        start_alone(job, who)
        job.step(0, 2, steps)
        victim = job.step(1, 2, steps)["pid"]
        before, killed = Before(job), time.monotonic()
        os.kill(victim, signal.SIGKILL)
        return recovered(job, before, None, killed)


def measure_node_killed(new_job: NewJob, who: str) -> Figures:
    """SIGKILL of all processes of the node that does not host the run."""
    return node_struck(new_job, who, signal.SIGKILL)


def measure_node_frozen(new_job: NewJob, who: str) -> Figures:
    """SIGSTOP of all processes of the node that does not host the run."""
    return node_struck(new_job, who, signal.SIGSTOP)


def node_struck(new_job: NewJob, who: str, number: signal.Signals) -> Figures:
    with new_job() as job:
        nodes = Nodes(job, who)
        nodes.start("host")
        guest = nodes.start("guest")
        for rank in (0, 1):
            job.step(rank, 2, ENOUGH)
        before, struck = Before(job), time.monotonic()
        guest.signal(number)
        if number == signal.SIGSTOP:
            job.limit(FROZEN_LIMIT)
        figures = recovered(job, before, 1, struck)
        formed = [x["clock"] for x in job.events("host") if x["event"] == "round_formed" and x["clock"] > struck]
        return figures | ({"formed": formed[0] - struck} if formed else {})


def measure_scale_up(new_job: NewJob, who: str) -> Figures:
    """One node trains; a second one is started."""
    with new_job() as job:
        nodes = Nodes(job, who)
        nodes.start("host")
        job.step(0, 1, ENOUGH)
        before = Before(job)
        nodes.start("guest")
        return recovered(job, before, 2, None)


def measure_sigterm(new_job: NewJob, who: str) -> Figures:
    """Two nodes train; the agent of the one that does not host the run gets SIGTERM."""
    with new_job() as job:
        nodes = Nodes(job, who)
        nodes.start("host")
        guest = nodes.start("guest")
        for rank in (0, 1):
            job.step(rank, 2, ENOUGH)
        before = Before(job)
        os.kill(guest.pid, signal.SIGTERM)
        return recovered(job, before, 1, None)


def launch_one_node(new_job: NewJob, who: str, nproc: int) -> float:
    """Time from just before the start of one node of 1:1 to the first step."""
    with new_job() as job:
        began = Nodes(job, who, "1:1").start("host", nproc).began
        return float(job.step(0, nproc)["clock"]) - began


def measure_two_nodes(new_job: NewJob, who: str) -> Figures:
    """Extra time of two nodes of 1:4, one worker each, compared with one node of 1:1 that has one worker or as many."""
    one, two = launch_one_node(new_job, who, 1), launch_one_node(new_job, who, 2)
    with new_job() as job:
        nodes = Nodes(job, who, "1:4")
        began = nodes.start("host").began
        nodes.start("guest")
        both = job.step(0, 2)["clock"] - began
        return {"one": one, "two": two, "both": both, "more": both - one, "more than two": both - two}


def measure_footprint(new_job: NewJob, who: str, seconds: float) -> Figures:
    """What the agent and its helpers use while two workers train."""
    with new_job() as job:
        return footprint.measure(job, who, seconds)


def measure_copies(new_job: NewJob, who: str, seconds: float) -> Figures:
    """The same with a durable checkpoint every five seconds."""
    with new_job() as job:
        return footprint.measure(job, who, seconds, "--checkpoint", str(job.directory / "checkpoints"))


def lost(what: str, goal: Goal | None = None) -> Row:
    return Row("lost", f"{what}: steps done again", goal, "", 0)


def changed(what: str, most: float) -> tuple[Row, ...]:
    """Rows of a planned change, which costs this project's library no step."""
    return (
        Row("begin", f"{what}: last step -> script begins again"),
        Row("new", f"{what}: last step -> next new step", Goal(most=most)),
        lost(what, Goal(most=0)),
    )


def taken(what: str, *goals: Goal) -> tuple[Row, ...]:
    memory, cpu = goals or (None, None)
    return (
        Row("memory", f"{what}: memory (PSS)", memory, "MiB", 0),
        Row("peak", f"{what}: memory, most of ten looks", None, "MiB", 0),
        Row("whole", f"{what}: memory with the workers (PSS)", None, "MiB", 0),
        Row("cpu", f"{what}: CPU in 20 s", cpu, "s"),
        Row("processes", f"{what}: processes", None, "", 0),
    )


LAUNCH = (
    Row("begin", "launch (1 node, 2 workers) -> script begins"),
    Row("step", "launch (1 node, 2 workers) -> first step", Goal(ratio=1)),
)
WORKER_KILLED = (
    Row("begin", "worker killed -> script begins again"),
    Row("step", "worker killed -> next step"),
    Row("new", "worker killed -> first new step", Goal(most=0.25, ratio=0.12)),
    lost("worker killed"),
)
KILLED_EARLY = (
    Row("step", "worker killed a second after the first step -> next step"),
    Row("new", "worker killed a second after the first step -> first new step"),
)
NODE_KILLED = (
    Row("formed", "node killed -> survivor's new round"),
    Row("step", "node killed -> survivor's first step", Goal(most=1)),
    Row("new", "node killed -> survivor's first new step"),
    lost("node killed"),
)
NODE_FROZEN = (
    Row("step", "node frozen -> survivor's first step", Goal(most=7)),
    lost("node frozen"),
)
TWO_NODES = (
    Row("one", "launch -> first step: one node of 1:1, 1 worker"),
    Row("two", "launch -> first step: one node of 1:1, 2 workers"),
    Row("both", "launch -> first step: two nodes of 1:4, 1 worker each"),
    Row("more", "two nodes need more than one with 1 worker", Goal(most=2.5)),
    Row("more than two", "two nodes need more than one with 2 workers"),
)


def scenarios(seconds: float) -> dict[str, Scenario]:
    """All scenarios.

    Args:
        seconds: for which agents are watched.
    """
    with_copies = taken("with a checkpoint every 5 s")
    small = taken("agent and helpers", Goal(ratio=1), Goal(most=0.1))
    return {
        "launch": Scenario(measure_launch, ALL, LAUNCH),
        "worker-killed": Scenario(measure_worker_killed, ALL, WORKER_KILLED),
        "killed-early": Scenario(partial(measure_worker_killed, steps=SOON), ALL, KILLED_EARLY),
        "node-killed": Scenario(measure_node_killed, ALL, NODE_KILLED),
        "node-frozen": Scenario(measure_node_frozen, ALL, NODE_FROZEN),
        "scale-up": Scenario(measure_scale_up, ALL, changed("second node joins", 0.5)),
        "sigterm": Scenario(measure_sigterm, ALL, changed("SIGTERM at a node, the other's", 1)),
        "two-nodes": Scenario(measure_two_nodes, BOTH, TWO_NODES),
        "footprint": Scenario(partial(measure_footprint, seconds=seconds), ALL[:3], small),
        "copies": Scenario(partial(measure_copies, seconds=seconds), ("ours",), with_copies),
    }


def main() -> int:
    options = parser("Measure what launches, faults and changes cost, in turn.", runs=5, timeout=90)
    options.add_argument("--only", choices=scenarios(0), action="append", help="measure this one; may be repeated")
    options.add_argument("--who", choices=ALL, action="append", help="measure this one; may be repeated")
    options.add_argument("--watch", type=positive, default=20, metavar="S", help="to watch an agent's memory and CPU")
    args = options.parse_args()
    found = {name: scenario for name, scenario in scenarios(args.watch).items() if name in (args.only or scenarios(0))}
    return run(found, args, args.who or ALL, SECTION)


if __name__ == "__main__":
    sys.exit(main())
