"""The interface of a backend, and c10d, where the leader's own links listen at the endpoint."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from dataclasses import dataclass, replace
from typing import Protocol

from elastic_launch.clock import Clock
from elastic_launch.config.endpoints import PORT, Endpoint
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.errors import EndpointError, InternalError, UnresolvedError
from elastic_launch.events.types import EventSink
from elastic_launch.rendezvous.backends.hosting import explain, said_rank
from elastic_launch.rendezvous.leader.service import LeaderService
from elastic_launch.rendezvous.record import ControlRecord, Leader
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.rendezvous.wire.addresses import (
    ANY_ADDRESS,
    is_hidden,
    listen_at,
    routable_address,
    source_address,
    try_listen,
)

_log = logging.getLogger(__name__)

ACK_TIMEOUT = 5.0
"""Seconds that the host of an ended run waits for all nodes to receive the end."""


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """How other nodes see this node.

    Attributes:
        incarnation: random per agent start.
        endpoint: where nodes find the leader, or None while it is unknown.
    """

    address: str
    incarnation: str
    endpoint: Endpoint | None
    hosting: bool


@dataclass(frozen=True, slots=True)
class FoundLeader:
    """Where the leader listens for links.

    Attributes:
        address: a host name or an address.
        what: a description for messages, such as "the rendezvous endpoint node0:29400".
        incarnation: incarnation of the leader's node; empty if unknown.
        given: whether the address comes only from the user, so that a mismatch there is most likely a user error.
        strange: whether the listener there may be another service.
        record: the control record, if it was found in a store.
    """

    address: str
    port: int
    what: str
    incarnation: str = ""
    given: bool = False
    strange: bool = False
    record: ControlRecord | None = None


class Backend(Protocol):
    """Finds the leader. Calls may block within their deadlines, and come from one thread at a time.

    The defaults are those of a run that only one node can lead.

    Attributes:
        steps_down: whether a leader steps down once it has been unsure for ``CUT_OFF`` times dead_after.
    """

    steps_down: bool = False

    def open(self) -> NodeAddress:
        """Determine this node's address and acquire its resources.

        Raises:
            RendezvousError: if that fails.
        """

    def find_leader(self, timeout: float) -> FoundLeader:
        """Return where the leader should be, or fail within about ``timeout`` seconds.

        Raises:
            RendezvousError: if it cannot be found now; ``RefusedError`` if retrying cannot help.
        """

    def unreachable(self, found: FoundLeader, *, refused: bool, silent_for: float = 0.0, seen_round: int = 0) -> None:
        """Record that a leader cannot be reached.

        Args:
            silent_for: seconds for which its link has already been silent.
            seen_round: the last round that this node knows of.
        """
        return

    def reached(self, order: m.Order) -> None:
        """Record that the leader is alive: it sent an order that this node obeys."""

    def unsure_for(self) -> float:
        """Seconds since this node, if it leads or led last, verified that no other node leads."""
        return 0.0

    def stepped_down(self) -> bool:
        """Whether this node has led and no longer does: it still listens, but serves no links."""
        return False

    def close(self) -> None:
        """Stop leading and release everything."""


class C10dBackend(Backend):
    """The leader is the node that listens at the endpoint, and the control record is in its memory."""

    def __init__(self, config: LaunchConfig, clock: Clock, events: EventSink) -> None:
        self._config = config
        self._clock = clock
        self._events = events
        self._endpoint = config.endpoint
        self._service: LeaderService | None = None
        self._hosted: FoundLeader | None = None
        self._taken = False  # the endpoint is on this host, but something else listens there

    def open(self) -> NodeAddress:
        try:
            return self._open()
        except UnresolvedError as error:
            if self._config.endpoint is not None or not self._config.local_addr:
                raise
            text = f"--local-addr {self._config.local_addr} does not resolve: {error.__cause__}."
            raise UnresolvedError(text, "Give an address of this host, or a name that is known here.") from error

    def _open(self) -> NodeAddress:
        config = self._config
        incarnation = secrets.token_hex(6)
        wanted = config.endpoint or self._own_endpoint()
        hidden = config.limits.max_nodes > 1 and is_hidden(wanted)
        address = config.local_addr or (routable_address() if hidden else source_address(wanted))
        listener, taken = None, False
        if config.is_host is not False:
            listener, taken = self._listen(wanted, hidden=hidden)
            if config.is_host and listener is None:
                found = "its port is in use" if taken else "it is not an address of this host"
                asker = "--node-rank 0" if config.kind.fixed_ranks else "is_host=true"
                raise EndpointError(
                    f"This node is to host the run at {wanted} ({asker}), but {found}.",
                    "Give another --rdzv-endpoint, or leave out is_host.",
                )
            if config.endpoint is None and listener is None:
                raise EndpointError(
                    f"This node is to host the run at its own address, but --local-addr {wanted.host} is not one.",
                    "Give an address of this host, or name the node that hosts by --rdzv-endpoint.",
                )
        self._tell(wanted, hosts=listener is not None, taken=taken, hidden=address if hidden else "")
        if listener is None:
            self._taken = taken
            return NodeAddress(address, incarnation, wanted, hosting=False)
        self._endpoint = Endpoint(wanted.host, int(listener.getsockname()[1]))
        self._lead(listener, address, incarnation)
        return NodeAddress(address, incarnation, self._endpoint, hosting=True)

    def _listen(self, wanted: Endpoint, *, hidden: bool) -> tuple[socket.socket | None, bool]:
        """Listen at the endpoint; see :func:`listen_at`."""
        return listen_at(wanted, hidden=hidden)

    def _lead(self, listener: socket.socket, address: str, incarnation: str) -> None:
        """Become the leader, with links at the endpoint itself."""
        self._serve(listener, address, incarnation)

    def _serve(self, links: socket.socket, address: str, incarnation: str) -> None:
        config = self._config
        host, port = str(links.getsockname()[0]), int(links.getsockname()[1])
        if host in ANY_ADDRESS:
            host = "127.0.0.1"  # a host may have no IPv6 address, not even loopback
        leader = Leader(config.node_id, incarnation, address, port)
        begun = ControlRecord(config.run_id, config.digest(), 1, leader, limits=config.limits)
        record = replace(begun, run=secrets.token_hex(8)).renewed()
        self._service = LeaderService(config, links, self._write, record, self._clock, self._events)
        self._hosted = FoundLeader(host, port, "this node's own leader", incarnation)
        self._service.start()

    def _write(self, expected: bytes, value: bytes, timeout: float) -> bool:
        """Write the record, which only the leader's memory has."""
        return True

    def _tell(self, wanted: Endpoint, *, hosts: bool, taken: bool, hidden: str) -> None:
        config = self._config
        if config.endpoint is None or config.limits.max_nodes == 1:
            return  # no other node is expected, or the command for them is printed
        said = said_rank(config.node_rank, os.environ)
        level, text = explain(
            wanted,
            said,
            hosts=hosts,
            taken=taken,
            is_host=config.is_host,
            nodes=config.limits.max_nodes,
            hidden=hidden,
        )
        _log.log(level, "%s", text)

    def _own_endpoint(self) -> Endpoint:
        """Choose an endpoint if none was given: any free port, on a routable address if other nodes are expected."""
        if not self._config.announce:
            return Endpoint(self._config.local_addr or "127.0.0.1", 0)
        host = self._config.local_addr or routable_address()
        listener, taken = try_listen(Endpoint(host, PORT))
        if listener is not None:
            listener.close()
        return Endpoint(host, PORT if listener is not None and not taken else 0)

    def find_leader(self, timeout: float) -> FoundLeader:
        if self._service is not None and self._service.died is not None:
            raise InternalError(f"the leader's thread failed: {self._service.died.error}")
        if self._hosted is not None:
            return self._hosted
        assert self._endpoint is not None
        where = f"the rendezvous endpoint {self._endpoint}"
        return FoundLeader(self._endpoint.host, self._endpoint.port, where, given=True, strange=self._taken)

    def reached(self, order: m.Order) -> None:
        self._taken = False

    def close(self) -> None:
        if self._service is not None:
            self._service.close(ACK_TIMEOUT)
            self._service = None
