"""Fault injection: a plan of which worker fails when, to test a run's recovery before it is needed.

``elastic-launch --drill PLAN`` carries out planned faults on a job: each happens once in the run, as its leader
remembers it. A worker that comes to a fault asks its agent, which asks the leader.

Without the launcher's help, a plan is passed in the environment::

    ELASTIC_LAUNCH_FAULTS='[{"rank": 1, "step": 20}]' elastic-launch ... train.py

There, each fault belongs to one round, and a worker that fails ends its round. So the fault happens once, and not again
when the step is repeated.

What is not a valid fault or plan is refused with a UsageError.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from elastic_launch.contract import ENV_ROUND, ENV_SOCKET, FaultDue, FaultOrder, pack, unpack
from elastic_launch.errors import ProtocolError, UsageError

ENV_FAULTS = "ELASTIC_LAUNCH_FAULTS"
ENV_DRILL = "ELASTIC_LAUNCH_DRILL"
"""The plan of ``--drill``, as JSON; the agent passes it to its workers."""

MOST = 1000
"""Most faults in a drill."""

ANSWER_TIMEOUT = 30.0
"""Seconds that a worker waits at a fault of a drill until the leader has decided whether it happens."""

MOMENTS = {
    "step": "after step {step}",
    "snapshot": "in the snapshot of step {step}",
    "drain": "as all stop after step {step}",
    "leave": "with step {step} in memory, as it leaves",
    "restore": "as step {step} is restored",
}
"""The moments at which a fault may happen, and their description for a step."""

WAYS = {
    "kill": "kills itself",
    "exit": "exits with 1",
    "hang": "hangs",
    "slow": "waits {seconds:g} s",
    "disconnect": "closes all its TCP connections",
    "flip": "flips a bit of {of}",
}
"""The ways in which a worker fails."""

FLIPS = {
    "gradient": "the gradient of a micro-batch",
    "parameter": "a parameter",
    "optimizer": "the optimizer's state",
    "sums": "the gradients that all ranks have summed, in its own copy",
}
"""Of what a worker flips a bit, in its next step; only in a loop of ``run.steps`` or of a ``Trainer``."""

NODE_WAYS = {
    "freeze": "is stopped for {seconds:g} s",
    "sigterm": "has its node leave by SIGTERM",
    "lose": "is lost with its node: SIGKILL to the agent and all workers",
    "cut_link": "has its agent cut off from the leader for {seconds:g} s",
    "fail_copies": "has its node's copies to storage fail for {seconds:g} s",
}
"""What a worker's agent does to it or to its node; only in a drill."""

REFUSED = {
    "partition": "It would need root. cut_link cuts an agent's link to the leader, disconnect a worker's connections.",
    "fill_disk": "A drill fills no disk that others may use. fail_copies has a node's copies to storage fail.",
    "tear": "A drill damages no checkpoint, since it may be the only one.",
}
"""What a drill does not do, and what it does instead."""

