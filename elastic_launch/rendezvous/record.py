"""The control record: one value per run, changed only as a whole by compare-and-set."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Annotated, NamedTuple

from elastic_launch import codec
from elastic_launch.codec import between
from elastic_launch.config.launch_config import Limits
from elastic_launch.errors import ProtocolError, UsageError
from elastic_launch.events.facts import ClosedBy
from elastic_launch.values import Value

SCHEMA = 2

MOST_LOCAL_RANKS = 65536
"""From here on, a number is not a local rank."""


def _local_ranks(value: tuple[int, ...]) -> tuple[int, ...]:
    ordered = all(low < high for low, high in pairwise(value))
    if value and not (ordered and value[0] >= 0 and value[-1] < MOST_LOCAL_RANKS):
        raise ValueError("local ranks in ascending order")
    return value


LocalRanks = Annotated[tuple[int, ...], _local_ranks]
"""Some of a node's local ranks, in ascending order; empty for all of them."""


def whole_replicas(local_ranks: Collection[int], size: int) -> tuple[int, ...]:
    """Return those of a node's local ranks, in ascending order, that belong to replicas of which all are there.

    Local ranks 0 to size - 1 are a replica, the next ones another.
    """
    there = Counter(local_rank // size for local_rank in local_ranks)
    return tuple(local_rank for local_rank in sorted(local_ranks) if there[local_rank // size] == size)


ReplicaSize = Annotated[int, between(1, MOST_LOCAL_RANKS, "the size of a replica")]
"""Workers of a replica."""

Seconds = Annotated[float, between(0.0, 1e9, "a number of seconds from 0 to 1e9")]
"""A time that has passed, or that is left: clocks of two hosts are never compared."""


class WorkerRanks(NamedTuple):
    """The ranks of one worker in a round; ``role_rank`` is its rank among the workers of its role."""

    local_rank: int
    rank: int
    role_rank: int


@dataclass(frozen=True, slots=True)
class Member:
    """One node of a round.

    Attributes:
        incarnation: random per agent start; distinguishes agents with the same node id.
        workers: number of its workers in the round.
        address, store_port: where its worker store listens if it is the round's first member.
        slots: their local ranks, if the node takes part with only some of its workers; empty if with all of them.
    """

    node_id: str
    incarnation: str
    workers: int
    address: str
    store_port: int
    role: str = "default"
    slots: LocalRanks = ()

    def __post_init__(self) -> None:
        if self.slots and len(self.slots) != self.workers:
            raise ProtocolError(f"Member.slots names {len(self.slots)} of {self.workers} workers.")

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The local ranks of its workers in the round, in ascending order."""
        return self.slots or tuple(range(self.workers))


class Round(Value):
    """The nodes that train together, in rank order. Number 0 means that no round has been formed yet."""

    number: int = 0
    members: tuple[Member, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of workers of all members."""
        return sum(member.workers for member in self.members)

    def index(self, node_id: str, incarnation: str) -> int | None:
        """Return the node's rank among the members, or None if it is not a member."""
        return self._ranks.get((node_id, incarnation))

    @cached_property
    def _ranks(self) -> dict[tuple[str, str], int]:
        """The leader asks for thousands of nodes in a round of as many."""
        return {(member.node_id, member.incarnation): rank for rank, member in enumerate(self.members)}

    def node_of(self, rank: int) -> str:
        """Return the id of the node of the worker with a global rank; empty if there is no such rank."""
        for member in self.members:
            if rank < member.workers:
                return member.node_id
            rank -= member.workers
        return ""

    def ranks_of(self, index: int) -> list[WorkerRanks]:
        """Return the ranks of the workers of the member with the rank ``index``, by local rank.

        Global ranks follow the order of the members, and within a member that of the local ranks. Of a member that
        takes part with only some of its workers, a local rank may be higher than the number of its workers.
        """
        member, before = self.members[index], self.members[:index]
        first = sum(other.workers for other in before)
        first_of_role = sum(other.workers for other in before if other.role == member.role)
        return [
            WorkerRanks(local_rank, first + place, first_of_role + place)
            for place, local_rank in enumerate(member.local_ranks)
        ]


class Leader(Value):
    """The leader, and where it listens for links.

    Attributes:
        port: 0 once it has left and no node leads.
    """

    node_id: str
    incarnation: str
    address: str
    port: int


class End(Value):
    """How the run ended: the exit code of its nodes, and the cause."""

    code: int
    cause: str


class FaultyNode(Value):
    """A node whose workers fail again and again, as of when the round was formed; see ``leader.exclusion``.

    Attributes:
        times: how often it was left out of rounds.
        left: seconds for which it is still left out.
        faults: how long ago its last faults were, if the run's last faults are its own.
    """

    node_id: str
    times: int = 0
    left: Seconds = 0.0
    faults: tuple[Seconds, ...] = ()


class RefusedHost(Value):
    """A host whose nodes were left out, as of when that was recorded; see ``leader.newcomers``.

    Attributes:
        times: how often in a row.
        left: seconds for which its nodes are still left out.
        failure: identifies the last failure, if a worker failed; else empty.
    """

    host: str
    times: int
    left: Seconds = 0.0
    failure: str = ""


class ControlRecord(Value):
    """The persistent state of a run.

    Attributes:
        digest: SHA-256 over what is run; a node with a different digest is refused.
        limits: those of the run's first node, or of the last resize; they apply to all nodes.
        term: the leader's term; nodes ignore messages from a lower term.
        floor: rounds up to this number may have been formed without being recorded here, see ``continuity``.
        restarts: restarts charged to the budget so far.
        refilled: how many of them were given back.
        last_step: the highest optimizer step at which a round began to train, or None if unknown.
        idle: consecutive restarts that were not charged and since which training has not advanced.
        soon, vain, best, healthy, repeats, repeats_step: likewise, see ``RestartBudget``.
        faulty: the nodes whose workers fail again and again.
        refused: the hosts whose nodes were left out as newcomers.
        closed_by: why no newcomers are admitted; None if they are.
        nonce: random per write; distinguishes two writers of otherwise equal records.
        first_term: the term in which this run began; above 1 if an earlier run had the same id.
        run: random per run; distinguishes runs with the same id.
        origin: that of the run whose lost record this one replaces, whose nodes go on; empty: none. States that the
            workers save are known by it.
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
    origin: str = ""
    refilled: int = 0
    soon: int = 0
    vain: int = 0
    best: int | None = None
    healthy: Seconds = 0.0
    repeats: str = ""
    repeats_step: int = 0
    faulty: tuple[FaultyNode, ...] = ()
    refused: tuple[RefusedHost, ...] = ()
    closed_by: ClosedBy | None = None
    schema: int = SCHEMA

    @property
    def repaired(self) -> bool:
        """Whether rounds that are not in this record may be training."""
        return self.floor > self.round.number

    def renewed(self) -> ControlRecord:
        """Return the record with a fresh nonce, which every write needs."""
        return replace(self, nonce=secrets.token_hex(8))

    def encode(self) -> bytes:
        """Return the record as JSON."""
        return codec.dumps(self)

    @staticmethod
    def parse(data: bytes) -> ControlRecord:
        """Read a record.

        Raises:
            ProtocolError: if data is not a record of this schema.
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
