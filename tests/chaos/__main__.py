"""Runs plans from a seed on, some of them side by side, and shows what came of each; fails if one did.

What a failed plan left is kept, and its directory named: outputs, events, logs and the plan itself. Each outcome is
appended to a file, from which ``--report`` makes the figures of a page.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import faulty_storage
import memory_group
import netns
from harness import forks

from chaos.plan import Plan, draw, draw_pairs
from chaos.report import report
from chaos.scene import run, undisturbed


def lacking(plan: Plan) -> str:
    """Return what this machine lacks for a plan, or nothing."""
    needed = [(plan.hosts or plan.disk, netns), (plan.faulty, faulty_storage), (plan.limited, memory_group)]
    return next((reason for needs, module in needed if needs and (reason := module.missing())), "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first plan's")
    parser.add_argument("--plans", type=int, default=10, help="how many plans")
    parser.add_argument("--jobs", type=int, default=4, help="how many plans side by side; most of a plan is waiting")
    parser.add_argument("--faults", type=int, default=6, help="at most so many faults in a plan")
    parser.add_argument("--pairs", action="store_true", help="plans with pairs of faults and other trainings")
    parser.add_argument("--forms", nargs="+", help="of the plans, only those with these forms of training")
    parser.add_argument("--directory", type=Path, help="keep what all plans leave here")
    parser.add_argument(
        "--record", type=Path, help="append the outcomes to this file; build/chaos.jsonl, or build/pairs.jsonl"
    )
    parser.add_argument("--report", type=Path, help="run nothing: write the figures of --record into this page")
    args = parser.parse_args()
    args.record = args.record or Path(f"build/{'pairs' if args.pairs else 'chaos'}.jsonl")
    if args.report is not None:
        report(args.record, args.report, args.pairs)
        return 0
    args.record.parent.mkdir(parents=True, exist_ok=True)
    base = args.directory or Path(tempfile.mkdtemp(prefix="elastic-launch-chaos-"))
    base.mkdir(parents=True, exist_ok=True)
    failed: list[int] = []
    seeds = range(args.seed, args.seed + args.plans)
    plans = {seed: draw_pairs(seed) if args.pairs else draw(seed, args.faults) for seed in seeds}
    plans = {seed: plan for seed, plan in plans.items() if args.forms is None or plan.form in args.forms}
    expected, began = undisturbed(base, plans.values()), time.monotonic()
    left_out = {seed: reason for seed, plan in plans.items() if (reason := lacking(plan))}
    for seed, reason in left_out.items():
        print(f"seed {seed}: left out: {reason}", flush=True)
    forks()  # now, so that not two threads start one
    # Threads: the ports, networks and control groups of all plans then have numbers from the same counters.
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = [
            pool.submit(run, plan, base / f"seed-{seed}", expected[plan.form])
            for seed, plan in plans.items()
            if seed not in left_out
        ]
        for each in as_completed(runs):
            outcome = each.result()
            seed = outcome.plan.seed
            print(outcome.line(), flush=True)
            with args.record.open("a") as record:
                load = os.getloadavg()[0]
                line = {**outcome.record(), "date": time.strftime("%Y-%m-%d"), "load": load, "jobs": args.jobs}
                record.write(json.dumps(line) + "\n")
            if outcome.problems:
                failed.append(seed)
            elif args.directory is None:
                shutil.rmtree(base / f"seed-{seed}")
    took = time.monotonic() - began
    which = f": {sorted(failed)}, see {base}" if failed else ""
    print(f"{len(plans)} plans in {took / 60:.1f} minutes, {len(left_out)} left out, {len(failed)} failed{which}")
    if not failed and args.directory is None:
        shutil.rmtree(base)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
