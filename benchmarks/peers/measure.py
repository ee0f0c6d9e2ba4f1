"""Measures the same faults and changes with several launchers, in turn: README.md is the plan. Asserts nothing.

python benchmarks/peers/measure.py --environments DIR --runs 3 --json benchmarks/peers/results/DATE.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from contenders import CONTENDERS, Run, versions
from figures import figures
from hangs import ask
from jobs import Figures, Job, Missing, Others, Record, Stop, Stopped, become_subreaper, descendants, signal_all
from results import table
from tables import positive, processor, say

ENOUGH = 35
"""Steps before the event: snapshots come every ten, so the last one is five steps old."""


def kill_worker(job: Job, _guest: int) -> None:
    os.kill(job.step(1, 2)["pid"], signal.SIGKILL)


def hang_worker(job: Job, _guest: int) -> None:
    ask(job.directory, job.step(1, 2)["pid"])


def lose_node(_job: Job, guest: int) -> None:
    signal_all([guest, *descendants(guest)], signal.SIGKILL)


def terminate_node(_job: Job, guest: int) -> None:
    os.kill(guest, signal.SIGTERM)


EVENTS: dict[str, tuple[Callable[[Job, int], None] | None, int, int, int]] = {
    # What happens; nodes and workers of each before it; the world afterwards. None: another node joins.
    "worker-killed": (kill_worker, 1, 2, 2),
    "worker-hung": (hang_worker, 1, 2, 2),
    "node-lost": (lose_node, 2, 1, 1),
    "node-sigterm": (terminate_node, 2, 1, 1),
    "node-joins": (None, 1, 1, 2),
}


def measure(event: str, who: str, new_job: Callable[[], Job], environments: Path, limit: float) -> Figures:
    """Cause an event once.

    Args:
        limit: seconds within which the world has to be whole again.

    Raises:
        Missing: the training did not begin.
    """
    happens, nodes, nproc, world = EVENTS[event]
    with new_job() as job:
        run = Run(CONTENDERS[who], job, environments, 1 if nproc == 2 else 2)
        run.start("host", nproc)
        guest = run.start("guest", nproc) if nodes == 2 else 0
        rank, size = nodes * nproc - 1, nodes * nproc
        job.step(rank, size, job.step(rank, size)["step"] + ENOUGH)
        since = time.monotonic()
        if happens is None:
            run.start("guest", nproc)
        else:
            happens(job, guest)
        job.limit(limit)
        found: Figures = {}

        def whole(_record: Record) -> bool:
            found.update(figures(job.steps.read(), since, world))
            return "whole" in found

        try:
            while not whole({}):
                job.until("a further step", later_than(job.steps.read()[-1]["clock"]))
        except Missing as error:
            say(f"{event}, {who}: {error}")
        return found


def later_than(clock: float) -> Callable[[Record], bool]:
    return lambda record: record["clock"] > clock


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--environments", type=Path, default=Path(), help="folder with the launchers' environments")
    options.add_argument("--runs", type=positive, default=3, help="of each event and launcher [3]")
    options.add_argument("--only", choices=EVENTS, action="append", help="measure this one; may be repeated")
    options.add_argument("--who", choices=CONTENDERS, action="append", help="measure this one; may be repeated")
    options.add_argument("--timeout", type=positive, default=90, help="seconds for a training to begin [90]")
    options.add_argument("--limit", type=positive, default=90, help="seconds for the world to be whole again [90]")
    options.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, after each measurement")
    args = options.parse_args()
    found: Record = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "processor": processor(),
        "limit": args.limit,
        "load_before": round(os.getloadavg()[0], 2),
        "versions": {},
        "measured": [],
    }
    for who in args.who or CONTENDERS:
        try:
            found["versions"][who] = versions(CONTENDERS[who], args.environments)
        except (OSError, subprocess.CalledProcessError):
            say(f"{who}: not installed")
    stop, others = Stop(), Others(0)
    stop.catch()
    become_subreaper()
    new_job = lambda: Job(stop, args.timeout, others)  # noqa: E731
    try:
        for _number in range(args.runs):
            for event in args.only or EVENTS:
                one_node = EVENTS[event][2] == 2
                for who in [x for x in found["versions"] if one_node or CONTENDERS[x].elastic]:
                    load, cost = os.getloadavg()[0], None
                    try:
                        cost = measure(event, who, new_job, args.environments, args.limit)
                    except Missing as error:
                        say(f"{event}, {who}: the training did not begin: {error}")
                    one = {"event": event, "who": who, "load": round(load, 1), "figures": cost}
                    say(json.dumps(one))
                    found["measured"].append(one)
                    found["others_cpu"] = round(others.share, 3)
                    if args.json:
                        args.json.write_text(json.dumps(found, indent=1) + "\n")
    except Stopped as stopped:
        say(str(stopped))
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
