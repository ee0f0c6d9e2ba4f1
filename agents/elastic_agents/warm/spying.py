"""What an import must not do where the process is to be forked: start threads that a fork does not end, touch a device,
or read what differs between workers. Each is noticed as it happens and blamed on the module that was being imported.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

__all__ = ["PER_WORKER", "Watch", "lives_after_fork", "poisoned_by_fork"]

PER_WORKER = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "NODE_RANK",
        "ROLE_RANK",
        "ROLE_NAME",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_RUN_ID",
        "ELASTIC_LAUNCH_ROUND",
        "ELASTIC_LAUNCH_SOCKET",
    }
)
"""Variables that workers have and the server has not."""


class Watch:
    """Notices what imports do between :meth:`begin` and :meth:`faults`."""

    def __init__(self) -> None:
        self._variables: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
        self._spy = _Spy(self._variables)
        _use(self._spy)
        self._threads = 0

    def begin(self) -> None:
        self._threads = tasks()
        self._spy.read.clear()

    def faults(self) -> tuple[str, ...]:
        """Return what happened since, each a few words that follow the name of a module."""
        found = []
        if threading.active_count() > 1:
            found.append("starts threads")
        elif tasks() > self._threads and lives_after_fork():
            found.append("starts threads that do not end for a fork")
        if self._spy.read:
            found.append(f"reads {', '.join(sorted(self._spy.read))}, which differs between workers")
        cuda = sys.modules.get("torch.cuda")
        if cuda is not None and (cuda.is_initialized() or (_has_device() and poisoned_by_fork())):
            found.append("initializes CUDA")
        return tuple(found)

    def close(self) -> None:
        """Put the environment back as it was."""
        self._variables.clear()
        self._variables.update(self._spy)
        _use(self._variables)


class _Spy(dict[bytes, bytes]):
    """The environment's dictionary, which remembers questions that have other answers in a worker."""

    def __init__(self, source: dict[bytes, bytes]) -> None:
        super().__init__(source)
        self.read: set[str] = set()

    def __getitem__(self, key: bytes) -> bytes:
        self._note(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._note(key)
        return super().__contains__(key)

    def _note(self, key: Any) -> None:
        name = os.fsdecode(key) if isinstance(key, bytes) else ""
        if name in PER_WORKER:
            self.read.add(name)


def _use(variables: dict[bytes, bytes]) -> None:
    """Have both views of the environment look into one dictionary, as they do from the start."""
    os.environ._data = os.environb._data = variables  # type: ignore[attr-defined]


def tasks() -> int:
    """The operating system's count of this process' threads."""
    return len(os.listdir("/proc/self/task"))


def lives_after_fork() -> bool:
    """Whether threads remain beside this one when the process forks.

    Libraries that know of forks (OpenBLAS) end theirs before one, and start them again when they are needed.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return tasks() > 1


def poisoned_by_fork() -> bool:
    """Whether a forked process could not use CUDA, since a library has asked the driver for devices."""
    pid = os.fork()
    if pid == 0:
        cuda = sys.modules["torch.cuda"]
        os._exit(int(bool(cuda._is_in_bad_fork())))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


def _has_device() -> bool:
    return os.path.exists("/dev/nvidiactl")
