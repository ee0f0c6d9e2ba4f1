"""The protocol between agent and worker: a worker's environment, and the messages.

Variables without a prefix and those with ``TORCHELASTIC_`` are torchrun's, as documented at
https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables; ``NODE_RANK`` is Composer's.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, NoReturn

__all__ = [
    "ENV_LOCAL_RANK",
    "ENV_ROUND",
    "ENV_SOCKET",
    "ENV_START_REASON",
    "FROM_WORKERS",
    "MAX_LINE",
    "SLOTS",
    "Commit",
    "Copied",
    "Copying",
    "Drained",
    "Ended",
    "Fetched",
    "Hello",
    "MayCommit",
    "Message",
    "Noted",
    "Placement",
    "Ready",
    "Save",
    "Saved",
    "Slots",
    "StepDone",
    "Stop",
    "Stored",
    "Use",
    "pack",
    "unpack",
    "worker_environment",
]

ENV_ROUND = "ELASTIC_LAUNCH_ROUND"
"""Number of the worker's round, from 1."""

ENV_START_REASON = "ELASTIC_LAUNCH_START_REASON"
"""Why this worker was started: ``first``, or the cause of the last round's end."""


ENV_LOCAL_RANK = "ELASTIC_LAUNCH_LOCAL_RANK"
"""Rank among the workers of the node, if ``LOCAL_RANK`` is 0 for all of them (``--virtual-local-rank``); else unset."""

ENV_SOCKET = "ELASTIC_LAUNCH_SOCKET"
"""Unix socket where the agent listens for its workers; a name that begins with ``@`` is in the abstract namespace."""

MAX_LINE = 64 * 1024
"""Longest message in bytes."""

SLOTS = 3
"""Slots per node: one with a complete snapshot, one being written, one being copied."""

# Types of message fields; _CHECKS has the values that each type allows.
Count = int
Positive = int
SlotNumber = int
SlotOrNone = int
Seconds = float
Text = str
OsText = str
Nonce = str
ExitStatus = int


@dataclass(frozen=True, slots=True)
class Message:
    """Base class of messages: one JSON object per line, whose ``type`` is the class name.

    A worker runs the user's code, so the agent does not trust its messages: :func:`unpack` checks every field by the
    name of its type, and is the only place that does.
    """

    TYPES: ClassVar[dict[str, type[Message]]] = {}


# Worker to agent.


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """First message; the agent answers with ``Slots``."""

    round: Count
    rank: Count
    local_rank: Count


@dataclass(frozen=True, slots=True)
class Ready(Message):
    """This worker has begun to train with ``step`` steps done, and can be drained from now on.

    Attributes:
        total: steps of the whole training; 0 if unknown.
        restore_s: seconds that restoring the state took.
    """

    step: Count
    total: Count = 0
    restore_s: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class Stored(Message):
    """A snapshot is in a slot.

    Attributes:
        sequence: its number.
        durable: whether to copy it to durable storage.
        directory: destination of the copy; empty if this worker's node writes no durable checkpoints.
        keep: number of newest checkpoints to keep there.
        owner: the required last owner of the directory, which the copier checks; empty for any.
        shares: number of nodes that copy it together, one share each; 1 for this node alone.
        share: this node's share, from 0; only the first node commits, and has failed shares of others repeated.
        nonce: part of the copy's name, the same on all these nodes.
    """

    slot: SlotNumber
    sequence: Count
    step: Count
    round: Count
    durable: bool
    directory: OsText
    keep: Positive
    owner: OsText = ""
    shares: Positive = 1
    share: Count = 0
    nonce: Nonce = ""

    def __post_init__(self) -> None:
        if self.share >= self.shares:
            raise ValueError(f"Stored.share is {self.share} of {self.shares}")


@dataclass(frozen=True, slots=True)
class StepDone(Message):
    """An optimizer step is done; ``step`` counts those done so far.

    Sent for the first step of a process, then once a second; ``elastic_launch.shared_progress`` has every step. If that
    cannot be written, it is sent for each step.
    """

    step: Count


