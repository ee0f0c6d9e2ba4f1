"""The typed events of a run, and their files.

Each node writes its own ``events-<node id>.jsonl``; the leader's decisions are in the file of the leader's node. A line
contains ``event`` (the name), ``time`` (UTC, for readers), ``clock`` (this host's monotonic clock in seconds, for
durations), ``incident`` (the id of the incident that it belongs to, if any) and the fields of the event. Times of
different hosts are not comparable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from elastic_launch.failure import SplitCollective, StallPlace, Suspect
from elastic_launch.system.host_load import overloaded
from elastic_launch.values import Value

Tone = Literal["", "good", "bad", "note"]
"""How a mark on the page's time axis looks; an event without a tone has no mark."""

ROUND_ENDS = ("membership", "preemption", "node loss", "fatal", "startup", "out of memory", "hang", "crash")
"""Why a round can end before its work is done; see :class:`elastic_launch.rendezvous.leader.verdict.Kind`."""

HOSTS = ("normal", "overloaded")
"""How a host is, by its load; a label of a metric."""

KINDS: dict[str, type[Event]] = {}
"""All events by their names."""


class Counter(NamedTuple):
    """A metric that counts events; see :mod:`elastic_launch.observe.metrics`."""

    name: str  # without the prefix ``elastic_launch_``; events may share one
    help: str
    labels: Mapping[str, tuple[str, ...]] = {}  # attributes of the event, and the values that each can have, if known
    when: str = ""  # attribute of the event that must be true for it to count; empty if all count


def event_name(kind: type[Any]) -> str:
    """``RoundFormed`` -> ``round_formed``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


class Event(Value):
    """Base class of all events. A subclass declares fields, and becomes a frozen dataclass and one of :data:`KINDS`.

    Its sentence is in :data:`elastic_launch.events.sentences.SENTENCES`.

    Attributes:
        leader: whether it is a decision of the leader.
        tone: of its mark on the time axis of page and report.
        counter: the metric that counts these events.
    """

    leader: ClassVar[bool] = False
    tone: ClassVar[Tone] = ""
    counter: ClassVar[Counter | None] = None

    def __init_subclass__(cls, *, base: bool = False) -> None:
        super().__init_subclass__()
        if not base:
            KINDS[event_name(cls)] = cls

    @property
    def printed(self) -> bool:
        """Whether the leader's agent prints it. It does not if another event, or the run's summary, says the same."""
        return self.leader


class EventSink(Protocol):
    """Receives events. Thread-safe."""

    def emit(self, event: Event) -> None:
        """Record the event; never blocks for long and never raises."""


# Decisions of the leader.


class LeaderEvent(Event, base=True):
    """Base class of the leader's decisions about membership."""

    leader = True


class NodeJoined(LeaderEvent):
    """A node's hello was accepted."""

    node: str
    workers: int
    address: str
    next: str


class NodeLost(LeaderEvent):
    """A node is dead: its connection closed, or it was silent for too long."""

    counter = Counter("nodes_lost_total", "Nodes that this leader declared dead.")

    node: str
    cause: str
    detect_s: float  # seconds from its last sign of life, as far as the leader can tell
    broke: int  # number of the round that was broken because of it; 0 if none was
    next: str

    @property
    def printed(self) -> bool:
        return not self.broke  # the round's end says it


class NodeExcluded(LeaderEvent):
    """A node is left out of rounds for a while, as long as there are enough others."""

    counter = Counter("nodes_excluded_total", "Nodes that this leader left out for a while.")

    node: str
    faults: int  # how many faults in a row its workers have caused; 0: it has computed wrong
    seconds: float  # for how long it is left out


class NewcomerLeftOut(LeaderEvent):
    """A node that has not trained in this run cannot do what the others do: the run goes on without it."""

    node: str
    round: int  # number of the run's last round
    cause: str
    seconds: float  # for how long its host is left out


class AdmissionClosed(LeaderEvent):
    """No newcomers take part any more, as long as there are enough: a restart would probably fail as they do."""

    cause: str


class FaultLanded(LeaderEvent):
    """A fault of the drill happens."""

    round: int
    node: str  # the node whose worker has come to it
    fault: int  # its position in the plan, from 0
    step: int  # optimizer steps done


