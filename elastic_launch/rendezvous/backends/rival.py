"""Two runs with the same id whose leaders both write the record: one has to end, or both repair it forever.

This happens if the record was deleted while one run trained, and another run began. A record of another run proves
nothing, since any client may have written it. So this leader connects to the other one by the links' protocol, with
the token if there is one.
"""

from __future__ import annotations

import logging

from elastic_launch.config.endpoints import Endpoint
from elastic_launch.errors import ElasticLaunchError
from elastic_launch.rendezvous.admin.client import Address, AdminClient
from elastic_launch.rendezvous.record import ControlRecord
from elastic_launch.secret import Token
from elastic_launch.system.threads import VitalThread

_log = logging.getLogger(__name__)

SIGHTINGS = 8
"""Writes of another run that a leader repairs, about one per second, before it asks that run's leader."""


LINGER = 1.0
"""Seconds that a leader that ends waits for an answer."""


class Rivals:
    """What one leader has seen of another run with the same id.

    Attributes:
        lost_to: why this leader's run has to end; empty if it need not.
    """

    def __init__(self, run: str, incarnation: str, token: Token | None) -> None:
        self.lost_to = ""
        self._run = run
        self._incarnation = incarnation
        self._token = token
        self._seen: tuple[str, set[str]] = ("", set())
        self._asking: VitalThread | None = None
        self._told = False

    def saw(self, rival: ControlRecord) -> None:
        """Record that the store holds the record of another run."""
        run, nonces = self._seen if self._seen[0] == rival.run else (rival.run, set())
        nonces.add(rival.nonce)
        self._seen = (run, nonces)
        if len(nonces) < SIGHTINGS or rival.leader.incarnation == self._incarnation:
            return
        if self._asking is None or not self._asking.is_alive():
            self._seen = ("", set())
            self._asking = VitalThread(self._ask, "rival", (rival,))
            self._asking.start()

    def close(self) -> None:
        """Wait briefly for a pending answer; its thread ends by itself."""
        if self._asking is not None:
            self._asking.join(LINGER)

    def _ask(self, rival: ControlRecord) -> None:
        where = Endpoint(rival.leader.address, rival.leader.port)
        try:
            # Its links answer like those of a c10d leader at its endpoint.
            with AdminClient(Address(rival.run_id, "c10d", (where,), self._token)) as link:
                status = link.status()
        except ElasticLaunchError as error:
            _log.debug("no leader of another run answers at %s: %s", where, error)
            return
        if status.leader != rival.leader.node_id:
            return
        other = f"another run has the id {rival.run_id!r}; its leader is node {rival.leader.node_id} at {where}"
        if self._run < rival.run:
            self.lost_to = f"{other}, and only one can go on"
        elif not self._told:
            self._told = True
            _log.warning("%s. That run has to end", other)
