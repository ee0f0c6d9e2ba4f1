"""The leader's end of a link to a node."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass

from elastic_launch.rendezvous.wire.authentication import Channel

__all__ = ["MAX_UNSENT", "Link"]

MAX_UNSENT = 64 * 1024 * 1024
"""Bytes that may wait for a node that does not read, before its link is closed."""


@dataclass
class Link:
    """A connection that came in.

    Attributes:
        peer: the address it came from.
        opened: when, by the leader's clock.
        greeted: whether it has said hello, or who calls.
        closing: nothing that comes over it counts any more; closed once all is sent.
    """

    sock: socket.socket
    peer: str
    opened: float
    channel: Channel
    greeted: bool = False
    closing: bool = False

    def flush(self) -> bool:
        """Send what can be sent without waiting; return whether the link is still good."""
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
        """Say goodbye without losing what was sent: the node closes its side when it has read all."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
