"""Runs ``scripts/changes.py``, or one like it, through changes of the world, and checks what must hold at the end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import SCRIPTS, Agent, Job, read_lines, run_script, wait_for

from elastic_launch.faults import FaultPlan

SCRIPT = str(SCRIPTS / "changes.py")
STEPS = 200

_hashes: dict[tuple[int, str], str] = {}


def undisturbed_hash(directory: Path, steps: int = STEPS, *options: str, script: str = SCRIPT, ranks: int = 1) -> str:
    """The hash of the weights that so many ranks end with; without options it is computed once."""
    known = (steps, script)
    if not options and known in _hashes:
        return _hashes[known]
    (directory / "hurry").touch()
    launcher = [] if ranks == 1 else ["-m", "elastic_launch", "--standalone", "--nproc", str(ranks)]
    run_script(*launcher, script, str(directory), "--steps", str(steps), *options)
    found = str(json.loads((directory / "result.json").read_text())["hash"])
    if not options:
        _hashes[known] = found
    return found


Samples = dict[tuple[int, int], list[int]]
"""The samples of each micro-batch, by step and place."""


def samples(directory: Path) -> Samples:
    """The samples that all ranks have loaded; a micro-batch that was loaded again must have had the same."""
    found: Samples = {}
    for line in read_lines(directory / "samples.jsonl"):
        micro = (line["step"], line["micro"])
        assert found.setdefault(micro, line["numbers"]) == line["numbers"], micro
    return found


class Changes:
    """One training, in several consecutive jobs if needed."""

    def __init__(
        self, job: Job, *options: str, step_time: float = 0.1, live: bool = False, script: str = SCRIPT
    ) -> None:
        self.job = job
        self.live = [] if live else ["--no-live"]
        self.checkpoints = job.directory / "checkpoints"
        step_timer = ["--steps", str(STEPS), "--step-time", str(step_time)]
        self.command = [script, str(job.work), *step_timer, *options]

    def node(
        self, name: str, *flags: str, rank: int | None = None, plan: FaultPlan | None = None, **options: Any
    ) -> Agent:
        """Start an agent of several, of which ``a`` hosts the run.

        Args:
            rank: the rank that the node requests; nodes that start together arrive in either order.
        """
        here = ["is_host=true" if name == "a" else "is_host=false"]
        if rank is not None:
            here += ["--node-rank", str(rank)]
        env = self._env(name, plan, options)
        return self.job.node(name, "--rdzv-conf", *here, *self.live, *flags, command=self.command, env=env, **options)

    def alone(self, *flags: str, name: str = "alone", plan: FaultPlan | None = None, **options: Any) -> Agent:
        """Start a single agent."""
        env = self._env(name, plan, options)
        return self.job.launch("--standalone", *self.live, *flags, name=name, command=self.command, env=env, **options)

    def _env(self, name: str, plan: FaultPlan | None, options: dict[str, Any]) -> dict[str, str]:
        return {"NODE": name, **(plan or FaultPlan()).environment(), **options.pop("env", {})}

    def hurry(self) -> None:
        self.job.tell("hurry")

    def trains(self, world: int, *, after: int = 0, steps: int = 1) -> int:
        """Wait until a round of a world size has done this many steps; return its number."""

        def probe() -> int:
            done = [x["round"] for x in self.steps() if x["world"] == world and x["round"] > after]
            return max((number for number in done if done.count(number) >= steps), default=0)

        try:
            return wait_for(f"{steps} steps in a world of {world} after round {after}", probe, 150)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.outputs()}") from None

    def steps(self, number: int | None = None) -> list[dict[str, Any]]:
        return self.job.noted("steps.jsonl", number=number)

    def finish(self, *agents: Agent, code: int = 0) -> dict[str, Any]:
        """Let the training end; return its result."""
        self.hurry()
        for agent in agents:
            assert agent.wait(100) == code, self.outputs()
        return dict(json.loads((self.job.work / "result.json").read_text()))

    def joined_left_and_lost(self) -> tuple[dict[str, Any], int]:
        """Let a node join and leave, and another one with two workers be lost: planned changes cost no step.

        Returns:
            The result, and the number of the round that was broken.
        """
        a = self.node("a")
        self.trains(1, steps=3)
        b = self.node("b")
        joined = self.trains(2, steps=3)
        b.signal(signal.SIGTERM)
        left = self.trains(1, after=joined, steps=3)
        assert b.wait() == 143
        done = [step["step"] for step in self.steps()]
        assert len(done) == len(set(done))
        c = self.node("c", nproc=2)
        broken = self.trains(3, after=left, steps=3)
        c.kill()
        self.trains(1, after=broken, steps=3)
        result = self.finish(a)
        assert self.kinds()[:2] == [("drained", 1, "membership"), ("drained", joined, "preemption")]
        assert self.kinds()[3] == ("broken", broken, "node loss")
        return result, broken

    def done_again(self) -> int:
        """How many times steps were repeated; fails unless the steps of each round are consecutive."""
        done = [x["step"] for x in self.steps()]
        assert set(done) == set(range(1, STEPS + 1))
        for key in {(x["node"], x["round"]) for x in self.steps()}:
            of_round = [x["step"] for x in self.steps() if (x["node"], x["round"]) == key]
            assert of_round == list(range(of_round[0], of_round[-1] + 1))
        return len(done) - STEPS

    def resumed(self, number: int, node: str | None = None) -> int:
        """Steps that were done when the training resumed in a round, with its first rank on a node."""
        (noted,) = self.job.noted("resumed.jsonl", node, number)
        return int(noted["step"])

    def last(self, number: int, nodes: str = "") -> int:
        """The last step of a round on the given nodes (names of one letter); on all nodes if none is given."""
        return max(int(x["step"]) for x in self.steps(number) if not nodes or x["node"] in [*nodes])

    def whole(self, number: int, node: str | None = None) -> int:
        """The step of the newest complete snapshot of a round on a node; 0 for none."""
        return max((int(x["step"]) for x in self.job.noted("snapshots.jsonl", node, number)), default=0)

    def assert_no_more_lost_than_an_interval(self, number: int, node: str | None = None) -> int:
        """The next round resumed no earlier than the last complete snapshot of this round; return the steps lost.

        Args:
            node: the only node whose snapshots survived.
        """
        resumed, last = self.resumed(number + 1), self.last(number)
        assert self.whole(number, node) <= resumed <= last, self.outputs()
        since = [x["interval"] for x in self.steps(number) if x["step"] > resumed]
        # A due snapshot is agreed on at the next boundary, and complete one step later.
        assert last - resumed <= max(since, default=0) + 2, self.job.noted("snapshots.jsonl")
        return last - resumed

    def kinds(self) -> list[tuple[str, int, str]]:
        """How rounds ended: (``drained`` or ``broken``, number, kind), in order."""
        ends = [e for e in self.job.events() if e["event"] in ("round_drained", "round_broken")]
        return [(e["event"].removeprefix("round_"), e["round"], e["kind"]) for e in ends]

    def durable(self) -> list[int]:
        """Steps of the complete checkpoints, in order."""
        found = self.checkpoints.glob("step-*/manifest.json")
        return sorted(int(path.parent.name.split(".")[0].removeprefix("step-")) for path in found)

    def ledger(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "elastic_launch.observe", str(self.job.logs), "--json"]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        return dict(json.loads(done.stdout))

    def outputs(self) -> str:
        return "\n".join(f"--- {agent.name}\n{agent.output}" for agent in self.job.agents)


def pids(job: Job, number: int) -> dict[int, int]:
    """The processes of a round so far, by rank."""
    starts = ("worker_started", "worker_kept", "worker_placed")
    return {e["rank"]: e["pid"] for e in job.events() if e["event"] in starts and e["round"] == number}


def ctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run elasticctl on a run that the flags name."""
    command = [sys.executable, "-m", "elastic_launch.cli.elasticctl", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)
