"""Messages between nodes and leader: one JSON object per line, ``type`` first.

A node sends reports, the leader sends orders. Every order carries the leader's term, and a node ignores orders from a
lower term than it has seen, so that a leader that was paused and wakes up has no effect.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from elastic_launch.codec import Messages
from elastic_launch.failure import Doing, Failure, Suspect
from elastic_launch.rendezvous.admin import messages as asking
from elastic_launch.rendezvous.record import LocalRanks, ReplicaSize, Round, Seconds
from elastic_launch.system.host_load import HostLoad
from elastic_launch.values import Value

PROTOCOL_VERSION = 15


# From a node to its leader.


class HeldSnapshot(Value):
    """The newest snapshot in a node's memory.

    Attributes:
        round, step: identify the snapshot across ranks. Snapshots are ordered by both, never by the step alone.
        port: where the node serves it to others; 0 if it does not.
        kept: whether processes are suspended on the node, which may have a newer state.
    """

    round: int
    step: int
    port: int = 0
    kept: bool = False

    @property
    def order(self) -> tuple[int, int]:
        """The key by which snapshots are compared."""
        return self.round, self.step


class RoundSeen(Value):
    """What a node knows of the round ``seen_round``, for a leader that has not formed it.

    Attributes:
        formed_ago: seconds since it was ordered to form the round.
        lasted: seconds from then until it was told to end the round or its workers had stopped, or else until now.
        begun: optimizer steps done when its workers began; None if unknown.
        reached: optimizer steps done; None if unknown.
    """

    formed_ago: Seconds
    lasted: Seconds
    begun: int | None = None
    reached: int | None = None


@dataclass(frozen=True, slots=True)
class NodeHello:
    """First message on a link.

    Attributes:
        command, limits: this node's command and limits as text, so that differences can be shown.
        replica_size: workers of a replica, equal on all nodes; the node's workers are whole replicas.
        wanted_rank: the rank that the node asks for, or None.
        holding: number of the round whose workers it still has, or 0.
        joined, ready, done: whether all of these workers are started; can be drained; have finished.
        live: see :class:`NodeReady`.
        importing: whether its workers could not begin at once, because their imports are not loaded yet, or because
            they are starting ahead of a place.
        slots: local ranks with which it could take part in a round from now on; empty for all.
        leaving: why the node leaves the run, or empty; its report of that may have been lost with the previous link.
        seen_term, seen_round, seen_restarts: the highest it knows; a leader that lost its store rebuilds it from them.
        seen_run: the run, as in the control record, that it was last welcomed to; empty if what it holds is of none.
        origin: see :class:`Form`, of its last round; empty if it was in none.
        held: see :class:`Stopped`.
        failed: the first failure among its workers in the round ``seen_round``, until another round is formed: a leader
            that is gone may have received the report of it, and not have charged it.
        broken: whether a leader has told it to end the round ``seen_round`` as broken.
        round_seen: what else it knows of that round; None if it was in none.
        planned, landed: number of faults in the plan of its drill; positions of those that it knows to have happened.
        shutdown_timeout: seconds that its workers have between SIGTERM and SIGKILL.
        apart: whether it could not connect to where the last round that it was asked about meets; see :class:`Reached`.
        trained: see :class:`Stopped`; without the steps of the round that it holds.
        host: what identifies the node's host across starts of its agent; empty if only ``node_id`` does.
        term: term of the record that named the leader, or 0 if no record did. A leader keeps its listening socket from
            one of its terms to the next, so that links of the earlier one may still wait there to be accepted.
    """

    version: int
    run_id: str
    digest: str
    command: str
    limits: str
    node_id: str
    incarnation: str
    workers: int
    address: str
    store_port: int
    wanted_rank: int | None = None
    holding: int = 0
    joined: bool = False
    ready: bool = False
    done: bool = False
    leaving: str = ""
    seen_term: int = 0
    seen_round: int = 0
    seen_restarts: int = 0
    importing: bool = False
    seen_run: str = ""
    origin: str = ""
    held: HeldSnapshot | None = None
    failed: Failure | None = None
    broken: bool = False
    planned: int = 0
    landed: tuple[int, ...] = ()
    shutdown_timeout: float = 0.0
    role: str = "default"
    live: bool = False
    slots: LocalRanks = ()
    apart: bool = False
    term: int = 0
    round_seen: RoundSeen | None = None
    trained: bool = False
    host: str = ""
    replica_size: ReplicaSize = 1


@dataclass(frozen=True, slots=True)
class Beat:
    """Heartbeat of a node.

    Attributes:
        load: how busy its host is; None if that was said by an earlier beat, or is not known.
    """

    load: HostLoad | None = None


@dataclass(frozen=True, slots=True)
class ProgressBeat:
    """Heartbeat with the number of optimizer steps that the round's workers have done. Sent instead of a beat.

    Attributes:
        snapshot: steps in the newest snapshot in this node's memory; None if there is none.
        step_s: seconds of a step, the median of the last ones; None if that is not known, as with the others below.
        remaining: seconds until the training ends at this pace.
        loss: loss of the last step.
        load: see :class:`Beat`.
        training: number of the script's training under way, from 0.
        snapshot_training: that of the snapshot, which may be an earlier one's.
    """

    round: int
    step: int
    snapshot: int | None = None
    step_s: float | None = None
    remaining: float | None = None
    loss: float | None = None
    load: HostLoad | None = None
    training: int = 0
    snapshot_training: int = 0


class NodeSaved(Value):
    """A checkpoint of the round's training was written, or could not be.

    Attributes:
        step: optimizer steps in it.
        error: why it was not written; empty if it was.
        asked: whether it is at least as new as the last :class:`SaveNow`.
        training: number of the script's training, from 0.
        withdrew: instead, checkpoints that may be wrong were removed, and this is the newest which is left; step 0 if
            there is none.
    """

    round: int
    step: int
    error: str = ""
    asked: bool = False
    training: int = 0
    withdrew: bool = False


class Joined(Value):
    """The workers of the round are started."""

    round: int


class NodeReady(Value):
    """The workers of the round train with this project's library: they can be drained.

    The round's first member repeats it from time to time with a new estimate.

    Attributes:
        remaining_s: seconds until the training ends at the current pace; None if unknown.
        step: optimizer steps done when they began; None if unknown.
        live: whether all of them can be suspended, and take places in another round.
        arguments: what must be the same on all ranks, as text; empty if that is not known.
    """

    round: int
    remaining_s: float | None = None
    step: int | None = None
    live: bool = False
    arguments: str = ""


class Collective(Value):
    """The last collective that a worker has begun in a process group.

    Attributes:
        group: the group's name in torch, which is the same on all of its ranks.
        description: what the group was called when it was made; empty if it was not.
        number: it is the group's collective of this number; they are counted from 1.
        what: such as ``all_reduce of Float[1024]``.
        waits: whether it has not finished.
        backend: such as ``gloo``; a group may have several, each of which counts its own collectives.
    """

    group: str
    description: str
    number: int
    what: str
    waits: bool
    backend: str = ""

    def __str__(self) -> str:
        return f"{self.what}, number {self.number} of group {self.description or self.group},"


class StalledWorker(Value):
    """Where a worker of a stalled node stands.

    Attributes:
        state: ``stopped`` by a signal; in an ``exchange`` with other ranks; waiting for its data ``loader``; elsewhere
            in its ``code``; or ``unknown``.
        moves: whether its processes did anything during the last seconds.
        frame: the innermost frame of the user's code, as ``file:line in function``; empty if unknown.
        stack: the frames of its main thread, outermost first, without those that are many calls away from the last.
        log: see :class:`Failure`.
        collectives: the last one in each of its process groups; empty if torch's flight recorder has none.
        prepares: whether its main thread imports, compiles or loads something, which may take long.
    """

    rank: int
    local_rank: int
    pid: int
    state: str
    moves: bool = False
    frame: str = ""
    stack: tuple[str, ...] = ()
    log: str = ""
    collectives: tuple[Collective, ...] = ()
    prepares: bool = False


class Stalled(Value):
    """All workers of this node are late in the round, and none of them is in a pause that is known; or one is stopped.

    Repeated from time to time with what is seen then.

    Attributes:
        seconds: for how long none of them has advanced; 0: they advance again, or are not to.
        doing: what they are late with.
        asked: whether the user has set the time after which they are late.
        early: whether they are not late yet, in a first step of the round, but did nothing, twice at the same place.
    """

    round: int
    seconds: float = 0.0
    doing: Doing = field(default_factory=Doing)
    host: str = ""
    workers: tuple[StalledWorker, ...] = ()
    asked: bool = False
    early: bool = False


class StacksTaken(Value):
    """The stacks of the node's workers, as text: the answer to :class:`TakeStacks`."""

    round: int
    text: str


