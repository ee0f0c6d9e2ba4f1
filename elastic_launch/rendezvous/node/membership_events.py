"""Events that a membership reports to its node, besides the leader's orders."""

from __future__ import annotations

from elastic_launch.errors import RendezvousError
from elastic_launch.rendezvous.backends.c10d import NodeAddress
from elastic_launch.rendezvous.node.failure_detector import CutOff
from elastic_launch.rendezvous.wire import messages as m
from elastic_launch.values import Value


class Opened(Value):
    """The node knows its address."""

    place: NodeAddress


class LinkUp(Value):
    """The leader accepted this node's hello.

    Attributes:
        leader: where it listens for links.
    """

    leader: str = ""


class LinkDown(Value):
    """The leader cannot be reached.

    Attributes:
        gone: whether its process is gone; otherwise it is only silent.
        elects: whether another leader can be elected; else an agent must come back to the endpoint.
    """

    reason: str
    gone: bool
    elects: bool = False


class RendezvousLost(Value):
    """Retrying cannot help."""

    error: RendezvousError


MembershipEvent = Opened | LinkUp | LinkDown | CutOff | RendezvousLost | m.ToNode
