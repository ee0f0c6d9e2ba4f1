"""Finds the connections of gloo's process groups and of their store in this process, and shuts them down.

gloo has no call that interrupts a collective. If its connections are shut down with ``shutdown(2)``, every collective
fails within milliseconds, whether the peers still run or not. Listening sockets are left alone: gloo ends the process
if one of them fails.

Connections of a broken round are shut down for reading only. At the end of what it reads, gloo wakes the threads that
wait for a peer, but none that waits for the end of a message that is under way: of a sending that has begun, or of the
last message that is being received (``signalException`` in gloo's ``transport/tcp/pair.cc``). So no sending must fail:
gloo can write until it has closed the connection itself, and its peers until this process has left its groups, as a
duplicate of the connection stays open. A message for a peer that has ended may fail all the same, and a large one may
still be under way: see :mod:`elastic_launch.training.live.waits`.

The kernel knows which sockets are gloo's. Each of gloo's groups has an ``epoll(7)`` descriptor that watches its
listening socket and all of its connections, and ``/proc/self/fdinfo`` lists what such a descriptor watches. This finds
connections that gloo opens after it has formed the group (``TORCH_GLOO_LAZY_INIT``), and none that the script opens
meanwhile. Executed programs inherit gloo's descriptors, unlike those of Python and most libraries; this tells gloo's
from those of a server that the script starts while a group is formed. The store's connection is known by its port.

While a group is formed, one of its members may wait for a peer to connect, without a connection that could be shut
down. It is released by a connection from this process, which then is shut down: each peer introduces itself with a
number that gloo has assigned to it, from 0, and any process may give that number.
"""

from __future__ import annotations

import os
import re
import resource
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_ENDING = 10.0
"""Seconds in which the thread of these searches must end."""

_POLL = 0.005
"""Seconds between two searches for new connections, while a broken round's group is still being formed."""

_KNOCK_S = 0.1
"""Seconds to wait for a connection within this process."""

_SPARE = 100
"""Descriptors that are left to others: with less room, connections have no duplicates."""

_TRUE = ("1", "t", "true", "y", "yes")  # as torch reads its variables

_NUMBER = struct.Struct("@n")
_WATCHED = re.compile(r"^tfd:.* ino:([0-9a-f]+)", re.MULTILINE)
_OVER = "The process groups of this round are disconnected."
_INTERNET = (socket.AF_INET, socket.AF_INET6)


class GroupSockets:
    """The sockets of the process groups that one round forms in this process.

    Sockets are known by their inodes, which are not used again, unlike descriptors. All methods may be called from any
    thread, except that :meth:`opening` must not be entered again before it is left.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: set[int] = set()
        self._connections: set[int] = set()
        self._shut: set[int] = set()
        self._kept: list[socket.socket] = []
        self._knocked: set[int] = set()
        self._before: set[int] | None = None
        self._epolls: list[int] = []
        self._open: set[int] = set()  # the connections that gloo's threads watch
        self._store_port = self._size = 0
        self.broken = False  # whether shut_down was called
        self._opened = threading.Event()
        self._breaker: threading.Thread | None = None

    @property
    def loops(self) -> int:
        """The number of gloo's groups whose sockets are recorded."""
        return len(self._listeners)

    @contextmanager
    def opening(self, store_port: int, size: int) -> Iterator[None]:
        """Record the sockets of the groups that the body forms.

        Args:
            store_port: port of the store where the members of these groups meet; 0 if unknown. Its connection is the
                groups' once one of gloo's groups listens.
            size: largest number of members of these groups.

        Raises:
            RuntimeError: if :meth:`shut_down` was called before, or is called before the body ends.
        """
        with self._lock:
            if self.broken:
                raise RuntimeError(_OVER)
            self._before = set(_sockets(_descriptors()))
            self._store_port, self._size = store_port, size
            self._opened.clear()
        try:
            yield
        finally:
            with self._lock:
                self._record()
                self._before = None
                self._opened.set()
                breaker, self._breaker = self._breaker, None
            if breaker is not None:
                breaker.join(_ENDING)
                self.shut_down()
        if self.broken:
            raise RuntimeError(_OVER)

    def shut_down(self) -> int:
        """Shut down all connections and, if a group is being formed, also those that are still to come.

        Returns:
            The number of connections that this call has shut down.
        """
        with self._lock:
            self.broken = True
            if self._before is not None and self._breaker is None:
                name = "elastic-launch disconnect"
                self._breaker = threading.Thread(target=self._break_opening, name=name, daemon=True)
                self._breaker.start()
            return self._shut_recorded()

    def close(self) -> list[int]:
        """Shut down the connections of groups that are about to be destroyed: gloo then destroys them sooner.

        If they were not shut down before, no collective is under way.

        Returns:
            The groups' epoll descriptors.
        """
        with self._lock:
            self._shut_recorded(keep=False)
            return self._epolls

    def end(self) -> None:
        """Let the peers read the end of the connections, now that gloo has closed them here.

        From now on they can write once: the kernel answers what arrives by a reset.
        """
        with self._lock:
            for each in self._kept:
                with suppress(OSError):  # the peer has ended
                    each.shutdown(socket.SHUT_WR)

    def release(self) -> None:
        """Close the duplicates of the connections that were shut down, once no peer uses these any more."""
        with self._lock:
            while self._kept:
                self._kept.pop().close()

    def still_open(self) -> int:
        """Return how many of the sockets recorded so far are open, apart from duplicates."""
        with self._lock:
            sockets = self._record()
            return len((self._listeners | self._connections) & sockets.keys())

    def connected(self) -> bool:
        """Whether gloo still has one of its connections, or may make one only now."""
        with self._lock:
            self._record()
            return bool(self._open) or _connects_late()

    def _break_opening(self) -> None:
        """Shut down each new connection, so that this member does not wait for a group that will not be formed."""
        while not self._opened.wait(_POLL):
            with self._lock:
                self._shut_recorded()
                sockets = _sockets(self._descriptors())
                for inode in (self._listeners - self._knocked) & sockets.keys():
                    self._knocked.add(inode)
                    _knock(sockets[inode], inode, self._size)

    def _shut_recorded(self, *, keep: bool = True) -> int:
        sockets = self._record()
        # With lazy initialization gloo may still watch a connection that it has closed, if there is a duplicate.
        keep = keep and not _connects_late()
        last = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _SPARE
        shut = 0
        for inode in (self._connections - self._shut) & sockets.keys():
            if (found := _opened_again(sockets[inode], inode)) is not None:
                kept = keep and found.fileno() < last
                done = _shut(found, socket.SHUT_RD if kept else socket.SHUT_RDWR)
                if done:
                    self._shut.add(inode)
                    shut += 1
                if done and kept:
                    self._kept.append(found)
                else:
                    found.close()
        return shut

    def _record(self) -> dict[int, int]:
        """Add the sockets that the groups have by now, and return the descriptors of all sockets, by inode."""
        descriptors = self._descriptors()
        sockets = _sockets(descriptors)
        listeners, store = set(self._listeners), set[int]()
        if self._before is not None:
            for inode in sockets.keys() - self._before:
                kind, port = _describe(sockets[inode], inode)
                if kind == "listening":
                    listeners.add(inode)
                elif kind == "connected" and port == self._store_port:
                    store.add(inode)
        self._epolls, self._open = [], set()
        for descriptor, watched in _watched(descriptors).items():
            if served := watched & listeners:
                self._epolls.append(descriptor)
                self._listeners |= served
                self._open |= watched & sockets.keys() - listeners
        self._connections |= self._open
        if self._listeners:  # before that, the store is being connected, and torch would connect it again and again
            self._connections |= store
        return sockets

    def _descriptors(self) -> dict[int, str]:
        found = _descriptors()
        for each in self._kept:
            found.pop(each.fileno(), None)
        return found


