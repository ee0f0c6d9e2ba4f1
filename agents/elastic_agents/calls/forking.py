"""Workers that are forked from the caller, for ``start_method="fork"``.

A worker must be both a child of the agent and a copy of the caller. So the caller forks a process, which forks a second
one and then becomes the agent by an exec. The second process is still a copy of the caller, and forks the workers as a
warm server does (:mod:`elastic_agents.warm.server`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from typing import NoReturn

from elastic_agents.calls.worker import call
from elastic_agents.warm.run_script import BLOCKED, await_orders, die_with_parent
from elastic_agents.warm.server import fork_on_demand

__all__ = ["fork_agent"]


def fork_agent(
    command: Callable[[int, int, int], list[str]],
    env: Mapping[str, str],
    inherit: Sequence[int],
    function: Callable[..., object],
    args: tuple[object, ...],
    results: Sequence[int],
) -> int:
    """Fork the agent's process, and from it the process that forks the workers; return the pid of the first.

    Args:
        command: builds the agent's command from the pid of the second process and the descriptors of the socket to it
            and of the pipe from it.
        inherit: descriptors for the agent alone.
        results: by local rank, descriptors for what a worker's function returns.

    Raises:
        OSError: if no process can be forked.
    """
    with contextlib.ExitStack() as stack:
        orders, theirs = map(stack.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
        source, tell = os.pipe2(os.O_CLOEXEC)
        for descriptor in (source, tell):
            stack.callback(os.close, descriptor)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()  # otherwise each worker would write what is buffered
        with warnings.catch_warnings():  # about other threads: that is the caller's own choice
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid:
            return pid
        try:  # must never return into the caller's code
            os.setsid()
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
            if server := os.fork():
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                for descriptor in (*inherit, orders.fileno(), source):
                    os.set_inheritable(descriptor, True)
                argv = command(server, orders.fileno(), source)
                os.execve(argv[0], argv, dict(env))
            for descriptor in (*inherit, orders.detach(), source):
                os.close(descriptor)
            _serve(theirs, tell, sorted(mask), function, args, results)
        finally:
            os._exit(127)


def _serve(
    theirs: socket.socket,
    tell: int,
    mask: Sequence[int],
    function: Callable[..., object],
    args: tuple[object, ...],
    results: Sequence[int],
) -> NoReturn:
    """Fork workers until the agent hangs up; in each worker, wait for orders and call the function."""
    os.setsid()
    die_with_parent()
    os.write(tell, json.dumps({"ready": []}).encode() + b"\n")
    agent = fork_on_demand(theirs)
    theirs.close()
    os.close(tell)
    orders = await_orders(agent)
    orders.take_place({})
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    local_rank = orders.argv[-1]
    mine = results[int(local_rank)]
    for descriptor in results:
        if descriptor != mine:
            os.close(descriptor)
    worker = get_context("fork").Process(target=call, args=(lambda: (function, args), local_rank, mine))
    os._exit(worker._bootstrap())  # type: ignore[attr-defined]
