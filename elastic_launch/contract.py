"""What agent and worker both know: the environment of a worker, and what the two say to each other.

The names without prefix and those with ``TORCHELASTIC_`` are torchrun's, as documented at
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
"""Number of the round under which the worker runs, from 1."""

ENV_START_REASON = "ELASTIC_LAUNCH_START_REASON"
"""Why this worker was started: ``first`` or the cause for which the last round ended."""


ENV_LOCAL_RANK = "ELASTIC_LAUNCH_LOCAL_RANK"
"""Rank among the workers of the node, if ``LOCAL_RANK`` is 0 for all of them (``--virtual-local-rank``); else unset."""

ENV_SOCKET = "ELASTIC_LAUNCH_SOCKET"
"""Where the agent listens for its workers: a Unix socket; a name with ``@`` first lies in the abstract namespace."""

MAX_LINE = 64 * 1024
"""Bytes of a message at most."""

SLOTS = 3
"""Slots of a node: one with a complete snapshot, one being written, one being copied."""

# What the fields of messages hold; _CHECKS has what each of these types admits.
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
    """What agent and worker say: one JSON object a line, its ``type`` being the class' name.

    A worker runs the user's code, so the agent believes nothing that it says: :func:`unpack` checks every field, by its
    type's name, and is the only place that does.
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
    """This worker has begun to train, with so many steps done, and can be drained from now on.

    Attributes:
        total: steps of the whole training, 0 if that is not known.
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
        durable: whether it is to be copied for good.
        directory: where to; empty if this worker's node writes no durable checkpoints.
        keep: so many of the newest stay there.
        owner: who must have taken the directory last, as the copier checks; empty: anybody.
        shares: nodes that copy it together, each a share; 1: this one alone.
        share: this node's, from 0; only the first node commits, and has others that fail done again.
        nonce: of the copy's name, the same on all these nodes.
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
    """An optimizer step is done; step counts those done so far.

    Sent for the first step of a process, then once a second; ``elastic_launch.shared_progress`` has all steps. Where
    that cannot be written, sent for each step.
    """

    step: Count


@dataclass(frozen=True, slots=True)
class Drained(Message):
    """All ranks have stopped after the same step, and what this one had to save is in memory; it ends now.

    Attributes:
        seconds: that saving took.
    """

    step: Count
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class Ended(Message):
    """The worker's script has ended, its threads and exit functions, too: only what it holds is still to be destroyed.

    The first and only message on its connection, whose process is the worker.

    Attributes:
        exit_code: with which the worker is about to end; -N for signal N.
    """

    exit_code: ExitStatus


@dataclass(frozen=True, slots=True)
class MayCommit(Message):
    """Asks whether a durable checkpoint that this worker has written itself may appear; ``Commit`` answers."""

    number: Count


@dataclass(frozen=True, slots=True)
class Saved(Message):
    """A durable checkpoint is written, with so many optimizer steps in it; or is not, and the error says why."""

    step: Count
    error: Text


# Agent to worker.


@dataclass(frozen=True, slots=True)
class Slots(Message):
    """Comes with the descriptors of the node's slots, tensors and head of each in turn, and of its progress.

    Attributes:
        slots: how many there are.
        use: the one to write next; -1 if that is still to be told.
        sequence: highest number of a snapshot so far.
        fetching: whether a snapshot is being fetched from another node, and Fetched follows.
    """

    slots: Count
    use: SlotOrNone
    sequence: Count
    fetching: bool


@dataclass(frozen=True, slots=True)
class Fetched(Message):
    """A snapshot from another node is in a slot now, or is not to be had; the fields are those of Slots."""

    use: SlotNumber
    sequence: Count


@dataclass(frozen=True, slots=True)
class Use(Message):
    """The slot to write next: the others hold the newest snapshot, or one that is being copied."""

    slot: SlotNumber


@dataclass(frozen=True, slots=True)
class Copied(Message):
    """A snapshot was copied for good, or could not be.

    Attributes:
        path, digest, bytes: of the checkpoint.
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
    """A copy makes progress; its end follows, however long it takes."""


@dataclass(frozen=True, slots=True)
class Commit(Message):
    """Answers ``MayCommit``, by its number: whether this node is a member of the run, and not cut off from it."""

    number: Count
    allowed: bool


@dataclass(frozen=True, slots=True)
class Stop(Message):
    """Stop after the same step as all other ranks, save and end."""

    cause: Text


@dataclass(frozen=True, slots=True)
class Save(Message):
    """Have all ranks save a durable checkpoint after the same step, whatever their interval; only rank 0 is asked."""


@dataclass(frozen=True, slots=True)
class Noted(Message):
    """The agent knows that the worker is drained."""


FROM_WORKERS: frozenset[type[Message]] = frozenset({Hello, Ready, StepDone, MayCommit, Stored, Drained, Saved, Ended})
"""What a worker may say to its agent."""

_FROM_AGENTS = frozenset({Slots, Fetched, Use, Commit, Copied, Copying, Stop, Save, Noted})

Message.TYPES.update({kind.__name__.lower(): kind for kind in FROM_WORKERS | _FROM_AGENTS})


def pack(message: Message) -> bytes:
    """Encode a message as one line. What is no text in it, as a file's name in an error may be, is escaped."""
    value: dict[str, object] = {"type": type(message).__name__.lower(), **asdict(message)}
    for item in fields(message):
        if item.type == "Text":
            value[item.name] = str(value[item.name]).encode(errors="backslashreplace").decode().replace("\0", r"\x00")
    return json.dumps(value).encode() + b"\n"


def unpack(line: bytes, kinds: Collection[type[Message]] = frozenset(Message.TYPES.values())) -> Message:
    """Read one line, whoever wrote it.

    Args:
        kinds: of messages that are expected.

    Raises:
        ValueError: if it is no message of such a kind, or a field is missing or not what its type admits.
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
"""Numbers from here on are not exact in JSON as others read it, and are no count of anything."""

_NONCE = re.compile(r"[0-9a-f]{0,64}")


def _whole(value: object, low: int, end: int = _MOST) -> bool:
    return type(value) is int and low <= value < end


def _is_text(value: object, admitted: str = "strict") -> bool:
    """Whether a value is text without a zero byte that can be encoded."""
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
    # A path, or what stands in the environment, may be other bytes than UTF-8 (PEP 383).
    "OsText": (lambda value: _is_text(value, "surrogateescape"), "a path"),
    "ExitStatus": (lambda value: _whole(value, -64, 256), "an exit code"),
    "Nonce": (lambda value: isinstance(value, str) and bool(_NONCE.fullmatch(value)), "hexadecimal digits"),
}


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one worker stands in a round.

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
        restarts: budgeted restarts so far; never falls within a run.
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
