"""Leader election in an external store: the node that writes itself into the record leads.

The first node writes the first record. When the leader's process is gone, or the leader is silent, any node may raise
the term by compare-and-set and take over; if several try, one succeeds and the others find its record. A leader
reads the record every second and steps down when it has another term.

The record keeps the invariant: it is one value, changed as a whole, and terms only rise. A leader that was paused or
cut off can neither write (its compare-and-set fails) nor give orders (nodes ignore terms lower than they have seen).
Values that other clients write into the record are not accepted, and are repaired; see ``continuity``.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from ipaddress import ip_address

from elastic_launch.clock import Clock
from elastic_launch.config.endpoints import Endpoint
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.errors import EndpointError, ExitCode, InternalError, LeasedError, RefusedError, StoreError
from elastic_launch.events.sentences import why
from elastic_launch.events.types import EventSink, LeaderElected
from elastic_launch.rendezvous.backends.c10d import ACK_TIMEOUT, FoundLeader, NodeAddress
from elastic_launch.rendezvous.backends.rival import Rivals
from elastic_launch.rendezvous.backends.succession import Succession, Takeover
from elastic_launch.rendezvous.continuity import REPAIR, STANDS, Claim, Continuity, Sight, SpoiledError, repairing
from elastic_launch.rendezvous.leader.service import UNSURE, LeaderService
from elastic_launch.rendezvous.record import ControlRecord, Leader, Round
from elastic_launch.rendezvous.stores.claimed_store import ClaimedStore
from elastic_launch.rendezvous.stores.control_store import ControlStore
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.rendezvous.wire.addresses import listen, source_address
from elastic_launch.rendezvous.wire.log_once import LogOnce
from elastic_launch.rendezvous.wire.seal import Patience, ValueSeal
from elastic_launch.system.threads import ThreadDied, VitalThread

_log = logging.getLogger(__name__)

WATCH = 1.0
"""Most seconds between two reads of the record by its leader."""

RESIGN_TIMEOUT = 1.0
"""Seconds that a leaving leader has to record that it leaves."""

MOST_DEATHS = 2
"""Internal errors of its leader after which a node leaves the run."""


class ElectedBackend:
    """Finds the leader by the record in an external store.

    Args:
        open_store: opens the store, which serves all threads.
        most_unsure: seconds without a confirmation from the store after which a leader steps down.
    """

    may_lead = True
    """Whether this node may be elected."""

    def __init__(
        self,
        config: LaunchConfig,
        clock: Clock,
        events: EventSink,
        open_store: Callable[[], ControlStore],
        most_unsure: float = math.inf,
    ) -> None:
        self._config = config
        self._clock = clock
        self._events = events
        self._open_store = open_store
        self._most_unsure = most_unsure
        self.steps_down = most_unsure < math.inf
        self._store: ControlStore | None = None
        self._address = ""
        self._links: socket.socket | None = None  # listens for links while it leads, or once it does
        self._incarnation = secrets.token_hex(6)
        self._succession = Succession(self._incarnation, config.timing.dead_after)
        self._seal = ValueSeal(config.token, config.run_id)
        self._continuity = Continuity(self._seal)
        self._patience = Patience(STANDS)
        self._repair = Patience(REPAIR * config.timing.dead_after)
        self._spoiled_at: float | None = None
        self._once = LogOnce(_log)
        self._leader_term: _LeaderTerm | None = None
        self._deaths = 0

    def open(self) -> NodeAddress:
        config = self._config
        self._address = config.local_addr or self._advertised()
        self._store = self._open_store()
        return NodeAddress(self._address, self._incarnation, config.endpoint, hosting=False)

    def _advertised(self) -> str:
        """Return the address at which other nodes reach this one."""
        return _address(self._config)

    def _removal(self) -> str:
        """Return how the user removes the record."""
        service = self._config.kind.service
        return service.removal(self._config.run_id) if service is not None else ""

    def find_leader(self, timeout: float) -> FoundLeader:
        """Return where the leader is by the record; if there is no leader, write a record as the leader.

        Raises:
            RefusedError: if no node leads, and this node's script is not the record's.
        """
        self._count_deaths()
        stored = self._look(timeout)
        try:
            record = self._continuity.judge(stored)
        except SpoiledError as spoiled:
            return self._without_record(stored, spoiled, timeout)
        self._spoiled_at = None
        if record is None:
            if not self.may_lead:
                raise StoreError("no node leads yet.")
            config = self._config
            record = ControlRecord(config.run_id, config.digest(), 1, self._candidate(), limits=config.limits)
            return self._take(None, replace(record, run=secrets.token_hex(8)), timeout, Takeover("first"))
        if record.end is not None and not self._continuity.member:
            return self._come_late(stored, record, timeout)
        self._patience.over()
        self._repair.over()
        if record.end is not None:
            return found_by(record)
        takeover = self._succession.decide(record, self._clock.now(), leading=self._leads)
        if takeover is None or not self.may_lead:
            return found_by(record)
        self._check_same(record)
        return self._take(stored, self._following(record), timeout, takeover)

    def unreachable(self, found: FoundLeader, *, refused: bool, silent_for: float = 0.0, seen_round: int = 0) -> None:
        now = self._clock.now()
        assert found.record is not None
        self._succession.unreachable(found.record, now, refused=refused, silent_for=silent_for, seen_round=seen_round)

    def reached(self, order: m.Order) -> None:
        self._succession.reached()
        match order:
            case m.Welcome(run=run):
                self._continuity.welcomed(run)
            case m.Form(term=term, round=formed, restarts=restarts, outline=outline):
                # A record must not hold made-up members: a new leader would wait for them.
                self._continuity.heard(term, formed if outline is None else Round(formed.number), restarts)
            case m.Pulse(term=term, round=number, restarts=restarts):
                self._continuity.heard(term, Round(number), restarts)

    def unsure_for(self) -> float:
        return self._clock.now() - self._leader_term.claim.sure if self._leader_term is not None else math.inf

    def stepped_down(self) -> bool:
        return self._leader_term is not None and not self._leads

    def close(self) -> None:
        if self._leader_term is not None:
            self._leader_term.close()
            self._leader_term = None
        if self._links is not None:
            self._links.close()
            self._links = None
        if self._store is not None:
            self._store.close()
            self._store = None

    def _look(self, timeout: float) -> bytes | None:
        """Load the record; note if that failed or was slow."""
        assert self._store is not None
        began = self._clock.now()
        try:
            value = self._store.load(timeout)
        except LeasedError as error:  # the store is within reach
            self._succession.leased(self._clock.now(), error.wait)
            raise
        except StoreError:
            self._succession.looked(self._clock.now() - began, failed=True)
            raise
        self._succession.looked(self._clock.now() - began, failed=False)
        return value

    def _without_record(self, stored: bytes | None, spoiled: SpoiledError, timeout: float) -> FoundLeader:
        """Use the newest record that this node has seen, if any; take over from it if no leader repairs the record."""
        newest, now = self._newest(), self._clock.now()
        if newest is None:
            refused = isinstance(spoiled.cause, RefusedError)
            if (self._patience if refused else self._repair).stands(stored, now):
                raise spoiled.cause
            raise StoreError(f"{spoiled} Waiting for the run's leader to repair the record.", spoiled.cause.hint)
        self._once.warn("spoiled", "%s It is ignored, and will be repaired.", spoiled)
        if self._spoiled_at is None:
            self._spoiled_at = now
        takeover = self._succession.decide(newest, now, leading=self._leads)
        dead_after = self._config.timing.dead_after
        leader_term = self._leader_term if newest.leader.incarnation == self._incarnation else None
        led = leader_term is not None and now - leader_term.claim.sure <= dead_after
        # A node that was frozen until its run had ended must not take the next one's record. If this run has not ended,
        # its leader repairs the record.
        waits = spoiled.later or now - self._spoiled_at < dead_after
        if takeover is None or not self.may_lead or (waits and not led):
            return found_by(newest)
        self._check_same(newest)
        following = self._following(repairing(newest, None if led else random.SystemRandom()))
        return self._take(stored, following, timeout, takeover)

    @property
    def _leads(self) -> bool:
        return self._leader_term is not None and self._leader_term.service.alive

    def _newest(self) -> ControlRecord | None:
        """Return the newest record of this node's run that it has seen or written, or None if it is new."""
        newest = self._continuity.newest
        if newest is None or not self._continuity.member:
            return None
        if newest.leader.incarnation == self._incarnation and self._leader_term is not None and not self._leads:
            return self._leader_term.record
        return newest

    def _come_late(self, stored: bytes | None, ended: ControlRecord, timeout: float) -> FoundLeader:
        """Begin a new run in the place of an ended one, or return its end, unless a leader reverts that end."""
        assert ended.end is not None
        config, run = self._config, f"run {ended.run_id!r}"
        if config.token is not None and not self._patience.stands(stored, self._clock.now()):
            raise StoreError(f"the record says that {run} has ended; waiting for a leader that may contradict it.")
        if config.reuse and not self.may_lead:
            raise StoreError(f"{run} has ended, and no node has begun a new one yet.")
        if config.reuse:
            # Terms and rounds continue, so that no old message can be mistaken for a new one.
            term, last, leader = ended.term + 1, Round(ended.round.number), self._candidate()
            begun = ControlRecord(
                ended.run_id, config.digest(), term, leader, round=last, first_term=term, limits=config.limits
            )
            begun = replace(begun, run=secrets.token_hex(8))
            return self._take(stored, begun, timeout, Takeover(f"a new run under the id {ended.run_id}"))
        if ended.end.code == ExitCode.DONE and config.token is None:
            raise RefusedError(
                f"The record says that {run} had ended with 0 before this node came, which cannot be verified without "
                f"a token: {ended.end.cause}.",
                "For a new run give another --rdzv-id, or all nodes --rdzv-conf reuse=true.",
            )
        return found_by(ended)

    def _candidate(self) -> Leader:
        """Return this node as leader; its port is set once it listens."""
        return Leader(self._config.node_id, self._incarnation, self._address, 0)

    def _following(self, record: ControlRecord) -> ControlRecord:
        """Return the record with which this node takes over."""
        if record.leader.incarnation == self._incarnation and self._leader_term is not None:
            record = replace(record, restarts=max(record.restarts, self._leader_term.service.restarts))
        return replace(record, term=record.term + 1, leader=self._candidate())

    def _check_same(self, record: ControlRecord) -> None:
        if record.digest != self._config.digest():
            raise RefusedError(
                f"No node leads run {record.run_id!r}, and this node has another script or --replica-size than the run "
                "began with.",
                "Give the same ones to go on with it; for another run give another --rdzv-id, or remove its record: "
                + self._removal(),
            )

    def _take(self, expected: bytes | None, record: ControlRecord, timeout: float, takeover: Takeover) -> FoundLeader:
        """Try to write a record with this node as its leader and to lead; return where the leader is then."""
        assert self._store is not None
        with contextlib.ExitStack() as undo:
            # Listens while the process lives, even after an unanswered write or after stepping down: a node whose
            # connection is refused would conclude that this process and its workers are dead.
            listener = self._links = self._links or listen(self._address)
            links = undo.enter_context(contextlib.closing(listener.dup()))
            leader = replace(record.leader, port=int(links.getsockname()[1]))
            record = replace(record, leader=leader).renewed()
            began = self._clock.now()
            self._succession.tries(record.term, takeover)
            try:
                written = self._store.compare_and_set(expected, self._seal.close(record.encode()), timeout)
            except LeasedError as error:
                self._succession.leased(self._clock.now(), error.wait)
                raise
            if not written:
                return self._beaten(timeout)
            undo.pop_all()
        if self._leader_term is not None:
            self._leader_term.close()
        self._continuity.wrote(record)
        self._spoiled_at = None
        claim = Claim(self._seal, record, began)  # not later: its answer may have waited in a frozen process
        claimed = ClaimedStore(self._store, claim, self._clock, _log)
        most, now = self._most_unsure, self._clock.now
        service = LeaderService(
            self._config,
            links,
            claimed.compare_and_set,
            record,
            self._clock,
            self._events,
            dead=frozenset({takeover.dead} - {""}),
            # Only if leaders step down in time: its node was cut off before another one could be elected.
            silent=frozenset({takeover.silent} - {""}) if self.steps_down else frozenset(),
            sure=lambda: now() - claim.sure < most,
            unsure_for=lambda: now() - claim.sure,
        )
        self._succession.reached()
        # Several reads within the time after which a leader that cannot see the record is no longer sure.
        look = min(WATCH, self._config.timing.dead_after / 5)
        rivals = Rivals(record.run, self._incarnation, self._config.token)
        self._leader_term = _LeaderTerm(service, self._store, claimed, self._clock, look, rivals, self._most_unsure)
        self._events.emit(LeaderElected(self._config.node_id, record.term, why(takeover.cause)))
        self._leader_term.start()
        return found_by(record)

    def _beaten(self, timeout: float) -> FoundLeader:
        """Handle that another node has written first."""
        assert self._store is not None
        try:
            record = self._continuity.judge(self._store.load(timeout))
        except SpoiledError as spoiled:
            raise StoreError(f"{spoiled} It is looked at again.") from spoiled
        if record is None:
            raise StoreError(
                "the control record has vanished from the store.",
                "Do not delete the record while the run is in progress.",
            )
        return found_by(record)

    def _count_deaths(self) -> None:
        """Record how this node's last term as leader ended.

        Raises:
            InternalError: if its leader has died of internal errors too often: another node may do better.
        """
        leader_term = self._leader_term
        if leader_term is None or leader_term.counted:
            return
        if leader_term.died is not None:
            leader_term.counted = True
            self._deaths += 1
            if self._deaths >= MOST_DEATHS:
                raise InternalError(f"the leader's thread failed: {leader_term.died.error}")
        if leader_term.yielded:
            leader_term.counted = True
            self._continuity.forget()


