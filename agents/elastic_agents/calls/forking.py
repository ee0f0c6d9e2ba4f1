"""Workers that are forked from the caller, for ``start_method="fork"``.

A worker must be both a child of the agent and a copy of the caller. So the caller forks a process, which forks a second
one and then becomes the agent by an exec. The second process is still a copy of the caller, and forks the workers as a
warm server does (:mod:`elastic_agents.warm.server`).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing import get_context
from typing import NoReturn

from elastic_agents.calls.function import ForkedCall
from elastic_agents.calls.held_signals import HeldSignals
from elastic_agents.calls.worker import call
from elastic_agents.prctl import signal_at_parents_death
from elastic_agents.warm.run_script import await_orders
from elastic_agents.warm.server import fork_on_demand

_forking = threading.Lock()
"""Held while warnings are suppressed, which are those of the whole process."""


def fork_agent(
    command: Callable[[int, int, int], list[str]],
    env: Mapping[str, str],
    inherit: Sequence[int],
    held: HeldSignals,
    called: ForkedCall,
) -> int:
    """Fork the agent's process, and from it the process that forks the workers; return the pid of the first.

    Args:
        command: builds the agent's command from the pid of the second process and the descriptors of the socket to it
            and of the pipe from it.
        inherit: descriptors for the agent alone.
        held: holds back all signals; a worker starts with the handlers and the mask from before.

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
        with _forking, warnings.catch_warnings():  # about other threads: that is the caller's own choice
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = _fork_without_garbage()
        if pid:
            return pid
        try:  # must never return into the caller's code
            held.restore()
            os.setsid()
            if server := os.fork():
                for descriptor in (*inherit, orders.fileno(), source):
                    os.set_inheritable(descriptor, True)
                argv = command(server, orders.fileno(), source)
                os.execve(argv[0], argv, dict(env))
            for descriptor in (*inherit, orders.detach(), source):
                os.close(descriptor)
            _serve(theirs, tell, held.mask, called)
        finally:
            os._exit(127)


def _fork_without_garbage() -> int:
    """Fork; the child never collects the parent's garbage: a process group in it would wait for threads not there."""
    collects = gc.isenabled()
    gc.disable()
    try:
        pid = os.fork()
        if not pid:
            gc.freeze()
    finally:
        if collects:
            gc.enable()
    return pid


def _serve(theirs: socket.socket, tell: int, mask: Collection[int], called: ForkedCall) -> NoReturn:
    """Fork workers until the agent hangs up; in each worker, wait for orders and call the function."""
    os.setsid()
    signal_at_parents_death(signal.SIGKILL)
    # What the caller has set up must not act in this process: its handler might wait for the processes forked here, and
    # its streams may be locked by a thread that does not exist here. The name keeps those streams from being flushed.
    _streams, on_child = (sys.stdout, sys.stderr), signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    signal.set_wakeup_fd(-1)
    os.write(tell, json.dumps({"ready": []}).encode() + b"\n")
    agent = fork_on_demand(theirs, os.close)
    theirs.close()
    os.close(tell)
    orders = await_orders(agent)
    orders.take_place({})
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    _limit_threads()
    # As newer versions of Python do: this may be a thread of a pool, which would wait for itself at the end.
    vars(sys.modules.get("concurrent.futures.thread", sys)).get("_threads_queues", {}).clear()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL if on_child is None else on_child)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    local_rank = orders.argv[-1]
    mine = called.results[int(local_rank)]
    for descriptor in called.results:
        if descriptor != mine:
            os.close(descriptor)
    interrupted = False

    def act() -> None:
        nonlocal interrupted
        try:
            call(lambda: (called.function, called.args), local_rank, mine)
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this frame
            raise

    code = get_context("fork").Process(target=act)._bootstrap()  # type: ignore[attr-defined]
    if interrupted:  # ended by the signal, like an interpreter
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _limit_threads() -> None:
    """Let torch compute with as many threads as the environment says, or one.

    After a fork there are none of OpenMP's threads, which the caller may have used, and GNU OpenMP would wait for them.
    """
    limit = getattr(sys.modules.get("torch"), "set_num_threads", None)
    if limit is not None:
        wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
        limit(max(1, int(wanted)) if wanted.isdecimal() else 1)
