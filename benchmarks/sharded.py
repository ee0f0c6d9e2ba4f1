"""Measures sharded models: steps beside plain FSDP2 under torchrun, snapshots, and changes of the world.

All nodes are on this host, in a network namespace of the benchmark's own if it may make one: the bytes that they send
to each other are those of its loopback interface.

    python benchmarks/sharded.py --runs 3 --json sharded.json
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
from collections.abc import Callable, Collection
from functools import partial
from itertools import pairwise

from jobs import Figures, Job, Missing, Record, descendants, life
from launchers import CONTENDERS, Nodes
from live import changed
from network import own_network
from snapshots import WARM, around, groups, intervals, mean, takes_snapshot
from tables import NewJob, Row, Scenario, parser, positive, run, say

SECTION = "sharded"
WHO = ("ours", "torchrun")
KINDS = ("steps", "killed", "resize", "replicas")
MIB = 2**20
LAYERS = 6
"""Of sharded_workload.py."""
ENOUGH = 20
"""Steps before a change."""
REPLICA = 2
"""Ranks that divide a model in the scenario with replicas."""
CHANGED = ("standstill", "whole", "lost", "kept")
"""The figures of a change."""


def script(job: Job, args: argparse.Namespace, *options: str) -> list[str]:
    options = ("--width", str(args.width), "--prepare", str(args.start), *options)
    return job.script("sharded_workload.py", *options, sleep=args.sleep)


def state_bytes(width: int) -> int:
    """The size of parameters and both of AdamW's moments."""
    return 3 * 4 * LAYERS * width**2


def least(before: int, after: int) -> float:
    """The part of a state, in equal shards by rank, that must move when the number of ranks changes.

    Ranks that stay keep their numbers; one that leaves still has its shard.
    """
    kept = sum(
        max(0.0, min((rank + 1) / before, (rank + 1) / after) - max(rank / before, rank / after))
        for rank in range(min(before, after))
    )
    return 1 - kept


def measure_steps(new_job: NewJob, who: str, args: argparse.Namespace) -> Figures:
    """Two nodes of one worker train to the end."""
    ours = CONTENDERS[who].ours
    with new_job() as job:
        nodes = Nodes(job, who, "2:2")
        told = script(job, args, "--micros", "2", "--steps", str(args.steps), *([] if ours else ["--plain"]))
        for name in ("host", "guest"):
            nodes.start(name, script=told)
        for rank in (0, 1):
            job.step(rank, 2, args.steps)
        noted, steps = job.steps.read(), intervals(job)
    figures = {
        "step": mean(steps),
        "sent": statistics.median(sends(noted)) / 2 / MIB,
        "grown": max(record["grown"] for record in noted if record["step"]) / MIB,
    }
    if not ours:
        return figures
    usual = [step for step in steps if not takes_snapshot(step)]
    # The machine's speed varies, so each snapshot is compared with adjacent steps.
    found = [(group, around(steps, group, takes_snapshot)) for group in groups(steps, takes_snapshot)]
    more = [mean(group) - mean(beside) for group, beside in found if beside]
    if not more:
        raise Missing(f"found no snapshot in {len(steps)} steps: --steps should be higher")
    return figures | {
        "step": mean(usual),
        "all": mean(steps),
        "taken": float(len(more)),
        "more": statistics.median(more),
    }


def sends(noted: list[Record]) -> list[int]:
    """The bytes that all ranks sent during each step, but the first ones."""
    steps = [record for record in noted if record["rank"] == 0 and record["step"]][WARM:]
    return [after["sent"] - before["sent"] for before, after in pairwise(steps)]


def measure_resize(new_job: NewJob, who: str, args: argparse.Namespace) -> Figures:
    """Some nodes train, another one joins, trains, and gets SIGTERM."""
    few, many = args.nodes, args.nodes + 1
    with new_job() as job:
        job.limit(args.timeout + 4 * args.start)
        nodes = Nodes(job, who, f"{few}:{many}", *(["--split-snapshots"] if args.split else []))
        told = script(job, args, "--micros", str(few * many))
        for number in range(few):
            nodes.start(f"guest{number}" if number else "host", script=told)
        trained(job, few)
        last: list[int] = []
        found = resized(job, "grow", few, many, lambda: last.append(nodes.start("last", script=told).pid), args)
        trained(job, many)
        gone = {*descendants(last[0])}
        return found | resized(job, "shrink", many, few, lambda: os.kill(last[0], signal.SIGTERM), args, gone)


def measure_killed(new_job: NewJob, who: str, args: argparse.Namespace) -> Figures:
    """Of nodes with two workers each, one worker of the last node is killed."""
    world = 2 * args.nodes
    with new_job() as job:
        job.limit(args.timeout + 4 * args.start)
        nodes = Nodes(job, who, f"{args.nodes}:{args.nodes}", *(["--split-snapshots"] if args.split else []))
        told = script(job, args, "--micros", str(world))
        for number in range(args.nodes):
            nodes.start(f"guest{number}" if number else "host", 2, script=told)
        trained(job, world)
        victim = job.step(world - 1, world)["pid"]
        found = changed(job, lambda: os.kill(victim, signal.SIGKILL), world, {victim})
    return {f"killed-{name}": found[name] for name in CHANGED}


