"""Measures what watching costs a training of about 20 steps a second: events, metrics and the page together.

Each measurement trains twice: without ``--http``, and with it and two readers, one of the page and one of the metrics,
which ask once a second. Events are written in both.

    python benchmarks/watching.py --runs 5 --json watching.json
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
import urllib.request
from collections.abc import Iterator
from functools import partial

from footprint import helpers_cpu
from jobs import RUN_ID, Figures, Job, Missing, free_port, program
from snapshots import intervals, mean
from tables import Goal, NewJob, Row, Scenario, parser, positive, run

SECTION = "watching"
PATHS = ("live", "metrics")
EVERY = 1.0


@contextlib.contextmanager
def read(port: int) -> Iterator[list[str]]:
    """Read the page's content and the metrics once a second; yields the names of what was read so far."""
    found: list[str] = []
    stop = threading.Event()

    def again(path: str) -> None:
        while not stop.wait(EVERY):
            with contextlib.suppress(OSError):  # the agent has not begun, or has ended
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10) as answer:
                    answer.read()
                found.append(path)

    threads = [threading.Thread(target=again, args=(path,)) for path in PATHS]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def train(job: Job, args: argparse.Namespace, *flags: str) -> Figures:
    """Train to the end; return the seconds of a step, and the CPU seconds of agent and helpers in 20 s."""
    own = ["--standalone", "--rdzv-id", RUN_ID, "--node-id", "host", "--log-dir", str(job.directory / "logs"), *flags]
    model = ["--width", "64", "--steps", str(args.steps)]
    script = job.script("snapshot_workload.py", *model, sleep=args.sleep)
    agent, _began = job.start([program("elastic-launch"), "--nproc", "2", *own, *script])
    settled = args.steps // 4  # by then the agent has prepared what later rounds need
    job.step(0, 2, settled)
    before = helpers_cpu(job, agent)
    job.step(0, 2, args.steps - 5)
    after = helpers_cpu(job, agent)
    spent = sum(after[pid] - before.get(pid, 0.0) for pid in after)
    steps = [step for step in intervals(job) if step["step"] > settled]
    return {"step": mean(steps), "cpu": 20 * spent / (steps[-1]["clock"] - steps[0]["since"])}


def measure(new_job: NewJob, _who: str, args: argparse.Namespace) -> Figures:
    """A run that is not watched, then one that is."""
    with new_job() as job:
        off = train(job, args)
    port = free_port()
    with new_job() as job, read(port) as found:
        on = train(job, args, "--http", str(port))
        if not set(PATHS) <= set(found):
            raise Missing(f"only {sorted(set(found))} was read: --steps should be higher")
    share = 100 * (on["step"] / off["step"] - 1)
    cpu = {"cpu-off": off["cpu"], "cpu-on": on["cpu"], "cpu-added": on["cpu"] - off["cpu"]}
    return {"off": off["step"], "on": on["step"], "share": share, **cpu}


ROWS = (
    Row("off", "step, not watched", digits=4),
    Row("on", "step, watched", digits=4),
    Row("share", "watching slows the training by", Goal(most=1), "%"),
    Row("cpu-off", "CPU of the agent and its helpers in 20 s, not watched"),
    Row("cpu-on", "the same, watched"),
    Row("cpu-added", "CPU that watching adds in 20 s", Goal(most=0.1)),
)


def main() -> int:
    options = parser("Measure what watching costs a training.", runs=5, timeout=600)
    options.add_argument("--steps", type=positive, default=600, help="of a run [600]")
    options.add_argument(
        "--sleep", type=float, default=0.045, help="seconds to sleep after a step of a small model [0.045]"
    )
    args = options.parse_args()
    args.cold = True  # the first steps are left out instead
    return run({"watched": Scenario(partial(measure, args=args), ("ours",), ROWS)}, args, ("ours",), SECTION)


if __name__ == "__main__":
    sys.exit(main())