_LASTING = ("slow", "freeze", "cut_link", "fail_copies")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One failure of one worker.

    Attributes:
        rank: the worker's rank in the round; None, only in a drill: one that the plan's seed determines.
        step: optimizer steps done, of the whole training; None for the first time that it reaches the moment.
        at: one of :data:`MOMENTS`: when the step is done; while its snapshot is being written into memory; when all
            ranks have agreed to stop after it and nothing is saved yet; when it is saved and the agent does not know
            yet; when a snapshot of it has been found and read, but not yet given to ranks that have none.
        round: number of the round; under torchrun, which does not count rounds, of the start: 1 for the first. None,
            only in a drill: any.
        do: one of :data:`WAYS`: SIGKILL; exit code 1 without output; hang forever; wait for some seconds; or close the
            TCP connections of its process. In a drill also one of :data:`NODE_WAYS`.
        of: one of :data:`FLIPS`: of what ``flip`` flips a bit. Which one derives from rank and step.
        every: whether it flips the same bit in all later steps of the round, too; a gradient's in each micro-batch.
        seconds: how long ``slow``, ``freeze``, ``cut_link`` and ``fail_copies`` last.
    """

    rank: int | None
    step: int | None = None
    at: str = "step"
    round: int | None = 1
    do: str = "kill"
    seconds: float = 0.0
    of: str = ""
    every: bool = False

    def __post_init__(self) -> None:
        for name, least in (("rank", 0), ("step", 0), ("round", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise UsageError(f"A fault's {name} cannot be {value!r}.", f"Give a whole number from {least}.")
        for name, known in (("at", MOMENTS), ("do", WAYS | NODE_WAYS)):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in known:
                hint = REFUSED.get(str(value), f"There are {', '.join(known)}.")
                raise UsageError(f"A fault cannot have {name!r}: {value!r}.", hint)
        flips, at = self.do == "flip", self.at == "step"
        if flips != (self.of in FLIPS) or self.of not in ("", *FLIPS) or (flips and not at) or self.every > flips:
            raise UsageError(
                f"The fault {self.do!r} cannot have 'at': {self.at!r}, 'of': {self.of!r}, 'every': {self.every!r}.",
                f'Only flip has "of", one of {", ".join(FLIPS)}, and "every"; it comes after a step.',
            )
        if isinstance(self.seconds, bool) or not isinstance(self.seconds, int | float) or not 0 <= self.seconds < 1e6:
            raise UsageError(f"A fault cannot take {self.seconds!r} seconds.", "Give a number from 0 to 1,000,000.")
        if (self.seconds > 0) != (self.do in _LASTING):
            lasting = ", ".join(_LASTING)
            raise UsageError(f"The fault {self.do!r} cannot take {self.seconds:g} s.", f"Only {lasting} take seconds.")

    def told(self, step: int, rank: int | None = None) -> str:
        """Return what happens at a step, as text; the rank is that of the worker, if the fault names none."""
        text = f"rank {self.rank if rank is None else rank} {(WAYS | NODE_WAYS)[self.do]} {MOMENTS[self.at]}"
        text += "" if self.round is None else f", in round {self.round}"
        return text.format(step=step, seconds=self.seconds, of=FLIPS.get(self.of, ""))


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The faults of a run; ``plan + plan`` combines both.

    Attributes:
        seed: determines the ranks of faults that name none.
    """

    faults: tuple[Fault, ...] = ()
    seed: int = 0

    @staticmethod
    def fail_at(rank: int, step: int | None = None, **how: Any) -> FaultPlan:
        """Return a plan of one fault: by default a worker is killed when a step is done.

        Args:
            how: other attributes of :class:`Fault`.
        """
        return FaultPlan((Fault(rank=rank, step=step, **how),))

    def __add__(self, other: FaultPlan) -> FaultPlan:
        return FaultPlan(self.faults + other.faults, self.seed)

    def dumps(self) -> str:
        """Return the plan as JSON: a list of objects."""
        return json.dumps([asdict(fault) for fault in self.faults])

    @staticmethod
    def loads(text: str) -> FaultPlan:
        """Parse the result of :meth:`dumps`; attributes with a default may be left out."""
        try:
            entries = json.loads(text)
        except (ValueError, RecursionError):
            raise _malformed(text) from None
        plan = FaultPlan.of_entries(entries, text)
        for fault in plan.faults:
            if fault.rank is None or fault.round is None or fault.do in NODE_WAYS:
                name = "do" if fault.do in NODE_WAYS else "rank" if fault.rank is None else "round"
                raise UsageError(
                    f"A fault's {name} cannot be {getattr(fault, name)!r}.", "Give another, or use --drill, which can."
                )
        return plan

    @staticmethod
    def of_entries(entries: object, text: str, *, seed: int = 0, **defaults: Any) -> FaultPlan:
        """Make a plan of parsed entries, one mapping for each fault.

        Args:
            text: what they were parsed from, for the error.
            defaults: values of attributes that an entry leaves out.
        """
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise _malformed(text)
        names = {field.name for field in fields(Fault)}
        for entry in entries:
            if unknown := sorted(entry.keys() - names):
                raise UsageError(f"A fault has the unknown key {unknown[0]!r}.", f"Known: {', '.join(sorted(names))}.")
            if "rank" not in entry and "rank" not in defaults:
                raise UsageError(f"The fault {json.dumps(entry)} has no rank.", "Say which worker is to fail.")
        return FaultPlan(tuple(Fault(**{**defaults, **entry}) for entry in entries), seed)

    @staticmethod
    def of_drill(text: str) -> FaultPlan:
        """Parse the plan of ``--drill``: a list of faults, or a mapping of ``seed`` and ``faults``, in YAML or JSON."""
        import yaml

        try:
            found = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise UsageError(f"This is not a plan of faults: {error}", _DRILL_HINT) from None
        seed: object = 0
        if isinstance(found, dict):
            if unknown := sorted(map(str, found.keys() - {"seed", "faults"})):
                raise UsageError(f"A drill has the unknown key {unknown[0]!r}.", "Known: seed, faults.")
            seed, found = found.get("seed", 0), found.get("faults")
        if type(seed) is not int:
            raise UsageError(f"A drill's seed cannot be {seed!r}.", "Give a whole number.")
        if not isinstance(found, list) or not 0 < len(found) <= MOST or not all(isinstance(x, dict) for x in found):
            raise UsageError(f"A drill is a list of 1 to {MOST} faults.", _DRILL_HINT)
        return FaultPlan.of_entries(found, text, seed=seed, rank=None, round=None)

    def drill(self) -> dict[str, str]:
        """Return the environment variable that makes a run's workers ask before each fault of the plan."""
        return {ENV_DRILL: json.dumps([self.seed, *(asdict(fault) for fault in self.faults)])} if self.faults else {}

    @staticmethod
    def of(environ: Mapping[str, str]) -> FaultPlan:
        """Read the plan from an environment; empty if there is none."""
        text = environ.get(ENV_FAULTS, "")
        try:
            return FaultPlan.loads(text) if text.strip() else FaultPlan()
        except UsageError as error:
            raise UsageError(f"{ENV_FAULTS}: {error.message}", error.hint) from None

    def environment(self) -> dict[str, str]:
        """Return the environment variable that makes a run's workers follow the plan."""
        return {ENV_FAULTS: self.dumps()}


