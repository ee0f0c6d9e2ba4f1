"""Ends waits for exchanges of a broken round that gloo does not end.

When a connection fails, gloo wakes the threads that wait for messages which have not begun, but no thread whose message
is under way: ``signalException`` in gloo's ``transport/tcp/pair.cc`` does not look at those. A peer that has asked for
a message and is killed leaves such a thread behind; so does one that is killed in the middle of a large message.
Nothing can wake that thread before the group's timeout.

What waits for it in Python can be told that the exchange has failed, once gloo has closed all connections of the round,
so that nothing arrives, and all of gloo's threads that execute works sleep, so that none still copies what has arrived.
The thread that is left behind writes nothing, and its group stays in the process, see
:meth:`elastic_launch.training.live.groups.RoundGroups.lost`.

Other waits in torch's C++ code are not ended: those of compiled graphs, of ``DistributedDataParallel`` and of DTensor's
operators.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from torch._C._distributed_c10d import OpType  # type: ignore[attr-defined]
from torch.distributed import Work

_LOOK_S = 0.05
"""Seconds between two looks at whether an exchange that has not ended will end."""

_LOOK = timedelta(seconds=_LOOK_S)

_ENDING = 10.0
"""Seconds in which a helper's thread must end."""

_FOREVER = timedelta(0)  # torch's value for a wait without a timeout

_TRANSFERS = [int(each) for each in (OpType.SEND, OpType.RECV, OpType.RECVANYSOURCE)]
"""For these, gloo has to wake the very thread that calls ``wait()``, and a timeout would break the group."""

_TIMED_OUT = "Operation timed out!"  # what torch's Work.wait() says if the work goes on

_LOST = "The process groups of this round are disconnected, and this exchange does not end."

_torchs_wait = Work.wait


_waits: Waits | None = None


def wait_for(work: Work | None, timeout: timedelta = _FOREVER) -> None:
    """Wait for a work of gloo's, if there is one, in the way of the :class:`Waits` that are in force, if any.

    Raises:
        RuntimeError: if it fails.
    """
    if _waits is not None and type(work) is Work:
        _waits.wait(work, timeout)
    elif work is not None:
        work.wait(*([timeout] if timeout else []))


def on_host(exchange: Callable[..., Work | None], *arguments: Any, **options: Any) -> None:
    """Call a collective of torch.distributed with tensors in host memory, and wait for it by :func:`wait_for`.

    Raises:
        RuntimeError: if it fails.
    """
    wait_for(exchange(*arguments, **options, async_op=True))


def wait_for_all(works: Sequence[Work]) -> None:
    """Wait for works of one backend, likewise, with one change of threads where :func:`wait_for` would need many.

    Raises:
        RuntimeError: if one of them fails.
    """
    if _waits is None:
        for work in works:
            work.wait()
    else:
        _waits.wait_in(lambda: [_torchs_wait(work) for work in works])


def wait_in(function: Callable[[], Any]) -> Any:
    """Call a function that exchanges with gloo and waits in torch's C++ code, likewise; return what it returns.

    It runs in another thread, without this one's modes, such as autocast.

    Raises:
        RuntimeError: if the exchange fails.
    """
    return function() if _waits is None else _waits.wait_in(function)


class Waits:
    """Lets waits for works of gloo's end which will not end, until it is closed. Any thread may wait.

    Args:
        lost: whether works that have not ended by now will not end.
        all_works: whether all works of this process are gloo's: then torch's ``Work.wait`` is replaced, also for the
            script's own use. Otherwise only :func:`wait_for` and :func:`on_host` end, which the library has for its
            own: nothing tells a work of gloo's from one of NCCL's.
    """

    def __init__(self, lost: Callable[[], bool], *, all_works: bool) -> None:
        global _waits
        self._lost = lost
        self._idle: list[_Helper] = []
        self._pid = os.getpid()
        # torch would take the stack of each look that ends, and print that it does.
        self._by_looks = os.environ.get("TORCH_SHOW_CPP_STACKTRACES", "0") == "0"
        _waits, self._all_works, self._open = self, all_works, True
        if all_works:
            # A subclass may call it for its own work: torch tells that by the name and the first argument.
            def wait(work: Work, timeout: timedelta = _FOREVER) -> bool:
                return self.wait(work, timeout) if type(work) is Work else _torchs_wait(work, timeout)

            Work.wait = wait  # type: ignore[method-assign, assignment]

    def close(self) -> None:
        """Put torch's method back, and end the threads that have nothing to wait for."""
        global _waits
        if _waits is self:
            _waits = None
            Work.wait = _torchs_wait  # type: ignore[method-assign]
        self._open = False
        while self._idle:
            self._idle.pop().close()

    def wait(self, work: Work, timeout: timedelta = _FOREVER) -> bool:
        """Wait for a work; see torch's ``Work.wait``.

        Raises:
            RuntimeError: if it fails, or does not end.
        """
        if os.getpid() != self._pid:  # a fork has none of the helpers
            return _torchs_wait(work, timeout)
        if timeout and work._get_op_type() not in _TRANSFERS:  # type: ignore[attr-defined]
            return _torchs_wait(work, timeout)
        if not self._by_looks or work._get_op_type() in _TRANSFERS:  # type: ignore[attr-defined]
            return bool(self._in_helper(partial(_torchs_wait, work, timeout)))
        while not work.is_completed():
            try:
                return _torchs_wait(work, _LOOK)
            except RuntimeError as error:
                if _TIMED_OUT not in str(error):
                    raise
            if not work.is_completed():
                self._check()
        return _torchs_wait(work)

    def wait_in(self, function: Callable[[], Any]) -> Any:
        """See :func:`wait_in`."""
        # A work of NCCL's has the streams wait that the thread uses which waits for it.
        return self._in_helper(function) if self._all_works else function()

    def _in_helper(self, function: Callable[[], Any]) -> Any:
        if os.getpid() != self._pid or not self._open:
            return function()
        self._check()  # else each of many works that do not end would leave a thread behind
        try:
            helper = self._idle.pop()
        except IndexError:
            try:
                helper = _Helper()
            except RuntimeError:  # no more threads
                return function()
        done, value = helper.call(function, self._check)
        if self._open:
            self._idle.append(helper)
        else:
            helper.close()  # while it made the call, this object was closed
        if done:
            return value
        try:
            raise value
        finally:
            del value  # its traceback has this frame

    def _check(self) -> None:
        if self._lost():
            raise RuntimeError(_LOST)


class _Helper:
    """A thread that makes one call at a time, and may be left behind in it."""

    def __init__(self) -> None:
        self._calls = SimpleQueue[Callable[[], Any] | None]()
        self._answers = SimpleQueue[tuple[bool, Any]]()
        self._thread = threading.Thread(target=self._run, name="elastic-launch transfer", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Any], check: Callable[[], object]) -> tuple[bool, Any]:
        """Call a function; return whether it has returned, and what, or the error that it has raised.

        Args:
            check: called from time to time; if it raises an error, this object must not be used any more.
        """
        self._calls.put(function)
        try:
            while True:
                with suppress(Empty):
                    return self._answers.get(timeout=_LOOK_S)
                check()
        except BaseException:
            self._calls.put(None)  # so that the thread ends once the call does, if ever
            raise

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join(_ENDING)

    def _run(self) -> None:
        while self._answered():
            pass

    def _answered(self) -> bool:
        """Make one call; its work and its error are not kept until the next one comes."""
        if (function := self._calls.get()) is None:
            return False
        try:
            answer = True, function()
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            answer = False, error
        self._answers.put(answer)
        del answer, function  # an error's traceback has this frame
        return True
