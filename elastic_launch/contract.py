"""What agent and worker both know: the environment of a worker, and what the two say to each other.

The names without prefix and those with ``TORCHELASTIC_`` are torchrun's, as documented at
https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables; ``NODE_RANK`` is Composer's.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

__all__ = [
    "ENV_LOCAL_RANK",
    "ENV_ROUND",
    "ENV_SOCKET",
    "ENV_START_REASON",
    "MAX_LINE",
    "Copied",
    "Drained",
    "Fetched",
    "Hello",
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


@dataclass(frozen=True, slots=True)
class Message:
    """What agent and worker say: one JSON object a line, its ``type`` being the class' name."""

    TYPES: ClassVar[dict[str, type[Message]]] = {}


# Worker to agent.


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """First message; the agent answers with ``Slots``."""

    round: int
    rank: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class Ready(Message):
    """This worker has begun to train, with so many steps done, and can be drained from now on.

    Attributes:
        total: steps of the whole training, 0 if that is not known.
        restore_s: seconds that restoring the state took.
    """

    step: int
    total: int = 0
    restore_s: float = 0.0


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

    slot: int
    sequence: int
    step: int
    round: int
    durable: bool
    directory: str
    keep: int
    owner: str = ""
    shares: int = 1
    share: int = 0
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class StepDone(Message):
    """An optimizer step is done; step counts those done so far.

    Said of the first one of a process, and of one a second then: all are in ``elastic_launch.progress``; where this
    cannot be written, of all.
    """

    step: int


@dataclass(frozen=True, slots=True)
class Drained(Message):
    """All ranks have stopped after the same step, and what this one had to save is saved; it ends now.

    Attributes:
        seconds: that saving took.
    """

    step: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Saved(Message):
    """A durable checkpoint is written, with so many optimizer steps in it; or is not, and the error says why."""

    step: int
    error: str


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

    slots: int
    use: int
    sequence: int
    fetching: bool


@dataclass(frozen=True, slots=True)
class Fetched(Message):
    """A snapshot from another node is in a slot now, or is not to be had; the fields are those of Slots."""

    use: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Use(Message):
    """The slot to write next: the others hold the newest snapshot, or one that is being copied."""

    slot: int


@dataclass(frozen=True, slots=True)
class Copied(Message):
    """A snapshot was copied for good, or could not be.

    Attributes:
        path, digest, bytes: of the checkpoint.
        error, hint: why there is none, or, with a path, why old ones could not be removed; empty without an error.
    """

    step: int
    round: int
    seconds: float
    path: str
    digest: str
    bytes: int
    error: str
    hint: str


@dataclass(frozen=True, slots=True)
class Stop(Message):
    """Stop after the same step as all other ranks, save and end."""

    cause: str


@dataclass(frozen=True, slots=True)
class Save(Message):
    """Have all ranks save a durable checkpoint after the same step, whatever their interval; only rank 0 is asked."""


@dataclass(frozen=True, slots=True)
class Noted(Message):
    """The agent knows that the worker is drained."""


_KINDS: tuple[type[Message], ...] = (
    *(Hello, Ready, StepDone, Stored, Drained, Saved),
    *(Slots, Fetched, Use, Copied, Stop, Save, Noted),
)
Message.TYPES.update({kind.__name__.lower(): kind for kind in _KINDS})


def pack(message: Message) -> bytes:
    """Encode a message as one line."""
    return json.dumps({"type": type(message).__name__.lower(), **asdict(message)}).encode() + b"\n"


def unpack(line: bytes) -> Message:
    """Read one line.

    Raises:
        ValueError: if it is no message that is known here, or a field is missing or has another type.
    """
    value = json.loads(line)
    kind = Message.TYPES.get(str(value.get("type"))) if isinstance(value, dict) else None
    if kind is None:
        raise ValueError(f"no message that is known: {line[:100]!r}")
    return kind(**{item.name: _checked(kind, item.name, str(item.type), value) for item in fields(kind)})


def _checked(kind: type[Message], name: str, hint: str, value: dict[str, Any]) -> Any:
    found = value.get(name)
    if hint == "float" and type(found) is int:
        return float(found)
    if type(found).__name__ != hint:
        raise ValueError(f"{kind.__name__}.{name} is {str(found)[:100]!r}, not of type {hint}")
    return found


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
    """

    rank: int
    local_rank: int
    group_rank: int
    world_size: int
    local_world_size: int
    group_world_size: int
    master_addr: str
    master_port: int


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
        "ROLE_RANK": str(placement.rank),
        "ROLE_NAME": role,
        "WORLD_SIZE": str(placement.world_size),
        "LOCAL_WORLD_SIZE": str(placement.local_world_size),
        "GROUP_WORLD_SIZE": str(placement.group_world_size),
        "ROLE_WORLD_SIZE": str(placement.world_size),
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
