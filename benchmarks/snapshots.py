"""What snapshots in memory and durable copies of them cost the training, on a model of 25 million parameters.

Snapshots: the steps during which one is taken, beside the others of the same run, and beside a run without any, in
turn. Copies: the steps while one is under way, to a storage that takes ten seconds for each, beside the others.

    python benchmarks/snapshots.py --runs 5 --json snapshots.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from functools import partial
from itertools import pairwise

import slow_storage
from jobs import RUN_ID, Figures, Job, Missing, Record, program
from tables import Goal, NewJob, Row, Scenario, parser, positive, run

SECTION = "snapshots"
WARM = 5
"""Steps at the beginning that are left out: what is allocated and connected once."""
BEFORE, AFTER = 0.5, 1.0
"""Seconds that a copy is under way before it waits for its storage (its process starts), and after (it writes)."""


def train(job: Job, args: argparse.Namespace, steps: int, *options: str, environ: dict[str, str] | None = None) -> None:
    """Train to the end."""
    own = ["--standalone", "--rdzv-id", RUN_ID, "--node-id", "host", "--log-dir", str(job.directory / "logs")]
    model = ["--width", str(args.width), "--steps", str(steps)]
    script = job.script("snapshot_workload.py", *model, *options, sleep=0.0)
    job.start([program("elastic-launch"), "--nproc", str(args.nproc), *own, *script], environ)
    job.step(0, args.nproc, steps)


def intervals(job: Job) -> list[Record]:
    """Rank 0's steps, each with the moment at which the one before was done."""
    steps = [record for record in job.steps.read() if record["rank"] == 0][WARM - 1 :]
    return [{**step, "since": before["clock"]} for before, step in pairwise(steps)]


def seconds(steps: list[Record]) -> list[float]:
    return [step["clock"] - step["since"] for step in steps]


def takes_snapshot(step: Record) -> bool:
    """Whether one was begun at the boundary before: it is finished within the step."""
    return bool(step["snapshot"] == step["step"] - 1)


def measure_memory(new_job: NewJob, _who: str, args: argparse.Namespace) -> Figures:
    """A run without snapshots, then one with."""
    with new_job() as job:
        train(job, args, args.steps, "--no-snapshots")
        without = seconds(intervals(job))
    with new_job() as job:
        train(job, args, args.steps)
        steps = intervals(job)
    taken = seconds([step for step in steps if takes_snapshot(step)])
    other = seconds([step for step in steps if not takes_snapshot(step)])
    if not taken or not other:
        raise Missing(f"took {len(taken)} snapshots in {len(steps)} steps: --steps should be higher")
    more = statistics.fmean(taken) - statistics.fmean(other)
    return {
        "off": statistics.fmean(without),
        "on": statistics.fmean(taken + other),
        "taken": float(len(taken)),
        "more": more,
        "share": 100 * more * len(taken) / (sum(taken) + sum(other)),
    }


def measure_copies(new_job: NewJob, _who: str, args: argparse.Namespace) -> Figures:
    """A run that saves to storage that is slow."""
    with new_job() as job:
        log = job.directory / "copies.jsonl"
        environ = slow_storage.install(job.directory / "driver", args.delay, log)
        url = f"slow://{job.directory}/checkpoints"
        train(job, args, args.copy_steps, "--url", url, "--every", str(args.every), environ=environ)
        copies = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        steps = [step for step in intervals(job) if not takes_snapshot(step)]
    within = seconds([step for step in steps if under_way(step, copies)])
    beside = seconds([step for step in steps if not under_way(step, copies)])
    if not within or not beside:
        raise Missing(f"found {len(within)} steps with a copy under way and {len(beside)} without: change --every")
    usual = statistics.fmean(beside)
    return {
        "copies": float(len(copies)),
        "beside": usual,
        "within": statistics.fmean(within),
        "longest": max(within),
        "share": 100 * (statistics.fmean(within) / usual - 1),
    }


def under_way(step: Record, copies: list[Record]) -> bool:
    return any(step["since"] < copy["ended"] + AFTER and step["clock"] > copy["began"] - BEFORE for copy in copies)


MEMORY = (
    Row("off", "step, a run without snapshots", digits=3),
    Row("on", "step, a run with snapshots", digits=3),
    Row("taken", "snapshots taken", None, "", 0),
    Row("more", "what one adds to its step", digits=3),
    Row("share", "snapshots' share of the training's time", Goal(most=1), "%"),
)
COPIES = (
    Row("copies", "copies that were written", None, "", 0),
    Row("beside", "step, no copy under way", digits=3),
    Row("within", "step, a copy under way", digits=3),
    Row("longest", "longest step, a copy under way", digits=3),
    Row("share", "a copy under way slows the training by", Goal(most=2), "%"),
)


def main() -> int:
    options = parser("Measure what snapshots and their durable copies cost the training.", runs=5, timeout=600)
    options.add_argument("--only", choices=("memory", "copies"), help="measure this one")
    options.add_argument("--nproc", type=positive, default=2, help="workers [2]")
    options.add_argument("--width", type=positive, default=2048, help="of six layers; 2048: 25 M parameters [2048]")
    options.add_argument("--steps", type=positive, default=120, help="of a run for snapshots [120]")
    options.add_argument("--copy-steps", type=positive, default=200, help="of a run for copies [200]")
    options.add_argument("--every", type=positive, default=50, help="steps between copies [50]")
    options.add_argument("--delay", type=float, default=10.0, help="seconds that storage takes for a copy [10]")
    args = options.parse_args()
    scenarios = {
        "memory": Scenario(partial(measure_memory, args=args), ("ours",), MEMORY),
        "copies": Scenario(partial(measure_copies, args=args), ("ours",), COPIES),
    }
    chosen = {name: scenario for name, scenario in scenarios.items() if args.only in (None, name)}
    args.cold = True  # the first steps are left out instead
    return run(chosen, args, ("ours",), SECTION)


if __name__ == "__main__":
    sys.exit(main())
