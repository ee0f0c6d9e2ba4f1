"""Answers HTTP probes by a kubelet or another supervisor, and requests for pages about this node's part of the run.

``/livez``, and ``/healthz``, its older name: the agent answers, and not just this server: its main loop takes the
question out of its inbox. So an agent that waits for other nodes is alive, and one that is stuck is not. ``/readyz``:
its workers train.

The kubelet treats status 200 to 399 as success and everything else, or silence, as failure
(https://kubernetes.io/docs/concepts/workloads/pods/probes/).
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

from elastic_agents.inbox import HowAreYou, Inbox
from elastic_agents.probes.http_server import HttpRequest, HttpResponse, HttpServer
from elastic_launch.config.endpoints import Endpoint
from elastic_launch.config.launch_config import LaunchConfig
from elastic_launch.errors import EndpointError
from elastic_launch.observe.present import Present
from elastic_launch.rendezvous.wire.addresses import early_address, full_host_name, listen, listen_anywhere, try_listen

Page = Callable[[Present, str], HttpResponse]
"""Shows how this node's part of the run is, given what follows the question mark in the address.

Called in the connection's thread, so by several at the same time.
"""

PATIENCE = 5.0
"""Seconds that the agent may take to answer."""

FOLLOWED = ("/live", "/status", "/metrics")
"""Pages that clients ask for again and again."""

FRESH = 1.0
"""Seconds for which pages show what the agent has said: a probe is always a new question."""

LAST = 2.0
"""Seconds for which the end is served at most, to those who have asked within as many seconds before it."""

ASK_EVERY = 0.05
"""Seconds between two questions to the agent's loop: more clients do not cause more questions."""


def health_listener(config: LaunchConfig) -> socket.socket:
    """Return a listening socket for probes, which are configured; raises EndpointError if it cannot listen there."""
    assert config.health_port is not None
    return _listener("--health-port", config.health_host, config.health_port, config)


def page_listener(config: LaunchConfig) -> socket.socket:
    """Return a listening socket for ``--http``, likewise."""
    assert config.http is not None
    return _listener("--http", config.http.host, config.http.port, config)


def own_names(config: LaunchConfig) -> frozenset[str]:
    """Return the names by which this node is asked for pages."""
    name = socket.gethostname()
    names = [name, name.partition(".")[0], full_host_name(), config.local_addr, *config.http_hosts]
    names += [config.http.host] if config.http else []
    return frozenset(name.lower().rstrip(".") for name in names if name)


def _listener(flag: str, host: str | None, port: int, config: LaunchConfig) -> socket.socket:
    try:
        if host is None:
            return listen(early_address(config), port)
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
        f"{flag} {where}: this node cannot listen there: {reason.rstrip('.')}.",
        "Give another address or port, or stop the program that listens there.",
    )


class Health:
    """Answers until it is closed.

    Args:
        listener: taken over.
        pages: further paths, and what they show of this node's part of the run.
        hosts: see :class:`HttpServer`.
    """

    def __init__(
        self, listener: socket.socket, pages: Mapping[str, Page] | None = None, hosts: Collection[str] | None = None
    ) -> None:
        self._inbox: Inbox[object] | None = None
        self._listener = listener
        self._turn = threading.Condition()
        self._asked_at = 0.0
        self._asking = False
        self._said: tuple[Present, float] | None = None  # the agent's last answer, and when it was given
        self._ended: tuple[Present, float] | None = None  # how the node was at its end, and when that was told
        self._readers: dict[tuple[str, str, str], float] = {}  # clients that follow a page: when each has last asked
        probes: dict[str, Page] = {"/livez": _livez, "/healthz": _livez, "/readyz": _readyz}
        routes = {path: partial(self._show, page, 0.0) for path, page in probes.items()}
        routes |= {path: partial(self._show, page, FRESH) for path, page in (pages or {}).items()}
        name = "http" if pages else "health"
        self._server = HttpServer(listener, routes, name=name, hosts=hosts, sent=self._sent)

    @property
    def endpoint(self) -> Endpoint:
        """The address where it listens."""
        host, port = self._listener.getsockname()[:2]
        return Endpoint(str(host), int(port))

    def ask(self, inbox: Inbox[object]) -> None:
        """From now on, ask the agent's loop through its inbox; until then, the agent is importing."""
        self._inbox = inbox

    def heard(self, present: Present) -> None:
        """Take note of what the agent has said; called from its loop."""
        with self._turn:
            self._said = present, time.monotonic()
            self._turn.notify_all()

    def ended(self, present: Present) -> None:
        """From now on, show how the node was at its end."""
        with self._turn:
            self._ended = present, time.monotonic()
            self._turn.notify_all()

    def close(self) -> None:
        """Stop answering, once those who follow a page have been told of the end."""
        if self._ended is not None:
            since = self._ended[1] - LAST

            def told() -> bool:
                return all(asked < since for asked in self._readers.values())

            with self._turn:
                self._turn.wait_for(told, max(0.0, since + 2 * LAST - time.monotonic()))
        self._server.close()
        self._listener.close()

    def _show(self, page: Page, fresh: float, request: HttpRequest) -> HttpResponse:
        """Respond with a page, or with 503 if the agent does not answer.

        Args:
            fresh: seconds before the request in which the agent may have said what is shown.
        """
        if request.path in FOLLOWED:
            with self._turn:
                self._readers = {reader: at for reader, at in self._readers.items() if at > request.at - LAST}
                self._readers[request.client, request.path, request.query] = request.at
        present = self._present(request.at - fresh, request.at + PATIENCE)
        if present is None:
            return HttpResponse.text(503, f"no answer within {PATIENCE:g} s")
        return page(present, request.query)

    def _present(self, since: float, until: float) -> Present | None:
        """Return what the agent says of its node, not before ``since``; None if it says nothing until ``until``."""
        with self._turn:
            while True:
                if self._ended is not None:
                    return self._ended[0]
                if self._inbox is None:
                    return Present("starting")
                if self._inbox.closed:
                    # What takes long after the loop is saving what must not be lost.
                    return replace(self._said[0], phase="leaving") if self._said else Present("leaving")
                if self._said is not None and self._said[1] >= since:
                    return self._said[0]
                now = time.monotonic()
                if now >= until:
                    return None
                if not self._asking and now - self._asked_at >= ASK_EVERY:
                    self._asking, self._asked_at = True, now
                    self._inbox.put(HowAreYou(self._answered))
                self._turn.wait(min(ASK_EVERY, until - now))

    def _sent(self, request: HttpRequest) -> None:
        with self._turn:
            if self._ended is not None and request.at >= self._ended[1]:
                self._readers.pop((request.client, request.path, request.query), None)
                self._turn.notify_all()

    def _answered(self, present: Present) -> None:
        self._asking = False
        self.heard(present)


def _livez(present: Present, query: str) -> HttpResponse:
    return HttpResponse.text(200, present.phase)


def _readyz(present: Present, query: str) -> HttpResponse:
    return HttpResponse.text(200 if present.phase == "running" else 503, present.phase)
