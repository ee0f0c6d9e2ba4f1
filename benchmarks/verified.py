"""Verified steps: how soon a rank that computes wrong is found, and what they cost, by the share of the steps.

For the first, a rank of three flips a bit of each gradient from a step on; each run has another seed, and so verifies
other steps. For the second, worlds that verify other shares do blocks of steps in turn, as in training.py. Prints two
Markdown tables, the costs first; asserts no figure.

    python benchmarks/verified.py --runs 9 --blocks 11
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import training
from jobs import program

from elastic_launch.faults import FaultPlan

WRONG_AFTER = 20
RANKS = 3
TIMEOUT = 600.0


def worker(args: argparse.Namespace) -> None:
    """Train until a verified step ends the run."""
    import torch
    from torch.utils.data import TensorDataset

    import elastic_launch as el

    with el.session() as run:
        network = training.model(64)
        inputs = torch.randn(training.SAMPLES, 64, generator=torch.Generator().manual_seed(0))
        loader = el.ElasticLoader(
            TensorDataset(inputs, inputs.flip(1)), el.GlobalBatch(RANKS * 4 * 8, 8), seed=args.seed
        )
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
        for step in run.steps(loader, network, optimizer, until="100000ba", exact=True, verify=args.verify):
            for features, targets in step:
                step.backward(torch.nn.functional.mse_loss(step.model(features), targets))
            step.update()


def steps_until_found(share: str, seed: int) -> int:
    """Return the number of steps from the first wrong gradient on, with the one that finds it."""
    plan = FaultPlan.fail_at(1, WRONG_AFTER, do="flip", of="gradient", every=True)
    with tempfile.TemporaryDirectory(prefix="verified-") as directory:
        launcher = [program("elastic-launch"), "--standalone", "--nproc", str(RANKS), "--max-restarts", "0"]
        options = ["--log-dir", directory, __file__, "--verify", share, "--seed", str(seed)]
        env = {**os.environ, **plan.environment(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run([*launcher, *options], env=env, capture_output=True, text=True, timeout=TIMEOUT)
        lines = [line for path in Path(directory).glob("latest/events-*.jsonl") for line in path.open()]
        found = [event for event in map(json.loads, lines) if event["event"] == "corruption_found"]
    if [event["ranks"] for event in found] != [[1]]:
        raise SystemExit(f"{done.stderr[-4000:]}\nfound {found} at {share}")
    return int(found[0]["step"]) - WRONG_AFTER


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="with a rank that computes wrong, for each share [5]")
    parser.add_argument("--blocks", type=int, default=7, help="measurements of the costs of each share [7]")
    parser.add_argument("--steps", type=int, default=400, help="in a block [400]")
    parser.add_argument("--width", type=int, default=256, help="of six square layers [256]")
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches of each of two ranks [4]")
    parser.add_argument("--verify", default="", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.verify:
        worker(args)
        return
    import torch

    print(
        f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f} before; medians "
        f"(least..greatest): of {args.runs} runs, and of {args.blocks} blocks of {args.steps} steps of two ranks with "
        f"{args.accumulate} micro-batches of 8 each, {6 * (args.width**2 + args.width):,} parameters\n"
    )
    costs = argparse.Namespace(blocks=args.blocks, micro_batch=8, modes=["exact", *training.VERIFIED])
    blocks = training.measure(2, args.width, args.steps, args.accumulate, costs)
    usual = {unit: statistics.median(block[unit] for block in blocks["exact"]) for unit in training.UNITS}
    print("| share verified | ms per step | / 0 % | CPU ms per step | / 0 % |\n|---|---|---|---|---|")
    for mode in costs.modes:
        seconds, cpu = ([block[unit] for block in blocks[mode]] for unit in ("seconds", "cpu"))
        print(
            f"| {'0 %' if mode == 'exact' else mode.replace('%', ' %')} "
            f"| {training.spread(seconds, 1e-3)} | {statistics.median(seconds) / usual['seconds']:.3f} "
            f"| {training.spread(cpu, 1e-3)} | {statistics.median(cpu) / usual['cpu']:.3f} |",
            flush=True,
        )
    print("\n| share verified | steps until found |\n|---|---|")
    for share in reversed(training.VERIFIED):  # the runs of small shares take longest
        found = [steps_until_found(share, seed) for seed in range(args.runs)]
        print(f"| {share.replace('%', ' %')} | {statistics.median(found):g} ({min(found)}..{max(found)}) |", flush=True)
    print(f"\nload {os.getloadavg()[0]:.2f} after")


if __name__ == "__main__":
    sys.exit(main())
