"""Turns a forked process into ``python script.py``, ``python -m module`` or ``python directory``.

This follows the interpreter's own sequence (https://docs.python.org/3.11/using/cmdline.html#interface-options):
``sys.argv``, ``sys.path[0]``, ``__main__`` and its attributes, and the handling of an uncaught exception.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import io
import json
import os
import pkgutil
import runpy
import signal
import socket
import struct
import sys
import time
import types
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NoReturn

from elastic_agents.prctl import signal_at_parents_death
from elastic_agents.warm._process_groups import outlive_users
from elastic_agents.warm._record import Recorder
from elastic_agents.warm.ending import end

BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that whole process groups receive; a process that is not a worker yet must ignore them."""


MOST_BYTES = 8 * 1024 * 1024

_SET_MM, _SET_MM_MAP = 35, 14
"""Of <linux/prctl.h>."""

_ends: dict[int, int] = {}
"""Where the area for the command of a process ended before this program wrote to it, by its beginning."""


def run_script(agent: int, mask: Collection[int], changed: Mapping[str, str | None]) -> NoReturn:
    """Wait for orders, perhaps for days, and carry them out, to the end of the process.

    If the agent closes the socket first, the process ends.

    Args:
        agent: descriptor of the socket to it, which is closed before the script starts.
        mask: the signals that are blocked in the worker at its start.
        changed: variables that the server's imports have set, or removed (None).
    """
    await_orders(agent).carry_out(mask, changed)


