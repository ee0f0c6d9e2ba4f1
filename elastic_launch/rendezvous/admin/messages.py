"""Requests of clients that are not nodes, and the leader's answers.

Such a link opens like a node's, with the same proof of the token. Its first message is a :class:`Caller`, and its
sender never counts as a node.
"""

from __future__ import annotations

from dataclasses import field

from elastic_launch.system.host_load import HostLoad
from elastic_launch.values import Value

# Requests.


class Caller(Value):
    """First message on the link."""

    version: int
    run_id: str


class AskStatus(Value):
    """Ask for the run's status. Answered by :class:`Status`, at once."""


class AskDrain(Value):
    """Have one node leave after a drain, or all nodes: then the run stops with its state saved.

    Attributes:
        node: the node's id; empty for all nodes.
        seconds: time after which the round is broken instead; None for no limit.
    """

    node: str = ""
    seconds: float | None = None


class AskSave(Value):
    """Have all ranks write a durable checkpoint now. Answered once it is written."""


class AskResize(Value):
    """Change how many nodes the run may have. Answered once a matching round is formed."""

    min_nodes: int
    max_nodes: int


class AskStacks(Value):
    """Have all nodes of the round tell where their workers stand: a :class:`NodeStacks` each, then the answer."""


AdminRequest = AskStatus | AskDrain | AskSave | AskResize | AskStacks

# Answers.


class AdminAnswer(Value):
    """The outcome of a request.

    Attributes:
        done: whether the request was carried out.
        step: optimizer steps in the saved state, if a state was saved.
    """

    term: int
    done: bool
    text: str
    step: int | None = None


class NodeStacks(Value):
    """The stacks of a node's workers, as text."""

    term: int
    node: str
    text: str


class NodeStatus(Value):
    """One node as its leader sees it.

    Attributes:
        workers: number of its workers that train or could.
        state: ``training``, ``stopping`` (its workers are being stopped), ``starting`` (its workers start, in the round
            or ahead of a place), ``waiting``, ``spare`` or ``leaving``.
        silence: seconds since its last sign of life.
        ranks: the first and the last of its ranks in the round, which are consecutive; empty if it has none.
        doing: what its workers do in the round: ``start``, ``run`` (they report no steps), ``train``, are ``late`` (no
            step has come for long) or ``done``; empty if it has none.
        step: optimizer steps done in the round, as this node reported them last; None if it has reported none.
        load: how busy its host is, as it reported last; None if it has not.
    """

    node_id: str
    address: str
    workers: int
    state: str
    silence: float
    ranks: tuple[int, ...] = ()
    doing: str = ""
    step: int | None = None
    load: HostLoad | None = None


class LastSave(Value):
    """The newest state that was reported as saved: its optimizer steps, and the seconds since the report.

    Attributes:
        training: number of the script's training, from 0.
    """

    step: int
    ago: float
    training: int = 0


class Decision(Value):
    """A decision of the leader, in one line, and the seconds since then."""

    text: str
    ago: float


class Status(Value):
    """The status of a run.

    Attributes:
        next: what happens next, as text.
        step: optimizer steps done; None until a worker has reported some to this leader.
        stepped: seconds since the round's workers reported their last further step, or the first number of them; None
            if no round trains, or none of them has.
        step_s: seconds of a step, the median of the last ones; None if that is not known, as with the next two.
        remaining: seconds until the training ends at this pace.
        loss: loss of the last step that has one.
        snapshot, checkpoint: the newest in memory and on storage; None until one was reported to this leader.
        incidents: the leader's last decisions, newest last.
        unconfirmed: seconds for which the store has not shown that this leader still leads, if they are many, else
            None. Meanwhile its node only adds checkpoints.
        replica_size: workers of a replica.
        time: time of the leader's host, in seconds since 1970. Reports use it; no decision depends on clocks of hosts.
    """

    run_id: str
    next: str
    term: int
    leader: str
    round: int
    world_size: int
    min_nodes: int
    max_nodes: int
    restarts: int
    max_restarts: int
    nodes: tuple[NodeStatus, ...]
    step: int | None = None
    step_s: float | None = None
    remaining: float | None = None
    loss: float | None = None
    snapshot: LastSave | None = None
    checkpoint: LastSave | None = None
    incidents: tuple[Decision, ...] = ()
    time: float = field(kw_only=True)
    unconfirmed: float | None = None
    stepped: float | None = None
    replica_size: int = 1