class DrillEnded(LeaderEvent):
    """The run ends, and with it its drill."""

    planned: int  # number of faults in the plan
    missing: tuple[int, ...]  # positions of those that have not happened, from 0


class NodeLeft(LeaderEvent):
    """A node announced that it leaves."""

    node: str
    cause: str
    broke: int  # number of the round that was drained or broken because of it; 0 if none was
    next: str

    @property
    def printed(self) -> bool:
        return not self.broke  # the round's end says it


class NodeRefused(LeaderEvent):
    """A node that does not fit the run was refused."""

    node: str
    cause: str


class JoinBlocked(LeaderEvent):
    """A node cannot connect to where the running round's workers meet: one that waits takes no part until it can.

    If it is a member, in its first round, its workers wait.
    """

    node: str
    member: str  # the node whose address and port these are
    address: str
    port: int
    cause: str


class NodeDiffers(LeaderEvent):
    """An accepted node has other arguments or limits than the run; emitted once for nodes with the same differences."""

    node: str
    arguments: str = ""  # the differences between its script's arguments and those of the leader's node
    limits: str = ""  # its limits and the run's, if they differ


_ROUNDS_ENDED = Counter(
    "rounds_ended_total",
    "Rounds that were broken, or drained by plan, under this leader.",
    {"how": ("broken", "drained"), "kind": ROUND_ENDS},
)


class RoundFormed(LeaderEvent):
    """A round was recorded and ordered."""

    counter = Counter("rounds_formed_total", "Rounds formed by this leader.")

    round: int
    term: int
    nodes: tuple[str, ...]
    world_size: int
    restarts: int
    cause: str
    form_s: float  # seconds since the last round was broken, or since the leader's term began


class RoundBroken(LeaderEvent):
    """A round ended before its work was done."""

    counter = _ROUNDS_ENDED
    tone = "bad"
    how = "broken"

    round: int
    kind: str  # as first reported, as is the cause
    cause: str
    lasted_s: float | None  # seconds since it was formed; None if an earlier leader formed it, whose clock is unknown
    next: str  # what follows; empty if that is reported once the round is judged
    exit_code: int | None = None  # that of the worker whose failure is the cause; None if it is none that has ended
    suspects: tuple[Suspect, ...] = ()  # of which the cause is; empty if it is of none


class HangFound(LeaderEvent):
    """A round stands still and is broken for it: the line of the round's end has the same cause."""

    counter = Counter("hangs_total", "Rounds that stood still, and were broken for it by this leader.")

    round: int
    cause: str
    still_s: float = 0.0  # for how long training had not advanced when this was found
    ranks: tuple[int, ...] = ()  # those that hang, and their nodes, hosts and places; empty if no rank stands out
    nodes: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    places: tuple[StallPlace, ...] = ()
    collectives: tuple[SplitCollective, ...] = ()  # in which ranks wait that others have not begun

    @property
    def printed(self) -> bool:
        return False  # the round's end says it


class CauseFound(LeaderEvent):
    """A later report gives the actual cause of a broken round, from which the first report had followed."""

    round: int
    kind: str
    cause: str
    exit_code: int | None = None  # as of a broken round
    suspects: tuple[Suspect, ...] = ()  # likewise


class RoundDraining(LeaderEvent):
    """A round was ordered to end after the same step on all ranks."""

    round: int
    kind: str  # the kind as of a broken round
    cause: str
    seconds: float | None  # time after which it is broken instead; None for no limit


class RoundDrained(LeaderEvent):
    """A round has ended after the same step on all ranks."""

    counter = _ROUNDS_ENDED
    how = "drained"

    round: int
    step: int  # optimizer steps done
    kind: str
    cause: str
    drain_s: float  # seconds since the drain was ordered
    next: str


class RestartCharged(LeaderEvent):
    """A broken round was charged to the restart budget."""

    counter = Counter("restarts_charged_total", "Restarts charged by this leader.", {"kind": ROUND_ENDS})

    round: int
    kind: str
    restarts: int
    max_restarts: int
    next: str = ""
    idle: int = 0  # consecutive restarts without progress, if it is charged for that; else 0
    delay_s: float = 0.0  # seconds until the next round, because workers again failed soon after their start
    refilled: int = 0  # how many of ``max_restarts`` were given back