@dataclass(frozen=True, slots=True)
class Drained(Message):
    """All ranks stopped after the same step, and this rank's state is saved in memory; it exits now.

    Attributes:
        seconds: the time that saving took.
    """

    step: Count
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class Ended(Message):
    """The worker's script, threads and exit functions have ended; only its resources are still to be released.

    This is the first and only message on its connection, whose process is the worker.

    Attributes:
        exit_code: the code with which the worker is about to exit; -N for signal N.
    """

    exit_code: ExitStatus


@dataclass(frozen=True, slots=True)
class MayCommit(Message):
    """Asks whether to commit a durable checkpoint that this worker wrote itself; answered by ``Commit``."""

    number: Count


@dataclass(frozen=True, slots=True)
class Saved(Message):
    """A durable checkpoint with ``step`` optimizer steps was written, or was not, and ``error`` says why."""

    step: Count
    error: Text


# Agent to worker.


@dataclass(frozen=True, slots=True)
class Slots(Message):
    """Sent with the descriptors of the node's slots, tensors and head of each in turn, and of its progress.

    Attributes:
        slots: number of slots.
        use: the slot to write next; -1 if it will be sent later.
        sequence: highest number of a snapshot so far.
        fetching: whether a snapshot is being fetched from another node, so that ``Fetched`` follows.
    """

    slots: Count
    use: SlotOrNone
    sequence: Count
    fetching: bool


@dataclass(frozen=True, slots=True)
class Fetched(Message):
    """A snapshot from another node is now in a slot, or is unavailable; the fields are those of ``Slots``."""

    use: SlotNumber
    sequence: Count


@dataclass(frozen=True, slots=True)
class Use(Message):
    """The slot to write next; the others hold the newest snapshot, or one that is being copied."""

    slot: SlotNumber


@dataclass(frozen=True, slots=True)
class Copied(Message):
    """A snapshot was copied to durable storage, or could not be.

    Attributes:
        path, digest, bytes: path, digest and size of the checkpoint.
        error, hint: why there is none, or, with a path, why old ones could not be removed; empty without an error.
    """

    step: Count
    round: Count
    seconds: Seconds
    path: OsText
    digest: Text
    bytes: Count
    error: Text
    hint: Text


@dataclass(frozen=True, slots=True)
class Copying(Message):
    """A copy is making progress; its end will follow, however long it takes."""


@dataclass(frozen=True, slots=True)
class Commit(Message):
    """Answers ``MayCommit``, by its number: whether this node is a member of the run and not cut off from it."""

    number: Count
    allowed: bool


@dataclass(frozen=True, slots=True)
class Stop(Message):
    """Stop after the same step as all other ranks, save and exit."""

    cause: Text


@dataclass(frozen=True, slots=True)
class Save(Message):
    """Have all ranks save a durable checkpoint after the same step, whatever their interval; sent only to rank 0."""


@dataclass(frozen=True, slots=True)
class Noted(Message):
    """The agent knows that the worker is drained."""


FROM_WORKERS: frozenset[type[Message]] = frozenset({Hello, Ready, StepDone, MayCommit, Stored, Drained, Saved, Ended})
"""The messages that a worker may send to its agent."""

_FROM_AGENTS = frozenset({Slots, Fetched, Use, Commit, Copied, Copying, Stop, Save, Noted})

Message.TYPES.update({kind.__name__.lower(): kind for kind in FROM_WORKERS | _FROM_AGENTS})


def pack(message: Message) -> bytes:
    """Encode a message as one line. Invalid text in it, such as a file name in an error, is escaped."""
    value: dict[str, object] = {"type": type(message).__name__.lower(), **asdict(message)}
    for item in fields(message):
        if item.type == "Text":
            value[item.name] = str(value[item.name]).encode(errors="backslashreplace").decode().replace("\0", r"\x00")
    return json.dumps(value).encode() + b"\n"


