"""Starts an agent's process for a Python program, forwards signals to it, and reads how the run ended."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import spawn
from types import FrameType
from typing import Any

from elastic_agents.calls.forking import fork_agent
from elastic_agents.calls.function import ForkedCall, memory
from elastic_agents.calls.held_signals import HeldSignals
from elastic_agents.calls.metrics import Monitor, wanted
from elastic_agents.calls.process import Order
from elastic_agents.child import Child, started
from elastic_agents.inbox import handling
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.error_file import ENV_ERROR_FILE

_log = logging.getLogger("elastic_launch")

MARGIN = 10.0
"""Seconds that an agent gets beyond its workers' shutdown timeout before it is killed, if the caller cannot wait."""

NAME = "the agent's process"


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """How an agent's process has ended.

    Attributes:
        report: the report by :mod:`elastic_agents.calls.process`; empty if the process was killed.
        signal: the first signal that the caller received meanwhile, 0 for none.
        exit_code: exit code of the process; -N for signal N; None if it could not be reaped.
    """

    report: dict[str, Any]
    signal: int
    exit_code: int | None
    pid: int


def run_agent(config: LaunchConfig, forked: ForkedCall | None = None) -> AgentEnd:
    """Run this node's part of a run in an agent's process, and wait for its end.

    In the main thread, signals that make an agent leave are forwarded to that process until it ends; the previous
    handlers are restored afterwards. If an exception ends the wait (another handler of the caller's may raise one), the
    process is ended first. Metrics that this process has a handler for are put meanwhile.

    Args:
        forked: what the workers call if they are forked from this process.
    """
    caught: list[int] = []
    with ExitStack() as stack:
        order, report = (memory(name, stack) for name in ("order", "report"))
        monitor, tell = _monitor(config, stack)
        with open(order, "wb", closefd=False) as file:
            token = config.token.reveal() if config.token else None
            # The agent's console lines have the level of this process' own logging, unless LOGLEVEL names one.
            level = None if os.environ.get("LOGLEVEL") else _log.getEffectiveLevel()
            pickle.dump(Order(replace(config, token=None), token, os.getpid(), level, tell), file)
        inherit = [order, report] if tell is None else [order, report, tell]
        held = HeldSignals()
        stack.callback(held.release)
        held.hold()
        if forked is None:
            # In its own session, so that a terminal's signals reach it through the caller only.
            inherit += config.command.inherit
            process = started(_command(order, report), NAME, env=_environment(), pass_fds=inherit)
        else:
            command = partial(_command, order, report)
            process = Child(fork_agent(command, _environment(), inherit, held, forked), NAME)

        def catch(number: int, frame: FrameType | None) -> None:
            caught.append(number)
            process.signal(number)

        try:
            held.restore()
            with _handling(config.signals.leave, catch):
                try:
                    held.release()
                    _await(process, monitor)
                finally:
                    process.end(config.shutdown_timeout + MARGIN)
        finally:
            process.end(config.shutdown_timeout + MARGIN)
        told = os.pread(report, os.fstat(report).st_size, 0)
    # Only now that signals are no longer caught: none is lost.
    return AgentEnd(json.loads(told) if told else {}, caught[0] if caught else 0, process.exit_code, process.pid)


def _command(order: int, report: int, *server: int) -> list[str]:
    # After the interpreter's own path: no module of the caller's can shadow the standard library.
    path = [os.path.abspath(entry) for entry in sys.path if entry]
    code = (
        f"import sys; sys.path += [entry for entry in {path!r} if entry not in sys.path]; "
        f"from elastic_agents.calls.process import main; main{(order, report, *server)}"
    )
    return [os.fsdecode(spawn.get_executable()), "-P", "-c", code]


def _environment() -> dict[str, str]:
    """Return the agent's environment, without the caller's own error file: only the caller writes that one."""
    return {name: value for name, value in os.environ.items() if name != ENV_ERROR_FILE}


def _monitor(config: LaunchConfig, stack: ExitStack) -> tuple[Monitor | None, int | None]:
    """Return the object that puts metrics, and the agent's end of its pipe; None if no handler here wants metrics."""
    if not wanted():
        return None, None
    source, tell = os.pipe2(os.O_CLOEXEC)
    for descriptor in (source, tell):
        stack.callback(os.close, descriptor)
    return Monitor(source, config.role, config.options.monitor_interval), tell


def _await(process: Child, monitor: Monitor | None) -> None:
    if monitor is None:
        process.wait()
        return
    while not process.wait(monitor.pause, monitor.descriptor):
        monitor.put()
    monitor.put()


def _handling(numbers: Sequence[signal.Signals], handler: Any) -> AbstractContextManager[None]:
    """Install a signal handler while entered; does nothing outside the main thread."""
    if threading.current_thread() is threading.main_thread():
        return handling(numbers, handler)
    _log.warning(
        "called from another thread than the main thread: signals to this process do not reach the workers; "
        "they end when this process does"
    )
    return nullcontext()