class ResizeSkipped(LeaderEvent):
    """Nodes wait although the running round has room for them, since the run ends before a resize would pay off."""

    nodes: tuple[str, ...]
    remaining_s: float  # seconds that the current round still needs, by its own estimate
    saved_s: float  # seconds of these that the larger round would save
    cost_s: float  # seconds that a resize costs


class LeaderElected(LeaderEvent):
    """A node became the leader; only emitted if no node hosts the run."""

    node: str
    term: int
    cause: str  # ``first``, or why the previous leader no longer leads


class Parked(LeaderEvent):
    """The run waits for nodes."""

    nodes: int
    min_nodes: int
    min_wait_s: float


class RunResized(LeaderEvent):
    """A user changed how many nodes the run may have."""

    min_nodes: int
    max_nodes: int
    had_min: int
    had_max: int


class RunEnded(LeaderEvent):
    """The run is over, which every agent's summary shows."""

    code: int
    cause: str
    restarts: int
    rounds: int
    lasted_s: float

    @property
    def printed(self) -> bool:
        return False  # every agent's summary says it


# Of one node.


class OrderReceived(Event):
    """The node received an order from the leader."""

    order: str
    round: int
    term: int
    cause: str
    kind: str = ""  # for a break or drain, the kind as of a broken round
    workers: int = 0  # for the forming of a round, how many workers of this node are in it
    world_size: int = 0  # likewise, how many workers of all nodes
    suspects: tuple[Suspect, ...] = ()  # for a break, those of a broken round


class LinkChanged(Event):
    """The node's link to the leader came up or went down, or the node found itself frozen or cut off."""

    up: bool
    cause: str


class WorkersHeld(Event):
    """The guard had stopped the node's workers, since their agent did not run; they go on."""

    round: int
    seconds: float  # for how long they stood still


class NoticeReceived(Event):
    """The node received a preemption or similar notice."""

    counter = Counter(
        "notices_total",
        "Notices that the node received.",
        {
            "source": ("AWS", "GCP", "Azure", "Slurm", "file", "signal"),
            "kind": ("preemption", "maintenance", "rebalance", "scale-in", "time limit", "request"),
        },
    )

    source: str  # AWS, GCP, Azure, Slurm, file or signal
    kind: str  # preemption, maintenance, rebalance, scale-in, time limit or request
    cause: str
    seconds: float | None  # seconds that are left; None if unknown
    leaves: bool  # whether the node leaves the run because of it


class NodeChecked(Event):
    """The node has passed the test of ``--node-check``; each figure is that of its slowest device."""

    devices: int  # number of GPUs tested, besides the CPU
    memory_gb_s: float  # memory written and read, in 10**9 bytes per second
    compute_gflop_s: float  # multiplication of float32 matrices, in 10**9 operations per second
    disk_mb_s: float  # a file written, synchronized and read in the log directory, in 10**6 bytes per second


class CorruptionFound(Event):
    """In a verified step, ranks computed different results for the same micro-batch, though no error occurred."""

    tone = "bad"
    counter = Counter("corruption_total", "Verified steps in which ranks computed different results.")

    round: int
    step: int  # the step, which was not applied
    ranks: tuple[int, ...]  # those that have computed wrong; empty if that is not known
    nodes: tuple[str, ...]  # their nodes
    suspect: int  # steps that are done again, at least: those since the last agreement, and the one agreed on


class StragglerFound(Event):
    """A rank of the round needs longer for its part of a step than the others, which wait for it."""

    counter = Counter(
        "stragglers_total",
        "Ranks found to be slow, on the node of rank 0.",
        {"slow_node": (), "phase": ("data", "compute"), "host": HOSTS},
    )

    @property
    def slow_node(self) -> str:
        return self.node

    @property
    def host(self) -> str:
        """One of :data:`HOSTS`, so that an alert can tell other work on the host from a slow host."""
        return HOSTS[overloaded(self.load, self.pressure)]

    round: int
    rank: int
    node: str  # the rank's node
    phase: str  # what it needs longer for: ``data``, or ``compute`` for everything else but waiting for other ranks
    ratio: float  # its time for a micro-batch divided by the median of the other ranks
    load: float = 0.0  # load average of its host in the last minute, per CPU
    pressure: float | None = None  # share of the last 10 s in which tasks of its host waited for a CPU, if it is known


