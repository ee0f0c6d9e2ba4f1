"""A worker's record of its imports, in memory that it shares with its agent and, later, with the warm server.

The worker writes what it imports while it does so. The agent sees by the length whether it still imports, and hands the
record to the server, which imports the same.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder

MOST_BYTES = 4 * 1024 * 1024
"""Maximum size of a record: some 40,000 modules. It takes the memory of what is written."""

_LENGTH = struct.Struct("Q")


@dataclass(frozen=True, slots=True)
class WorkerImports:
    """What a worker has imported so far.

    Attributes:
        modules: file of each module, in the order in which their imports began; "" for a directory without
            ``__init__.py``.
        sets: variables that a worker had changed, or removed (None), before its last import.
    """

    modules: Mapping[str, str]
    sets: Mapping[str, str | None]

    @staticmethod
    def of(data: bytes) -> WorkerImports:
        """Read the lines of a record, up to one that no recorder writes: a worker may write over its memory."""
        modules: dict[str, str] = {}
        sets: dict[str, str | None] = {}
        with suppress(ValueError, RecursionError):
            for found in map(json.loads, data.splitlines()):
                match found:
                    case [str(name), str(origin)]:
                        modules.setdefault(name, origin)
                    case dict() if all(value is None or isinstance(value, str) for value in found.values()):
                        sets = found
                    case _:
                        break
        return WorkerImports(modules, sets)

    @property
    def lines(self) -> bytes:
        """This content as lines of a record."""
        return b"".join(map(_line, [*self.modules.items(), self.sets]))

    def put(self) -> int:
        """Return the descriptor of a record with this content."""
        descriptor, data = new_record(), self.lines[: MOST_BYTES - _LENGTH.size]
        os.pwrite(descriptor, _LENGTH.pack(len(data)) + data, 0)
        return descriptor


class Learned:
    """What a node's workers have imported, from the records of all that keep one. For any thread."""

    def __init__(self) -> None:
        self._taken: dict[int, int] = {}  # how many bytes of each record, by its descriptor
        self._left = 0  # how many bytes that closed records had, and that were not taken before
        self._imported = WorkerImports({}, {})
        self._lock = threading.Lock()

    def begin(self) -> int:
        """Return the descriptor of a record, for another worker to keep."""
        record = new_record()
        with self._lock:
            self._taken[record] = 0
        return record

    def end(self, record: int) -> None:
        """Close the record of a worker that has ended; what it has still counts as not taken."""
        with self._lock:
            if record in self._taken:  # else all are closed
                self._left += sum(map(self._read, self._taken))
                del self._taken[record]
                os.close(record)

    def length(self) -> int:
        """Return the number of bytes that were recorded and are not taken yet."""
        with self._lock:
            return self._left + sum(max(0, length(record) - taken) for record, taken in self._taken.items())

    def take(self) -> WorkerImports:
        """Return what is known, with what was recorded since the last time."""
        with self._lock:
            self._left = 0
            for record in self._taken:
                self._read(record)
            return self._imported

    def _read(self, record: int) -> int:
        """Add what a record has; return how many bytes of it are new."""
        new = length(record) - self._taken[record]
        if new > 0:
            self._taken[record] += new
            mine, found = self._imported, read(record)
            # Any worker may begin again as any other: each one's variables count.
            self._imported = WorkerImports({**mine.modules, **found.modules}, {**mine.sets, **found.sets})
        return max(0, new)

    def close(self) -> None:
        with self._lock:
            for record in self._taken:
                os.close(record)
            self._taken.clear()


def new_record() -> int:
    """Return the descriptor of an empty record."""
    descriptor = os.memfd_create("elastic-launch-imports")
    os.truncate(descriptor, MOST_BYTES)
    return descriptor


def length(descriptor: int) -> int:
    """Return the number of bytes that have been recorded."""
    found: int = _LENGTH.unpack(os.pread(descriptor, _LENGTH.size, 0))[0]
    return min(found, MOST_BYTES - _LENGTH.size)


def read(descriptor: int) -> WorkerImports:
    """Return what has been recorded."""
    return WorkerImports.of(os.pread(descriptor, length(descriptor), _LENGTH.size))


class Recorder:
    """Finds modules as ``PathFinder`` does, and records those that this process imports.

    Args:
        descriptor: of the record, which is closed: the script may reuse its number.
        after_each: called before each import, when the previous ones are done.
    """

    def __init__(self, descriptor: int, after_each: Callable[[], object]) -> None:
        self._memory = _mapped(descriptor)
        os.close(descriptor)
        self._length = 0
        self._after_each = after_each
        self._pid = os.getpid()
        self._started = dict(_variables())
        self._last = self._started
        sys.meta_path.insert(sys.meta_path.index(PathFinder), self)

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        self._after_each()
        spec = PathFinder.find_spec(name, path, target)  # type: ignore[arg-type]
        # Also called by importlib.util.find_spec, which imports nothing, and in processes that the worker has forked.
        imports = spec is not None and sys._getframe(2).f_code.co_name == "_find_and_load_unlocked"
        if spec is not None and imports and os.getpid() == self._pid:
            self._record(name, spec.origin or "" if spec.has_location else "")
        return spec

    def _record(self, name: str, origin: str) -> None:
        now = _variables()
        if now != self._last:
            self._last = dict(now)
            names = {key for key in now.keys() | self._started.keys() if now.get(key) != self._started.get(key)}
            self._write({os.fsdecode(key): os.fsdecode(now[key]) if key in now else None for key in names})
        self._write([name, origin])

    def _write(self, what: object) -> None:
        line = _line(what)
        start = _LENGTH.size + self._length
        if start + len(line) <= MOST_BYTES:
            ctypes.memmove(self._memory + start, line, len(line))
            self._length += len(line)
            ctypes.memmove(self._memory, _LENGTH.pack(self._length), _LENGTH.size)


def _mapped(descriptor: int) -> int:
    """Map a record into this process' memory and return its address; Python's own mmap keeps a descriptor open."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = libc.mmap(None, MOST_BYTES, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "the record of imports cannot be mapped")
    return int(address)


def _line(what: object) -> bytes:
    return json.dumps(what).encode() + b"\n"


def _variables() -> dict[bytes, bytes]:
    """The environment's own dictionary: comparing it takes a microsecond, and decoding it a hundred."""
    return os.environ._data  # type: ignore[attr-defined, no-any-return]
