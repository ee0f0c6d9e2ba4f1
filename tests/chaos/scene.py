"""One run under a plan: agents and etcd servers, what happens to them, and what must hold at the end."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from changes import SCRIPT, undisturbed_hash
from etcd_servers import Member, cluster, endpoints
from explore.recorder import TRACES, recorded
from explore.traces import Drift, replay
from faulty_storage import Storage, storage
from harness import SCRIPTS, SLOWNESS, Agent, Job, alive, free_port, read_lines, tree
from memory_group import Group, group
from netns import Host, net

from chaos.plan import REPLICA, Fault, Plan
from chaos.strikes import STRIKES, copier
from elastic_launch import stack_dump

__all__ = ["Outcome", "Scene", "run", "undisturbed"]

LASTS = 40.0
"""Seconds of all steps together, if the training is not told to hurry."""

STANDSTILL = 60.0
"""Seconds without a step after which a run counts as stuck; a round that parks waits for as long as a node is away."""

SETTLED = 4.0
"""Seconds of training together after which a run has settled: longer than until a node counts as dead."""

LOOK = 0.2
"""Seconds between two looks at which processes there are."""

WRITTEN = 1.0
"""Seconds for workers to write their stacks."""

LAND = 40.0 * SLOWNESS
"""Seconds within which a fault finds what it is to hit: a worker that is being started, for instance."""

ENOUGH = 4.0
"""Seconds of notice that are ample to stop after a step, on a busy machine too."""

SAMPLES, BATCH = 96, 16
"""Samples of the script's data set, and of a step."""

MORE = 48
"""Descriptors that an agent may have more of at the end than when its node began to train: it leads now (32, with
three etcd servers), or has links to later nodes, workers that are started ahead, a snapshot that is being copied. A
leak of one a round is what the soak looks for."""

CHANGES = ("round_draining", "round_drained", "round_broken", "round_formed", "node_lost")
"""Events that begin or end a change of the round."""

ORDERED = {
    "suspending": ("round_broken", "round_draining"),
    "forming": ("round_formed",),
    "placing": ("worker_kept", "worker_placed", "worker_started"),
}
"""Events at moments of a plan."""

AIMED = 8.0
"""Seconds for which a fault waits for the moment at which it is aimed; then it happens all the same."""

DRAINED = ("notice", "term agent", "term worker")
"""Kinds after which all ranks stop after the same step."""

INTERRUPTED = ("kill worker", "kill agent", "out of memory", "lose node")
"""Kinds that cost no completed step if a process is kept."""

FLAGS = ["--max-restarts", "100", "--dead-after", "2.5", "--shutdown-timeout", "5", "--min-wait", "120"]

CONF = "beat=0.5,join_settle=1,start_wait=1"


