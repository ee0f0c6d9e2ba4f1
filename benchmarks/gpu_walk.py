"""Leads a training through faults and changes, and compares its weights with those of the undisturbed training.

A worker is killed, another one is frozen, a node is lost, one joins, and it leaves: all within one training of two or
three nodes with a worker each. Prints a line of JSON for each change, with the figures of live.py, and one for the
weights. In default mode sums depend on the number of ranks, so there are two micro-batches: two numbers have one sum.

    python benchmarks/gpu_walk.py --world 2 --start 10 --exact --live confirmed
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from jobs import Job, Missing, Others, Stop, become_subreaper, descendants
from launchers import Node, Nodes
from live import changed, trained

MICRO = 8
"""Half of the workload's global batch."""

SLEEP = 0.05
"""Seconds after each step until the last change is over: with them the steps last longer than all changes."""


class Walk:
    """A training of some nodes."""

    def __init__(self, job: Job, world: int, steps: int, options: list[str]) -> None:
        self._job, self._world, self._steps = job, world, steps
        self._options = [*options, "--sleep", str(SLEEP), "--result", str(job.directory / "result.json")]
        self._nodes = Nodes(job, "ours", f"1:{world}")
        names = ["host", *(f"guest-{number}" for number in range(1, world))]
        self._agents = {name: self._start(name) for name in names}

    def changes(self) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
        """Each change by its name, with the function that makes it and returns its figures."""
        last, world = f"guest-{self._world - 1}", self._world
        yield "killed", partial(self._worker, last, signal.SIGKILL)
        yield "frozen", partial(self._worker, last, signal.SIGSTOP)
        yield "lost", lambda: self._change(lambda: self._agents[last].signal(signal.SIGKILL), world - 1, self._of(last))
        yield "joins", lambda: self._change(self._join, world, set())
        yield "leaves", lambda: self._change(self._leave, world - 1, self._of("newcomer"))

    def finish(self) -> str:
        """Let the training end; return the hash of its weights."""
        (self._job.directory / "hurry").touch()
        self._job.until("the last step", lambda record: record["step"] == self._steps)
        self._job.sleep(time.monotonic() + 60)
        return weights(self._job.directory / "result.json")

    def _start(self, name: str) -> Node:
        return self._nodes.start(name, 1, *self._options)

    def _join(self) -> None:
        self._agents["newcomer"] = self._start("newcomer")

    def _leave(self) -> None:
        os.kill(self._agents["newcomer"].pid, signal.SIGTERM)

    def _workers(self) -> set[int]:
        """The processes of the newest round."""
        steps = [record for record in self._job.steps.read() if record["step"]]
        number = max(record["round"] for record in steps)
        return {record["pid"] for record in steps if record["round"] == number}

    def _of(self, name: str) -> set[int]:
        return self._workers() & set(descendants(self._agents[name].pid))

    def _worker(self, name: str, number: signal.Signals) -> dict[str, float]:
        (victim,) = self._of(name)
        return self._change(lambda: os.kill(victim, number), self._world, {victim})

    def _change(self, change: Callable[[], object], world: int, gone: set[int]) -> dict[str, float]:
        earlier = {record["pid"] for record in self._job.steps.read()} - self._workers()
        return changed(self._job, change, world, gone | earlier)


def weights(result: Path) -> str:
    return str(json.loads(result.read_text())["hash"]) if result.exists() else "none"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2, help="nodes, with a worker each [2]")
    parser.add_argument("--start", type=float, default=0.0, help="seconds of the script's own start [0]")
    parser.add_argument("--steps", type=int, default=3000, help="of the training [3000]")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--live", default="default", help="as elastic_workload.py has it")
    args = parser.parse_args()
    options = ["--steps", str(args.steps), "--live", args.live]
    options += ["--exact"] if args.exact else ["--micro", str(MICRO)]
    stop = Stop()
    stop.catch()
    become_subreaper()
    try:
        limit = 3 * args.start + (60 if "WORKLOAD_GPU" in os.environ else 240)
        with Job(stop, limit, Others(0)) as job:
            alone = job.directory / "alone.json"
            where = ["--file", str(job.directory / "alone.jsonl"), "--result", str(alone)]
            job.start([sys.executable, str(Path(__file__).with_name("elastic_workload.py")), *options, *where])
            walk = Walk(job, args.world, args.steps, [*options, "--prepare", str(args.start)])
            trained(job, args.world)
            for name, change in walk.changes():
                job.limit(limit)
                print(json.dumps({"change": name, **change()}), flush=True)
            job.limit(limit)
            print(json.dumps({"hash": walk.finish(), "undisturbed": weights(alone)}), flush=True)
    except Missing as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
