"""The process of a program: its standard streams, early signals, and exit."""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from elastic_launch.errors import ElasticLaunchError, ExitCode, UsageError
from elastic_launch.system.interrupts import end_quietly
from elastic_launch.system.termination_log import write_termination_log
from elastic_launch.system.writer_thread import IDLE, Writer, flush_all

PROGRAM = "elastic-launch"

GIVEN_UP = "c10d-call"
"""Name of threads whose calls are abandoned after their timeout."""

LOST_OUTPUT = 120
"""Exit code, as of the interpreter, if all went well but the output could not be written."""


def exiting(act: Callable[[], int]) -> NoReturn:
    """Exit with the code that ``act`` returns, or as after Ctrl-C, whatever started this process and however."""
    end_quietly()
    open_streams()
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        # The parent ignores exit codes, and with this setting the kernel would not keep those of the workers either.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if os.getpid() == 1:
        _end_by_signals()
    try:
        code = act()
    except KeyboardInterrupt:  # raised by another package's handler
        code = ExitCode.INTERRUPTED
    _leave(code)


def reported(act: Callable[[], int]) -> int:
    """Return what ``act`` returns; if it raises an error, print it and return its exit code."""
    try:
        return act()
    except ElasticLaunchError as error:
        text = f"{PROGRAM}: error: {error}"
        words = f"exit code {error.exit_code}: {error.message}\n{error.hint}\n"
        # Neither a console without a reader nor a hanging file system may block this process.
        with contextlib.closing(Writer("last words", limit=len(text), patience=IDLE)) as writer:
            writer.put(lambda data: write_termination_log(words))
            writer.put(lambda data: print(text, file=sys.stderr, flush=True))
        return error.exit_code


def check_kernel() -> None:
    """Check that processes can be watched on this kernel, which is needed to start workers.

    Raises:
        UsageError: if they cannot.
    """
    if not hasattr(os, "pidfd_open") or not hasattr(signal, "pidfd_send_signal"):
        raise UsageError(
            f"{sys.executable} was built for Linux before 5.3: its os module has no pidfd_open.",
            "Use another build of Python, such as that of your distribution or of python.org.",
        )
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return  # which has its own remedies
        raise UsageError(
            f"the kernel, {os.uname().sysname} {os.uname().release}, lets no process be watched: "
            f"pidfd_open(2) fails: {error.strerror}.",
            "Linux 5.3 or newer is needed; in a container its seccomp profile must allow pidfd_open.",
        ) from None


def _leave(code: int) -> NoReturn:
    """Exit with a code, as the interpreter does, except that it is not torn down.

    Tearing down all modules takes half a second with torch, for which the caller would wait. An abandoned
    thread would abort the process if its call returned meanwhile: the call is C++ and does not allow its thread to be
    unwound. Such a thread is not waited for, nor is one that hangs in a write, which may hold a lock. Files that are
    open are not flushed, other than those of logging and the standard streams.
    """
    if not flush_all():
        os._exit(code)
    if any(thread.name == GIVEN_UP for thread in threading.enumerate()):
        logging.shutdown()
    elif sys.gettrace() is not None or sys.getprofile() is not None:
        sys.exit(code)  # to what reports at the end
    else:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()  # logging's is one of them
    os._exit(code if _flushed() else code or LOST_OUTPUT)


def _flushed() -> bool:
    """Flush the standard streams; return whether all of the output was written or not wanted, and say so if not."""
    lost = ""
    try:
        sys.stdout.flush()
    except (ValueError, BrokenPipeError):  # it is closed, or its reader is gone
        pass
    except OSError as error:
        lost = str(error.strerror)
    with contextlib.suppress(OSError, ValueError):
        if lost:
            print(f"[{PROGRAM}] the output could not be written: {lost}", file=sys.stderr)
        sys.stderr.flush()
    return not lost


def open_streams() -> None:
    """Open those of descriptors 0 to 2 that were closed: else a socket would get the number, and workers inherit it.

    What the locale cannot express is escaped in the output, as Python does on stderr.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    # The interpreter found these closed and set them to None.
    sys.stdout = sys.stdout or io.TextIOWrapper(io.FileIO(1, "w", closefd=False), "utf-8", "backslashreplace")
    sys.stderr = sys.stderr or io.TextIOWrapper(io.FileIO(2, "w", closefd=False), "utf-8", "backslashreplace")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        with contextlib.suppress(OSError):  # it writes what is buffered; the end reports that this failed
            sys.stdout.reconfigure(errors="backslashreplace")


def _end_by_signals() -> None:
    """Let signals end process 1 like any other process, before and after the agent's handlers (pid_namespaces(7))."""

    def end(number: int, frame: object) -> NoReturn:
        try:
            text = f"exit code {128 + number}: stopped by {signal.Signals(number).name}\n"
            write_termination_log(text, unless_written=True)  # a message of the agent is more precise
        finally:
            os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, end)