class Stopped(Value):
    """The workers of the round are reaped or suspended; the node is ready for the next one.

    A suspended worker has left the round's process groups, and does nothing until it has a place in another round.

    Attributes:
        store_port: where its next worker store listens.
        drained: optimizer steps done, if they stopped together with all others after the same step, else None.
        held: the newest snapshot in its memory.
        saved: whether this node has already committed the drained state to durable storage.
        unsaved: why not, if it waited for that; empty if that was not this node's task, or it did not wait.
        importing: whether its workers could not begin at once, as in :class:`NodeHello`. A round that can do without
            the node does not wait for it; one that cannot is formed with it at once.
        slots: local ranks with which it could take part in a round from now on; empty for all. The others are left
            out, such as a killed worker whose replacement is starting ahead.
        trained: whether the node has completed a step in this run, in this round or an earlier one. If its script
            reports no steps, whether it has been in a round for longer than a start takes.
        training: number of the script's training, from 0, that was drained.
    """

    round: int
    store_port: int
    drained: int | None = None
    held: HeldSnapshot | None = None
    saved: bool = False
    unsaved: str = ""
    importing: bool = False
    slots: LocalRanks = ()
    trained: bool = False
    training: int = 0


class RankOffer(Value):
    """This node could take part in a round with these local ranks from now on; empty for all.

    If they are more than those of the running round, the round is drained at a step boundary for a larger one.
    """

    slots: LocalRanks