class WorkerStarted(Event):
    """A worker process was started."""

    counter = Counter("worker_starts_total", "Worker processes that the node started.")

    round: int  # 0 if it was started ahead of one
    rank: int | None  # None ahead of a round
    local_rank: int
    pid: int
    cause: str
    start_s: float  # seconds that the agent took to start it
    ahead: int = 0  # n of the directory ``ahead_<n>`` with its output; 0 if it was started in a round


class WorkerKept(Event):
    """A worker of an earlier round, which was suspended, got its place in the next one; its process stays."""

    round: int
    rank: int
    local_rank: int
    pid: int


class WorkerAhead(Event):
    """A worker that was started ahead has come to its first use of the world, and can take a place in a round."""

    local_rank: int
    pid: int
    took_s: float  # seconds since its start


class WorkerPlaced(Event):
    """A worker that was started ahead got its place in a round."""

    round: int
    rank: int
    local_rank: int
    pid: int


class WorkerExited(Event):
    """A worker process was reaped."""

    counter = Counter("worker_failures_total", "The node's workers that failed by themselves.", when="failed")

    @property
    def failed(self) -> bool:
        """Whether it ended unsuccessfully by itself."""
        return self.exit_code != 0 and not self.stopped

    round: int  # 0 if it was started ahead and had no place yet
    rank: int | None  # None without a place
    local_rank: int
    pid: int
    exit_code: int  # its exit code, -N for signal N
    ran_s: float  # seconds since its start
    stopped: bool  # whether the agent had ordered it to stop


class TrainingBegun(Event):
    """The first of this node's workers has reached the point where one of the script's trainings begins or resumes."""

    round: int
    rank: int  # its rank
    step: int  # optimizer steps done before
    total: int  # steps of the whole training; 0 if unknown
    restore_s: float  # seconds that it took to restore the state
    uncompared: int = 0  # steps since the ranks' states were last compared; 0 if the snapshot was, or if none are
    saves_itself: bool = False  # whether the script saves its state, if anything does: nothing is known of that here
    training: int = 0  # number of the script's training, from 0; its steps are numbered by themselves
    continues: int | None = None  # number of the earlier one whose checkpoints, and so whose steps, it goes on with


class FirstStep(Event):
    """A training's first optimizer step in the round is done; ``step`` counts those done so far."""

    round: int
    step: int
    training: int = 0  # as in TrainingBegun


class RoundProgress(Event):
    """How far this node's workers have come in a round that goes on: after 4 s, then ever more rarely, up to a minute.

    The last one of a training comes before a further one begins in the round.
    It tells what a run has done that is in progress, and what an agent's had that was killed.
    """

    round: int
    step: int  # optimizer steps done
    trained_s: float  # seconds from the beginning of training to that step
    training: int = 0  # as in TrainingBegun


class RoundSteps(Event):
    """This node's workers have done their last step in a round. The numbers are those of its last training."""

    round: int
    first: int  # optimizer steps done when training began; ``last`` are those when it ended
    last: int
    trained_s: float  # seconds from the beginning of training to the last step done
    training: int = 0  # as in TrainingBegun


class SnapshotsLeftOut(Event):
    """From now on a worker of this node writes no snapshots in memory."""

    round: int
    cause: str  # why, with how much memory they need and how much there is, or how much they used


class CheckpointSaved(Event):
    """A checkpoint written by this node is committed to durable storage."""

    counter = Counter("checkpoints_total", "Durable checkpoints that the node has written.")
    tone = "good"

    round: int  # the round in which it was committed, or the last one before
    step: int  # optimizer steps done
    path: str  # directory or URL; empty if a worker wrote it, since workers do not report it
    training: int = 0  # as in TrainingBegun


class NodeEnded(Event):
    """This node's part of the run is over."""

    code: int
    cause: str
    saved: str = ""  # where the latest state is, and what was lost; empty if this node does not know it
    root_cause: str = ""  # of a run that a worker's failure has ended, in several lines


def counted(number: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def listed(names: Sequence[object], most: int = 8) -> str:
    """``a, b``; of more than so many names, the first ones: ``a, b, ...``."""
    return ", ".join([*map(str, names[:most]), *(["..."] if len(names) > most else [])])
