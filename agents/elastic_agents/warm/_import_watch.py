"""Detects what an import must not do in a process that will be forked.

It must not start threads that a fork does not end, use a device, or read what differs between workers. Each is detected
when it happens, and attributed to the module being imported.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

PER_WORKER = frozenset(
    [
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "TORCHELASTIC_ERROR_FILE"),
        *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"),
        *("TORCHELASTIC_USE_AGENT_STORE", "ELASTIC_LAUNCH_LOCAL_RANK", "ELASTIC_LAUNCH_ROUND"),
        *("ELASTIC_LAUNCH_RUN_NUMBER", "ELASTIC_LAUNCH_SOCKET", "ELASTIC_LAUNCH_START_REASON"),
    ]
)
"""Variables that workers have and the server does not."""

IMPORT_TIME = (
    *("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "BLIS_", "NUMEXPR_", "LD_", "PYTHON"),
    *("PYTORCH_", "TORCH", "TRITON_", "MALLOC_", "GLIBC_"),
)
"""Variables with these prefixes are read when a module is imported or a process starts."""

DEVICES = ("/dev/nvidia-uvm", "/dev/kfd", "/dev/dxg")
"""Files that a process opens to compute on a device: NVIDIA's, AMD's, or through Windows."""

FORKABLE = frozenset({"jemalloc_bg_thd"})
"""Threads that a forked process does without: jemalloc (part of pyarrow) frees memory in the child, too."""


def matters_at_import(name: str) -> bool:
    """Whether a variable is one that a process reads as it starts or imports."""
    return name.startswith(IMPORT_TIME) and not name.startswith("TORCHELASTIC_")


def differs_at_import(mine: Mapping[str, str], asked: Mapping[str, str], read: Collection[str] = ()) -> list[str]:
    """Return variables that differ between two environments, and that matter at import or were read during one."""
    names = (name for name in mine.keys() | asked.keys() if matters_at_import(name) or name in read)
    return sorted(name for name in names if mine.get(name) != asked.get(name))


class ImportWatch:
    """Detects what imports do between :meth:`begin` and :meth:`faults`.

    Attributes:
        read: names of all variables that were looked up.
    """

    def __init__(self) -> None:
        self._variables: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
        self._spy = _Spy(self._variables)
        _use(self._spy)
        self._before = _State.now()
        self.read: set[str] = set()

    def begin(self) -> None:
        self._before = _State.now()
        self._spy.read.clear()

    def faults(self) -> tuple[str, ...]:
        """Return what has happened since, each as a few words that follow a module's name."""
        before, now = self._before, _State.now()
        self.read |= self._spy.read
        found = []
        if now.python_threads > before.python_threads:
            found.append("starts threads")
        elif now.tasks > before.tasks and lives_after_fork(before.tasks):
            found.append("starts threads that do not end for a fork")
        if mine := sorted(self._spy.read & PER_WORKER):
            found.append(f"reads {', '.join(mine)}, which differs between workers")
        if now.cuda > before.cuda or any(what in DEVICES for what in now.open - before.open):
            found.append("initializes a device")
        elif kept := sorted(now.open - before.open):
            found.append(f"keeps open {', '.join(kept)}, which workers would share")
        if now.shared > before.shared:
            found.append("makes a semaphore or memory that workers would share")
        if now.children > before.children:
            found.append("starts a process")
        return tuple(found)

    def close(self) -> None:
        """Restore the environment's original dictionary, with the current content."""
        self._variables.clear()
        self._variables.update(self._spy)
        _use(self._variables)


@dataclass(frozen=True, slots=True)
class _State:
    """The state of this process that a fork would share or lose."""

    python_threads: int
    tasks: int
    cuda: bool
    open: frozenset[str]
    shared: int
    children: frozenset[str]

    @staticmethod
    def now() -> _State:
        cuda = sys.modules.get("torch.cuda")
        return _State(
            python_threads=threading.active_count(),
            tasks=_lasting(),
            cuda=cuda is not None and (cuda.is_initialized() or (_has_device() and poisoned_by_fork())),
            open=frozenset(_open()),
            shared=_shared(),
            children=frozenset(_children()),
        )


def _open() -> Iterator[str]:
    """Return what this process' descriptors refer to and workers would share; files opened for reading do not count."""
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            with open(f"/proc/self/fdinfo/{name}") as info:
                flags = next(int(line.split()[1], 8) for line in info if line.startswith("flags:"))
        except OSError:
            continue  # the descriptor of the listing itself
        written = flags & os.O_ACCMODE != os.O_RDONLY and target.startswith("/") and not target.startswith("/dev/")
        if written or target in DEVICES or target.partition(":")[0] in ("socket", "pipe", "anon_inode"):
            yield target


def _shared() -> int:
    with open("/proc/self/maps") as maps:
        return sum("/dev/shm/" in line for line in maps)


def _children() -> Iterator[str]:
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children") as children:
                yield from children.read().split()
        except OSError:
            continue  # a kernel without that file, or a thread that has just ended


class _Spy(dict[bytes, bytes]):
    """The environment's dictionary; records which names are looked up."""

    def __init__(self, source: dict[bytes, bytes]) -> None:
        super().__init__(source)
        self.read: set[str] = set()

    def __getitem__(self, key: bytes) -> bytes:
        self._note(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._note(key)
        return super().__contains__(key)

    def _note(self, key: object) -> None:
        if isinstance(key, bytes):
            self.read.add(os.fsdecode(key))


def _use(variables: dict[bytes, bytes]) -> None:
    """Make both views of the environment use one dictionary, as they do from the start."""
    os.environ._data = os.environb._data = variables  # type: ignore[attr-defined]


def tasks() -> int:
    """The operating system's count of this process' threads."""
    return len(os.listdir("/proc/self/task"))


def _lasting() -> int:
    """Count this process' threads that would be missing in a forked process."""
    found = 0
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as name:
                found += name.read().rstrip("\n") not in FORKABLE
        except OSError:
            continue  # it has just ended
    return found


def watched() -> str:
    """Return why each worker needs a process of its own instead of a fork of this one; "" if there is no reason."""
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    if sys.gettrace() or sys.getprofile() or any(monitoring and monitoring.get_tool(tool) for tool in range(6)):
        return "a debugger or profiler watches each process from its start"
    if tasks() > 1:
        return "the interpreter has threads from its start"
    return ""


def lives_after_fork(before: int) -> bool:
    """Whether more threads than before remain when the process forks.

    Libraries that support forks (OpenBLAS) end their threads before one, and restart them when needed.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return _lasting() > before


def poisoned_by_fork() -> bool:
    """Whether a forked process could not use CUDA, because a library has queried the driver for devices."""
    pid = os.fork()
    if pid == 0:
        cuda = sys.modules["torch.cuda"]
        os._exit(int(bool(cuda._is_in_bad_fork())))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


def _has_device() -> bool:
    return os.path.exists("/dev/nvidiactl")
