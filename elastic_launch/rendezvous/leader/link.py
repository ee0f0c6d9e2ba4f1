"""The leader's end of a link to a node."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass

from elastic_launch.rendezvous.wire.authentication import Channel

MAX_UNSENT = 64 * 1024 * 1024
"""Bytes that may be queued for a node that does not read before its link is closed."""


@dataclass
class Link:
    """An incoming connection.

    Attributes:
        opened: when it was opened, by the leader's clock.
        greeted: whether a :class:`Hello` or a :class:`Caller` has been received.
        closing: further input is ignored, and the link is closed once all output is sent.
    """

    sock: socket.socket
    peer: str
    opened: float
    channel: Channel
    greeted: bool = False
    closing: bool = False

    def flush(self) -> bool:
        """Send what can be sent without blocking; return whether the link still works."""
        unsent = self.channel.unsent
        try:
            while unsent:
                del unsent[: self.sock.send(unsent)]
        except BlockingIOError:
            pass
        except OSError:
            return False
        if self.closing and not unsent:
            self._half_close()
        return len(unsent) <= MAX_UNSENT

    def _half_close(self) -> None:
        """Close the sending side without losing output: the node closes its side when it has read everything."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
