"""The process groups of one round: formed, broken from another thread, and left without ending the process."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Imported later, the defaults of its functions would hold the first round's default group.
import torch.distributed.nn.functional
from torch._C._distributed_c10d import Backend
from torch.distributed import ProcessGroup, distributed_c10d

from elastic_launch.collective_dump import forget_collectives
from elastic_launch.system.allowance import Allowance
from elastic_launch.training.live.sockets import GroupSockets
from elastic_launch.training.live.turns import quick_turns
from elastic_launch.training.live.waits import on_host

_ASLEEP_S = 0.1
"""Seconds for which gloo's threads sleep before one of them counts as left behind."""

_LEFT_S = 1.0
"""Seconds for groups and sockets to be gone after the groups were destroyed."""

_POLL = 0.001

_ERRORS_ONLY = 2
"""The level at which torch's C++ code logs errors only."""


_PART_OF_WAIT = 0.02
"""Pause between two looks at a GPU, as a part of the time waited so far. The wait may take longer by this part."""

_LONGEST_PAUSE = 1e-3
"""Maximum seconds of such a pause."""


class GroupsRemainError(RuntimeError):
    """Process groups of the last round remain in this process, so that it cannot take part in another round."""


class RoundGroups:
    """The process groups of one round: joined, broken from another thread, and left. Each round needs a new object.

    Use: form groups only within :meth:`forming`. When the round breaks, call :meth:`disconnect` from any thread: the
    thread that waits in a collective gets a RuntimeError. That thread then waits for all asynchronous collectives
    that it has posted (``Work.wait()`` raises for each; what they write to is undefined), drops them, the errors'
    tracebacks, which keep frames and thus works alive, and everything that holds a group
    (``DistributedDataParallel``), and calls :meth:`leave`.

    Other backends, such as NCCL's: :meth:`disconnect` aborts them. TORCH_NCCL_ASYNC_ERROR_HANDLING must be 0 in the
    worker's environment: with any other value, NCCL's watchdog may end the process when a peer fails. With 0, no
    collective raises after an abort: it ends, and what it has written is undefined, so check :attr:`disconnected` after
    waiting for the device. Nor does the watchdog end a collective that outlasts the timeout; see ``timeout_watch``.

    Args:
        last: those of the round before, which are released as soon as a group of this round is formed: then all members
            have left them.
    """

    def __init__(self, last: RoundGroups | None = None) -> None:
        self._last = last
        self._sockets = GroupSockets()
        self._inner = GroupSockets()  # of groups that disconnect() leaves alone while they are held
        self._holds = 0
        self._ours: list[weakref.ref[ProcessGroup]] = []
        self._excepthooks: list[tuple[Any, Any]] = []
        self._lock = threading.Lock()
        self._forming = False
        self._log_level: int | None = None  # to put back
        self._threads: dict[str, tuple[str, ...]] = {}  # those that execute works, at the last look, and
        self._asleep_since = 0.0  # since when they have been as they were then
        self._lost = False  # whether one of them is left behind

    @contextmanager
    def forming(self, *, inner: bool = False) -> Iterator[None]:
        """Wrap each creation of a group: ``init_process_group`` with its store client, or ``new_group``.

        The groups that appear meanwhile are the round's, and so are their sockets. Only one thread may form groups.
        Those that are ``inner``, see :meth:`held`, are formed after the first one.

        Raises:
            RuntimeError: if :meth:`disconnect` was called before the group was formed.
        """
        before, hook = set(_groups()), sys.excepthook
        port, size = (int(os.environ.get(name) or 0) for name in ("MASTER_PORT", "WORLD_SIZE"))
        with (self._inner if inner else self._sockets).opening(port, size):
            self._forming = True
            try:
                yield
            finally:
                with self._lock:
                    self._forming = False
                    level, self._log_level = self._log_level, None
                if level is not None:
                    _log_from(level)
                self._ours += [weakref.ref(group) for group in _groups() if group not in before]
                if sys.excepthook is not hook:
                    self._excepthooks.append((hook, sys.excepthook))
                if self.disconnected:
                    self._abort()
        if self._last is not None:
            self._last.release()
            self._last = None

    def release(self) -> None:
        """Close what :meth:`leave` keeps of the connections for members that leave later, here and in rounds before."""
        self._sockets.release()
        self._inner.release()
        if self._last is not None:
            self._last.release()

    def disconnect(self) -> int:
        """Make all collectives of these groups fail, the present ones and later ones; callable from any thread.

        gloo's fail within milliseconds, whether the peers run, are frozen or dead. If a group is being formed, that
        fails, too, but only after its store is connected: one that does not answer is waited for until its timeout.

        A caller still needs a limit of its own: gloo may not wake a rank whose message is under way, so that it waits
        until the group's timeout. See :meth:`lost`.

        Returns:
            The number of connections that this call has shut down; 0 if all were shut down before.
        """
        with self._lock:
            if self._forming and self._log_level is None:
                # A store's client that waits would print a warning with a stack of some 20 lines of C++.
                self._log_level = _log_from(_ERRORS_ONLY)
        shut = self._sockets.shut_down()
        with self._lock:
            if not self._holds:
                shut += self._inner.shut_down()
        self._abort()
        return shut

    def lost(self) -> bool:
        """Whether works of gloo's that have not ended by now will not end; call it from time to time.

        gloo wakes a thread before it closes the connection: a thread that sleeps for some time after all connections
        were closed will not be woken. Once this is so, the groups' threads and listening sockets remain until the
        process ends, as gloo would wait for that thread.
        """
        with self._lock:
            if self._lost or not self.disconnected or self._sockets.connected() or self._inner.connected():
                return self._lost
            threads, now = _gloos_threads(), time.monotonic()
            if threads != self._threads:
                self._threads, self._asleep_since = threads, now
            sleep = bool(threads) and all(state == "S" for state, *_ in threads.values())
            self._lost = sleep and now - self._asleep_since >= _ASLEEP_S
            if self._lost:
                for each in filter(_is_gloo, chain.from_iterable(map(_backends, _groups()))):
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
            return self._lost

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within this context, :meth:`disconnect` leaves inner groups connected; on exit, it does not any more.

        So ranks that are all still in the round can complete what they exchange among themselves.
        """
        with self._lock:
            self._holds += 1
        try:
            yield
        finally:
            with self._lock:
                self._holds -= 1
                ends = not self._holds
            if ends and self.disconnected:
                self._inner.shut_down()

    @property
    def disconnected(self) -> bool:
        """Whether :meth:`disconnect` was called."""
        return self._sockets.broken

    @property
    def breakable(self) -> bool:
        """Whether :meth:`disconnect` can end the collectives of all groups made within :meth:`forming`."""
        loops = self._sockets.loops + self._inner.loops
        return not self.unbreakable and loops >= sum(map(_is_gloo, self._backends()))

    @property
    def unbreakable(self) -> list[str]:
        """The names of the backends whose collectives nothing can end, such as ``ucc``."""
        return sorted({each.name() for each in self._backends() if not _is_gloo(each) and not _can_abort(each)})

    @staticmethod
    def of_gpus() -> list[Any]:
        """Return the backends of all process groups of this process that are not gloo's."""
        return [each for group in _groups() for each in _backends(group) if not _is_gloo(each)]

    @property
    def foreign(self) -> bool:
        """Whether this process has process groups that were not made within :meth:`forming`."""
        return bool(self._foreign())

    def used(self, *others: ProcessGroup) -> int:
        """Return how many collectives this rank has begun on the default group, and others; 0 right after joining."""
        groups = [group for group in (distributed_c10d._world.default_pg, *others) if group is not None]
        return sum(each._get_sequence_number_for_group() for group in groups for each in _backends(group))

    def confirm(self, gpus: Collection[torch.device], timeout: float) -> None:
        """Wait until the GPUs of all ranks have completed what they exchange; called by all ranks after an exchange.

        Once NCCL's communicator is aborted on one rank, a collective that has not ended there may end on another one
        with wrong values, and without an error. What was exchanged counts only if no rank has aborted it before it had
        ended on that rank: then all of them take part in this exchange, which fails otherwise.

        Args:
            gpus: those of this rank.
            timeout: that of the process group, in seconds.

        Raises:
            RuntimeError: if the exchange failed on any rank, or lasts longer than the timeout.
        """
        done: list[Any] = []
        for gpu in gpus:
            done.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
            done[-1].record(torch.cuda.current_stream(gpu))
        began = time.monotonic()
        # Synchronizing would use a CPU all the time, and could not end.
        while not self.disconnected and not all(each.query() for each in done):
            waited = time.monotonic() - began
            if waited > timeout:
                raise RuntimeError(f"Timed out waiting {timeout * 1000:.0f}ms for the GPU to exchange gradients")
            time.sleep(min(waited * _PART_OF_WAIT, _LONGEST_PAUSE))
        if self.disconnected:
            raise RuntimeError("NCCL communicator was aborted, since the round is over")
        on_host(dist.all_reduce, torch.zeros(1, device="cpu"))

    def leave(self) -> None:
        """Destroy all process groups of this process, and wait until they and their sockets are gone.

        After :meth:`disconnect` this depends on no peer, and lets the collectives of those fail that wait for this one.
        Without it, all ranks must have completed all collectives.

        Raises:
            GroupsRemainError: if the script has made groups itself, or if anything still holds one.
        """
        foreign = [_describe(group) for group in self._foreign()]
        held = [(weakref.ref(group), _describe(group)) for group in _groups()]
        epolls = [*self._sockets.close(), *self._inner.close()]
        try:
            # Where the groups of GPUs take longer anyway, there is nothing to gain.
            with quick_turns(epolls if all(map(_is_gloo, self._backends())) and not self._lost else []):
                self._destroy()
                if not foreign:
                    _wait_until_gone(held, *(() if self._lost else (self._sockets, self._inner)))
        finally:
            for each in (self._sockets, self._inner):
                each.end()
        if foreign:
            raise GroupsRemainError(f"The script made process groups itself: {', '.join(foreign)}.")

    def _destroy(self) -> None:
        if self.disconnected and any(map(_can_abort, self._backends())):
            distributed_c10d._abort_process_group()  # destroying would wait for what has been aborted
        elif dist.is_initialized():
            dist.destroy_process_group()
        forget_collectives()
        distributed_c10d._world.group_count = 0  # groups are named by it; one that could not be formed has counted, too
        while self._excepthooks:
            hook, ours = self._excepthooks.pop()
            if sys.excepthook is ours:
                sys.excepthook = hook

    def _foreign(self) -> list[ProcessGroup]:
        ours = [ref() for ref in self._ours]
        return [group for group in _groups() if not any(group is each for each in ours)]

    def _backends(self) -> list[Any]:
        return [each for ref in list(self._ours) if (group := ref()) is not None for each in _backends(group)]

    def _abort(self) -> None:
        """Abort what is not gloo's; several within one group of NCCL's calls, else two can wait for each other."""
        backends = [each for each in self._backends() if _can_abort(each)]
        with _at_once(backends) if backends else nullcontext():
            for each in reversed(backends):
                each.abort()


