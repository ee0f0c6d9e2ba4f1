"""The control record on torch's TCPStore, embedded in the node that the endpoint names.

What TCPStore does and this file works around, as measured on torch 2.13: a client that connects to something else than
a TCPStore, or to a frozen one, hangs beyond its timeout (so every client call runs on a thread that can be given up);
``compare_set`` on a missing key returns the expected value (so writes are confirmed by reading); there is no watch.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from elastic_launch.config import Endpoint
from elastic_launch.errors import EndpointError, RefusedError, StoreError
from elastic_launch.process import GIVEN_UP
from elastic_launch.rendezvous.net import resolve

__all__ = ["C10dStore", "NotAStoreError", "connect_store", "host_store"]

_OWN = "elastic_launch/"
_RUN_KEY = f"{_OWN}run"
_POLL = 0.05

T = TypeVar("T")


class NotAStoreError(EndpointError):
    """What listens at the endpoint does not answer as a run's c10d store."""


class C10dStore:
    """One run's control record in a TCPStore.

    Args:
        store: a TCPStore that nothing else uses at the same time.
        embedded: its server lives in this process and so answers at once.
    """

    def __init__(self, store: TCPStore, run_id: str, where: str, *, embedded: bool) -> None:
        self._store: TCPStore | None = store
        self._key = f"{_OWN}record/{run_id}"
        self._where = where
        self._embedded = embedded

    def load(self, timeout: float) -> bytes | None:
        def get(store: TCPStore) -> bytes | None:
            return bytes(store.get(self._key)) if store.check([self._key]) else None

        return self._call(get, timeout)

    def compare_and_set(self, expected: bytes | None, value: bytes, timeout: float) -> bool:
        def swap(store: TCPStore) -> bool:
            old = "" if expected is None else expected.decode()
            store.compare_set(self._key, old, value.decode())
            return store.check([self._key]) and bytes(store.get(self._key)) == value

        return self._call(swap, timeout)

    def wait_changed(self, known: bytes | None, timeout: float) -> bytes | None:
        deadline = time.monotonic() + timeout
        while True:
            value = self.load(max(_POLL, deadline - time.monotonic()))
            if value != known or time.monotonic() >= deadline:
                return value
            time.sleep(_POLL)

    def remove_others(self, timeout: float) -> None:
        """Remove all keys that are not this project's own."""

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
            raise StoreError(f"The c10d store at {self._where} is closed.")
        return _bounded(lambda: function(store), timeout, self._where, inline=self._embedded)


def host_store(listener: socket.socket, host: str, run_id: str, timeout: float) -> C10dStore:
    """Serve a new store on a listening socket, which it takes over."""
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )
    store.set(_RUN_KEY, run_id)
    return C10dStore(store, run_id, str(Endpoint(host, port)), embedded=True)


def connect_store(endpoint: Endpoint, run_id: str, timeout: float) -> C10dStore:
    """Connect to the store at the endpoint.

    Raises:
        EndpointError: if the name does not resolve, nothing listens, or what listens is no c10d store.
        RefusedError: if it serves another run.
    """
    host = _reachable(endpoint, timeout)

    def connect() -> TCPStore:
        return TCPStore(
            host, endpoint.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout)
        )

    where = str(endpoint)
    try:
        store = _bounded(connect, timeout, where, inline=False)
        served = _bounded(lambda: store.get(_RUN_KEY).decode(), timeout, where, inline=False)
    except StoreError as error:
        _reachable(endpoint, timeout)  # a host that was just dying may have accepted the first time
        raise NotAStoreError(
            f"{endpoint} accepts connections but does not answer as a run's c10d store: {error.message}",
            "If the port is in use by another service, choose another --rdzv-endpoint; if its agent is frozen, end it.",
        ) from error
    if served != run_id:
        raise RefusedError(
            f"The endpoint {endpoint} serves run {served!r}, not {run_id!r}.",
            "Give the same --rdzv-id on all nodes, or another --rdzv-endpoint for another run.",
        )
    return C10dStore(store, run_id, where, embedded=False)


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


def _bounded(function: Callable[[], T], timeout: float, where: str, *, inline: bool) -> T:
    """Call a store; one that does not return in time is left to a daemon thread."""
    if inline:
        with _translated(where):
            return function()
    result: list[T] = []
    errors: list[StoreError] = []

    def work() -> None:
        try:
            with _translated(where):
                result.append(function())
        except StoreError as error:
            errors.append(error)

    thread = threading.Thread(target=work, name=GIVEN_UP, daemon=True)
    thread.start()
    thread.join(timeout)
    if errors:
        error = errors.pop()
        try:
            raise error
        finally:
            # An error that refers to itself by its traceback would keep the store's socket open until some collection.
            del error
    if not result:
        raise StoreError(f"the c10d store at {where} did not answer within {timeout:g} s.")
    return result[0]


@contextlib.contextmanager
def _translated(where: str) -> Iterator[None]:
    try:
        yield
    except (DistError, RuntimeError, ValueError) as error:
        first = str(error).strip().split("\n")[0]
        raise StoreError(f"the c10d store at {where} failed: {first}") from error