class Done(Value):
    """All workers of the round finished with exit code 0."""

    round: int


class Leaving(Value):
    """This node leaves the run; no node waits for it.

    Attributes:
        seconds: time that it has left and in which its workers can be drained; 0 if they cannot.
    """

    reason: str
    seconds: float = 0.0


class Imported(Value):
    """This node's workers can begin at once from now on: their imports are loaded, or they are started ahead.

    Attributes:
        arguments: those of its workers that were started ahead, see :class:`NodeReady`.
    """

    arguments: str = ""


class Unfit(Value):
    """A worker that was started ahead ended, and would so again; this node has not completed a step in this run.

    The leader answers with :class:`LeftOut`, or takes it for :class:`Imported`.
    """

    failure: Failure


class Reached(Value):
    """Whether this node can connect to where the round's workers meet: the answer to :class:`Reach`.

    A member of a round says unasked, in its first one, that it cannot.

    Attributes:
        error: why not; empty if it can.
    """

    round: int
    error: str


class StrikeDue(Value):
    """A worker of the round has come to a fault of the drill, and waits for :class:`Strike`.

    Attributes:
        fault: its position in the plan.
        step: optimizer steps done.
    """

    round: int
    fault: int
    step: int


Report = (
    NodeHello
    | Beat
    | ProgressBeat
    | Imported
    | Unfit
    | Reached
    | NodeSaved
    | Joined
    | NodeReady
    | Failure
    | Stalled
    | StacksTaken
    | Stopped
    | RankOffer
    | Done
    | Leaving
    | StrikeDue
)


# From the leader to its nodes.


class Welcome(Value):
    """The hello was accepted.

    Attributes:
        run: see the control record.
        max_nodes: the run's current limit, which may differ from this node's; 0 if not given.
        leader: incarnation of the leader's node.
    """

    term: int
    node_id: str
    beat: float
    dead_after: float
    run: str = ""
    max_nodes: int = 0
    leader: str = ""


class Refused(Value):
    """This node does not fit the run and must not reconnect."""

    term: int
    reason: str
    hint: str = ""
    code: int = 95


class Pulse(Value):
    """Heartbeat of the leader.

    Attributes:
        round, restarts: the last round's number, and the restarts charged.
        max_nodes: see :class:`Welcome`.
        max_restarts: restarts that may be charged in all, with those given back so far; None if not told.
        outlook: what happens next, as text for users.
        checkpoint: the newest on storage, of step 0 if those that were reported to this leader are gone; None before.
        parked: whether no round can form, since too few nodes are there.
    """

    term: int
    round: int = 0
    restarts: int = 0
    max_nodes: int = 0
    max_restarts: int | None = None
    outlook: str = ""
    checkpoint: asking.LastSave | None = None
    parked: bool = False


class SnapshotSource(Value):
    """A node that serves a snapshot; see :class:`HeldSnapshot`."""

    address: str
    port: int
    round: int
    step: int


class MembersAlike(Value):
    """Members of a round that follow each other and have as many workers, of the same role."""

    count: int
    workers: int
    role: str


class RoundOutline(Value):
    """All members of a large round, of which the order to form it lists only some.

    Attributes:
        runs: how many workers they have, in rank order.
        listed: the ranks, among the members, of those that the order lists.
    """

    runs: tuple[MembersAlike, ...]
    listed: tuple[int, ...]