def _log_from(level: int) -> int | None:
    """Set the level from which torch logs in C++; return the one before, None if this torch does not have one."""
    with suppress(OSError, ValueError):
        variable = ctypes.c_int.in_dll(
            ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so")), "FLAGS_caffe2_log_level"
        )
        before, variable.value = variable.value, level
        return before
    return None


def _groups() -> list[ProcessGroup]:
    return list(distributed_c10d._world.pg_map)


def _backends(group: ProcessGroup) -> list[Any]:
    """Return the backends of a group, each once; TORCH_DISTRIBUTED_DEBUG=DETAIL wraps them."""
    found: list[Any] = []
    for device in group._device_types:
        backend = group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)
        if not any(backend is each for each in found):
            found.append(backend)
    return found or [group]  # a backend written in Python may be a process group itself


def _describe(group: ProcessGroup) -> str:
    return f"{distributed_c10d._world.pg_names[group]} ({group.group_desc})"


def _can_abort(backend: Any) -> bool:
    """Whether ``abort()`` ends the backend's collectives; where nothing overrides it, it does nothing, or raises.

    In torch 2.15 NCCL's backends no longer declare it in Python. One of them says that it calls hooks when it aborts;
    nccl-lazy consists of such backends, and does not say so.
    """
    if _is_gloo(backend):
        return False
    own = type(backend).abort not in (Backend.abort, ProcessGroup.abort)
    return own or getattr(backend, "supports_abort_hooks", False) or backend.name() == "nccl-lazy"