def measure_replicas(new_job: NewJob, who: str, args: argparse.Namespace) -> Figures:
    """Of nodes with a replica each, a worker of the last one is killed; another node joins, and gets SIGTERM."""
    size, few, many = REPLICA, args.nodes * REPLICA, (args.nodes + 1) * REPLICA
    with new_job() as job:
        job.limit(args.timeout + 4 * args.start)
        nodes = Nodes(job, who, f"1:{args.nodes + 1}", "--replica-size", str(size))
        told = script(job, args, "--micros", str(few * many), "--replica", str(size))
        for number in range(args.nodes):
            nodes.start(f"guest{number}" if number else "host", size, script=told)
        trained(job, few)
        victim = job.step(few - 1, few)["pid"]
        killed = changed(job, lambda: os.kill(victim, signal.SIGKILL), few, {victim})
        last: list[int] = []
        joins = changed(job, lambda: last.append(nodes.start("last", size, script=told).pid), many, {victim})
        gone = {victim, *descendants(last[0])}
        leaves = changed(job, lambda: os.kill(last[0], signal.SIGTERM), few, gone)
    kinds = {"replica-killed": killed, "replica-joins": joins, "replica-leaves": leaves}
    return {f"{kind}-{name}": found[name] for kind, found in kinds.items() for name in CHANGED}


def trained(job: Job, world: int) -> None:
    """Wait until all ranks of a world have done some steps."""
    first = job.step(0, world)["step"]
    for rank in range(world):
        job.step(rank, world, first + ENOUGH)


def resized(
    job: Job,
    kind: str,
    before: int,
    after: int,
    change: Callable[[], object],
    args: argparse.Namespace,
    gone: Collection[int] = (),
) -> Figures:
    """Change the number of ranks, and return the figures of the change, which ends the processes that are ``gone``."""
    old = {life(record) for record in job.steps.read()}
    found = changed(job, change, after, {*gone})
    steps = sorted((record for record in job.steps.read() if record["step"]), key=lambda record: record["clock"])
    later = [record for record in steps if life(record) not in old]
    *_, last = (record for record in steps if life(record) in old)
    moved = later[0]["sent"] - last["sent"] - statistics.median(sends(later))
    needed = least(before, after) * state_bytes(args.width)
    figures = {name: found[name] for name in CHANGED}
    figures |= {"moved": moved / MIB, "least": needed / MIB, "times": moved / needed}
    figures["grown"] = max(record["grown"] for record in later) / MIB
    return {f"{kind}-{name}": value for name, value in figures.items()}


STEPS = (
    Row("step", "step in which no snapshot is taken", digits=3),
    Row("all", "step, with all snapshots", digits=3),
    Row("taken", "snapshots taken, each with its copy on the other node", None, "", 0),
    Row("more", "what one adds to its step", digits=3),
    Row("sent", "sent per rank and step", None, "MiB", 1),
    Row("grown", "memory that a worker gains at most", None, "MiB", 0),
)


def change_rows(kind: str, what: str) -> tuple[Row, ...]:
    return (
        Row(f"{kind}-standstill", f"{what}: longest standstill"),
        Row(f"{kind}-whole", f"{what}: until the first step of the new world"),
        Row(f"{kind}-lost", f"{what}: completed steps lost", None, "", 0),
        Row(f"{kind}-kept", f"{what}: survivors that keep their process", None, "%", 0),
    )


def resize_rows(kind: str, what: str) -> tuple[Row, ...]:
    return (
        *change_rows(kind, what),
        Row(f"{kind}-moved", f"{what}: sent, without a usual step", None, "MiB", 1),
        Row(f"{kind}-least", f"{what}: least that must be sent, as computed", None, "MiB", 1),
        Row(f"{kind}-times", f"{what}: sent / least", None, "", 2),
        Row(f"{kind}-grown", f"{what}: memory that a worker then gains at most", None, "MiB", 0),
    )


def chosen(kinds: list[str], args: argparse.Namespace) -> dict[str, Scenario]:
    found: dict[str, Scenario] = {}
    if "steps" in kinds:
        found["steps"] = Scenario(partial(measure_steps, args=args), WHO, STEPS)
    if "resize" in kinds:
        few, many = args.nodes, args.nodes + 1
        rows = resize_rows("grow", f"from {few} to {many} ranks") + resize_rows("shrink", f"from {many} to {few} ranks")
        found["resize"] = Scenario(partial(measure_resize, args=args), WHO[:1], rows)
    if "killed" in kinds:
        rows = change_rows("killed", f"one of {2 * args.nodes} workers killed")
        found["killed"] = Scenario(partial(measure_killed, args=args), WHO[:1], rows)
    if "replicas" in kinds:
        whats = {
            "killed": f"one worker of {args.nodes} replicas of {REPLICA} killed",
            "joins": f"a replica joins {args.nodes}",
            "leaves": f"one of {args.nodes + 1} replicas leaves",
        }
        rows = sum((change_rows(f"replica-{kind}", what) for kind, what in whats.items()), ())
        found["replicas"] = Scenario(partial(measure_replicas, args=args), WHO[:1], rows)
    return found


def main() -> int:
    options = parser("Measure steps, snapshots and changes of the world of sharded models.", runs=3, timeout=300)
    options.add_argument("--only", choices=KINDS, action="append", help="measure this one; may be repeated")
    options.add_argument(
        "--width", type=positive, default=1024, help=f"of {LAYERS} layers; 1024: 6.3 M parameters [1024]"
    )
    options.add_argument("--nodes", type=positive, default=2, help="before one joins and leaves again [2]")
    options.add_argument("--split", action="store_true", help="with snapshots that are split among the nodes")
    options.add_argument("--start", type=float, default=0.0, metavar="S", help="seconds of the script's own start [0]")
    options.add_argument("--steps", type=positive, default=120, help="of a run beside plain FSDP2 [120]")
    options.add_argument("--sleep", type=float, default=0.0, help="seconds to sleep after a step of a small model [0]")
    args = options.parse_args()
    if not args.show and not own_network():
        say("no network namespace may be made: what other programs send to this host is counted, too")
    args.cold = True  # the first steps are left out instead
    return run(chosen(args.only or [*KINDS], args), args, WHO, SECTION)


if __name__ == "__main__":
    sys.exit(main())