def unpack(line: bytes, kinds: Collection[type[Message]] = frozenset(Message.TYPES.values())) -> Message:
    """Parse one untrusted line.

    Args:
        kinds: the message classes that are expected.

    Raises:
        ValueError: if it is not a message of these classes, or a field is missing or invalid for its type.
    """
    if len(line) > MAX_LINE:
        raise ValueError(f"a line of {len(line)} bytes, the limit is {MAX_LINE}")
    try:
        value = _DECODER.decode(line.decode())
    except RecursionError:
        raise ValueError(f"JSON that is nested too deeply: {line[:100]!r}") from None
    name = value.get("type") if isinstance(value, dict) else None
    kind = Message.TYPES.get(name) if isinstance(name, str) else None
    if kind is None or kind not in kinds:
        raise ValueError(f"no message that is known: {line[:100]!r}")
    found: dict[str, Any] = {}
    for item in fields(kind):
        one = value.get(item.name)
        check, admitted = _CHECKS[str(item.type)]
        if not check(one):
            shown = str(one)[:100] if isinstance(one, str | int | float | None) else type(one).__name__
            raise ValueError(f"{kind.__name__}.{item.name} is {shown!r}, not {admitted}")
        found[item.name] = float(one) if item.type == "Seconds" and one is not None else one
    return kind(**found)


_MOST = 2**53
"""From here on, numbers are not exact in other readers' JSON, and are not valid counts."""

_NONCE = re.compile(r"[0-9a-f]{0,64}")


def _whole(value: object, low: int, end: int = _MOST) -> bool:
    return type(value) is int and low <= value < end


def _is_text(value: object, admitted: str = "strict") -> bool:
    """Whether a value is encodable text without a zero byte."""
    try:
        return isinstance(value, str) and b"\0" not in value.encode(errors=admitted)
    except UnicodeEncodeError:
        return False


def _is_seconds(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < _MOST and math.isfinite(value)  # type: ignore[operator,arg-type]


_CHECKS: dict[str, tuple[Callable[[object], bool], str]] = {
    "bool": (lambda value: type(value) is bool, "true or false"),
    "Count": (lambda value: _whole(value, 0), "a number from 0 to 2**53"),
    "Positive": (lambda value: _whole(value, 1), "a number from 1 to 2**53"),
    "SlotNumber": (lambda value: _whole(value, 0, SLOTS), "the number of a slot"),
    "SlotOrNone": (lambda value: _whole(value, -1, SLOTS), "the number of a slot, or -1"),
    "Seconds": (_is_seconds, "a number of seconds"),
    "Text": (_is_text, "text"),
    # Paths and environment variables may contain bytes that are not UTF-8 (PEP 383).
    "OsText": (lambda value: _is_text(value, "surrogateescape"), "a path"),
    "ExitStatus": (lambda value: _whole(value, -64, 256), "an exit code"),
    "Nonce": (lambda value: isinstance(value, str) and bool(_NONCE.fullmatch(value)), "hexadecimal digits"),
}


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


@dataclass(frozen=True, slots=True)
class Placement:
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
    """

    rank: int
    local_rank: int
    group_rank: int
    world_size: int
    local_world_size: int
    group_world_size: int
    master_addr: str
    master_port: int
    role_rank: int
    role_world_size: int


def worker_environment(
    placement: Placement,
    *,
    run_id: str,
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
        "RANK": str(placement.rank),
        "LOCAL_RANK": str(placement.local_rank),
        "GROUP_RANK": str(placement.group_rank),
        "NODE_RANK": str(placement.group_rank),
        "ROLE_RANK": str(placement.role_rank),
        "ROLE_NAME": role,
        "WORLD_SIZE": str(placement.world_size),
        "LOCAL_WORLD_SIZE": str(placement.local_world_size),
        "GROUP_WORLD_SIZE": str(placement.group_world_size),
        "ROLE_WORLD_SIZE": str(placement.role_world_size),
        "MASTER_ADDR": placement.master_addr,
        "MASTER_PORT": str(placement.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": nccl_async_error_handling,
        ENV_ROUND: str(round_number),
        ENV_START_REASON: reason,
        ENV_SOCKET: socket,
    }
