"""The control record: one value per run, changed only by compare-and-set of the whole."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace

from elastic_launch.config.launch_config import Limits
from elastic_launch.errors import ProtocolError, UsageError
from elastic_launch.rendezvous.wire import codec

__all__ = ["SCHEMA", "ControlRecord", "End", "Leader", "Member", "Round"]

SCHEMA = 2


@dataclass(frozen=True, slots=True)
class Member:
    """A node's part in a round.

    Attributes:
        incarnation: random per agent start; tells two agents of one node id apart.
        workers: number of its workers.
        address, store_port: where its worker store listens if it is the round's first member.
        role: of its workers.
    """

    node_id: str
    incarnation: str
    workers: int
    address: str
    store_port: int
    role: str = "default"


@dataclass(frozen=True, slots=True)
class Round:
    """Who trains together: members in rank order. Number 0 means that no round was formed yet."""

    number: int = 0
    members: tuple[Member, ...] = ()

    @property
    def world_size(self) -> int:
        """Workers of all members."""
        return sum(member.workers for member in self.members)

    def index(self, node_id: str, incarnation: str) -> int | None:
        """Rank of a node among the members, or None if it is none."""
        for rank, member in enumerate(self.members):
            if member.node_id == node_id and member.incarnation == incarnation:
                return rank
        return None


@dataclass(frozen=True, slots=True)
class Leader:
    """Who decides, and where its links listen.

    Attributes:
        port: 0 once it has left: nobody leads.
    """

    node_id: str
    incarnation: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class End:
    """How the run ended: the exit code of its nodes and why."""

    code: int
    cause: str


@dataclass(frozen=True, slots=True)
class ControlRecord:
    """All that a run must not forget.

    Attributes:
        digest: SHA-256 over what is run; a node with another one is refused.
        limits: those of the run's first node, or what it was resized to since; they hold for all nodes.
        term: a leader's reign; nodes ignore whatever comes from a lower one.
        floor: rounds up to this number may have been formed without a trace here, see ``continuity``.
        restarts: restarts charged to the budget so far.
        last_step: the highest optimizer step at which a round has begun to train, None if none is known.
        idle: restarts in a row that were not charged, and since which the training has not advanced.
        nonce: random per write; tells two writers of otherwise equal records apart.
        first_term: the term in which this run began; above 1 if another one had its id before.
        run: random per run; tells two runs of one id apart. Empty where the record is in its leader's memory only.
    """

    run_id: str
    digest: str
    term: int
    leader: Leader
    round: Round = field(default_factory=Round)
    floor: int = 0
    restarts: int = 0
    last_step: int | None = None
    idle: int = 0
    end: End | None = None
    limits: Limits = field(default_factory=Limits)
    nonce: str = ""
    first_term: int = 1
    run: str = ""
    schema: int = SCHEMA

    @property
    def repaired(self) -> bool:
        """Whether rounds that this record does not show may be training."""
        return self.floor > self.round.number

    def renewed(self) -> ControlRecord:
        """Return the same record under a fresh nonce, as every write must have."""
        return replace(self, nonce=secrets.token_hex(8))

    def encode(self) -> bytes:
        """Return the record as JSON."""
        return codec.dumps(self)

    @staticmethod
    def parse(data: bytes) -> ControlRecord:
        """Read a record.

        Raises:
            ProtocolError: if data is no record of this schema.
        """
        value = codec.loads(data)
        if value.get("schema") != SCHEMA:
            raise ProtocolError(
                f"The run's control record has schema {value.get('schema')!r}; this version reads {SCHEMA}.",
                "Use the same version of elastic-launch on all nodes.",
            )
        try:
            return codec.decode(ControlRecord, value)
        except UsageError as error:
            raise ProtocolError(f"ControlRecord.limits: {error.message}") from error
