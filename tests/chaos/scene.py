"""One run under a plan: agents and etcd servers, what happens to them, and what must hold at the end."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from changes import SCRIPT
from etcd_servers import Member, cluster, endpoints
from harness import SLOWNESS, Agent, Job, alive, read_lines, tree
from netns import Host, net

from chaos.plan import STEPS, Fault, Plan
from chaos.strikes import STRIKES

__all__ = ["Outcome", "Scene", "run"]

STEP_TIME = 0.1
"""Seconds of a step, until the training is told to hurry."""

STANDSTILL = 60.0
"""Seconds without a step after which a run counts as stuck; a round that parks waits for as long as a node is away."""

SETTLED = 4.0
"""Seconds of training together after which a run has settled: longer than until a node counts as dead."""

LOOK = 0.2
"""Seconds between two looks at which processes there are."""

LAND = 20.0
"""Seconds within which a fault finds what it is to hit: a worker that is being started, for instance."""

FLAGS = ["--max-restarts", "100", "--dead-after", "2.5", "--shutdown-timeout", "5", "--min-wait", "120"]

CONF = "beat=0.5,join_settle=1,start_wait=1"


@dataclass(slots=True)
class Outcome:
    """What came of a plan; ``problems`` is empty if all held.

    Attributes:
        landed: faults that happened, of those planned.
        rounds, restarts: of the run, as far as its nodes know.
        kept: places that workers took without a new process.
        again: steps that were done more than once.
        seconds: from the first agent's start to the last one's end.
    """

    plan: Plan
    landed: int = 0
    rounds: int = 0
    restarts: int = 0
    kept: int = 0
    again: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    def line(self) -> str:
        """Return the outcome as text."""
        plan = self.plan
        where = f"{plan.nodes}x{plan.nproc} on {f'etcd of {plan.members}' if plan.members else 'c10d'}"
        how = "live" if plan.live else "no-live"
        kinds = ", ".join(fault.kind for fault in plan.faults)
        verdict = "ok" if not self.problems else f"FAILED: {'; '.join(self.problems)}"
        counts = f"{self.rounds} rounds, {self.restarts} restarts, {self.kept} kept, {self.again} steps again"
        landed = f"{self.landed}/{len(plan.faults)} landed ({kinds})"
        return f"seed {plan.seed}: {where}, {how}: {landed}; {counts}, {self.seconds:.0f} s: {verdict}"


class Problem(Exception):
    """Something that must hold does not."""


class Scene:
    """The processes of a run, for those who do something to them."""

    def __init__(self, plan: Plan, directory: Path, hosts: dict[str, Host], members: list[Member]) -> None:
        self.plan = plan
        self.job = Job(directory)
        self.checkpoints = directory / "checkpoints"
        self.hosts = hosts
        self.members = members
        self.cluster = ",".join(f"{member.name}={member.peer}" for member in members)
        self.landed = 0
        self._started = self._back = 0.0  # when an agent was started last, and when anything came back
        self._away: set[str] = set()  # names of etcd servers, hosts and the disk
        self._running: dict[str, Agent] = {}
        self._codes: list[tuple[Agent, set[int]]] = []  # agents that were ended, and the codes that are right for them
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._count = itertools.count()
        self._looked = 0.0
        self._seen: dict[int, str] = {}  # start times of all processes, by pid

    # What strikes use.

    def agent(self, fault: Fault) -> Agent | None:
        """The agent of the fault's node, or of another one; None if none runs."""
        here = sorted(self._running.items())
        return here[fault.node % len(here)][1] if here else None

    def workers(self) -> list[int]:
        """The pids of all workers."""
        pids = {x["pid"] for x in self.job.started()} | {
            e["pid"] for e in self.job.events() if e["event"] == "worker_started"
        }
        return sorted(pid for pid in pids if alive(pid))

    def worker(self, fault: Fault) -> int | None:
        """A worker of the fault's node, or of the node that took its place."""
        agent = self.agent(fault)
        if agent is None:
            return None
        under = set(tree(agent.process.pid))
        here = [pid for pid in self.workers() if pid in under]
        return here[fault.worker % len(here)] if here else None

    def later(self, seconds: float, act: Callable[[], object]) -> None:
        """Do something after so many seconds."""
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._count), act))

    def gone(self, agent: Agent, codes: set[int]) -> None:
        """Note that an agent was ended, and with which code."""
        self._running = {name: other for name, other in self._running.items() if other is not agent}
        self._codes.append((agent, codes))

    def take(self, what: str) -> bool:
        """Note that something is out of service; False if it or anything else is already, and at most one may be."""
        if self._away:
            return False
        self._away.add(what)
        return True

    def give_back(self, what: str) -> None:
        self._away.discard(what)

    def start(self, name: str) -> None:
        """Start a node's agent, also again."""
        self._started = time.monotonic()
        plan = self.plan
        flags = [*FLAGS, *([] if plan.live else ["--no-live"])]
        command = [SCRIPT, str(self.job.work), "--steps", str(STEPS), "--step-time", str(STEP_TIME)]
        command += ["--checkpoint", str(self.checkpoints), "--every", str(plan.every)]
        command += ["--start-time", str(plan.start)]
        if plan.members:
            flags += ["--rdzv-backend", "etcd", "--rdzv-id", "chaos", "--rdzv-conf", CONF]
        else:
            flags += ["--rdzv-conf", f"{CONF},is_host={'true' if name == 'a' else 'false'}"]
        where = endpoints(self.members) if self.members else ""
        env, prefix = {"NODE": name, "RES_OPTIONS": "attempts:0"}, ()
        if self.hosts:
            where = where or f"{self.hosts['a'].address}:{self.job.port}"
            env, prefix = {**env, **self.hosts[name].env}, self.hosts[name].prefix
        size = {"nnodes": f"1:{plan.nodes}", "nproc": plan.nproc}
        agent = self.job.node(
            name, *flags, **size, endpoint=where, command=command, env=env, prefix=prefix, executed=True
        )
        self._running[name] = agent

    # The run.

    def play(self) -> None:
        """Start the run, do everything that is planned, and have it end.

        Raises:
            Problem: if the run does not go on, or does not end as it must.
        """
        names = "abcd"[: self.plan.nodes]
        early, late = names[: len(names) - self.plan.late], names[len(names) - self.plan.late :]
        for name in early:
            self.start(name)
        for name in late:
            self.later(3.0, lambda name=name: self.start(name))
        for fault in self.plan.faults:
            if fault.gap is None:
                self._until(f"step {fault.step}", lambda fault=fault: self._step() >= fault.step)
            else:
                until = time.monotonic() + fault.gap
                self._until("the next fault", lambda until=until: time.monotonic() >= until)
            deadline = time.monotonic() + LAND
            while not STRIKES[fault.kind](self, fault):
                if time.monotonic() > deadline:
                    raise Problem(f"{fault.kind} did not land")
                self._wait(0.05)
            self.landed += 1
        self._until("all that was away to be back", lambda: not self._due)
        self._until("all nodes to train together", self._settled)
        self.job.tell("hurry")
        self._until("the run to end", lambda: all(agent.process.poll() is not None for agent in self._running.values()))

    def check(self, expected: str) -> None:
        """Hold the end against what must be.

        Raises:
            Problem: if something else came of it.
        """
        codes = {name: agent.process.poll() for name, agent in self._running.items()}
        if any(codes.values()):
            raise Problem(f"exit codes {codes}")
        for agent, allowed in self._codes:
            code = agent.wait(60)
            if code not in allowed | {0}:
                raise Problem(f"{agent.name}, which was ended, has exit code {code}")
        result = json.loads((self.job.work / "result.json").read_text())
        if result["hash"] != expected:
            raise Problem(f"another hash: {result['hash'][:12]}, not {expected[:12]}")
        done = {x["step"] for x in self._steps()}
        # A rank that was killed may not have noted its last step.
        if max(done) != STEPS or len(done) < STEPS - len(self.plan.faults) - 1:
            raise Problem(f"{len(done)} steps of {STEPS} were noted")

    def close(self) -> list[str]:
        """End everything; return what outlived the agents."""
        for agent in self.job.agents:
            with contextlib.suppress(ProcessLookupError):
                agent.thaw(tree(agent.process.pid))
        self._look()
        self.job.close()
        deadline = time.monotonic() + 10 * SLOWNESS
        while left := [pid for pid, start in self._seen.items() if alive(pid) and _start(pid) == start]:
            if time.monotonic() > deadline:
                commands = [f"{pid} ({_text(f'/proc/{pid}/cmdline')[:80]})" for pid in left]
                return [f"processes outlived their agents: {', '.join(commands)}"]
            time.sleep(0.1)
        return []

    def _until(self, what: str, reached: Callable[[], bool]) -> None:
        last, since = self._step(), time.monotonic()
        while not reached():
            self._wait(0.02)
            for name, agent in self._running.items():
                if agent.process.poll() not in (None, 0):
                    raise Problem(f"{name} ended with {agent.process.poll()} before {what}")
            if self._running and all(agent.process.poll() == 0 for agent in self._running.values()) and not reached():
                raise Problem(f"the run ended before {what}")
            if (now := self._step()) != last:
                last, since = now, time.monotonic()
            if time.monotonic() - since > STANDSTILL * SLOWNESS:
                raise Problem(f"no step for {STANDSTILL * SLOWNESS:g} s, waiting for {what}")

    def _wait(self, seconds: float) -> None:
        time.sleep(seconds)
        if time.monotonic() > self._looked + LOOK:
            self._look()
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()
            self._back = time.monotonic()

    def _look(self) -> None:
        """Note all processes of the run."""
        self._looked = time.monotonic()
        for agent in self._running.values():
            for pid in tree(agent.process.pid):
                if pid not in self._seen and (start := _start(pid)):
                    self._seen[pid] = start

    def _steps(self) -> list[dict[str, int]]:
        return read_lines(self.job.work / "steps.jsonl")

    def _step(self) -> int:
        """The number of noted steps, repeated ones included: it grows as long as the run goes on."""
        path = self.job.work / "steps.jsonl"
        return len(path.read_bytes().splitlines()) if path.exists() else 0

    def _settled(self) -> bool:
        """Whether all nodes have trained together for a while, so that whatever was done has had its effect."""
        if any(e["clock"] > self._started for e in self.job.events("resize_skipped")):
            return True  # so little is left that the run does not wait for a node that comes back
        rounds = [e for e in self.job.events("round_formed") if e["clock"] > self._started]
        if not rounds or len(rounds[-1]["nodes"]) < self.plan.nodes:
            return False
        clocks = [x["clock"] for x in self._steps() if x["round"] == rounds[-1]["round"]]
        return bool(clocks) and max(clocks) - max(min(clocks), self._back) > SETTLED