class Form(Value):
    """The round is formed and recorded: start its workers.

    Attributes:
        cause: why the last round ended; ``first`` for the first one.
        sources: which nodes serve the newest snapshot, if no member has it.
        max_restarts: the run's limit, which may differ from the node's.
        origin: the number of the run that the workers' states belong to, see the control record.
        outline: of a round with too many members to list them; see :mod:`elastic_launch.rendezvous.wire.outline`.
        slots, index: then the local ranks of this node's workers, empty for all, and its rank among the members.
    """

    term: int
    round: Round
    restarts: int
    cause: str
    sources: tuple[SnapshotSource, ...] = ()
    max_restarts: int = 3
    origin: str = ""
    outline: RoundOutline | None = None
    slots: LocalRanks = ()
    index: int = 0


class DrainRound(Value):
    """Have the round's workers stop after the same step, save and exit; then report them as stopped.

    Attributes:
        kind: see :class:`Break`.
        seconds: time after which the round is broken; None for no limit.
        final: the run ends with this drain: each node saves its part before it reports.
    """

    term: int
    round: int
    kind: str
    cause: str
    seconds: float | None = None
    final: bool = False


class Break(Value):
    """The round is over: stop its workers and report.

    Attributes:
        kind: see :class:`elastic_launch.rendezvous.leader.verdict.Kind`.
        hung: ranks of the workers that hang: they are killed.
        suspects: the nodes and ranks of which the cause is.
    """

    term: int
    round: int
    kind: str
    cause: str
    hung: tuple[int, ...] = ()
    suspects: tuple[Suspect, ...] = ()


class StartAhead(Value):
    """Start the workers ahead of a place, and report :class:`Imported` when all of them wait for one.

    Sent to nodes that wait while the workers of a round are live. Until that report, only a round that lacks nodes is
    formed with this one. The order may be repeated; a node whose workers wait already reports it at once.
    """

    term: int
    round: int


class Reach(Value):
    """Try to connect to where the round's workers meet, until that succeeds, and report :class:`Reached`.

    Sent to nodes that wait while a round runs. Only a round that lacks nodes is formed with one that has not connected.
    """

    term: int
    round: int
    address: str
    port: int


class Depart(Value):
    """This node must leave the run after a drain, within the given seconds."""

    term: int
    reason: str
    seconds: float


class SaveNow(Value):
    """Have the round's ranks write a durable checkpoint; sent only to the first member, whose rank informs all."""

    term: int
    round: int


class TakeStacks(Value):
    """Report where the node's workers stand."""

    term: int
    round: int


class Evicted(Value):
    """This node is no longer a member: kill its workers.

    Attributes:
        final: another agent has replaced it: do not reconnect.
        anew: the run has begun anew without it: drop the snapshots, too, and reconnect as a new node.
    """

    term: int
    reason: str
    final: bool = False
    anew: bool = False


class UserMessage(Value):
    """Information for the node's user, such as what the run waits for."""

    term: int
    text: str


class Released(Value):
    """Order to a node that left: its snapshot is no longer needed."""

    term: int


class PeerDone(Value):
    """All workers of another node finished the round with exit code 0: workers of this node that hang may be killed."""

    term: int
    round: int


class Strike(Value):
    """A fault of the drill happens now; sent to all nodes, so that it does not happen again under another leader.

    Attributes:
        fault: its position in the plan.
        node_id: the node that carries it out; empty if the fault has happened before.
    """

    term: int
    fault: int
    node_id: str


class LeftOut(Value):
    """The run goes on without this node, which cannot do what the others do: stop and exit with the code.

    Attributes:
        failure: what failed on this node; None if its workers have not failed.
    """

    term: int
    code: int
    cause: str
    failure: Failure | None = None


class RunEnd(Value):
    """The run is over and recorded as such: stop and exit with the code.

    Attributes:
        failure: the root cause, if a worker's failure ended the run.
        saver: id of the node that holds the newest state as far as the leader knows; empty if that is not known.
    """

    term: int
    code: int
    cause: str
    restarts: int = 0
    failure: Failure | None = None
    saver: str = ""


ToNode = (
    Form
    | DrainRound
    | Break
    | StartAhead
    | Reach
    | Depart
    | Released
    | SaveNow
    | TakeStacks
    | PeerDone
    | Evicted
    | UserMessage
    | Strike
    | LeftOut
    | RunEnd
)
Order = Welcome | Refused | Pulse | ToNode | asking.AdminAnswer | asking.Status | asking.NodeStacks

Spoken = Report | Order | asking.Caller | asking.AdminRequest

_MESSAGES: Messages[Spoken] = Messages(get_args(Spoken))
pack, unpack = _MESSAGES.pack, _MESSAGES.unpack
