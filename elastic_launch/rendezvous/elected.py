"""Electing the leader in a store that no node hosts: whoever writes itself into the record leads.

The first node to come writes the first record. When the leader's process is gone, or it is silent, any node raises the
term by compare-and-set and leads on; of several that try, one succeeds, and the others find its record. A leader
watches the record, and steps down as soon as another term stands there.

The invariant is the record's: one value, changed as a whole, terms only rising. A leader that was paused or cut off can
neither write (its compare-and-set fails) nor order (nodes ignore lower terms than they have seen).
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from ipaddress import ip_address

from elastic_launch.clock import Clock
from elastic_launch.config import LaunchConfig
from elastic_launch.errors import EndpointError, ProtocolError, RefusedError, StoreError
from elastic_launch.events import EventSink, LeaderElected
from elastic_launch.rendezvous.auth import link_key
from elastic_launch.rendezvous.backend import ACK_TIMEOUT, Place
from elastic_launch.rendezvous.net import listen, source_address
from elastic_launch.rendezvous.record import ControlRecord, Leader, Round
from elastic_launch.rendezvous.service import LeaderService
from elastic_launch.rendezvous.store import ControlStore
from elastic_launch.rendezvous.succession import Succession

__all__ = ["ElectedBackend"]

_log = logging.getLogger(__name__)

WATCH = 1.0
"""Seconds for which one look at the record lasts at most: what it takes to stop watching."""


RESIGN_TIMEOUT = 1.0
"""Seconds that a leader which goes has to say so."""


class ElectedBackend:
    """A way to the leader by way of the record in a store of its own.

    Args:
        open_store: opens a further view of the store; called for the node, and for a leader's watch.
    """

    def __init__(
        self, config: LaunchConfig, clock: Clock, events: EventSink, open_store: Callable[[], ControlStore]
    ) -> None:
        self._config = config
        self._clock = clock
        self._events = events
        self._open_store = open_store
        self._store: ControlStore | None = None
        self._address = ""
        self._links: socket.socket | None = None  # where it leads, or will
        self._incarnation = secrets.token_hex(6)
        self._succession = Succession(self._incarnation, config.timing.dead_after)
        self._reign: _Reign | None = None
        self._came = False  # to a run: an end that this node finds from then on is that run's

    def open(self) -> Place:
        config = self._config
        self._address = config.local_addr or _address(config)
        self._store = self._open_store()
        return Place(self._address, self._incarnation, config.endpoint, hosting=False)

    def find_leader(self, timeout: float) -> ControlRecord:
        """Return the present record, or, if there is no leader, write one as the leader and return that.

        Raises:
            RefusedError: if nobody leads, and this node's command or limits are not the record's.
        """
        assert self._store is not None
        value = self._look(timeout)
        if value is None:
            digest, work = self._config.digest(), self._config.work()
            record = ControlRecord(self._config.run_id, digest, 1, self._candidate(), work=work)
            return self._take(None, record, timeout, "first")
        record = ControlRecord.parse(value)
        if record.end is not None:
            if self._config.reuse and not self._came:
                return self._begin_anew(value, record, timeout)
            return record
        self._came = True
        leading = self._reign is not None and self._reign.alive
        takeover = self._succession.decide(record, self._clock.now(), leading=leading)
        if takeover is None:
            return record
        self._check_same(record)
        if record.leader.incarnation == self._incarnation and self._reign is not None:
            record = replace(record, restarts=max(record.restarts, self._reign.restarts))
        following = replace(record, term=record.term + 1, leader=self._candidate())
        return self._take(value, following, timeout, takeover.cause, dead=takeover.dead)

    def unreachable(
        self, record: ControlRecord, *, refused: bool, silent_for: float = 0.0, seen_round: int = 0
    ) -> None:
        """Take note that a record's leader cannot be reached.

        Args:
            refused: whether its host answered that nobody listens there.
            silent_for: seconds for which its link was silent already.
            seen_round: the last round that this node has heard of.
        """
        now = self._clock.now()
        self._succession.unreachable(record, now, refused=refused, silent_for=silent_for, seen_round=seen_round)

    def reached(self) -> None:
        """Take note that the leader lives: it has said something."""
        self._succession.reached()

    def unsure_for(self) -> float:
        return self._reign.unsure_for() if self._reign is not None else math.inf

    def close(self) -> None:
        if self._reign is not None:
            self._reign.close()
            self._reign = None
        if self._links is not None:
            self._links.close()
            self._links = None
        if self._store is not None:
            self._store.close()
            self._store = None

    def _look(self, timeout: float) -> bytes | None:
        """Load the record; note if that failed, or took so long that it would have but for its patience."""
        assert self._store is not None
        began = self._clock.now()
        try:
            value = self._store.load(timeout)
        except StoreError:
            self._succession.looked(self._clock.now() - began, failed=True)
            raise
        self._succession.looked(self._clock.now() - began, failed=False)
        return value

    def _begin_anew(self, value: bytes, ended: ControlRecord, timeout: float) -> ControlRecord:
        """Put a new run in the place of an ended one; terms and rounds go on, so that nothing old can be mistaken."""
        term, last = ended.term + 1, Round(ended.round.number)
        config, leader = self._config, self._candidate()
        begun = ControlRecord(
            ended.run_id, config.digest(), term, leader, round=last, first_term=term, work=config.work()
        )
        return self._take(value, begun, timeout, f"a new run under the id {ended.run_id}")

    def _candidate(self) -> Leader:
        """Return this node as leader; the port follows with its listener."""
        return Leader(self._config.node_id, self._incarnation, self._address, 0)

    def _check_same(self, record: ControlRecord) -> None:
        config = self._config
        resized = record.size is not None and record.work == config.work()
        if record.digest != config.digest() and not resized:
            raise RefusedError(
                f"Nobody leads run {record.run_id!r}, and this node came with another command or other limits than it "
                "was begun with.",
                "Give the same command, --nnodes and --max-restarts to go on with it; for another run give another "
                f"--rdzv-id, or remove its record: etcdctl del /elastic-launch/runs/{record.run_id}/record",
            )

    def _take(
        self, expected: bytes | None, record: ControlRecord, timeout: float, cause: str, *, dead: str = ""
    ) -> ControlRecord:
        """Try to write a record with this node as its leader, and lead; return what stands there then."""
        assert self._store is not None
        with contextlib.ExitStack() as undo:
            watched, written = (undo.enter_context(contextlib.closing(self._open_store())) for _ in range(2))
            # Listens while the process lives, also when a write was made without an answer, or a leader steps down:
            # whoever found nobody listening would take this process, and its workers, for dead.
            listener = self._links = self._links or listen(self._address)
            links = undo.enter_context(contextlib.closing(listener.dup()))
            leader = replace(record.leader, port=int(links.getsockname()[1]))
            record = replace(record, leader=leader).renewed()
            if not self._store.compare_and_set(expected, record.encode(), timeout):
                self._came = True
                value = self._store.load(timeout)
                if value is None:
                    raise StoreError(
                        "the control record has vanished from the store.", "Do not delete it while it runs."
                    )
                return ControlRecord.parse(value)
            undo.pop_all()
        if self._reign is not None:
            self._reign.close()
        command = " ".join(self._config.command.display)
        limits, timing = self._config.limits, self._config.timing
        service = LeaderService(
            links,
            written,
            record,
            limits,
            timing,
            command,
            self._clock,
            self._events,
            dead=frozenset({dead} - {""}),
            key=link_key(self._config.token, self._config.run_id),
        )
        self._succession.reached()
        self._came = True
        # Several looks in the time after which a leader that cannot see the record is not sure any more.
        look = min(WATCH, timing.dead_after / 5)
        self._reign = _Reign(service, watched, written, record, self._clock, look)
        self._events.emit(LeaderElected(self._config.node_id, record.term, cause))
        self._reign.start()
        return record


def _address(config: LaunchConfig) -> str:
    """Return this host's address on the route to the first endpoint that has one.

    It may be loopback, if the store is on this host; but a proxy of the store may listen there on every host.

    Raises:
        EndpointError: if no endpoint has a route.
    """
    assert config.endpoint is not None
    error: EndpointError | None = None
    for endpoint in config.endpoints or (config.endpoint,):
        try:
            found = source_address(endpoint)
        except EndpointError as failed:
            error = failed
            continue
        if config.limits.max_nodes > 1 and ip_address(found).is_loopback:
            _log.warning("others are told this node's address %s; if some run on other hosts, give --local-addr", found)
        return found
    assert error is not None
    raise error


class _Reign:
    """A node's leadership: the service, and a thread that ends it when another term stands in the record."""

    def __init__(
        self,
        service: LeaderService,
        watched: ControlStore,
        written: ControlStore,
        record: ControlRecord,
        clock: Clock,
        look: float,
    ) -> None:
        self._service = service
        self._watched = watched
        self._written = written
        self._record = record
        self._clock = clock
        self._look = look
        self._sure = clock.now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="leader-watch", daemon=True)

    @property
    def alive(self) -> bool:
        return self._service.alive

    @property
    def restarts(self) -> int:
        return self._service.restarts

    def start(self) -> None:
        self._service.start()
        self._thread.start()

    def unsure_for(self) -> float:
        """Seconds since its term was last seen in the record, or written there; for ever if it has ended."""
        return self._clock.now() - max(self._sure, self._service.sure) if self.alive else math.inf

    def close(self) -> None:
        """Stop leading; if the run goes on, say so in the record, so that nobody has to find out."""
        # First, while it leads: once its links are closed, members look for another leader.
        self._stop.set()
        self._thread.join(3 * WATCH)
        leads = self.alive
        self._service.close(ACK_TIMEOUT)
        standing = ControlRecord.parse(self._service.committed)
        if leads and standing.end is None:
            resigned = replace(standing, leader=replace(standing.leader, port=0)).renewed()
            with contextlib.suppress(StoreError):  # then they find out
                self._written.compare_and_set(self._service.committed, resigned.encode(), RESIGN_TIMEOUT)
        self._watched.close()
        self._written.close()

    def _watch(self) -> None:
        known: bytes | None = self._record.encode()
        told = False
        while not self._stop.is_set() and self._service.alive:
            began = self._clock.now()
            try:
                known = self._watched.wait_changed(known, self._look)
                told = False
                if known is None or ControlRecord.parse(known).leader != self._record.leader:
                    self._service.depose("another node leads")
                    return
                self._sure = began  # it may have waited ever since for changes that cannot arrive
            except (StoreError, ProtocolError, RefusedError) as error:  # refused: not written under the run's token
                if not told:
                    _log.warning("the control record cannot be read, training goes on: %s", error.message)
                told = True
                self._stop.wait(WATCH)
