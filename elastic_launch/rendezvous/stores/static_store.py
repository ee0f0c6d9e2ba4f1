"""The store of the static backend: a TCPStore at the master's address, for the workers and for finding the leader.

This module works around TCPStore's behaviour, as measured on torch 2.13: a client that connects to something other
than a TCPStore, or to a frozen one, hangs beyond its timeout; so every client call runs on a thread that can be
abandoned. Any client that reaches its port can read it and write to it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TypeVar

from torch._C._distributed_c10d import TCPStore

from elastic_launch.config.endpoints import Endpoint
from elastic_launch.errors import EndpointError, StoreError
from elastic_launch.rendezvous.wire.addresses import resolve
from elastic_launch.rendezvous.worker_store import store_client, store_server
from elastic_launch.system.program import GIVEN_UP
from elastic_launch.system.threads import within

_OWN = "elastic_launch/"
_LEADER = f"{_OWN}leader"

T = TypeVar("T")


class NotAStoreError(EndpointError):
    """What listens at the master's address does not answer like a TCPStore."""


class StaticStore:
    """A client's view of the store.

    Args:
        store: a TCPStore that nothing else uses at the same time.
        embedded: whether its server is in this process, and so answers at once.
    """

    def __init__(self, store: TCPStore, where: str, *, embedded: bool) -> None:
        self._store: TCPStore | None = store
        self._where = where
        self._embedded = embedded

    def leader(self, timeout: float) -> bytes | None:
        """Return the leader's published value, or None.

        Raises:
            StoreError: if the store did not answer within timeout seconds.
        """

        def get(store: TCPStore) -> bytes | None:
            return bytes(store.get(_LEADER)) if store.check([_LEADER]) else None

        return self._call(get, timeout)

    def says(self, leader: bytes, timeout: float) -> bool:
        """Whether this is the leader's published value; unlike a read, this never waits for a deleted key."""
        text = leader.decode()
        return self._call(
            lambda store: store.check([_LEADER]) and bytes(store.compare_set(_LEADER, text, text)) == leader, timeout
        )

    def publish(self, leader: bytes, timeout: float) -> None:
        """Publish where the leader is, overwriting any value."""
        self._call(lambda store: store.set(_LEADER, leader.decode()), timeout)

    def remove_workers_keys(self, timeout: float) -> None:
        """Remove all keys but this project's own: a worker treats any key that it finds as one of its own round."""

        def remove(store: TCPStore) -> None:
            for key in store.list_keys():
                if not key.startswith(_OWN):
                    store.delete_key(key)

        self._call(remove, timeout)

    def close(self) -> None:
        self._store = None  # the last reference closes client and server

    def _call(self, function: Callable[[TCPStore], T], timeout: float) -> T:
        store = self._store
        if store is None:
            raise StoreError(f"The store at {self._where} is closed.")
        if self._embedded:
            return _answer(lambda: function(store), self._where)
        return _bounded(lambda: function(store), timeout, self._where)


def host_store(listener: socket.socket, host: str, timeout: float) -> StaticStore:
    """Serve a new store on a listening socket; it takes ownership of the socket."""
    where = str(Endpoint(host, listener.getsockname()[1]))
    return StaticStore(store_server(listener, host, timeout), where, embedded=True)


def connect_store(endpoint: Endpoint, timeout: float) -> StaticStore:
    """Connect to the store at the master's address.

    Raises:
        EndpointError: if the name does not resolve, nothing listens, or what listens is not a store.
    """
    host, where = _reachable(endpoint, timeout), str(endpoint)
    try:
        store = _bounded(lambda: store_client(host, endpoint.port, timeout), timeout, where)
    except StoreError as error:
        _reachable(endpoint, timeout)  # a dying host may have accepted the first connection
        raise NotAStoreError(
            f"{endpoint} accepts connections but does not answer as a store of torch: {error.message}",
            "If the port is in use by another service, choose another --master-port; if its agent is frozen, end it.",
        ) from error
    return StaticStore(store, where, embedded=False)


def _reachable(endpoint: Endpoint, timeout: float) -> str:
    reason = "it has no address"
    for _, address in resolve(endpoint):
        try:
            with socket.create_connection(address, timeout):
                return address[0]
        except OSError as error:
            reason = error.strerror or str(error)
    raise EndpointError(
        f"Nothing answers at the rendezvous endpoint {endpoint}: {reason}.",
        "Start the agent on that host, or correct --rdzv-endpoint.",
    )


def _bounded(function: Callable[[], T], timeout: float, where: str) -> T:
    """Call a store; a call that does not return in time is left to a daemon thread."""
    try:
        return within(timeout, where, lambda: _answer(function, where), thread=GIVEN_UP)
    except TimeoutError:
        raise StoreError(f"the store at {where} did not answer within {timeout:g} s.") from None


def _answer(function: Callable[[], T], where: str) -> T:
    # No context manager: in some Python versions it keeps the error, and so the socket, until garbage collection.
    try:
        return function()
    except (RuntimeError, ValueError) as error:
        first = str(error).strip().split("\n")[0]
        raise StoreError(f"the store at {where} failed: {first}") from error