@dataclass(slots=True)
class Outcome:
    """What came of a plan; ``problems`` is empty if all held.

    Attributes:
        landed: the kinds of those faults that happened, in order, and when: as the run starts, while it trains, in a
            change (between a round's end, or the order to end it, and the next step), or in the last steps.
        rounds, restarts, resizes: of the run, as far as its nodes know.
        kept: places that workers took without a new process.
        aimed: moments at which faults were aimed, and whether each came.
        steps: that were done; ``again``: of these, more than once.
        seconds: from the first agent's start to the last one's end.
    """

    plan: Plan
    landed: list[tuple[str, str]] = field(default_factory=list)
    rounds: int = 0
    restarts: int = 0
    resizes: int = 0
    kept: int = 0
    aimed: list[tuple[str, bool]] = field(default_factory=list)
    steps: int = 0
    again: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    def line(self) -> str:
        """Return the outcome as text."""
        plan = self.plan
        store = f"etcd of {plan.members}" if plan.members else "three voters" if plan.voters else "c10d"
        where = f"{plan.nodes}x{plan.nproc} on {store}"
        how = f"{plan.form}, {'live' if plan.live else 'no-live'}"
        kinds = ", ".join(fault.kind for fault in plan.all)
        verdict = "ok" if not self.problems else f"FAILED: {'; '.join(self.problems)}"
        counts = f"{self.rounds} rounds, {self.restarts} restarts, {self.kept} kept, {self.again} steps again"
        landed = f"{len(self.landed)}/{len(plan.all)} landed ({kinds})"
        return f"seed {plan.seed}: {where}, {how}: {landed}; {counts}, {self.seconds:.0f} s: {verdict}"

    def record(self) -> dict[str, object]:
        """Return the outcome as JSON, from which a report is made."""
        return {"planned": len(self.plan.all), **asdict(self)}


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault that landed.

    Attributes:
        seconds: of the fault.
        quiet: whether training had gone on undisturbed for a while, with nothing away.
    """

    kind: str
    when: float
    seconds: float
    quiet: bool


class Problem(Exception):
    """Something that must hold does not."""


class Scene:
    """The processes of a run, for those who do something to them."""

    def __init__(
        self,
        plan: Plan,
        directory: Path,
        hosts: dict[str, Host],
        members: list[Member],
        storage: Storage | None,
        groups: dict[str, Group],
    ) -> None:
        self.plan = plan
        self.job = Job(directory, executed=plan.executed)
        self.checkpoints = directory / "checkpoints"
        self.hosts = hosts
        self.members = members
        self.storage = storage
        self.groups = groups
        self.cluster = ",".join(f"{member.name}={member.peer}" for member in members)
        self.voters = [f"127.0.0.1:{free_port()}" for _ in range(3)] if plan.voters else []
        # Not in the directory: the loader processes of a script have sockets there, whose paths must be short.
        self.temporary = Path(tempfile.mkdtemp(prefix="chaos-"))
        self.traces = directory / "traces"
        self.struck: list[Strike] = []
        self.aimed: list[tuple[str, bool]] = []
        self._torn: dict[Path, tuple[float, Path]] = {}  # when, and the newest checkpoint that was left
        self._problem = ""
        self._started = self._back = 0.0  # when an agent was started last, and when anything came back
        self._away: set[str] = set()  # names of etcd servers, hosts and the disk
        self._running: dict[str, Agent] = {}
        self._codes: list[tuple[Agent, set[int]]] = []  # agents that were ended, and the codes that are right for them
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._count = itertools.count()
        self._looked = 0.0
        self._seen: dict[int, str] = {}  # start times of all processes, by pid
        self._descriptors: dict[int, int] = {}  # of agents when their nodes began to train, by pid
        self._starts: dict[str, float] = {}  # when the agent of each node was started last
        self._backs: list[float] = []  # when anything came back

    # What strikes use.

    def agent(self, fault: Fault) -> Agent | None:
        """The agent of the fault's node, or of another one; None if none runs."""
        here = sorted(self._running.items())
        return here[fault.node % len(here)][1] if here else None

    def leader(self, fault: Fault) -> Agent | None:
        """The agent that leads the run, if it runs; else the fault's."""
        elected = [e["node"] for e in self.job.events("leader_elected")] or ["a"]
        return self._running.get(elected[-1]) or self.agent(fault)

    def agents(self) -> list[Agent]:
        """The agents that run."""
        return list(self._running.values())

    @property
    def landed(self) -> int:
        """How many faults have landed."""
        return len(self.struck)

    def problem(self, what: str) -> None:
        """Note that something does not hold."""
        self._problem = self._problem or what

    def notice_of(self, name: str) -> Path:
        """The file that has a node leave."""
        return self.job.directory / f"notice-{name}"

    def kill_all(self) -> list[str]:
        """Kill all agents, those included that are about to leave; return the names of those that were not."""
        self._look()
        names = sorted(self._running)
        for _, allowed in self._codes:
            allowed.add(-signal.SIGKILL)
        for agent in self.job.agents:
            if agent.process.poll() is None:
                agent.kill()
        for agent in self.agents():
            self.gone(agent, {-signal.SIGKILL})
        return names

    def processes(self) -> list[int]:
        """The processes of the run that are alive, whether their agents are or not."""
        return [pid for pid, start in self._seen.items() if alive(pid) and _start(pid) == start]

    def whole(self) -> list[Path]:
        """The complete checkpoints that no fault has touched, the newest first."""
        found = [path.parent for path in self.checkpoints.glob("step-*/manifest.json") if path.parent not in self._torn]
        return sorted(found, key=_position, reverse=True)

    def tore(self, checkpoint: Path, left: Path) -> None:
        """Note that a checkpoint was damaged while no node ran, and which one is the newest now."""
        self._torn[checkpoint] = time.monotonic(), left

    def trains(self) -> bool:
        """Whether training has gone on undisturbed for a while."""
        now = time.monotonic()
        changes = [e["clock"] for e in self.job.events() if e["event"] in CHANGES]
        clocks = [x["clock"] for x in self._steps()]
        struck = max((strike.when for strike in self.struck), default=0.0)
        return bool(clocks) and max(clocks) > now - 1.0 and max([struck, self._back, *changes]) < now - SETTLED

    def workers(self) -> list[int]:
        """The pids of all workers."""
        pids = {x["pid"] for x in self.job.started()} | {
            e["pid"] for e in self.job.events() if e["event"] == "worker_started"
        }
        # A pid that was used before may be a process of another run by now.
        ours = {pid for agent in self.agents() for pid in tree(agent.process.pid)}
        return sorted(pid for pid in pids & ours if alive(pid))

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

    def needed(self, name: str) -> bool:
        """Whether the run cannot go on without a node: it keeps the record alone."""
        return name == "a" and not self.members and not self.voters

    def start(self, name: str) -> None:
        """Start a node's agent, also again."""
        self._started = self._starts[name] = time.monotonic()
        plan = self.plan
        flags = [*FLAGS, *([] if plan.live else ["--no-live"]), "--notice", f"file:{self.notice_of(name)}"]
        flags += ["--replica-size", str(plan.replica)] if plan.replica > 1 else []
        script, options = _trained(plan.form)
        command = [
            script,
            str(self.job.work),
            "--steps",
            str(plan.steps),
            "--step-time",
            str(LASTS / plan.steps),
            *options,
        ]
        command += ["--checkpoint", str(self.checkpoints), "--every", str(plan.every)]
        command += ["--start-time", str(plan.start)]
        if plan.members:
            flags += ["--rdzv-backend", "etcd", "--rdzv-id", "chaos", "--rdzv-conf", CONF]
        elif self.voters:
            flags += ["--rdzv-id", "chaos", "--rdzv-conf", CONF]
        else:
            flags += ["--rdzv-conf", f"{CONF},is_host={'true' if name == 'a' else 'false'}"]
        where = endpoints(self.members) if self.members else ",".join(self.voters)
        env, prefix = {"NODE": name, "RES_OPTIONS": "attempts:0", "TMPDIR": str(self.temporary)}, ()
        env[TRACES] = str(self.traces)
        if self.hosts:
            where = where or f"{self.hosts['a'].address}:{self.job.port}"
            prefix = self.hosts[name].prefix
        if self.groups:
            prefix = (*self.groups[name].prefix, *prefix)
        size = {"nnodes": f"1:{plan.nodes}", "nproc": plan.nproc}
        agent = self.job.node(name, *flags, **size, endpoint=where, command=command, env=env, prefix=prefix)
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
                self._until(f"step {fault.step}", lambda fault=fault: self.step() >= fault.step)
            if fault.moment:
                self._aim(fault.moment)
            if fault.gap is not None:
                until = time.monotonic() + fault.gap
                self._until("the next fault", lambda until=until: time.monotonic() >= until)
            self._strike(fault)
        self._until("all that was away to be back", lambda: not self._due)
        self._until("all nodes to train together", self._settled)
        self._check_descriptors()
        self.job.tell("hurry")
        if (last := self.plan.last) is not None:
            self._until("the last steps", lambda: self.step() >= self.plan.steps - 60)
            (self.job.work / "hurry").unlink()
            self._until(f"step {last.step}", lambda: max(x["step"] for x in self._steps()) >= last.step)
            self._strike(last)
            self.job.tell("hurry")
        self._until("the run to end", lambda: all(agent.process.poll() is not None for agent in self._running.values()))

    def _aim(self, moment: str) -> None:
        """Wait for a moment; not for long, because faults can keep it from coming."""
        since = self.struck[-1].when if self.struck else 0.0
        deadline = time.monotonic() + AIMED
        self._until(f"{moment} or no longer", lambda: self._comes(moment, since) or time.monotonic() > deadline)
        self.aimed.append((moment, time.monotonic() <= deadline))

    def _comes(self, moment: str, since: float) -> bool:
        """Whether a moment has come after a time, or is now."""
        if moment == "commit":
            return copier(self) is not None
        file = {"place": "places.jsonl", "restoring": "resumed.jsonl"}.get(moment)
        noted = read_lines(self.job.work / file) if file else self.job.events()
        names = ORDERED.get(moment)
        # A place is passed often: only one that was reached right now counts.
        since = max(since, time.monotonic() - LOOK) if moment == "place" else since
        return any(x["clock"] > since and (names is None or x["event"] in names) for x in noted)

    def _strike(self, fault: Fault) -> None:
        deadline = time.monotonic() + LAND
        quiet = self.trains() and not self._away
        while not STRIKES[fault.kind](self, fault):
            if time.monotonic() > deadline:
                raise Problem(f"{fault.kind} did not land")
            self.wait(0.05)
            quiet = self.trains() and not self._away
        self.struck.append(Strike(fault.kind, time.monotonic(), fault.seconds, quiet))

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
        if max(done) != self.plan.steps or len(done) < self.plan.steps - len(self.plan.all) - 1:
            raise Problem(f"{len(done)} steps of {self.plan.steps} were noted")
        self._check_samples()
        self._check_saved()
        self._check_drained()
        self._check_lost()
        self._check_torn()
        if any(strike.kind == "out of memory" for strike in self.struck) and not self._says("for lack of memory"):
            raise Problem("the log does not say that the kernel killed a worker for lack of memory")

    def _check_saved(self) -> None:
        """What is called saved is in the storage, and no later round begins before it, unless it was damaged."""
        saved = [e for e in self.job.events("checkpoint_saved") if e["path"]]
        if self.storage is not None:
            commits = self.storage.commits()
            for event in saved:
                if commits.get(Path(event["path"]).name, event["clock"] + 1) > event["clock"]:
                    raise Problem(f"{event['path']} was called saved before it was")
        formed = self.job.events("round_formed")
        for resumed in read_lines(self.job.work / "resumed.jsonl"):
            begun = max(
                (e["clock"] for e in formed if e["round"] == resumed["round"] and e["clock"] < resumed["clock"]),
                default=0.0,
            )
            torn = max((when for when, _ in self._torn.values() if when < resumed["clock"]), default=0.0)
            durable = max((e["step"] for e in saved if torn < e["clock"] < begun), default=0)
            if resumed["step"] < durable:
                text = f"round {resumed['round']} resumed at step {resumed['step']}, and step {durable} was saved"
                raise Problem(text)

    def _check_drained(self) -> None:
        """A round that was drained for a node that joins costs no step, unless a fault comes between."""
        resumed = read_lines(self.job.work / "resumed.jsonl")
        for event in self.job.events("round_drained"):
            after = [x for x in resumed if x["clock"] > event["clock"]]
            if event["kind"] != "membership" or not after:
                continue
            struck = [x for x in self.struck if event["clock"] - SETTLED < x.when < after[0]["clock"]]
            if not struck and after[0]["step"] < event["step"]:
                text = f"round {event['round']} was drained after step {event['step']}"
                raise Problem(f"{text}, and the next one resumed at step {after[0]['step']}")

    def _check_samples(self) -> None:
        """Each step has used the same samples each time that it was done, and each epoch each sample once."""
        used: dict[int, dict[int, list[int]]] = {}
        for line in read_lines(self.job.work / "samples.jsonl"):
            step, micro, numbers = line["step"], line["micro"], line["numbers"]
            if used.setdefault(step, {}).setdefault(micro, numbers) != numbers:
                raise Problem(f"micro-batch {micro} of step {step} has had samples {used[step][micro]} and {numbers}")
        epoch: list[int] = []
        for step in range(1, self.plan.steps + 1):
            epoch += [number for micro in used.get(step, {}).values() for number in micro]
            whole = step * BATCH % SAMPLES == 0
            if len({*epoch}) != len(epoch) or (whole and sorted(epoch) != [*range(SAMPLES)]):
                raise Problem(f"the samples of the epoch up to step {step} are {sorted(epoch)}")
            epoch = [] if whole else epoch

    def _check_lost(self) -> None:
        """What a fault in quiet training costs: see docs/training/faults.md."""
        resumed = read_lines(self.job.work / "resumed.jsonl")
        noted = self._steps()
        for number, strike in enumerate(self.struck):
            after = next((x for x in resumed if x["clock"] > strike.when), None)
            if after is None or not strike.quiet or strike.kind not in (*DRAINED, *INTERRUPTED):
                continue
            others = [x.when for x in self.struck[number + 1 :]]
            if any(strike.when < when < after["clock"] for when in (*others, *self._backs)):
                continue
            before = [x for x in noted if x["clock"] < after["clock"]][-1]
            lost = before["step"] - after["step"]
            if strike.kind in DRAINED:
                ordered = strike.kind != "notice" or strike.seconds > ENOUGH
                rounds = [e for e in self.job.events("round_formed") if e["clock"] < strike.when]
                alone = strike.kind != "term worker" and len(rounds[-1]["nodes"]) == 1
                if ordered and not alone and lost > 0:
                    raise Problem(f"{strike.kind} has cost {lost} steps in quiet training, and time was enough")
            elif lost > 0 and self._rank_0(before["round"]) in self._kept(after["round"]):
                raise Problem(f"{strike.kind} has cost {lost} steps, though rank 0 has kept its process")

    def _rank_0(self, number: int) -> int:
        """The pid of a round's first rank."""
        events = [e for e in self.job.events() if e["event"] in ("worker_started", "worker_kept", "worker_placed")]
        return next((e["pid"] for e in events if e["round"] == number and e["rank"] == 0), 0)

    def _kept(self, number: int) -> set[int]:
        return {e["pid"] for e in self.job.events("worker_kept") if e["round"] == number}

    def _in_round(self, agent: Agent) -> bool:
        """Whether a node trains in a round that was formed with this agent."""
        started = [e["clock"] for e in self.job.events("first_step")]
        rounds = self.job.events("round_formed")
        begun = rounds[-1]["clock"] if rounds else 0.0
        return bool(started) and started[-1] > begun > self._starts[agent.name] and agent.name in rounds[-1]["nodes"]

    def _check_descriptors(self) -> None:
        """Agents have about as many descriptors as when their nodes began to train."""
        for agent in self._running.values():
            first, now = self._descriptors.get(agent.process.pid), _descriptors(agent.process.pid)
            if first is not None and now > first + MORE:
                self._keep_descriptors(agent)
                raise Problem(f"agent {agent.name} had {first} descriptors when it began to train, and has {now}")

    def _left_files(self) -> list[str]:
        """What is left in the directories for temporary files and shared memory."""
        # A process of the script that is killed leaves directories of multiprocessing's, as it does anywhere.
        names = [name for name in os.listdir(self.temporary) if not name.startswith(("torchinductor_", "pymp-"))]
        found = [str(self.temporary / name) for name in names]
        pids = {str(pid) for pid in self._seen}
        found += [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if pids & {*re.split(r"[^0-9]", name)}]
        return found

    def _check_torn(self) -> None:
        """After a damaged checkpoint the run begins with the newest whole one, and names the damaged one."""
        for torn, (when, left) in self._torn.items():
            after = [x["step"] for x in read_lines(self.job.work / "resumed.jsonl") if x["clock"] > when]
            if not after or after[0] != _position(left)[1]:
                raise Problem(f"{torn.name} was damaged; the run resumed at {after[:1]}, and {left.name} was left")
            if not self._says(str(torn)):
                raise Problem(f"the log does not say that {torn.name} was damaged")

    def _says(self, text: str) -> bool:
        return any(text in agent.output for agent in self.job.agents)

    def phases(self) -> list[tuple[str, str]]:
        """The faults that landed, and when in the run's life."""
        clocks = sorted(x["clock"] for x in self._steps())
        changes = sorted(e["clock"] for e in self.job.events() if e["event"] in CHANGES)
        found = []
        for number, strike in enumerate(self.struck):
            step = max((clock for clock in clocks if clock < strike.when), default=0.0)
            change = max((clock for clock in changes if clock < strike.when), default=0.0)
            phase = "start" if not step else "change" if change > step else "training"
            found.append((strike.kind, "end" if number == len(self.plan.faults) else phase))
        return found

    def close(self) -> list[str]:
        """End everything; return what outlived the agents."""
        for agent in self.job.agents:
            with contextlib.suppress(ProcessLookupError):
                agent.thaw(tree(agent.process.pid))
        self._look()
        self.job.close()
        deadline = time.monotonic() + 10 * SLOWNESS
        while left := self.processes():
            if time.monotonic() > deadline:
                commands = [f"{pid} ({_text(f'/proc/{pid}/cmdline')[:80]})" for pid in left]
                return [f"processes outlived their agents: {', '.join(commands)}"]
            time.sleep(0.1)
        files = self._left_files()
        return [f"files were left: {', '.join(files)}"] if files else []

    def drifts(self) -> list[str]:
        """Where forked agents, which record their machines, have not kept to these, or to the explorer's invariants."""
        try:
            replay(recorded(self.traces), disturbed=True)
        except Drift as drift:
            return [f"the trace: {drift}"]
        return []

    def _until(self, what: str, reached: Callable[[], bool]) -> None:
        last, since = self.step(), time.monotonic()
        while not reached():
            self.wait(0.02)
            for name, agent in self._running.items():
                if agent.process.poll() not in (None, 0):
                    raise Problem(f"{name} ended with {agent.process.poll()} before {what}")
            if self._running and all(agent.process.poll() == 0 for agent in self._running.values()) and not reached():
                raise Problem(f"the run ended before {what}")
            if (now := self.step()) != last:
                last, since = now, time.monotonic()
            if time.monotonic() - since > STANDSTILL * SLOWNESS:
                self._keep_stacks()
                raise Problem(f"no step for {STANDSTILL * SLOWNESS:g} s, waiting for {what}")

    def _keep_stacks(self) -> None:
        """Keep the stacks of all workers beside the plan, to see what a run that stands still waits for."""
        for pid in self.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, stack_dump.SIGNAL)
        time.sleep(WRITTEN)
        for number, stacks in enumerate(sorted(self.temporary.rglob(stack_dump.STACKS))):
            shutil.copy(stacks, self.job.directory / f"stacks-{number}-{stacks.parent.name}.txt")

    def _keep_descriptors(self, agent: Agent) -> None:
        """Keep a list of what an agent has open beside the plan."""
        opened = Path(f"/proc/{agent.process.pid}/fd")
        found = [_link(descriptor) for descriptor in opened.iterdir()]
        (self.job.directory / f"descriptors-{agent.name}.txt").write_text("\n".join(sorted(found)) + "\n")

    def wait(self, seconds: float) -> None:
        """Wait while what is due happens."""
        time.sleep(seconds)
        if time.monotonic() > self._looked + LOOK:
            self._look()
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()
            self._back = time.monotonic()
            self._backs.append(self._back)
        if self._problem:
            raise Problem(self._problem)

    def _look(self) -> None:
        """Note all processes of the run."""
        self._looked = time.monotonic()
        for agent in self._running.values():
            if agent.process.pid not in self._descriptors and self._in_round(agent):
                self._descriptors[agent.process.pid] = _descriptors(agent.process.pid)
            for pid in tree(agent.process.pid):
                if pid not in self._seen and (start := _start(pid)):
                    self._seen[pid] = start

    def _steps(self) -> list[dict[str, int]]:
        return read_lines(self.job.work / "steps.jsonl")

    def step(self) -> int:
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
        begun, number = rounds[-1]["clock"], rounds[-1]["round"]
        clocks = [x["clock"] for x in self._steps() if x["round"] == number and x["clock"] > begun]
        return bool(clocks) and max(clocks) - max(min(clocks), self._back) > SETTLED


