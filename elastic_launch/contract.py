"""The protocol between agent and worker: a worker's environment, and the messages.

Variables without a prefix and those with ``TORCHELASTIC_`` are torchrun's, as documented at
https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables; ``NODE_RANK`` is Composer's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from elastic_launch.codec import Messages, between
from elastic_launch.errors import ProtocolError, UsageError
from elastic_launch.system.plain_text import plain
from elastic_launch.values import Value

ENV_RUN_NUMBER = "ELASTIC_LAUNCH_RUN_NUMBER"
"""Random per run; of several runs with one id, each has its own."""

ENV_ROUND = "ELASTIC_LAUNCH_ROUND"
"""Number of the worker's round, from 1."""

ENV_START_REASON = "ELASTIC_LAUNCH_START_REASON"
"""Why this worker was started: ``first``, or the cause of the last round's end."""


ENV_LOCAL_RANK = "ELASTIC_LAUNCH_LOCAL_RANK"
"""Rank among the workers of the node, if ``LOCAL_RANK`` is 0 for all of them (``--virtual-local-rank``); else unset."""

ENV_AHEAD = "ELASTIC_LAUNCH_AHEAD"
"""1 for a worker that is started ahead of a place in a round, until it has one; see :class:`Ahead`. Else unset."""

ENV_FIRST_ON_NODE = "ELASTIC_LAUNCH_FIRST_ON_NODE"
"""1 for the worker with the lowest local rank among those of its node in the round, 0 for the others."""

ENV_REPLICA_SIZE = "ELASTIC_LAUNCH_REPLICA_SIZE"
"""Workers of a replica: consecutive ranks on one node; 1 unless ``--replica-size`` was given."""

ENV_REPLICA = "ELASTIC_LAUNCH_REPLICA"
"""Number of the worker's replica in the round, from 0."""

ENV_REPLICA_RANK = "ELASTIC_LAUNCH_REPLICA_RANK"
"""Rank of the worker in its replica, from 0: it never changes."""

ENV_REPLICAS = "ELASTIC_LAUNCH_REPLICAS"
"""Number of replicas in the round."""

ENV_SOCKET = "ELASTIC_LAUNCH_SOCKET"
"""Unix socket where the agent listens for its workers; a name that begins with ``@`` is in the abstract namespace."""

ENV_STACKS = "ELASTIC_LAUNCH_STACKS"
"""1 if a worker writes its threads' stacks to a file on SIGURG, also if its script does not use the library."""

MAX_LINE = 64 * 1024
"""Longest message in bytes."""

UNPLACED = "unplaced"
"""The ranks and sizes in the environment of a worker without a place: a script that reads them itself fails there.

Were they missing, it would take itself for the only process, or for rank 0.
"""

SLOTS = 3
"""Slots per node: one with a complete snapshot, one being written, one being copied."""

_OF_PLACE = (
    "RANK",
    "GROUP_RANK",
    "NODE_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    ENV_FIRST_ON_NODE,
    ENV_REPLICA,
    ENV_REPLICA_RANK,
    ENV_REPLICAS,
    ENV_ROUND,
    ENV_RUN_NUMBER,
)

_MOST = 2**53
"""From here on, numbers are not exact in other readers' JSON, and are not valid counts."""

_NONCE = re.compile(r"[0-9a-f]{0,64}")


def _printable(value: str) -> str:
    """Return text as one printable line: what a worker reports must not look like the launcher's own lines."""
    return plain(value).replace("\n", " ")


def _of_system(value: str) -> str:
    """Paths and environment variables may contain bytes that are not UTF-8 (PEP 383), but no zero bytes."""
    try:
        if b"\0" not in value.encode(errors="surrogateescape"):
            return value
    except UnicodeEncodeError:
        pass
    raise ValueError("a path")


def _hexadecimal(value: str) -> str:
    if not _NONCE.fullmatch(value):
        raise ValueError("hexadecimal digits")
    return value


def _min_or_max(value: str) -> str:
    if value not in ("min", "max"):
        raise ValueError("min or max")
    return value


Count = Annotated[int, between(0, _MOST, "a number from 0 to 2**53")]
Positive = Annotated[int, between(1, _MOST, "a number from 1 to 2**53")]
SlotNumber = Annotated[int, between(0, SLOTS, "the number of a slot")]
Seconds = Annotated[float, between(0, _MOST, "a number of seconds")]
ExitStatus = Annotated[int, between(-64, 256, "an exit code")]
Text = Annotated[str, _printable]
OsText = Annotated[str, _of_system]
Nonce = Annotated[str, _hexadecimal]


