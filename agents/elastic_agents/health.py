"""Whether this node's agent is well, for those who ask by HTTP, as a kubelet does.

``/livez``: the agent answers, and not just this server: its one loop takes the question out of its inbox. So an agent
that waits for other nodes is alive, and one that is stuck is not. ``/readyz``: its workers train.

The kubelet takes 200 to 399 for yes and all else, or silence, for no
(https://kubernetes.io/docs/concepts/workloads/pods/probes/).
"""

from __future__ import annotations

import queue
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from elastic_agents.inbox import HowAreYou, Inbox
from elastic_launch.config import Endpoint
from elastic_launch.errors import EndpointError
from elastic_launch.rendezvous.net import listen, listen_anywhere

__all__ = ["Health", "health_listener"]

PATIENCE = 5.0
"""Seconds that the agent may take to answer."""

READ_TIMEOUT = 5.0
"""Seconds after which a connection that asks nothing is closed."""


def health_listener(port: int, address: str | None) -> socket.socket:
    """Return a socket that listens for who asks.

    Args:
        address: the only one to listen at; None: all of this host.

    Raises:
        EndpointError: if the port cannot be had.
    """
    try:
        return listen(address, port) if address else listen_anywhere(port)
    except (OSError, EndpointError) as error:
        raise EndpointError(
            f"The port for --health-port, {port}, cannot be had: {getattr(error, 'strerror', None) or error}.",
            "Give another one, or end what listens there.",
        ) from error


class Health:
    """Answers until it is closed.

    Args:
        listener: taken over.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._inbox: Inbox[object] | None = None
        self._server = _Server(self, listener.getsockname()[:2])
        self._server.socket.close()
        self._server.socket = listener
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="health", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> Endpoint:
        """Where it listens."""
        host, port = self._server.socket.getsockname()[:2]
        return Endpoint(str(host), int(port))

    def ask(self, inbox: Inbox[object]) -> None:
        """From now on the agent's loop is asked, by its inbox; until then it imports."""
        self._inbox = inbox

    def alive(self) -> tuple[bool, str]:
        """Return whether the agent answers, and what."""
        inbox = self._inbox
        if inbox is None:
            return True, "starting"
        question = HowAreYou()
        inbox.put(question)
        try:
            return True, question.answer.get(timeout=0 if inbox.closed else PATIENCE)
        except queue.Empty:
            # What takes long after the loop is to save what must not be lost.
            return inbox.closed, "leaving" if inbox.closed else f"no answer within {PATIENCE:g} s"

    def ready(self) -> tuple[bool, str]:
        """Return whether the agent's workers train, and what it answers."""
        well, text = self.alive()
        return well and text == "running", text

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, health: Health, address: tuple[str, int]) -> None:
        super().__init__(address, _Handler, bind_and_activate=False)
        self.health = health

    def handle_error(self, request: object, client_address: object) -> None:
        """Nobody needs to read that a probe has hung up."""


class _Handler(BaseHTTPRequestHandler):
    timeout = READ_TIMEOUT

    def do_GET(self) -> None:
        assert isinstance(self.server, _Server)
        health = self.server.health
        asked = {"/livez": health.alive, "/readyz": health.ready}.get(self.path.partition("?")[0])
        if asked is None:
            self.send_error(404, "Ask for /livez or /readyz")
            return
        well, text = asked()
        body = f"{text}\n".encode()
        self.send_response(200 if well else 503)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: somebody asks every few seconds."""