def _start(pid: int) -> str:
    return _text(f"/proc/{pid}/stat").rpartition(")")[2].split()[19] if alive(pid) else ""


def _text(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(errors="replace").replace("\0", " ")
    return ") " + "0 " * 20


@contextlib.contextmanager
def _built(plan: Plan, directory: Path) -> Iterator[Scene]:
    with contextlib.ExitStack() as stack:
        hosts: dict[str, Host] = {}
        if plan.hosts:
            *nodes, server = stack.enter_context(net(plan.nodes + 1))
            hosts = dict(zip("abcd", nodes, strict=False))
        if plan.disk:
            (directory / "checkpoints").mkdir()
            stack.enter_context(_small_disk(directory / "checkpoints"))
        members: list[Member] = []
        if plan.members:
            (directory / "etcd").mkdir()
            there = server if plan.hosts else None
            members = stack.enter_context(cluster(directory / "etcd", plan.members, host=there))
        yield Scene(plan, directory, hosts, members)


@contextlib.contextmanager
def _small_disk(directory: Path) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(directory)], check=True, timeout=20)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True, timeout=20)


def run(plan: Plan, directory: Path, expected: str) -> Outcome:
    """Run a plan in a new directory; ``expected`` is the hash of the undisturbed run."""
    directory.mkdir(parents=True)
    (directory / "plan.json").write_text(str(plan))
    outcome, began = Outcome(plan), time.monotonic()
    with _built(plan, directory) as scene:
        try:
            scene.play()
            scene.check(expected)
        except (Problem, AssertionError) as problem:  # the harness asserts
            outcome.problems.append(str(problem))
        finally:
            left = scene.close()
        outcome.problems += left
    outcome.landed = scene.landed
    outcome.seconds = time.monotonic() - began
    events = scene.job.events()
    outcome.rounds = max((e["round"] for e in events if e["event"] == "round_formed"), default=0)
    outcome.restarts = max((e["restarts"] for e in events if e["event"] in ("round_formed", "run_ended")), default=0)
    outcome.kept = sum(e["event"] == "worker_kept" for e in events)
    steps = [x["step"] for x in read_lines(scene.job.work / "steps.jsonl")]
    outcome.again = len(steps) - len(set(steps))
    return outcome