class Placement(Value):
    """The position of one worker in a round.

    Attributes:
        rank: global rank, 0 to world_size - 1.
        local_rank: rank among the workers of its node.
        group_rank: rank of its node in the round.
        world_size: workers in the round.
        local_world_size: workers on its node.
        group_world_size: nodes in the round.
        master_addr, master_port: where the round's worker store listens.
        role_rank: rank among the workers of its role.
        role_world_size: workers of its role in the round.
        first_on_node: whether its local rank is the lowest among those of its node in the round; it need not be 0, as a
            node may take part with only some of its workers.
        replica_size: workers of a replica; a round has whole replicas only.
    """

    rank: Count
    local_rank: Count
    group_rank: Count
    world_size: Count
    local_world_size: Count
    group_world_size: Count
    master_addr: Text
    master_port: Count
    role_rank: Count
    role_world_size: Count
    first_on_node: bool
    replica_size: Positive = 1


class NoPlacement(Value):
    """What is known of the position of a worker that is started ahead: not its rank."""

    local_rank: int
    rank: None = None
    world_size: int = 0


class Message(Value):
    """Base class of messages: one JSON object per line, whose ``type`` is the class name.

    A worker runs the user's code, so the agent does not trust its messages: ``unpack`` checks every field.
    """


class FromWorker(Message):
    """A message of a worker to its agent."""


class FromAgent(Message):
    """A message of an agent to its worker."""


class WorkerHello(FromWorker):
    """First message; the agent answers with ``SnapshotSlots``, or with ``PlaceTaken``.

    Attributes:
        saves: whether the library saves the worker's state; else its script does, if anything does.
    """

    round: Count
    rank: Count
    local_rank: Count
    saves: bool = True


class Ready(FromWorker):
    """This worker has begun to train with ``step`` steps done.

    Attributes:
        drains: whether it can be drained from now on; if not, it may say so later in another ``Ready``.
        total: steps of the whole training; 0 if unknown.
        restore_s: seconds that restoring the state took.
        uncompared: number of the last of these steps after which the ranks' states were not compared.
        live: whether it can be suspended, and take a place in another round.
        rehearses: whether a worker that is started ahead does all that its first step needs before its ``Ahead``.
        checkpoints: whether the library is to save checkpoints of this training.
        base, base_in: step and place of the durable state that the run last resumed from; 0 and empty without one.
        arguments: what must be the same on all ranks, as text; empty if that is not known.
        training: number of the script's training, from 0; it may begin several in a round, one after the other.
        continues: number of the earlier training whose checkpoints it goes on with; None: it has none of another one.
        last, last_at: the training before ended with so many steps, the last one at that time by the host's monotonic
            clock; 0 if this process was in none.
    """

    step: Count
    total: Count = 0
    restore_s: Seconds = 0.0
    uncompared: Count = 0
    live: bool = False
    drains: bool = True
    rehearses: bool = False
    checkpoints: bool = False
    base: Count = 0
    base_in: OsText = ""
    arguments: Text = ""
    training: Count = 0
    continues: Count | None = None
    last: Count = 0
    last_at: Seconds = 0.0


class Best(Value):
    """The best checkpoints by a metric, which are not removed.

    A checkpoint without the metric, or with NaN, is not among the best. If evaluations follow each other faster than
    checkpoints are written, training waits, or the agent logs which evaluation has no checkpoint. After a fault between
    an evaluation and its checkpoint, the results may belong to the checkpoint of one of the next two steps, or to none.
    The results are in the checkpoint's manifest (``meta``, ``metrics``).

    Args:
        metric: name of the metric in the evaluations, such as ``"loss"``.
        mode: ``"min"`` if lower values are better, ``"max"`` if higher ones are.
        count: number of checkpoints to keep.

    Raises:
        UsageError: if the mode or the count is invalid.
    """

    metric: Text
    mode: Annotated[str, _min_or_max] = "min"
    count: Positive = 1

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise UsageError(f"Best(mode={self.mode!r}) is unknown.", 'Give "min" or "max".')
        if type(self.count) is not int or self.count < 1:
            raise UsageError(f"Best(count={self.count!r}): it must be a whole number, 1 or more.")


