"""The store through which the workers of a round meet; its socket listens before its address is published."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from elastic_launch.rendezvous.wire.addresses import listen
from elastic_launch.system.descriptors import ensure_free

_OPENS = 10
"""Descriptors that torch's store opens. If one is lacking, it fails and leaves its listener open for good."""


def store_server(listener: socket.socket, host: str, timeout: float) -> TCPStore:
    """Serve a new store on a listening socket, and return its client; it takes ownership of the socket."""
    wait, port = timedelta(seconds=timeout), listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=wait, master_listen_fd=listener.detach()
    )


def store_client(host: str, port: int, timeout: float) -> TCPStore:
    """Return a client of another process' store."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))


class WorkerStore:
    """Holds a listening socket for the next round, and serves on it if this node is the round's first member."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._listener: socket.socket | None = None
        self._server: TCPStore | None = None

    def reserve(self) -> int:
        """Return the port of the next round's store; it listens from now on."""
        if self._listener is None:
            self._listener = listen(self.address)
        return int(self._listener.getsockname()[1])

    def serve(self, timeout: float) -> TCPStore:
        """Serve on the reserved port until :meth:`stop`; workers connect as clients (TORCHELASTIC_USE_AGENT_STORE).

        Raises:
            OSError: if descriptors are lacking; a retry may succeed.
        """
        self.reserve()
        ensure_free(_OPENS)
        listener, self._listener = self._listener, None
        assert listener is not None
        self._server = store_server(listener, self.address, timeout)
        return self._server

    def stop(self) -> None:
        """Stop the current round's server, if this node runs it."""
        self._server = None  # the last reference closes it

    def close(self) -> None:
        """Release everything."""
        self.stop()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