def _trained(form: str) -> tuple[str, list[str]]:
    """Return the script of a form of training, and its options."""
    if form == "plain":
        return SCRIPT, ["--samples"]
    if form == "stream":
        return SCRIPT, ["--stream", "skip", "--loader-workers", "1", "--persistent"]
    return str(SCRIPTS / "forms.py"), ["--form", form]


def undisturbed(base: Path, plans: Iterable[Plan]) -> dict[str, str]:
    """Return the hash with which one process, or replica, ends each form of the plans' trainings."""
    found = {}
    for form, steps in sorted({(plan.form, plan.steps) for plan in plans}):
        (base / f"undisturbed-{form}").mkdir(parents=True)
        script, options = _trained(form)
        ranks = REPLICA if form == "tensor" else 1  # which the bits of its sums depend on
        found[form] = undisturbed_hash(base / f"undisturbed-{form}", steps, *options, script=script, ranks=ranks)
    return found


def _start(pid: int) -> str:
    return _text(f"/proc/{pid}/stat").rpartition(")")[2].split()[19] if alive(pid) else ""


def _descriptors(pid: int) -> int:
    with contextlib.suppress(OSError):  # it has just ended
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


def _link(path: Path) -> str:
    with contextlib.suppress(OSError):  # it has just been closed
        return os.readlink(path)
    return ""