class CopyJob(Value):
    """How a snapshot in memory goes to durable storage. A worker makes it, and the copying process carries it out.

    Attributes:
        sequence: the snapshot's number, which increases with every snapshot of the node.
        directory: directory or URL of the checkpoints; empty if this node writes none.
        keep: number of newest checkpoints to keep there.
        keep_every, keep_best: which others are kept.
        now: whether to copy this snapshot, even if it is not the last one.
        owner: the required last owner of the directory; empty for any.
        shares: number of nodes that copy it together, one share each; 1 for this node alone.
        share: this node's share, from 0; only the first node commits, and has failed shares of others repeated.
        nonce: part of the copy's name, the same on all these nodes.
        last: this is the final copy, which is not needed if this snapshot or a newer one is stored already.
        stands_by: another node saves this state. This one does if no other can, and then adds it without removing any.
        results: it has the results of an evaluation that ``keep_best`` keeps: no newer snapshot takes its place.
    """

    sequence: Count
    step: Count
    round: Count
    directory: OsText = ""
    keep: Positive = 1
    now: bool = False
    owner: OsText = ""
    shares: Positive = 1
    share: Count = 0
    nonce: Nonce = ""
    last: bool = False
    keep_every: Count = 0
    keep_best: Best | None = None
    stands_by: bool = False
    results: bool = False

    def __post_init__(self) -> None:
        if self.share >= self.shares:
            raise ProtocolError(f"CopyJob.share is {self.share} of {self.shares}.")


class Stored(FromWorker):
    """A snapshot is in a slot."""

    slot: SlotNumber
    job: CopyJob


class NoSnapshots(FromWorker):
    """From now on the worker writes no snapshots; ``cause`` says why, such as how much memory there is."""

    cause: Text


class Restored(FromWorker):
    """The worker has restored a training and needs no snapshot of it.

    It is said only if the worker writes none (``SnapshotSlots.writes``).

    Attributes:
        training: number of the training within its script, from 0.
    """

    training: Count


class StepDone(FromWorker):
    """An optimizer step is done; ``step`` counts those done so far.

    Sent for the first step of a process in each round and training, then once a second;
    ``elastic_launch.shared_progress`` has every step. If that cannot be written, it is sent for each step.

    Attributes:
        training: as in :class:`Ready`.
    """

    step: Count
    training: Count = 0


class Drained(FromWorker):
    """All ranks stopped after the same step, and this rank's state is saved in memory; it exits now.

    Attributes:
        seconds: the time that saving took.
    """

    step: Count
    seconds: Seconds


class Stopping(FromWorker):
    """All ranks stop after the same step; this rank's script saves the state itself, and exits with 0 when it has."""

    step: Count


class SlowRank(FromWorker):
    """A rank of the round needs longer for its part of a step than the others, which wait for it; rank 0 says so.

    Attributes:
        phase: what it needs longer for.
        ratio: its time divided by the median of the other ranks.
        load: load average of its host in the last minute, per CPU.
        pressure: share of the last 10 s in which tasks of its host waited for a CPU; None if that is not known.
    """

    rank: Count
    phase: Text
    ratio: Seconds
    load: Seconds
    pressure: Seconds | None = None


class FaultDue(FromWorker):
    """The worker has come to a planned fault, and waits for :class:`FaultOrder`; the only message on its connection.

    Attributes:
        fault: its position in the plan.
        step: optimizer steps done.
        rank: the worker's.
    """

    fault: Count
    step: Count
    rank: Count


class WorkerEnding(FromWorker):
    """The worker's script, threads and exit functions have ended; only its resources are still to be released.

    This is the first and only message on its connection, whose process is the worker.

    Attributes:
        exit_code: the code with which the worker is about to exit; -N for signal N.
    """

    exit_code: ExitStatus


class Disconnected(FromWorker):
    """An exchange with other ranks failed in the step after ``step``; the worker waits for orders.

    Sent only by workers that can be suspended. Without an order to suspend, the worker fails with this error.
    """

    step: Count
    error: Text


class Suspended(FromWorker):
    """The worker has left the round's process groups, with ``step`` steps done, and waits for ``Place`` or ``Exit``."""

    step: Count


class Ahead(FromWorker):
    """The worker was started ahead, has come to its first use of the world, and waits for ``Place`` or ``Exit``.

    Its ``WorkerHello`` has round and rank 0.

    Attributes:
        arguments: see :class:`Ready`.
    """

    arguments: Text = ""


class Differs(FromWorker):
    """The ranks of the round were given different arguments; the agent confirms it with ``Noted``.

    Attributes:
        alike: for each rank, the lowest rank that was given the same.
    """

    alike: tuple[Count, ...]


class RestoreFailed(FromWorker):
    """The worker has failed as it restored a state, by its script's own code; the agent confirms it with ``Noted``."""


class Agreed(FromWorker):
    """All ranks agreed in a verified step: its state is the last one known to be good, and kept until the next one."""

    step: Count


