"""Finding the leader, or becoming it. The c10d way: the leader is the host of the store that the endpoint names."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from dataclasses import dataclass
from typing import Protocol

from elastic_launch.clock import Clock
from elastic_launch.config import Endpoint, LaunchConfig
from elastic_launch.errors import EndpointError, RefusedError, StoreError
from elastic_launch.events import EventSink
from elastic_launch.rendezvous.auth import link_key
from elastic_launch.rendezvous.c10d import NotAStoreError, connect_store, host_store
from elastic_launch.rendezvous.hosting import explain, said_rank
from elastic_launch.rendezvous.net import listen, listen_anywhere, routable_address, source_address, try_listen
from elastic_launch.rendezvous.record import ControlRecord, Leader
from elastic_launch.rendezvous.sealed_store import SealedStore
from elastic_launch.rendezvous.service import LeaderService
from elastic_launch.rendezvous.shared_store import SharedStore
from elastic_launch.rendezvous.store import ControlStore

__all__ = ["Backend", "C10dBackend", "Place"]

_log = logging.getLogger(__name__)

ACK_TIMEOUT = 5.0
"""Seconds for which the host of an ended run waits until all nodes have heard of the end."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a node is to others.

    Attributes:
        address: what it advertises.
        incarnation: random per agent start.
        endpoint: where the store is, or None as long as it is not known.
        hosting: whether this node has the store.
    """

    address: str
    incarnation: str
    endpoint: Endpoint | None
    hosting: bool


class Backend(Protocol):
    """A way to the leader. All calls may block, within their deadlines, and come from one thread at a time."""

    def open(self) -> Place:
        """Find out who this node is and take what it must hold.

        Raises:
            RendezvousError: if it cannot be.
        """
        ...

    def find_leader(self, timeout: float) -> ControlRecord:
        """Return the present record, or fail within about timeout seconds.

        Raises:
            RendezvousError: if it cannot be had now; ``RefusedError`` if trying again is of no use.
        """
        ...

    def unreachable(
        self, record: ControlRecord, *, refused: bool, silent_for: float = 0.0, seen_round: int = 0
    ) -> None:
        """Take note that a record's leader cannot be reached.

        Args:
            refused: whether its host answered that nobody listens there.
            silent_for: seconds for which its link was silent already.
            seen_round: the last round that this node has heard of.
        """
        ...

    def reached(self) -> None:
        """Take note that the leader lives: it has said something."""
        ...

    def unsure_for(self) -> float:
        """Seconds for which this node, if it is the leader, has not made sure that nobody else leads."""
        ...

    def close(self) -> None:
        """Stop leading and release everything."""
        ...


class C10dBackend:
    """See the module."""

    def __init__(self, config: LaunchConfig, clock: Clock, events: EventSink) -> None:
        self._config = config
        self._clock = clock
        self._events = events
        self._endpoint = config.endpoint
        self._store: ControlStore | None = None
        self._service: LeaderService | None = None
        self._taken = False  # the endpoint is this host's, but somebody else listens there

    def open(self) -> Place:
        config = self._config
        incarnation = secrets.token_hex(6)
        wanted = config.endpoint or self._own_endpoint()
        address = config.local_addr or source_address(wanted)
        listener = None
        taken = False
        if config.is_host is not False:
            listener, taken = try_listen(wanted)
            if config.backend == "static" and listener is None and not taken:
                listener = listen_anywhere(wanted.port)  # the address may be translated on the way to this host
            if config.is_host and listener is None:
                found = "its port is in use" if taken else "it is not an address of this host"
                asker = "--node-rank 0" if config.backend == "static" else "is_host=true"
                raise EndpointError(
                    f"This node is to host the store at {wanted} ({asker}), but {found}.",
                    "Give another --rdzv-endpoint, or leave out is_host.",
                )
            if config.endpoint is None and listener is None:
                raise EndpointError(
                    f"This node is to host the store at its own address, but --local-addr {wanted.host} is not one.",
                    "Give an address of this host, or name the node that hosts by --rdzv-endpoint.",
                )
        self._tell(wanted, hosts=listener is not None, taken=taken)
        if listener is None:
            self._taken = taken
            return Place(address, incarnation, wanted, hosting=False)
        port = int(listener.getsockname()[1])
        self._endpoint = Endpoint(wanted.host, port)
        with contextlib.ExitStack() as undo:
            undo.callback(listener.close)
            links = undo.enter_context(contextlib.closing(listen(address)))
            host = str(listener.getsockname()[0])
            if host in ("::", "0.0.0.0"):
                host = "127.0.0.1"  # a host may have no address of IPv6, not even loopback's
            hosted = host_store(listener, host, config.run_id, config.timing.read_timeout)
            store: ControlStore = SealedStore(hosted, config.token, config.run_id)
            if config.backend == "static":
                store = SharedStore(store, hosted)
            leader = Leader(config.node_id, incarnation, address, int(links.getsockname()[1]))
            record = ControlRecord(config.run_id, config.digest(), 1, leader, work=config.work()).renewed()
            if not store.compare_and_set(None, record.encode(), config.timing.read_timeout):
                raise StoreError("the new store holds a control record already.")
            undo.pop_all()
        self._store = store
        command = " ".join(config.command.display)
        self._service = LeaderService(
            links,
            store,
            record,
            config.limits,
            config.timing,
            command,
            self._clock,
            self._events,
            key=link_key(config.token, config.run_id),
        )
        self._service.start()
        return Place(address, incarnation, self._endpoint, hosting=True)

    def _tell(self, wanted: Endpoint, *, hosts: bool, taken: bool) -> None:
        config = self._config
        if config.endpoint is None or config.limits.max_nodes == 1:
            return  # nobody else is to come, or the command for them is printed
        said = said_rank(config.node_rank, os.environ)
        level, text = explain(
            wanted, said, hosts=hosts, taken=taken, is_host=config.is_host, nodes=config.limits.max_nodes
        )
        _log.log(level, "%s", text)

    def _own_endpoint(self) -> Endpoint:
        """No endpoint was given: any free port, on a routable address if others are to come."""
        if not self._config.announce:
            return Endpoint(self._config.local_addr or "127.0.0.1", 0)
        host = self._config.local_addr or routable_address()
        listener, taken = try_listen(Endpoint(host, 29400))
        if listener is not None:
            listener.close()
        return Endpoint(host, 29400 if listener is not None and not taken else 0)

    def find_leader(self, timeout: float) -> ControlRecord:
        if self._store is not None:
            return _present(self._store, timeout)
        assert self._endpoint is not None
        timeout = min(timeout, self._config.timing.read_timeout)
        try:
            found = connect_store(self._endpoint, self._config.run_id, timeout)
            store = SealedStore(found, self._config.token, self._config.run_id)
        except NotAStoreError as error:
            if self._taken:
                raise RefusedError(error.message, error.hint) from error
            raise
        try:
            record = _present(store, timeout)
            self._taken = False
            return record
        finally:
            store.close()

    def unreachable(
        self, record: ControlRecord, *, refused: bool, silent_for: float = 0.0, seen_round: int = 0
    ) -> None:
        """Nothing follows: only an agent at the endpoint can lead."""

    def reached(self) -> None:
        """Nothing follows."""

    def unsure_for(self) -> float:
        return 0.0  # nobody else can lead

    def close(self) -> None:
        if self._service is not None:
            self._service.close(ACK_TIMEOUT)
            self._service = None
        if self._store is not None:
            self._store.close()
            self._store = None


def _present(store: ControlStore, timeout: float) -> ControlRecord:
    value = store.wait_changed(None, timeout)
    if value is None:
        raise StoreError(f"the store held no control record within {timeout:g} s.")
    return ControlRecord.parse(value)