def _position(checkpoint: Path) -> tuple[int, int]:
    """Round and step in a checkpoint's name."""
    step, round_, _ = checkpoint.name.removeprefix("step-").split(".")
    return int(round_.removeprefix("r")), int(step)


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
        if plan.disk or plan.faulty:
            (directory / "checkpoints").mkdir()
        if plan.disk:
            stack.enter_context(_small_disk(directory / "checkpoints"))
        faulty = stack.enter_context(storage(directory / "storage", directory / "checkpoints")) if plan.faulty else None
        groups = {name: stack.enter_context(group()) for name in "abcd"[: plan.nodes]} if plan.limited else {}
        members: list[Member] = []
        if plan.members:
            (directory / "etcd").mkdir()
            there = server if plan.hosts else None
            members = stack.enter_context(cluster(directory / "etcd", plan.members, host=there))
        yield Scene(plan, directory, hosts, members, faulty, groups)


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
            shutil.rmtree(scene.temporary, ignore_errors=True)
        outcome.problems += [*left, *scene.drifts()]
    outcome.landed, outcome.aimed = scene.phases(), scene.aimed
    outcome.seconds = time.monotonic() - began
    events = scene.job.events()
    outcome.rounds = sum(e["event"] == "round_formed" for e in events)
    outcome.restarts = max((e["restarts"] for e in events if e["event"] in ("round_formed", "run_ended")), default=0)
    outcome.resizes = sum(e["event"] == "round_drained" for e in events)
    outcome.kept = sum(e["event"] == "worker_kept" for e in events)
    steps = [x["step"] for x in read_lines(scene.job.work / "steps.jsonl")]
    outcome.steps, outcome.again = len(steps), len(steps) - len(set(steps))
    return outcome