def reached(moment: str, step: int) -> None:
    """Fail if the environment's plan says so; call this when the process reaches one of :data:`MOMENTS` of a step."""
    for fault in _due(moment, step, flips=False):
        _strike(fault)


def flips(step: int) -> list[Fault]:
    """Return what the plan has this process flip in the step after ``step``; each is returned once."""
    return [*_due("step", step, flips=True)]


def _due(moment: str, step: int, *, flips: bool) -> Iterator[Fault]:
    text, drill = os.environ.get(ENV_FAULTS, ""), os.environ.get(ENV_DRILL, "")
    if not text and not drill:
        return
    # A process may go on in another round, as another rank.
    round_number = int(os.environ.get(ENV_ROUND) or int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) + 1)
    rank, world_size = int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)
    left = _left(text, drill)
    for entry in tuple(left):
        number, fault, seed = entry
        due = fault.at == moment and fault.step in (None, step) and fault.round in (None, round_number)
        due = due and flips == (fault.do == "flip")
        failing = zlib.crc32(f"{seed} {number}".encode()) % world_size if fault.rank is None else fault.rank
        if due and rank == failing:
            left.remove(entry)
            if seed is None:
                print(f"[elastic-launch] planned fault: {fault.told(step)}", file=sys.stderr, flush=True)
            if seed is None or _ordered(number, step, rank):
                yield fault


@functools.cache
def _left(text: str, drill: str) -> list[tuple[int, Fault, int | None]]:
    """Return the faults that have not happened in this process: position in the plan, fault, and seed of its drill."""
    planned = enumerate(FaultPlan.of({ENV_FAULTS: text}).faults)
    seed, *entries = json.loads(drill) if drill else [0]
    return [
        *((number, fault, None) for number, fault in planned),
        *((number, Fault(**entry), seed) for number, entry in enumerate(entries)),
    ]


def _ordered(number: int, step: int, rank: int) -> bool:
    """Ask the agent about a fault of the drill; return whether this process is to carry it out."""
    address = os.environ.get(ENV_SOCKET, "")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(ANSWER_TIMEOUT)
            sock.connect("\0" + address[1:] if address.startswith("@") else address)
            sock.sendall(pack(FaultDue(number, step, rank)))
            answer = unpack(sock.recv(4096).strip())
    except (OSError, ProtocolError) as error:
        text = f"fault {number} of the drill does not happen at step {step}: the agent has not answered ({error})"
        print(f"[elastic-launch] {text}", file=sys.stderr, flush=True)
        return False
    return isinstance(answer, FaultOrder) and answer.strikes


def _strike(fault: Fault) -> None:
    match fault.do:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(1)  # works from any thread
        case "slow":
            time.sleep(fault.seconds)
        case "disconnect":
            _disconnect()
        case _:
            while True:  # hang
                time.sleep(3600)


def _disconnect() -> None:
    """Shut down this process' TCP connections; listening sockets stay, since gloo ends the process without them."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            descriptor = os.dup(int(name))
            try:
                found = socket.socket(fileno=descriptor)
            except OSError:  # another kind of file
                os.close(descriptor)
                continue
            with found:
                internet = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
                if internet and not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.shutdown(socket.SHUT_RDWR)


_DRILL_HINT = "Write a list such as [{step: 20, rank: 1, do: kill}, {step: 40, do: freeze, seconds: 10}]."


def _malformed(text: str) -> UsageError:
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return UsageError(
        f"{shown!r} is not a fault plan.", 'It is a list of objects in JSON, such as [{"rank": 1, "step": 20}].'
    )