def _connects_late() -> bool:
    return os.environ.get("TORCH_GLOO_LAZY_INIT", "").lower() in _TRUE


def _descriptors() -> dict[int, str]:
    """Return what each of this process' descriptors refers to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _sockets(descriptors: dict[int, str]) -> dict[int, int]:
    """Return a descriptor of each socket, by inode."""
    return {int(target[8:-1]): each for each, target in descriptors.items() if target.startswith("socket:[")}


def _watched(descriptors: dict[int, str]) -> dict[int, set[int]]:
    """Return the inodes of what each epoll descriptor watches that executed programs inherit."""
    found = {}
    for descriptor, target in descriptors.items():
        if target != "anon_inode:[eventpoll]":
            continue
        with suppress(OSError):  # closed meanwhile
            if not os.get_inheritable(descriptor):
                continue
            with open(f"/proc/self/fdinfo/{descriptor}") as file:
                found[descriptor] = {int(inode, 16) for inode in _WATCHED.findall(file.read())}
    return found


def _opened_again(descriptor: int, inode: int) -> socket.socket | None:
    """Return a socket with a descriptor of its own, which stays open; None if it was closed meanwhile."""
    with suppress(OSError):
        copy = os.dup(descriptor)
        if os.fstat(copy).st_ino == inode:
            return socket.socket(fileno=copy)
        os.close(copy)
    return None


def _describe(descriptor: int, inode: int) -> tuple[str, int]:
    """Return what a socket does, and the port of its peer if it is connected to one."""
    if (found := _opened_again(descriptor, inode)) is None:
        return "other", 0
    with found:
        if found.family not in _INTERNET or found.type & socket.SOCK_STREAM == 0:
            return "other", 0
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return "listening", 0
        try:
            return "connected", found.getpeername()[1]
        except OSError:
            return "unconnected", 0


def _shut(found: socket.socket, how: int) -> bool:
    with suppress(OSError):
        if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            try:
                found.getpeername()
                found.shutdown(how)
            except OSError:
                found.shutdown(socket.SHUT_RDWR)  # this ends an attempt to connect, too
            return True
    return False


def _knock(descriptor: int, inode: int, size: int) -> None:
    """Connect to a listening socket of gloo's as each of its peers would, and close the connections."""
    if (found := _opened_again(descriptor, inode)) is None:
        return
    with found:
        for number in range(size):
            with suppress(OSError), socket.socket(found.family) as peer:
                peer.settimeout(_KNOCK_S)
                peer.connect(found.getsockname())
                peer.sendall(_NUMBER.pack(number))
