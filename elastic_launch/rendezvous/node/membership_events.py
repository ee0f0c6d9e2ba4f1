"""Events that a membership reports to its node, besides the leader's orders."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_launch.errors import RendezvousError
from elastic_launch.rendezvous.backends.c10d import NodeAddress
from elastic_launch.rendezvous.node.failure_detector import CutOff
from elastic_launch.rendezvous.wire import messages as m

AT_ENDPOINT = "an agent is back at the endpoint"
"""What a c10d run waits for before it continues: its store can only be at the endpoint."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The node knows its address."""

    place: NodeAddress


@dataclass(frozen=True, slots=True)
class LinkUp:
    """The leader accepted this node's hello.

    Attributes:
        leader: where it listens for links.
    """

    leader: str = ""


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The leader cannot be reached.

    Attributes:
        gone: whether its process is gone; otherwise it is only silent.
        until: what the run waits for, as text.
    """

    reason: str
    gone: bool
    until: str = AT_ENDPOINT


@dataclass(frozen=True, slots=True)
class RendezvousLost:
    """Retrying cannot help."""

    error: RendezvousError


MembershipEvent = Opened | LinkUp | LinkDown | CutOff | RendezvousLost | m.ToNode
