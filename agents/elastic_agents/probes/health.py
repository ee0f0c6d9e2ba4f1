"""Answers HTTP probes by a kubelet or another supervisor.

``/livez``: the agent answers, and not just this server: its main loop takes the question out of its inbox. So an agent
that waits for other nodes is alive, and one that is stuck is not. ``/readyz``: its workers train.

The kubelet treats status 200 to 399 as success and everything else, or silence, as failure
(https://kubernetes.io/docs/concepts/workloads/pods/probes/).
"""

from __future__ import annotations

import ipaddress
import socket
import time

from elastic_agents.inbox import HowAreYou, Inbox
from elastic_agents.probes.http_server import HttpServer, Request, Response
from elastic_launch.config.launch_config import Endpoint, LaunchConfig
from elastic_launch.errors import EndpointError
from elastic_launch.rendezvous.wire.addresses import (
    listen,
    listen_anywhere,
    routable_address,
    source_address,
    try_listen,
)

__all__ = ["Health", "health_listener"]

PATIENCE = 5.0
"""Seconds that the agent may take to answer."""

ASK_EVERY = 0.05
"""Seconds between two questions to the agent's loop: more clients do not cause more questions."""


def health_listener(config: LaunchConfig) -> socket.socket | None:
    """Return a listening socket for probes, if they are configured.

    Raises:
        EndpointError: if it cannot listen there.
    """
    port = config.health_port
    if port is None:
        return None
    host = config.health_host
    try:
        if host is None:
            return listen(config.local_addr or _own_address(config), port)
        if host in ("0.0.0.0", "::"):
            return listen_anywhere(port)
        listener, taken = try_listen(Endpoint(host, port))
        if listener is not None:
            return listener
        reason = "Address already in use" if taken else f"{host} is not an address of this host"
    except (OSError, EndpointError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    where = port if host is None else Endpoint(host, port)
    raise EndpointError(
        f"--health-port {where}: this node cannot listen there: {reason.rstrip('.')}.",
        "Give another one, or end what listens there.",
    )


def _own_address(config: LaunchConfig) -> str:
    """The address that this node will advertise, as far as it is known without a DNS lookup, which may take long."""
    try:
        if config.endpoint is not None and config.limits.max_nodes > 1:
            ipaddress.ip_address(config.endpoint.host)
            return source_address(config.endpoint)
    except (ValueError, EndpointError):
        pass
    return routable_address()


class Health:
    """Answers until it is closed.

    Args:
        listener: taken over.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._inbox: Inbox[object] | None = None
        self._listener = listener
        self._asked_at = 0.0
        self._asking = False
        self._said = ("", 0.0)  # the agent's last answer, and when it was given
        self._server = HttpServer(listener, {"/livez": self._livez, "/readyz": self._readyz}, name="health")

    @property
    def endpoint(self) -> Endpoint:
        """The address where it listens."""
        host, port = self._listener.getsockname()[:2]
        return Endpoint(str(host), int(port))

    def ask(self, inbox: Inbox[object]) -> None:
        """From now on, ask the agent's loop through its inbox; until then, the agent is importing."""
        self._inbox = inbox

    def close(self) -> None:
        """Stop answering."""
        self._server.close()
        self._listener.close()

    def _livez(self, request: Request) -> Response | None:
        well, text = self._state(request)
        return Response.text(200 if well else 503, text) if text else None

    def _readyz(self, request: Request) -> Response | None:
        well, text = self._state(request)
        return Response.text(200 if well and text == "running" else 503, text) if text else None

    def _state(self, request: Request) -> tuple[bool, str]:
        """Whether the agent is alive, and its phase; an empty phase while it has not answered yet."""
        inbox = self._inbox
        if inbox is None:
            return True, "starting"
        if inbox.closed:
            # What takes long after the loop is saving what must not be lost.
            return True, "leaving"
        text, at = self._said
        if at >= request.at:
            return True, text
        now = time.monotonic()
        if not self._asking and now - self._asked_at >= ASK_EVERY:
            self._asking, self._asked_at = True, now
            inbox.put(HowAreYou(self._answered))
        if now - request.at >= PATIENCE:
            return False, f"no answer within {PATIENCE:g} s"
        return True, ""

    def _answered(self, phase: str) -> None:
        """Called from the agent's loop."""
        self._said = phase, time.monotonic()
        self._asking = False
        self._server.wake()
