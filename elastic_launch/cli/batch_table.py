"""``elasticctl plan``: how a global batch is divided at each world size, before a run begins."""

from __future__ import annotations

import re

from elastic_launch.batch import GlobalBatch
from elastic_launch.config.launch_config import parse_nnodes
from elastic_launch.errors import ExitCode, UsageError

MOST = 4096
"""World sizes that are shown at most."""


def show_plan(size: str, micro: str, world: str) -> int:
    """Print one row for each world size; return the exit code.

    Args:
        size, micro: samples of the global batch, and of one forward and backward pass.
        world: a number of workers, or ``MIN:MAX``.
    """
    samples, each = _number("--global-batch", size), _number("--micro-batch", micro)
    GlobalBatch(samples, each)  # raises if they do not fit
    low, high = parse_nnodes(world, "--world", "workers")
    if not 1 <= low <= high < low + MOST:
        raise UsageError(
            f"--world {low}:{high} is not a range of workers.",
            f"Write MIN:MAX with 1 <= MIN <= MAX, at most {MOST} sizes.",
        )
    total = -(-samples // each)
    passes = "pass" if total == 1 else "passes"
    print(f"global batch {samples}, micro-batch {each}: {total} forward and backward {passes} in a step")
    print()
    print(f"{'WORKERS':>7}  {'PASSES OF A WORKER':>18}  {'IDLE':>5}  {'EFFICIENCY':>10}")
    for workers in range(low, high + 1):
        longest, shortest = -(-total // workers), total // workers
        passes = str(longest) if longest == shortest else f"{shortest} or {longest}"
        idle = max(0, workers - total)
        print(f"{workers:>7}  {passes:>18}  {idle:>5}  {total / (workers * longest):>9.1%}")
    return ExitCode.DONE


def _number(flag: str, text: str) -> int:
    if not re.fullmatch(r"0*[1-9][0-9]{0,11}", text):
        raise UsageError(f"{flag} {text!r} is not a number of samples.", "Give a whole number of at least 1.")
    return int(text)
