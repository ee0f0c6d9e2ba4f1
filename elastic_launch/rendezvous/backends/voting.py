"""Leader election without an external store: the hosts that the endpoint names keep the record by majority.

A node that can bind one of the endpoints is that host's voter, and only voters lead. Other nodes read the record. The
voter listens at its endpoint; a leader's links listen elsewhere, at the address in the record.
"""

from __future__ import annotations

import contextlib
import logging
import socket

from elastic_launch.clock import Clock
from elastic_launch.config.endpoints import Endpoint
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.errors import EndpointError, ProtocolError, RefusedError, UnresolvedError
from elastic_launch.events.facts import Misfit
from elastic_launch.events.types import EventSink, counted
from elastic_launch.rendezvous.backends.c10d import ACK_TIMEOUT, FoundLeader, NodeAddress
from elastic_launch.rendezvous.backends.election import ElectedBackend
from elastic_launch.rendezvous.record import ControlRecord
from elastic_launch.rendezvous.stores.control_store import ControlStore
from elastic_launch.rendezvous.stores.majority import MajorityStore, OwnVoter
from elastic_launch.rendezvous.voters.messages import group_of
from elastic_launch.rendezvous.voters.server import VoterServer
from elastic_launch.rendezvous.voters.vote_file import VoteFile
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.rendezvous.wire.addresses import is_hidden, listen_at, routable_address, source_address
from elastic_launch.rendezvous.wire.authentication import link_key

_log = logging.getLogger(__name__)

STEP_DOWN = 0.8
"""Fraction of dead_after without a majority after which a leader steps down: voters wait for all of it."""


class VotingBackend(ElectedBackend):
    """Finds the leader by the record that the voters keep, and is a voter on one of their hosts."""

    def __init__(self, config: LaunchConfig, clock: Clock, events: EventSink) -> None:
        super().__init__(config, clock, events, self._share, STEP_DOWN * config.timing.dead_after)
        self._key = link_key(config.token, config.run_id)
        self._own: OwnVoter | None = None
        self._server: VoterServer | None = None
        self._majority: MajorityStore | None = None
        self._endpoint: Endpoint | None = None
        self._over = False
        self._taken: list[str] = []

    def open(self) -> NodeAddress:
        config = self._config
        endpoint, listener = self._bind()
        with contextlib.ExitStack() as undo:
            undo.callback(self._forget)
            if endpoint is not None and listener is not None:
                undo.callback(listener.close)
                self._own = self._voter(endpoint)
                undo.callback(self._own.file.close)
            self._endpoint, self.may_lead = endpoint, endpoint is not None
            lease = config.timing.dead_after
            self._majority = MajorityStore(config.endpoints, config.run_id, self._key, self._clock, self._own, lease)
            undo.callback(self._majority.close)
            if listener is not None:
                alone = Misfit("alone", ours=",".join(map(str, config.endpoints)))
                self._server = VoterServer(listener, self._key, self._majority.vote, alone)
                undo.callback(self._server.close)
                self._server.start()
            address = super().open()
            undo.pop_all()
        names = counted(len(config.endpoints), "host")
        if endpoint is not None:
            _log.info("this node is voter %s, one of %s that keep the run's record together", endpoint, names)
        else:
            why = f" ({', '.join(self._taken)}: the port is in use on this host)" if self._taken else ""
            _log.info(
                "this node is not one of the %s that keep the run's record together, so it never leads%s", names, why
            )
        return address

    def _forget(self) -> None:
        self._own = self._majority = self._server = None

    def find_leader(self, timeout: float) -> FoundLeader:
        found = super().find_leader(timeout)
        self._over = self._over or (found.record is not None and found.record.end is not None)
        return found

    def reached(self, order: m.Order) -> None:
        super().reached(order)
        self._over = self._over or isinstance(order, m.RunEnd)

    def close(self) -> None:
        super().close()
        over = self._over or (self._own is not None and self._ended(self._own))
        if self._majority is not None:
            self._majority.close()  # the other voters wait for its connections
            self._majority = None
        if self._server is not None:
            # Once most voters are gone, no node can learn from the record that the run has ended.
            self._server.close(ACK_TIMEOUT if over else 0.0)
            self._server = None
        if self._own is not None:
            if over:
                with contextlib.suppress(OSError):
                    self._own.file.remove()
            self._own.file.close()
            self._own = None

    def _advertised(self) -> str:
        endpoint = self._endpoint
        if endpoint is None:
            return super()._advertised()
        return routable_address() if is_hidden(endpoint) else source_address(endpoint)

    def _removal(self) -> str:
        return "the files voter-*.json in the run's directory, on all hosts that --rdzv-endpoint names"

    def _share(self) -> ControlStore:
        assert self._majority is not None
        return self._majority

    def _bind(self) -> tuple[Endpoint | None, socket.socket | None]:
        """Listen at the first endpoint that is an address of this host and free; one with its name comes before others.

        Raises:
            UnresolvedError: if the name may be this host's, and does not resolve yet.
            EndpointError: if this node is to be a voter, and cannot.
        """
        config = self._config
        taken: list[str] = []
        self._taken = taken
        if config.is_host is False:
            return None, None
        name = socket.gethostname().partition(".")[0]
        # DNS may still give this host's address for the name of one that is gone.
        for endpoint in sorted(config.endpoints, key=lambda each: each.host.partition(".")[0] != name):
            try:
                listener, in_use = listen_at(endpoint, hidden=is_hidden(endpoint))
            except UnresolvedError:
                # A host that is gone may have lost its name; this host's own name may only not be known yet.
                if endpoint.host.partition(".")[0] == name:
                    raise
                continue
            if listener is not None:
                return endpoint, listener
            taken += [str(endpoint)] if in_use else []
        if config.is_host:
            why = f"the port of {', '.join(taken)} is in use" if taken else "no endpoint is an address of this host"
            raise EndpointError(
                f"This node is to be a voter (is_host=true), but {why}.",
                "Correct --rdzv-endpoint, end what uses the port, or leave out is_host.",
            )
        return None, None

    def _voter(self, endpoint: Endpoint) -> OwnVoter:
        config, name = self._config, str(endpoint)
        names = frozenset(map(str, config.endpoints))
        file = VoteFile((config.link_dir or config.log_dir) / config.run_id, name)
        group = group_of(config.run_id, names)
        return OwnVoter(name, group, names - {name}, file, config.timing.dead_after, self._clock.now())

    def _ended(self, own: OwnVoter) -> bool:
        """Whether the record that the own voter has is that of an ended run."""
        try:
            value = own.voter.state.value
            return value is not None and ControlRecord.parse(self._seal.open(value.encode())).end is not None
        except (ProtocolError, RefusedError):
            return False
