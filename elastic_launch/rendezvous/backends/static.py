"""The static backend: node 0 leads, and publishes its address in the store through which the workers also meet.

That store is torch's, at the address that users give, and has no access control. So nodes use it only for the leader's
address, which carries a MAC if the run has a token, and which the leader rewrites if it was changed.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from dataclasses import dataclass

from elastic_launch import codec
from elastic_launch.clock import Clock
from elastic_launch.config.endpoints import Endpoint
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.errors import EndpointError, ProtocolError, RefusedError, StoreError
from elastic_launch.events.types import EventSink
from elastic_launch.rendezvous.backends.c10d import C10dBackend, FoundLeader
from elastic_launch.rendezvous.record import ControlRecord
from elastic_launch.rendezvous.stores.static_store import NotAStoreError, StaticStore, connect_store, host_store
from elastic_launch.rendezvous.wire.addresses import ANY_ADDRESS, listen, listen_anywhere, try_listen
from elastic_launch.rendezvous.wire.log_once import LogOnce
from elastic_launch.rendezvous.wire.seal import Patience, ValueSeal
from elastic_launch.secret import Token
from elastic_launch.system.threads import VitalThread

_log = logging.getLogger(__name__)

LOOK = 1.0
"""Seconds between two reads of the published address."""

PATIENCE = 3 * LOOK
"""Seconds for which a joining node treats a wrong value in the store as another client's write."""


@dataclass(frozen=True, slots=True)
class LeaderAddress:
    """What the store says about the leader."""

    run_id: str
    incarnation: str
    address: str
    port: int


def published_leader(endpoint: Endpoint, run_id: str, token: Token | None, timeout: float) -> LeaderAddress:
    """Return what the store at the endpoint says about the leader.

    Raises:
        EndpointError: if there is no store.
        StoreError: if it has no value, or one that cannot be parsed.
        RefusedError: if the value has another run's id or token; any client may have written it.
    """
    with contextlib.closing(connect_store(endpoint, timeout)) as store:
        value = store.leader(timeout)
    if value is None:
        raise StoreError(f"the store at {endpoint} does not say yet where the leader is.")
    try:
        found = codec.decode(LeaderAddress, codec.loads(ValueSeal(token, run_id).open(value)))
    except ProtocolError as error:
        raise StoreError(f"the store at {endpoint} holds garbage: {error.message}") from error
    if found.run_id != run_id:
        raise RefusedError(
            f"The endpoint {endpoint} serves run {found.run_id!r}, not {run_id!r}.",
            "Give the same --rdzv-id on all nodes, or another --rdzv-endpoint for another run.",
        )
    return found


class StaticBackend(C10dBackend):
    """The static backend; see the module."""

    def __init__(self, config: LaunchConfig, clock: Clock, events: EventSink) -> None:
        super().__init__(config, clock, events)
        self._store: StaticStore | None = None
        self._publisher: _Publisher | None = None
        self._patience = Patience(PATIENCE)
        self._round = 0

    def _listen(self, wanted: Endpoint, *, hidden: bool) -> tuple[socket.socket | None, bool]:
        listener, taken = try_listen(wanted)
        if listener is None and not taken:
            listener = listen_anywhere(wanted.port)  # the address may be translated on the way to this host
        return listener, taken

    def _lead(self, listener: socket.socket, address: str, incarnation: str) -> None:
        config = self._config
        timeout = config.timing.read_timeout
        with contextlib.ExitStack() as undo:
            undo.callback(listener.close)
            links = undo.enter_context(contextlib.closing(listen(address)))
            host = str(listener.getsockname()[0])
            # A host may have no IPv6 address, not even loopback.
            store = self._store = host_store(listener, "127.0.0.1" if host in ANY_ADDRESS else host, timeout)
            self._serve(links, address, incarnation)
            undo.pop_all()
        leader = LeaderAddress(config.run_id, incarnation, address, int(links.getsockname()[1]))
        value = ValueSeal(config.token, config.run_id).close(codec.dumps(leader))
        self._publisher = _Publisher(store, value, timeout)

    def _write(self, expected: bytes, value: bytes, timeout: float) -> bool:
        """Before a round is written, remove what workers of the last one left in the store.

        By then all members of the last round have stopped, and no worker of the next one has started.
        """
        number = ControlRecord.parse(value).round.number
        if number > self._round:
            assert self._store is not None
            self._store.remove_workers_keys(timeout)
            self._round = number
        return True

    def find_leader(self, timeout: float) -> FoundLeader:
        if self._hosted is not None:
            return super().find_leader(timeout)
        assert self._endpoint is not None
        config = self._config
        try:
            timeout = min(timeout, config.timing.read_timeout)
            found = published_leader(self._endpoint, config.run_id, config.token, timeout)
        except NotAStoreError as error:
            if self._taken:
                raise RefusedError(error.message, error.hint) from error
            raise
        except RefusedError as error:
            raise self._patience.refused(error, self._clock.now()) from error
        self._patience.over()
        where = f"the leader's address {Endpoint(found.address, found.port)}"
        return FoundLeader(found.address, found.port, where, found.incarnation)

    def close(self) -> None:
        super().close()
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        if self._store is not None:
            self._store.close()
            self._store = None


class _Publisher:
    """Publishes the leader's address, and again whenever it was changed or deleted."""

    def __init__(self, store: StaticStore, value: bytes, timeout: float) -> None:
        self._store = store
        self._value = value
        self._timeout = timeout
        self._once = LogOnce(_log)
        self._stop = threading.Event()
        store.publish(value, timeout)
        self._thread = VitalThread(self._watch, "publisher")
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(self._timeout)

    def _watch(self) -> None:
        while not self._stop.wait(LOOK):
            try:
                if not self._store.says(self._value, self._timeout):
                    text = "the store was written to by something that is not of this run; it is repaired"
                    self._once.warn("spoiled", text)
                    self._store.publish(self._value, self._timeout)
            except (StoreError, EndpointError) as error:
                self._once.warn("store", "%s", error.message)
