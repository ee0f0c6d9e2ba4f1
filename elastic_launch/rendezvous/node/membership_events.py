"""What a membership tells its node, besides the leader's orders."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_launch.errors import RendezvousError
from elastic_launch.rendezvous.backends.c10d import NodeAddress
from elastic_launch.rendezvous.node.failure_detector import CutOff
from elastic_launch.rendezvous.wire import messages as m

__all__ = ["AT_ENDPOINT", "LinkDown", "LinkUp", "MembershipEvent", "Opened", "RendezvousLost"]

AT_ENDPOINT = "an agent is back at the endpoint"
"""What has to come on c10d before the run goes on: only there can its store be."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The node knows its address."""

    place: NodeAddress


@dataclass(frozen=True, slots=True)
class LinkUp:
    """The leader accepted this node's hello.

    Attributes:
        leader: where its links listen.
    """

    leader: str = ""


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The leader cannot be reached.

    Attributes:
        gone: its process is gone, else it is only silent.
        until: what has to come before the run goes on, in words.
    """

    reason: str
    gone: bool
    until: str = AT_ENDPOINT


@dataclass(frozen=True, slots=True)
class RendezvousLost:
    """No use to go on trying."""

    error: RendezvousError


MembershipEvent = Opened | LinkUp | LinkDown | CutOff | RendezvousLost | m.ToNode
