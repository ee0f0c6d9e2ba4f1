"""Events for the agent's policy."""

from __future__ import annotations

from dataclasses import replace
from signal import SIGINT, SIGTERM, Signals
from typing import Any

from elastic_agents import policy
from elastic_agents import policy_types as v
from elastic_launch.errors import RefusedError
from elastic_launch.events.facts import Isolation
from elastic_launch.rendezvous.node.failure_detector import CutOff
from elastic_launch.rendezvous.node.membership_events import LinkDown, RendezvousLost
from elastic_launch.rendezvous.record import Member, Round
from elastic_launch.rendezvous.wire import messages as m

TERM_CODE, INT_CODE = -SIGTERM, -SIGINT
SILENT, GONE = LinkDown("the leader was silent for 5 s", gone=False), LinkDown("connection refused", gone=True)
CUT_OFF = CutOff(Isolation("silent", 4.0), leader="i1")
OUT = CutOff(Isolation("frozen", 9.0), certain=True, leader="i1")
LOST = RendezvousLost(RefusedError("the run refuses this node"))


def decide(view: v.View, event: v.Event, nproc: int, node_id: str = "", **facts: Any) -> tuple[v.View, list[v.Action]]:
    """Return the policy's response on a node with nproc workers.

    Args:
        facts: of :class:`elastic_agents.policy_types.NodeFacts`.
    """
    return policy.decide(view, event, v.NodeFacts(nproc, node_id, **facts))


def form(number: int, nodes: int = 2, slots: tuple[int, ...] = ()) -> m.Form:
    """The order to form a round.

    Args:
        slots: local ranks with which the first member, n0, takes part; empty for both.
    """
    members = [Member(f"n{index}", f"i{index}", 2, "host", 7000) for index in range(nodes)]
    if slots:
        members[0] = replace(members[0], workers=len(slots), slots=slots)
    return m.Form(1, Round(number, tuple(members)), 0, "first")


def brk(number: int) -> m.Break:
    return m.Break(1, number, "crash", "rank 0 crashed")


def gone(local_rank: int, exit_code: int, number: int = 1) -> v.WorkerExit:
    return v.WorkerExit(number, local_rank, exit_code)


def leave(number: int, seconds: float = 0.0) -> v.Leave:
    return v.Leave(Signals(number).name, 128 + number, seconds, number)
