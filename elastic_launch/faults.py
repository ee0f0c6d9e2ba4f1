"""Fault injection: a plan of which worker fails when, to test a run's recovery before it is needed.

A plan is passed in the environment, from the launcher to its workers::

    ELASTIC_LAUNCH_FAULTS='[{"rank": 1, "step": 20}]' elastic-launch ... train.py

Each fault belongs to one round, and a worker that fails ends its round. So the fault happens once, and not again when
the step is repeated.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NoReturn

from elastic_launch.contract import ENV_ROUND
from elastic_launch.errors import UsageError

__all__ = ["ENV_FAULTS", "MOMENTS", "WAYS", "Fault", "FaultPlan", "Rehearsal", "reached"]

ENV_FAULTS = "ELASTIC_LAUNCH_FAULTS"

MOMENTS = {
    "step": "behind step {step}",
    "snapshot": "in the snapshot of step {step}",
    "drain": "as all stop after step {step}",
    "leave": "with step {step} in memory, as it leaves",
    "restore": "as step {step} is restored",
}
"""The moments at which a fault may happen, and their description for a step."""

WAYS = {"kill": "kills itself", "exit": "exits with 1", "hang": "hangs", "slow": "waits {seconds:g} s"}
"""The ways in which a worker fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One failure of one worker.

    Attributes:
        rank: the worker's rank in the round.
        step: optimizer steps done, of the whole training; None for the first time that it reaches the moment.
        at: one of :data:`MOMENTS`: when the step is done; while its snapshot is being written into memory; when all
            ranks have agreed to stop after it and nothing is saved yet; when it is saved and the agent does not know
            yet; when a snapshot of it has been found and read, but not yet given to ranks that have none.
        round: number of the round; under torchrun, which does not count rounds, of the start: 1 for the first.
        do: one of :data:`WAYS`: SIGKILL; exit code 1 without output; hang forever; or wait for some seconds.
        seconds: how long ``slow`` waits.

    Raises:
        UsageError: if the fault is invalid.
    """

    rank: int
    step: int | None = None
    at: str = "step"
    round: int = 1
    do: str = "kill"
    seconds: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("rank", 0), ("step", 0), ("round", 1)):
            value = getattr(self, name)
            if (name, value) != ("step", None) and (type(value) is not int or value < least):
                raise UsageError(f"A fault's {name} cannot be {value!r}.", f"Give a whole number from {least}.")
        for name, known in (("at", MOMENTS), ("do", WAYS)):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in known:
                raise UsageError(f"A fault cannot have {name!r}: {value!r}.", f"There are {', '.join(known)}.")
        if isinstance(self.seconds, bool) or not isinstance(self.seconds, int | float) or not 0 <= self.seconds < 1e6:
            raise UsageError(f"A fault cannot take {self.seconds!r} seconds.", "Give a number from 0 to 1,000,000.")
        if (self.seconds > 0) != (self.do == "slow"):
            raise UsageError(f"The fault {self.do!r} cannot take {self.seconds:g} s.", "Only slow takes seconds.")

    def told(self, step: int) -> str:
        """Return what happens at a step, as text."""
        return f"rank {self.rank} {WAYS[self.do]} {MOMENTS[self.at]}, in round {self.round}".format(
            step=step, seconds=self.seconds
        )


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The faults of a run; ``plan + plan`` combines both."""

    faults: tuple[Fault, ...] = ()

    @staticmethod
    def fail_at(rank: int, step: int | None = None, **how: Any) -> FaultPlan:
        """Return a plan of one fault: by default a worker is killed when a step is done.

        Args:
            how: other attributes of :class:`Fault`.

        Raises:
            UsageError: if the fault is invalid.
        """
        return FaultPlan((Fault(rank=rank, step=step, **how),))

    def __add__(self, other: FaultPlan) -> FaultPlan:
        return FaultPlan(self.faults + other.faults)

    def dumps(self) -> str:
        """Return the plan as JSON: a list of objects."""
        return json.dumps([asdict(fault) for fault in self.faults])

    @staticmethod
    def loads(text: str) -> FaultPlan:
        """Parse the result of :meth:`dumps`; attributes with a default may be left out.

        Raises:
            UsageError: if it is not a plan.
        """
        try:
            entries = json.loads(text)
        except (ValueError, RecursionError):
            raise _malformed(text) from None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise _malformed(text)
        names = {field.name for field in fields(Fault)}
        for entry in entries:
            if unknown := sorted(entry.keys() - names):
                raise UsageError(f"A fault has no {unknown[0]!r}.", f"It has {', '.join(sorted(names))}.")
            if "rank" not in entry:
                raise UsageError(f"The fault {json.dumps(entry)} has no rank.", "Say which worker is to fail.")
        return FaultPlan(tuple(Fault(**entry) for entry in entries))

    @staticmethod
    def of(environ: Mapping[str, str]) -> FaultPlan:
        """Read the plan from an environment; empty if there is none.

        Raises:
            UsageError: if the variable is not a plan.
        """
        text = environ.get(ENV_FAULTS, "")
        try:
            return FaultPlan.loads(text) if text.strip() else FaultPlan()
        except UsageError as error:
            raise UsageError(f"{ENV_FAULTS}: {error.message}", error.hint) from None

    def environment(self) -> dict[str, str]:
        """Return the environment variable that makes a run's workers follow the plan."""
        return {ENV_FAULTS: self.dumps()}


class Rehearsal:
    """One worker's part in a plan.

    Args:
        strike: carries out a fault.
    """

    def __init__(self, plan: FaultPlan, *, rank: int, round: int, strike: Callable[[Fault], None]) -> None:
        self._left = [fault for fault in plan.faults if (fault.rank, fault.round) == (rank, round)]
        self._strike = strike

    def reached(self, moment: str, step: int) -> None:
        """Note that the worker has reached a moment of a step."""
        for fault in tuple(self._left):
            if fault.at == moment and fault.step in (None, step):
                self._left.remove(fault)
                print(f"[elastic-launch] planned fault: {fault.told(step)}", file=sys.stderr, flush=True)
                self._strike(fault)


def reached(moment: str, step: int) -> None:
    """Fail if the environment's plan says so; call this when the process reaches one of :data:`MOMENTS` of a step.

    Raises:
        UsageError: if the environment's plan is invalid.
    """
    text = os.environ.get(ENV_FAULTS, "")
    if text:
        # A process may go on in another round, as another rank.
        number = os.environ.get(ENV_ROUND) or int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) + 1
        _rehearsal(text, int(os.environ.get("RANK") or 0), int(number)).reached(moment, step)


@functools.cache
def _rehearsal(text: str, rank: int, number: int) -> Rehearsal:
    return Rehearsal(FaultPlan.of({ENV_FAULTS: text}), rank=rank, round=number, strike=_strike)


def _strike(fault: Fault) -> None:
    match fault.do:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(1)  # works from any thread
        case "slow":
            time.sleep(fault.seconds)
        case _:
            _hang()


def _hang() -> NoReturn:
    while True:
        time.sleep(3600)


def _malformed(text: str) -> UsageError:
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return UsageError(
        f"{shown!r} is no plan of faults.", 'It is a list of objects in JSON, such as [{"rank": 1, "step": 20}].'
    )