@contextmanager
def _at_once(backends: list[Any]) -> Iterator[None]:
    """Let NCCL take what is called within as one call, as ``_abort_process_group`` of the installed torch does."""
    first = backends[0]
    if hasattr(first, "_group_start"):
        begin, end = first._group_start, first._group_end
    elif len(backends) > 1 and first.supports_coalescing:
        begin, end = first._start_coalescing, first._end_coalescing
    else:
        begin = end = lambda: None
    begin()
    yield
    end()


def _gloos_threads() -> dict[str, tuple[str, ...]]:
    """Return the state of each thread that executes works of gloo's, and for how long it has run and been ready to."""
    found = {}
    for name in os.listdir("/proc/self/task"):
        task = Path("/proc/self/task", name)
        with suppress(OSError, IndexError):  # it has ended
            if (task / "comm").read_text().startswith("pt_gloo"):
                times = (task / "schedstat").read_text().split()[:2]
                found[name] = ((task / "stat").read_text().rpartition(")")[2].split()[0], *times)
    return found


def _is_gloo(backend: object) -> bool:
    return dist.is_gloo_available() and isinstance(backend, distributed_c10d.ProcessGroupGloo)


def _wait_until_gone(held: list[tuple[weakref.ref[ProcessGroup], str]], *sockets: GroupSockets) -> None:
    """Wait until groups and sockets are gone: a thread of gloo or autograd may be the last to drop its reference."""
    allowance, collected = Allowance(_LEFT_S, os.getpid()), False
    while True:
        left = [name for ref, name in held if ref() is not None]
        still_open = sum(each.still_open() for each in sockets)
        if not left and not still_open:
            return
        if not collected:
            gc.collect()  # cycles may hold them, such as that of an error and its traceback
            collected = True
            continue
        if allowance.left() <= 0:
            break
        time.sleep(_POLL)
    if left:
        what = f"Something still holds these process groups of the last round: {', '.join(left)}."
    else:
        what = f"Something still uses {still_open} sockets of the last round's groups, such as an unfinished work."
    raise GroupsRemainError(what)