def found_by(record: ControlRecord) -> FoundLeader:
    """Return where a record's leader is."""
    leader = record.leader
    where = f"the address of leader {leader.node_id}, {Endpoint(leader.address, leader.port)}"
    return FoundLeader(leader.address, leader.port, where, leader.incarnation, record=record)


def _address(config: LaunchConfig) -> str:
    """Return this host's address on the route to the first endpoint that has one.

    If the store is on this host, this may be loopback; but a proxy of the store may listen there on every host.

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
            _log.warning("the others get this node's address %s; if some run on other hosts, give --local-addr", found)
        return found
    assert error is not None
    raise error


class _LeaderTerm:
    """One term of this node as leader: the service, and a thread that ends it when the record has another term.

    Attributes:
        service: leads, as far as this node knows.
        claim: what it has written, and when it last found that in the store.
        yielded: whether it ended because another run owns the record, before its own had formed a round.
        counted: whether its end has been counted.
    """

    def __init__(
        self,
        service: LeaderService,
        store: ControlStore,
        claimed: ClaimedStore,
        clock: Clock,
        look: float,
        rivals: Rivals,
        most_unsure: float,
    ) -> None:
        self._rivals = rivals
        self._most_unsure = most_unsure
        self.yielded = self.counted = False
        self.service = service
        self._store = store
        self._claimed, self.claim = claimed, claimed.claim
        self._clock = clock
        self._look = look
        self._watch_died: ThreadDied | None = None
        self._stop = threading.Event()
        self._thread = VitalThread(self._watch, "leader-watch", owner=self._failed)

    @property
    def died(self) -> ThreadDied | None:
        """The internal error that ended it, if one did."""
        return self.service.died or self._watch_died

    @property
    def record(self) -> ControlRecord:
        """The record as last written in this term; call this only once the term is over."""
        return ControlRecord.parse(self.service.committed)

    def start(self) -> None:
        self.service.start()
        self._thread.start()

    def close(self) -> None:
        """Stop leading; if the run goes on, note it in the record, so that other nodes need not detect it."""
        # While it still leads: once its links are closed, members look for another leader.
        self._stop.set()
        self._thread.join(3 * WATCH)
        leads = self.service.alive
        self.service.close(ACK_TIMEOUT)
        standing = self.record
        if leads and standing.end is None:
            resigned = replace(standing, leader=replace(standing.leader, port=0)).renewed()
            with contextlib.suppress(StoreError):  # the other nodes detect it by themselves
                self._claimed.compare_and_set(self.service.committed, resigned.encode(), RESIGN_TIMEOUT)
                self._claimed.resign()
        self._rivals.close()

    def _failed(self, died: ThreadDied) -> None:
        self._watch_died = died
        self.service.depose("the thread that watches the record failed with an internal error")

    def _watch(self) -> None:
        told = False
        while not self._stop.is_set() and self.service.alive:
            began = self._clock.now()
            left = self._most_unsure - (began - self.claim.sure)
            if left <= 0:
                self.service.depose(UNSURE)
                return
            try:
                stored = self._store.renew(min(self._look, left))
                told = False
                if not self._judge(stored):
                    return
                self.claim.seen(began)
                pause = began + self._look - self._clock.now()
            except StoreError as error:
                if not told:
                    _log.warning("the control record cannot be read, training goes on: %s", error.message)
                told, pause = True, WATCH
            sure = self._most_unsure - (self._clock.now() - self.claim.sure)
            self._stop.wait(max(0.0, min(pause, sure)))

    def _judge(self, stored: bytes | None) -> bool:
        """Check what the store holds, and restore it if that is safe; return whether this node still leads.

        Raises:
            StoreError: if the store does not answer.
        """
        sight = self.claim.look(stored)
        if sight is Sight.OWN:
            return True
        # The value read may be older than this leader's last write; a spoiled value is still there on a second read.
        if self._store.load(self._look) != stored:
            return True
        if sight is Sight.SUCCEEDED:
            self.service.depose("another node leads")
            return False
        if sight is Sight.SPOILED and self.claim.record.end is not None and self.claim.has_followed(stored):
            self.service.depose("the next run with this id has the record")
            return False
        if sight is Sight.SPOILED and self.claim.record.end is None:
            self.service.depose("the control record was changed or deleted by another client; this node repairs it")
            return False
        if sight is Sight.RIVAL and not self.claim.record.round.members:
            self.yielded = True
            self.service.depose("another run with this id has the record")
            return False
        if sight is Sight.RIVAL and stored is not None:
            self._rivals.saw(self.claim.rival(stored))
            if self._rivals.lost_to:
                self.service.give_way(self._rivals.lost_to)
                return False
        self._claimed.repair(stored, self._look)
        if sight is Sight.RIVAL:
            self._stop.wait(WATCH)  # if that run's leader is alive, it repairs the record, too
        return True