def run_recorded(record: str, argv: list[str]) -> NoReturn:
    """Run as a worker that records its imports, in a process that was executed for this.

    Args:
        record: descriptor of the record.
        argv: the worker's command.
    """
    Orders(argv, dict(os.environ), record=int(record)).become(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def await_orders(agent: int) -> Orders:
    """Wait for orders, perhaps for days, and acknowledge them; end the process if the agent closes the socket."""
    with socket.socket(fileno=agent) as sock:
        orders = _receive(sock)
        # Signals sent to the waiting process were not meant for the worker.
        while signal.sigtimedwait(BLOCKED, 0) is not None:
            pass
        _say(sock, b"begun\n")
    return orders


def _receive(sock: socket.socket) -> Orders:
    pending = b""
    descriptors: list[int] = []
    while not pending.endswith(b"\n"):
        try:
            data, received, _, _ = socket.recv_fds(sock, 65536, 3)
        except OSError:
            data, received = b"", []
        descriptors += received
        pending += data
        if not data or len(pending) > MOST_BYTES:
            os._exit(0)
        if pending == b"\n":  # the agent checks whether this process runs
            pending = b""
            _say(sock, b"here\n")
    order = json.loads(pending)
    return Orders(order["argv"], order["env"], *descriptors)


def _say(sock: socket.socket, text: bytes) -> None:
    try:
        sock.sendall(text)
    except OSError:
        os._exit(1)


@dataclass(frozen=True, slots=True)
class Orders:
    """Describes the worker that a forked process is to become.

    Attributes:
        argv: the complete command, with the interpreter.
        env: the complete environment.
        stdout, stderr: descriptors of its standard streams.
        record: descriptor of the record of its imports, if it is to keep one.
    """

    argv: list[str]
    env: dict[str, str]
    stdout: int = 1
    stderr: int = 2
    record: int | None = None

    def take_place(self, changed: Mapping[str, str | None]) -> None:
        """Install the worker's standard streams and environment."""
        _take_streams(self.stdout, self.stderr)
        os.environ.clear()
        os.environ.update(self.env)
        for name, value in changed.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def carry_out(self, mask: Collection[int], changed: Mapping[str, str | None]) -> NoReturn:
        """Run as the worker, to its end. See :func:`run_script`."""
        self.take_place(changed)
        importlib.invalidate_caches()  # modules may have been created since
        self.become(mask)

    def become(self, mask: Collection[int]) -> NoReturn:
        """Run as the worker, to its end, in a process that has its streams and environment."""
        show(self.argv)
        _forget_server()
        _fresh_randomness()
        # Signals that arrived after the acknowledgement were meant for the worker.
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        sys.orig_argv[:] = self.argv
        if "ELASTIC_LAUNCH_STACKS" in self.env:
            # Only then: other workers must not see modules of this project as imported.
            from elastic_launch.collective_dump import dump_collectives_on_request
            from elastic_launch.stack_dump import dump_stacks_on_signal

            dump_stacks_on_signal()
            dump_collectives_on_request()
        if self.record is not None:
            # Also where torch is not loaded yet, process groups must outlive their users.
            Recorder(self.record, outlive_users)
        worker = os.getpid()
        end(_run(self.argv[2:]), self.env, worker)  # skip the interpreter and -u


def leave_parent(parent: int, leave: int, agent: int) -> None:
    """Become a session leader, report this process' pid to the agent, and on its go become its child, and confirm that.

    If the agent does not answer, it has given this worker up: the process then ends as a child of its parent, which
    reaps it.

    Args:
        leave: a pipe's end; a byte there makes the parent exit.
    """
    os.setsid()
    try:
        os.write(agent, b"%d\n" % os.getpid())
        go = os.read(agent, 1)
    except OSError:
        go = b""
    if not go:
        os._exit(1)
    os.write(leave, b"l")
    os.close(leave)
    while os.getppid() == parent:
        time.sleep(0.0001)
    # At once, and without the guard; if the agent is already dead, nothing can be written to it.
    signal_at_parents_death(signal.SIGKILL)
    try:
        os.write(agent, b"ready\n")
    except OSError:
        os._exit(1)


def _take_streams(stdout: int, stderr: int) -> None:
    for source, target in ((stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)


def _fresh_randomness() -> None:
    """Python's own generator reseeds itself after a fork; NumPy's and torch's are seeded when they are imported."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _forget_server() -> None:
    """A worker must not see the agent's modules as imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "elastic_agents"]:
        del sys.modules[name]


def show(argv: list[str]) -> None:
    """Make ``ps`` and ``/proc/self/cmdline`` show a command: write it over this process' own, at least as long.

    The kernel is told where it ends, as PR_SET_MM(2const) allows without privileges. Where it refuses, as one without
    CONFIG_CHECKPOINT_RESTORE does, the arguments have spaces between them: a last byte other than 0 says that the rest
    is one string, as setproctitle(3) leaves it (get_mm_cmdline in fs/proc/base.c).
    """
    with open("/proc/self/stat", "rb") as file:
        # proc_pid_stat(5): field 3 follows the name in parentheses.
        fields = [0, 0, 0, 0, *map(int, file.read().rpartition(b")")[2].split()[1:])]
    start, end = fields[48], max(fields[49], _ends.get(fields[48], 0))
    _ends[start] = end
    words = list(map(os.fsencode, argv))
    text = b"".join(word + b"\0" for word in words)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    if len(text) <= end - start:
        # struct prctl_mm_map: code, data, heap, stack, arguments, environment; auxv and executable remain.
        places = (*fields[26:28], *fields[45:48], libc.sbrk(0), fields[28], start, start + len(text), *fields[50:52], 0)
        area = struct.pack("=12QIi", *places, 0, -1)
        if libc.prctl(_SET_MM, _SET_MM_MAP, area, ctypes.c_ulong(len(area)), ctypes.c_ulong(0)) == 0:
            ctypes.memmove(start, text, len(text))
            return
    room = end - start
    ctypes.memmove(start, b" ".join(words)[: room - 2].ljust(room - 1, b"\0") + b" ", room)


def _run(argv: list[str]) -> BaseException | None:
    """Run a script, module or directory as the interpreter would; return the exception that it raises, if any."""
    try:
        if argv[0] == "-m":
            sys.argv[:] = argv[:1] + argv[2:]
            if not sys.flags.safe_path:
                sys.path.insert(0, os.getcwd())
            _clean_main()
            runpy._run_module_as_main(argv[1])  # type: ignore[attr-defined]
            return None
        sys.argv[:] = argv
        if pkgutil.get_importer(argv[0]) is not None:  # a directory or an archive
            sys.path.insert(0, argv[0])
            _clean_main()
            runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
            return None
        if not sys.flags.safe_path:
            sys.path.insert(0, os.path.dirname(os.path.realpath(argv[0])))
        main = _clean_main()
        path = main.__file__ = os.path.abspath(argv[0])
        main.__dict__["__cached__"] = None
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
        try:
            with io.open_code(path) as file:
                source = file.read()
        except OSError as error:
            print(
                f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr
            )
            return SystemExit(2)
        if source.startswith(importlib.util.MAGIC_NUMBER):
            main.__loader__ = loader = importlib.machinery.SourcelessFileLoader("__main__", path)
            code = loader.get_code("__main__")
            assert code is not None
        else:
            code = _compiled(source, path)
        exec(code, main.__dict__)
    except BaseException as error:  # noqa: BLE001 - the script's, which ends the process and is reported there
        return error
    return None


def _compiled(source: bytes, path: str) -> types.CodeType:
    """Compile a script as the interpreter compiles a file: :func:`compile` does not check the encoding of comments."""
    try:
        importlib.util.decode_source(source)
    except (UnicodeDecodeError, SyntaxError) as error:
        raise _of_encoding(source, path) or error from None
    return compile(source, path, "exec", dont_inherit=True)


def _of_encoding(source: bytes, path: str) -> SyntaxError | None:
    """Return the interpreter's error for a file that is not in UTF-8 and names no encoding; None for another one."""
    try:
        source.decode()
    except UnicodeDecodeError as error:
        if any(b"coding" in line for line in source.splitlines()[:2]):
            return SyntaxError(f"(unicode error) {error}", (path, 1, None, None))
        line = source.count(b"\n", 0, error.start) + 1
        text = f"Non-UTF-8 code starting with '\\x{source[error.start]:02x}' on line {line}, but no encoding declared"
        return SyntaxError(f"{text}; see https://peps.python.org/pep-0263/ for details", (path, line, None, None))
    return None


def _clean_main() -> types.ModuleType:
    """Return a new ``__main__``: unlike the server's, it can be destroyed at the worker's end."""
    builtins = sys.modules["__main__"].__dict__["__builtins__"]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.clear()
    main.__dict__.update(
        __name__="__main__",
        __doc__=None,
        __package__=None,
        __loader__=None,
        __spec__=None,
        __builtins__=builtins,
    )
    if sys.version_info < (3, 14):
        main.__dict__.update(__annotations__={})
    return main
