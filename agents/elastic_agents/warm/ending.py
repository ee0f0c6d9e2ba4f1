"""Ends a forked worker as the interpreter ends ``python script.py``, except that the interpreter is not torn down.

This follows _PyErr_PrintEx and Py_FinalizeEx (https://github.com/python/cpython/tree/3.11/Python, pythonrun.c and
pylifecycle.c): the exception that ends the script, threads, exit functions, the objects in ``__main__``, standard
streams. Then the process exits at once. Tearing down all modules takes 0.3 s after a fork, and lets C++ destructors
race with threads that wait for the GIL: some hang, others end the process by a signal.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Mapping
from typing import NoReturn

SOCKET = "ELASTIC_LAUNCH_SOCKET"
"""The variable with the agent's socket (elastic_launch.contract.ENV_SOCKET): a worker imports nothing at its end."""

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""The variable with the file for the worker's exception (elastic_launch.error_file.ENV_ERROR_FILE)."""

FLUSH_FAILED = 120
"""Exit code of an interpreter that could not flush its standard streams."""

_PARTS = (types.ModuleType, types.FunctionType, type)
"""Objects that must be destroyed last."""


def end(error: BaseException | None, env: Mapping[str, str], worker: int) -> NoReturn:
    """End this process.

    Args:
        error: the exception that ended its script, if any; to be called when it is no longer being handled.
        env: the worker's environment at its start.
        worker: its pid at its start; a process that the script has forked comes here, too.
    """
    at_once = isinstance(error, SystemExit) and getattr(error, "at_once", False)
    interrupted = type(error) is KeyboardInterrupt
    record(error, env.get(ERROR_FILE, ""), worker)
    code = 0 if error is None else _report(error)
    # The first to run; an exception in it is reported like that of an exit function.
    atexit.register(threading._shutdown)  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _tell(env.get(SOCKET, ""), -signal.SIGINT if interrupted else code)
    _let_go(error)
    if not at_once:
        _destroy_globals()
    if not _flush():
        code = FLUSH_FAILED
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        code = 128 + signal.SIGINT
    os._exit(code)


def last_words(code: int) -> bytes:
    """Return the message that tells the agent that only destructors are left: elastic_launch.contract.Ended."""
    return b'{"type":"workerending","exit_code":%d}\n' % code


def record(error: BaseException | None, path: str, worker: int) -> None:
    """Write a worker's exception where the agent looks for it, as torch's ``@record`` does, unless that has done so.

    Written at once, as the end may take long: the file's time determines whose exception was the first.
    """
    if not isinstance(error, Exception) or not path or os.getpid() != worker:
        return
    kind, tb = type(error), _without_ours(error.__traceback__)
    with contextlib.suppress(OSError, MemoryError, RecursionError, ValueError), open(path, "x") as file:
        entries = traceback.format_exception_only(kind, error)
        named = (entry for entry in entries if entry.partition(":")[0].rstrip().endswith(kind.__qualname__))
        stack = "".join(traceback.format_exception(kind, error, tb))
        message: dict[str, object] = {
            "message": next(named, kind.__qualname__).rstrip(),
            "extraInfo": {"py_callstack": stack, "timestamp": str(int(time.time()))},
        }
        json.dump({"message": message}, file)


def _report(error: BaseException) -> int:
    """Print the exception that ends the script; return the exit code."""
    if isinstance(error, SystemExit):
        return _exit_code(error.code)
    kind, tb = type(error), _without_ours(error.__traceback__)
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, tb
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        sys.excepthook(kind, error.with_traceback(tb), tb)
    except SystemExit as leaving:
        return _exit_code(leaving.code)
    except BaseException as another:  # noqa: BLE001 - whatever a hook raises is printed, too
        _print("Error in sys.excepthook:")
        _display(another.with_traceback(_without_ours(another.__traceback__)))
        _print("\nOriginal exception was:")
        _display(error)
    return 1


def _display(error: BaseException) -> None:
    sys.__excepthook__(type(error), error, error.__traceback__)


def _display_ignored(error: BaseException, stream: object) -> None:
    """Report that standard output could not be flushed, as an interpreter of this version does at its end."""
    if sys.version_info < (3, 13):
        _print(f"Exception ignored in: {stream!r}")
        _display(error)
        return
    _print(f"Exception ignored {'on' if sys.version_info < (3, 14) else 'while'} flushing sys.stdout:")
    lines = "".join(traceback.format_exception(error)).splitlines()
    _print("\n".join(line for line in lines if line.strip(" ^~") or not line.strip()))


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF if -(2**63) <= code < 2**63 else 0xFF
    _print(str(code))
    return 1


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr)


def _without_ours(tb: types.TracebackType | None) -> types.TracebackType | None:
    """Remove this package's frames."""
    here = os.path.dirname(os.path.abspath(__file__))
    while tb is not None and _is_ours(tb.tb_frame.f_code.co_filename, here):
        tb = tb.tb_next
    return tb


def _is_ours(filename: str, here: str) -> bool:
    return filename == "<string>" or os.path.dirname(filename) == here


def _let_go(error: BaseException | None) -> None:
    """Clear the frames in which an exception was raised, and with them their variables."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _tell(address: str, code: int) -> None:
    """Report to the agent that the script has ended: if this process hangs from now on, the agent ends it."""
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        sock.connect("\0" + address[1:] if address.startswith("@") else address)
        sock.send(last_words(code))


def _destroy_globals() -> None:
    """Destroy the objects in ``__main__``; functions, classes and modules last. This flushes and closes files."""
    # In an interpreter that is ending, no other thread runs any more, and signals have no handlers.
    threading.excepthook = lambda args: None
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    held = sys.modules["__main__"].__dict__
    for name in [name for name in held if not name.startswith("__")]:
        if name in held and not issubclass(type(held[name]), _PARTS):
            del held[name]
    gc.collect()  # modules loaded ahead are frozen, so the collector skips them
    # The collector frees functions and classes, and what they hold, together: destructors there still find them.
    del held, sys.modules["__main__"]
    gc.collect()


def _flush() -> bool:
    """Flush all files; return whether the standard streams could be flushed."""
    flushed = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (OSError, ValueError) as error:
            flushed = False
            if stream is sys.stdout:
                _display_ignored(error.with_traceback(_without_ours(error.__traceback__)), stream)
    for file in gc.get_objects():
        if issubclass(type(file), io.BufferedWriter | io.BufferedRandom | io.TextIOWrapper) and not file.closed:
            with contextlib.suppress(OSError, ValueError):
                file.flush()
    ctypes.CDLL(None).fflush(None)  # C's own buffers
    return flushed
