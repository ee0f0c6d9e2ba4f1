"""What somebody who is no node asks the leader, and what it answers.

Such a link opens like a node's, with the same proof of the token. Its first message is a :class:`Caller`, and its
sender is never counted as a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = [
    "NAMES",
    "Answer",
    "AskDrain",
    "AskResize",
    "AskSave",
    "AskStatus",
    "Caller",
    "Decision",
    "LastSave",
    "LeaderFound",
    "NodeStatus",
    "Request",
    "Status",
]

# Up, to the leader.


@dataclass(frozen=True, slots=True)
class Caller:
    """First message on the link."""

    version: int
    run_id: str


@dataclass(frozen=True, slots=True)
class AskStatus:
    """How does the run stand? Answered by :class:`LeaderFound`, at once."""


@dataclass(frozen=True, slots=True)
class AskDrain:
    """Have a node leave after a drain, or all: the run then stops with its state saved.

    Attributes:
        node: its id; empty for all.
        seconds: after which the round is broken instead; None for no such limit.
    """

    node: str = ""
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class AskSave:
    """Have all ranks write a durable checkpoint now. Answered when it is written."""


@dataclass(frozen=True, slots=True)
class AskResize:
    """Change how many nodes the run may have. Answered when the round that fits is formed."""

    min_nodes: int
    max_nodes: int


Request = AskStatus | AskDrain | AskSave | AskResize

# Down, to who asks.


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request.

    Attributes:
        done: whether what was asked for is done.
        step: optimizer steps in what was saved, if something was.
    """

    term: int
    done: bool
    text: str
    step: int | None = None


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node, as its leader sees it.

    Attributes:
        state: ``training``, ``stopping`` (its workers are being ended), ``waiting``, ``spare`` or ``leaving``.
        silence: seconds since its last sign of life.
    """

    node_id: str
    address: str
    workers: int
    state: str
    silence: float


@dataclass(frozen=True, slots=True)
class LastSave:
    """The newest state that was reported as kept: optimizer steps in it, and seconds since the report."""

    step: int
    ago: float


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision of the leader's, in one line, and seconds since then."""

    text: str
    ago: float


@dataclass(frozen=True, slots=True)
class Status:
    """How a run stands.

    Attributes:
        next: what comes next, in words.
        step: optimizer steps done, None until a worker has reported some to this leader.
        snapshot, checkpoint: kept in memory, and written; None until one was reported to this leader.
        incidents: the leader's last decisions, the newest last.
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
    snapshot: LastSave | None = None
    checkpoint: LastSave | None = None
    incidents: tuple[Decision, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaderFound:
    """The answer to :class:`AskStatus`."""

    term: int
    status: Status


NAMES: dict[str, type[Any]] = {
    "caller": Caller,
    "ask status": AskStatus,
    "ask drain": AskDrain,
    "ask save": AskSave,
    "ask resize": AskResize,
    "answer": Answer,
    "found": LeaderFound,
}
"""The messages by what stands in their ``type``."""