class Differing(FromWorker):
    """In a verified step, ranks computed different results for a micro-batch; the agent confirms it with ``Noted``.

    One worker of the round that has not computed wrong says so.

    Attributes:
        ranks: those that have computed wrong; empty if that is not known.
        suspect: how many steps are done again, at least: those since the last agreement, and the one agreed on.
    """

    step: Count
    ranks: tuple[Count, ...]
    suspect: Count


class Corrupt(FromWorker):
    """The worker has computed wrong, as others have found, and ends; the agent confirms it with ``Noted``."""


class MayCommit(FromWorker):
    """Asks whether to commit a durable checkpoint that the sender wrote; answered by ``CommitAnswer``.

    A worker asks if it wrote the checkpoint itself, the copying process if it copied a snapshot.
    """

    number: Count


class WorkerSaved(FromWorker):
    """The worker wrote a durable checkpoint with ``step`` steps itself, or could not; ``error`` says why.

    Attributes:
        training: as in :class:`Ready`.
        withdrew: instead, it has removed checkpoints that may be wrong; ``step`` is that of the newest which is left,
            0 if there is none.
    """

    step: Count
    error: Text
    training: Count = 0
    withdrew: bool = False


class SnapshotSlots(FromAgent):
    """Sent with the descriptors of the node's slots, tensors and head of each in turn, and of its progress.

    Attributes:
        slots: number of slots.
        use: the slot to write next; None if it will be sent later.
        sequence: highest number of a snapshot so far.
        fetching: whether a snapshot is being fetched from another node, so that ``Fetched`` follows.
        patience_s: seconds to wait for an order after an exchange has failed; 0 if no worker is to be suspended.
        writes: whether workers write snapshots.
        split: whether those of sharded states are to be split among the nodes.
    """

    slots: Count
    use: SlotNumber | None
    sequence: Count
    fetching: bool
    patience_s: Seconds = 0.0
    writes: bool = True
    split: bool = False


class Fetched(FromAgent):
    """A snapshot from another node is now in a slot, or is unavailable; the fields are those of ``SnapshotSlots``."""

    use: SlotNumber
    sequence: Count


class Use(FromAgent):
    """The slot to write next; the others hold the newest snapshot, or one that is being copied."""

    slot: SlotNumber


class Copied(FromAgent):
    """A snapshot was copied to durable storage, or could not be. The copying process reports so to its agent, too.

    Attributes:
        path, digest, bytes: path, digest and size of the checkpoint.
        error, hint: why there is none, or, with a path, why old ones could not be removed; empty without an error.
        final: whether retrying is pointless.
        pruning: the checkpoint is written, and old ones are being removed: another message follows.
        directory: directory or URL of the checkpoints, as in the ``CopyJob``.
        training: as in ``Ready``; filled in by the agent.
    """

    step: Count
    round: Count
    seconds: Seconds = 0.0
    path: OsText = ""
    digest: Text = ""
    bytes: Count = 0
    error: Text = ""
    hint: Text = ""
    final: bool = False
    pruning: bool = False
    directory: OsText = ""
    training: Count = 0


class Copying(FromAgent):
    """A copy is making progress; its end will follow, however long it takes."""


class CommitAnswer(FromAgent):
    """Answers ``MayCommit``, by its number.

    Attributes:
        allowed: whether the checkpoint may become visible.
        adds: whether nothing may be removed for it, since this node's membership is not confirmed.
    """

    number: Count
    allowed: bool
    adds: bool = False


class Stop(FromAgent):
    """Stop after the same step as all other ranks, save, and then exit or, if the worker can, be suspended.

    Attributes:
        ends: whether this node leaves, or the run ends: one that has done all steps is not to wait for anything else.
    """

    cause: Text
    ends: bool = False


class Suspend(FromAgent):
    """The round is over: leave its process groups at once, without its unfinished step, and report ``Suspended``."""

    round: Count
    cause: Text


class Place(FromAgent):
    """The place in a round of a worker that is suspended, or was started ahead.

    ``use``, ``sequence``, ``fetching`` and ``writes`` are those of ``SnapshotSlots``.

    Attributes:
        run_number: as in the environment: the host of the run may have been lost and replaced.
        restarts, max_restarts: restarts charged so far, and the run's limit.
        reason: why the last round ended.
    """

    round: Count
    run_number: Text
    placement: Placement
    restarts: Count
    max_restarts: Count
    reason: Text
    use: SlotNumber | None
    sequence: Count
    fetching: bool
    writes: bool = True


