"""The cluster's DNS: the current names of pods with a headless service (RFC 1035, A records)."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Sequence

__all__ = ["Dns", "answer"]

A, IN = 1, 1
NO_SUCH_NAME = 3
TTL = 5
"""Seconds; CoreDNS' default for the names of a cluster."""

HEADER = struct.Struct("!HHHHHH")


class Dns:
    """Answers on a socket until it is closed.

    Args:
        listener: a datagram socket, which it takes over.
        addresses: returns the IPv4 addresses of a name; none if there is no such name.
    """

    def __init__(self, listener: socket.socket, addresses: Callable[[str], Sequence[str]]) -> None:
        self._socket = listener
        self._addresses = addresses
        self._open = True
        self._socket.settimeout(0.1)
        self._thread = threading.Thread(target=self._serve, name="dns")
        self._thread.start()

    def close(self) -> None:
        self._open = False
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while self._open:
            try:
                query, sender = self._socket.recvfrom(512)
                self._socket.sendto(answer(query, self._addresses), sender)
            except OSError:  # there was no query, or its sender is gone
                continue


def answer(query: bytes, addresses: Callable[[str], Sequence[str]]) -> bytes:
    """Return the answer to a query of one question."""
    number, flags, *_ = HEADER.unpack_from(query)
    labels, at = [], HEADER.size
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode())
        at += 1 + length
    kind, family = struct.unpack_from("!HH", query, at + 1)
    question = query[HEADER.size : at + 5]
    found = addresses(".".join(labels).lower())
    records = found if (kind, family) == (A, IN) else ()
    code = 0 if found else NO_SUCH_NAME
    head = HEADER.pack(number, 0x8480 | (flags & 0x0100) | code, 1, len(records), 0, 0)
    # Each record's name is a pointer to the question's, at byte 12.
    body = [struct.pack("!HHHIH", 0xC00C, A, IN, TTL, 4) + socket.inet_aton(address) for address in records]
    return head + question + b"".join(body)
