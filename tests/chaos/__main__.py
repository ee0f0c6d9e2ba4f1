"""Runs plans from a seed on, one after the other, and shows what came of each; fails if one did.

What a failed plan left is kept, and its directory named: outputs, events, logs and the plan itself.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from changes import undisturbed_hash
from netns import missing

from chaos.plan import STEPS, draw
from chaos.scene import run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first plan's")
    parser.add_argument("--plans", type=int, default=10, help="how many plans")
    parser.add_argument("--faults", type=int, default=6, help="at most so many faults in a plan")
    parser.add_argument("--directory", type=Path, help="keep what all plans leave here")
    args = parser.parse_args()
    base = args.directory or Path(tempfile.mkdtemp(prefix="elastic-launch-chaos-"))
    (base / "undisturbed").mkdir(parents=True)
    expected, began = undisturbed_hash(base / "undisturbed", STEPS), time.monotonic()
    failed: list[int] = []
    left_out: list[int] = []
    for seed in range(args.seed, args.seed + args.plans):
        directory, plan = base / f"seed-{seed}", draw(seed, args.faults)
        if plan.needs_root and (lacking := missing()):
            print(f"seed {seed}: left out: {lacking}", flush=True)
            left_out.append(seed)
            continue
        outcome = run(plan, directory, expected)
        print(outcome.line(), flush=True)
        if outcome.problems:
            failed.append(seed)
        elif args.directory is None:
            shutil.rmtree(directory)
    took = time.monotonic() - began
    which = f": {failed}, see {base}" if failed else ""
    print(f"{args.plans} plans in {took / 60:.1f} minutes, {len(left_out)} left out, {len(failed)} failed{which}")
    if not failed and args.directory is None:
        shutil.rmtree(base)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