class Exit(FromAgent):
    """A worker that waits for a place gets none, as its node leaves or the run ends: it exits as after a drain.

    Attributes:
        use: as in ``SnapshotSlots`` if it writes its node's last snapshot, should its state be newer; else None.
        sequence: as in ``SnapshotSlots``.
    """

    use: SlotNumber | None = None
    sequence: Count = 0


class Save(FromAgent):
    """Have all ranks save a durable checkpoint after the same step, whatever their interval; sent only to rank 0."""


class FaultOrder(FromAgent):
    """The answer to :class:`FaultDue`: whether the worker is to carry out the fault; else it continues."""

    strikes: bool


class PlaceTaken(FromAgent):
    """The answer to a :class:`WorkerHello` if another process that still runs has its place."""

    pid: Count


class Noted(FromAgent):
    """The agent knows what the worker has reported.

    That is ``Drained``, ``Differs``, ``RestoreFailed``, ``Differing`` or ``Corrupt``.
    """


FROM_WORKERS = frozenset[type[Message]](FromWorker.__subclasses__())
_FROM_AGENTS = frozenset[type[Message]](FromAgent.__subclasses__())

_MESSAGES: Messages[Message] = Messages([*FROM_WORKERS, *_FROM_AGENTS], MAX_LINE)
pack, unpack = _MESSAGES.pack, _MESSAGES.unpack


def worker_environment(
    placement: Placement,
    *,
    run_id: str,
    run_number: str,
    role: str,
    restarts: int,
    max_restarts: int,
    round_number: int,
    reason: str,
    error_file: str,
    socket: str = "",
    nccl_async_error_handling: str = "1",
) -> dict[str, str]:
    """Return the variables that the agent adds to a worker's environment.

    Args:
        restarts: restarts charged so far; never decreases within a run.
        error_file: where ``torch.distributed.elastic``'s ``@record`` writes an exception.
        socket: where the agent listens for its workers.
    """
    return {
        **round_environment(
            placement,
            round_number,
            run_number=run_number,
            restarts=restarts,
            max_restarts=max_restarts,
            reason=reason,
        ),
        "ROLE_NAME": role,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": nccl_async_error_handling,
        ENV_SOCKET: socket,
    }


def ahead_environment(environ: Mapping[str, str], *, workers: int) -> dict[str, str]:
    """Return a worker's environment without its place in a round, for one that is started ahead.

    Its local rank is its own already.

    Args:
        environ: made by :func:`worker_environment`, from any placement with its local rank.
        workers: how many workers the node has.
    """
    unplaced = dict.fromkeys(_OF_PLACE, UNPLACED)
    return {**environ, **unplaced, "LOCAL_WORLD_SIZE": str(workers), ENV_AHEAD: "1"}


def round_environment(
    placement: Placement, round_number: int, *, run_number: str, restarts: int, max_restarts: int, reason: str
) -> dict[str, str]:
    """Return those of a worker's variables that change from round to round."""
    return {
        "RANK": str(placement.rank),
        "LOCAL_RANK": str(placement.local_rank),
        "GROUP_RANK": str(placement.group_rank),
        "NODE_RANK": str(placement.group_rank),
        "ROLE_RANK": str(placement.role_rank),
        "WORLD_SIZE": str(placement.world_size),
        "LOCAL_WORLD_SIZE": str(placement.local_world_size),
        "GROUP_WORLD_SIZE": str(placement.group_world_size),
        "ROLE_WORLD_SIZE": str(placement.role_world_size),
        "MASTER_ADDR": placement.master_addr,
        "MASTER_PORT": str(placement.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        ENV_FIRST_ON_NODE: str(int(placement.first_on_node)),
        ENV_REPLICA_SIZE: str(placement.replica_size),
        ENV_REPLICA: str(placement.rank // placement.replica_size),
        ENV_REPLICA_RANK: str(placement.rank % placement.replica_size),
        ENV_REPLICAS: str(placement.world_size // placement.replica_size),
        ENV_RUN_NUMBER: run_number,
        ENV_ROUND: str(round_number),
        ENV_START_REASON: reason,
    }


FOR_WORKERS = frozenset(
    worker_environment(
        Placement(0, 0, 0, 1, 1, 1, "", 0, 0, 1, first_on_node=True),
        run_id="",
        run_number="",
        role="",
        restarts=0,
        max_restarts=0,
        round_number=0,
        reason="",
        error_file="",
    )
) | {ENV_AHEAD, ENV_LOCAL_RANK, ENV_STACKS}
"""The variables that the agent sets for workers only, those of torchrun included."""
