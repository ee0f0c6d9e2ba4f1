"""Records what goes into the machines of a real agent, and what comes out.

An agent that is forked (``forked``) with the variable :data:`TRACES` does so. The machines are the same as without it;
``traces`` replays what was recorded.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["TRACES", "Line", "record", "recorded"]

TRACES = "MACHINE_TRACES"
"""The environment variable with the directory to which agents write."""


class Line(NamedTuple):
    """One call of a machine.

    Attributes:
        at: the host's monotonic time at which it had returned.
        process: which agent's process.
        machine: ``leader``, ``node``, ``policy``, or ``store`` for writes of the record.
        key: tells the machines of a process apart; a later ``__init__`` may use it again.
        result: what it returned, or the exception that it raised.
    """

    at: float
    process: str
    machine: str
    key: int
    method: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    result: Any


MACHINES = {
    "leader": "__init__ hello report closed turn give_way depart stop save resize too_large",
    "node": "__init__ begin say importing beats greet take obey",
}
"""The inputs of each machine."""


def record(directory: Path) -> None:
    """Have this process append to a file what goes into its machines and comes out."""
    from elastic_agents import agent
    from elastic_launch.rendezvous.leader.machine import LeaderMachine
    from elastic_launch.rendezvous.leader.service import LeaderService
    from elastic_launch.rendezvous.node.machine import NodeMachine

    directory.mkdir(exist_ok=True)
    process = f"{os.getpid()}-{time.time_ns()}"
    file = os.open(directory / process, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def noting(function: Callable[..., Any], machine: str, name: str, key: int | None = None) -> Callable[..., Any]:
        @wraps(function)
        def noted(*arguments: Any, **options: Any) -> Any:
            mine, given = (id(arguments[0]), arguments[1:]) if key is None else (key, arguments)
            result: Any = None
            try:
                result = function(*arguments, **options)
            except Exception as error:
                result = error
                raise
            finally:
                if result or name != "take":
                    now = time.clock_gettime(time.CLOCK_BOOTTIME)
                    line = (now, process, machine, mine, name, given, options, result)
                    os.write(file, pickle.dumps(line))  # at once: this process may be killed at any time
            return result

        return noted

    for kind, machine in ((LeaderMachine, "leader"), (NodeMachine, "node")):
        for name in MACHINES[machine].split():
            setattr(kind, name, noting(getattr(kind, name), machine, name))
    setattr(agent, "decide", noting(agent.decide, "policy", "decide", 0))  # noqa: B010, the module does not export it
    serve = LeaderService.__init__

    def begin(self: Any, config: Any, listener: Any, write: Any, *rest: Any, **options: Any) -> None:
        serve(self, config, listener, noting(write, "store", "write", 0), *rest, **options)

    setattr(LeaderService, "__init__", begin)  # noqa: B010, mypy refuses a plain assignment


def recorded(directory: Path) -> list[Line]:
    """Return what the agents of a host have recorded, in the order of time; nothing without the directory."""
    found: list[Line] = []
    for path in sorted(directory.glob("*")):
        with path.open("rb") as file:
            try:
                while True:
                    found.append(Line(*pickle.load(file)))
            except (EOFError, pickle.UnpicklingError):
                continue  # the rest of the last line is missing if the process was killed
    return sorted(found, key=lambda line: line.at)
