"""Measures what in-memory snapshots and their durable copies cost the training, on a model of 25 million parameters.

Snapshots: the steps during which one is taken, compared with the other steps of the same run, and with a run without
snapshots, in turn. Copies: the steps during a copy, to a storage that takes ten seconds for each, compared with the
rest.

    python benchmarks/snapshots.py --runs 5 --json snapshots.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from itertools import groupby, pairwise

import slow_storage
from jobs import RUN_ID, Figures, Job, Missing, Record, program
from tables import Goal, NewJob, Row, Scenario, parser, positive, run

SECTION = "snapshots"
WARM = 5
"""Steps at the beginning that are left out: they include one-time allocation and connection setup."""
BEFORE, AFTER = 0.5, 1.0
"""Seconds of a copy before it waits for its storage (its process starts), and after that (it writes)."""


def train(job: Job, args: argparse.Namespace, steps: int, *options: str, environ: dict[str, str] | None = None) -> None:
    """Train to the end."""
    own = ["--standalone", "--rdzv-id", RUN_ID, "--node-id", "host", "--log-dir", str(job.directory / "logs")]
    model = ["--width", str(args.width), "--steps", str(steps)]
    script = job.script("snapshot_workload.py", *model, *options, sleep=args.sleep)
    job.start([program("elastic-launch"), "--nproc", str(args.nproc), *own, *script], environ)
    job.step(0, args.nproc, steps)


def intervals(job: Job) -> list[Record]:
    """Rank 0's steps, each with the time at which the previous one ended."""
    steps = [record for record in job.steps.read() if record["rank"] == 0][WARM - 1 :]
    return [{**step, "since": before["clock"]} for before, step in pairwise(steps)]


def mean(steps: list[Record]) -> float:
    return statistics.fmean(step["clock"] - step["since"] for step in steps)


def takes_snapshot(step: Record) -> bool:
    """Whether a snapshot was begun at the boundary before: it is finished within the step."""
    return bool(step["snapshot"] == step["step"] - 1)


def measure_memory(new_job: NewJob, _who: str, args: argparse.Namespace) -> Figures:
    """A run without snapshots, then one with snapshots."""
    with new_job() as job:
        train(job, args, args.steps, "--no-snapshots")
        without = mean(intervals(job))
    with new_job() as job:
        train(job, args, args.steps)
        steps = intervals(job)
    # The machine's speed varies, so each snapshot is compared with adjacent steps.
    more = [mean(group) - mean(around(steps, group, takes_snapshot)) for group in groups(steps, takes_snapshot)]
    if not more:
        raise Missing(f"found no snapshot in {len(steps)} steps: --steps should be higher")
    return {
        "off": without,
        "on": mean(steps),
        "taken": float(len(more)),
        "more": statistics.median(more),
        "share": 100 * statistics.fmean(more) * len(more) / (mean(steps) * len(steps)),
    }


def measure_copies(new_job: NewJob, _who: str, args: argparse.Namespace) -> Figures:
    """A run that saves to slow storage."""
    with new_job() as job:
        log = job.directory / "copies.jsonl"
        environ = slow_storage.install(job.directory / "driver", args.delay, log)
        url = f"slow://{job.directory}/checkpoints"
        train(job, args, args.copy_steps, "--url", url, "--every", str(args.every), environ=environ)
        copies = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        steps = [step for step in intervals(job) if not takes_snapshot(step)]
    busy = partial(under_way, copies=copies)
    pairs = [(group, beside) for group in groups(steps, busy) if (beside := around(steps, group, busy))]
    if not pairs:
        raise Missing(f"found no steps beside those with a copy under way, of {len(steps)}: --every should be higher")
    within = [step for group, _beside in pairs for step in group]
    return {
        "copies": float(len(pairs)),
        "beside": mean([step for _group, beside in pairs for step in beside]),
        "within": mean(within),
        "longest": max(step["clock"] - step["since"] for step in within),
        "share": 100 * (statistics.median(mean(group) / mean(beside) for group, beside in pairs) - 1),
    }


def groups(steps: list[Record], wanted: Callable[[Record], bool]) -> list[list[Record]]:
    """Runs of consecutive steps for which something holds, with other steps on both sides."""
    found = [(holds, list(group)) for holds, group in groupby(steps, wanted)]
    return [group for holds, group in found[1:-1] if holds]


def around(steps: list[Record], group: list[Record], wanted: Callable[[Record], bool]) -> list[Record]:
    """As many steps before a group as it has, and as many after it, unless they are of the same kind."""
    first, last = steps.index(group[0]), steps.index(group[-1])
    near = steps[max(0, first - len(group)) : first] + steps[last + 1 : last + 1 + len(group)]
    return [step for step in near if not wanted(step)]


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
    options.add_argument("--sleep", type=float, default=0.0, help="seconds to sleep after a step of a small model [0]")
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
