"""One request to a metadata service, bounded in time and bytes, and sent past every proxy."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

from elastic_agents.notices.types import Source, Trouble

LINK_LOCAL = "http://169.254.169.254"
"""The address of the metadata service of AWS, GCP and Azure alike."""

LIMIT = 64 * 1024
"""Bytes of a body that are read at most; documents have some hundred."""

CONNECT = 2.0
"""Seconds for a connection; the service is on the host below."""


class Unanswered(Trouble):
    """There was no server, or no answer in time."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace").strip()


class _Socket(socket.socket):
    """A socket whose timeout covers all of its reads together, so a server that trickles bytes gains nothing."""

    until: float

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        self.rush()
        return super().recv_into(*args, **kwargs)

    def rush(self) -> None:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self.settimeout(left)


class Http:
    """Sends requests to one server, one connection each; used by one thread, closed by any.

    The standard library's urllib honours HTTP_PROXY, but a proxy has another host's metadata; http.client does not.

    Args:
        base: ``http://HOST[:PORT]``; the host as an IPv4 address, so that no name is looked up.
    """

    def __init__(self, base: str = LINK_LOCAL) -> None:
        where = urlsplit(base)
        self._host, self._port = where.hostname or "", where.port or 80
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._closed = False

    def ask(
        self, method: str, path: str, headers: Mapping[str, str], *, deadline: float, body: bytes | None = None
    ) -> Reply:
        """Send a request and return the answer, whatever its status, within ``deadline`` seconds.

        Raises:
            Unanswered: if there is no answer in time.
            Trouble: if the answer is not HTTP, or endless.
        """
        connection = HTTPConnection(self._host, self._port)
        try:
            connection.sock = made = _Socket(socket.AF_INET, socket.SOCK_STREAM)
            made.until = time.monotonic() + deadline
            with self._lock:
                if self._closed:
                    raise ConnectionAbortedError("closed")
                self._socket = made
            made.settimeout(min(deadline, CONNECT))
            made.connect((self._host, self._port))
            made.rush()
            connection.request(method, path, body, {"Connection": "close", **headers})
            response = connection.getresponse()
            found = response.read(LIMIT + 1)
            names = {name.lower(): value for name, value in response.getheaders()}
        except OSError as error:
            raise Unanswered("the metadata service does not answer", str(error)) from error
        except (HTTPException, ValueError) as error:
            raise Trouble("the metadata service does not speak HTTP", repr(error)[:80]) from None
        finally:
            with self._lock:
                self._socket = None
            connection.close()
        if len(found) > LIMIT:
            raise Trouble(f"the metadata service sends more than {LIMIT} bytes", path)
        return Reply(response.status, names, found)

    def get(self, path: str, headers: Mapping[str, str], deadline: float) -> Reply:
        """Return the answer with status 200; likewise.

        Raises:
            Trouble: also if the status is another one.
        """
        reply = self.ask("GET", path, headers, deadline=deadline)
        if reply.status != 200:
            raise Trouble(f"the metadata service answers {reply.status}", path.partition("?")[0])
        return reply

    def close(self) -> None:
        """Abort the request in progress; no later one succeeds."""
        with self._lock:
            self._closed = True
            if self._socket is not None:
                # If it is not connected yet, this ends the attempt.
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)


class MetadataSource(Source):
    """A source that asks a metadata service."""

    def __init__(self, base: str = LINK_LOCAL) -> None:
        self._http = Http(base)

    def close(self) -> None:
        self._http.close()
