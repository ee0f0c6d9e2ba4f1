"""Messages between nodes and leader: one JSON object per line, ``type`` first.

A node sends reports, the leader sends orders. Every order carries the leader's term, and a node ignores orders from a
lower term than it has seen, so that a leader that was paused and wakes up has no effect.
"""

from __future__ import annotations

from typing import Any, Protocol

from elastic_launch.errors import ProtocolError
from elastic_launch.rendezvous.admin import messages as asking
from elastic_launch.rendezvous.snapshot_holders import HeldSnapshot, Released, SnapshotSource
from elastic_launch.rendezvous.wire import codec
from elastic_launch.rendezvous.wire.orders import (
    Break,
    Depart,
    Drain,
    Evicted,
    Form,
    Notice,
    Order,
    PeerDone,
    Pulse,
    Refused,
    RunEnd,
    SaveNow,
    ToNode,
    Welcome,
)
from elastic_launch.rendezvous.wire.reports import (
    Beat,
    Done,
    Failed,
    Failure,
    Hello,
    Imported,
    Joined,
    Leaving,
    Progress,
    Ready,
    Report,
    Saved,
    Stopped,
)

__all__ = [
    "PROTOCOL_VERSION",
    "Beat",
    "Break",
    "Depart",
    "Done",
    "Drain",
    "Evicted",
    "Failed",
    "Failure",
    "Form",
    "HeldSnapshot",
    "Hello",
    "Imported",
    "Joined",
    "Leaving",
    "Message",
    "Notice",
    "Order",
    "PeerDone",
    "Progress",
    "Pulse",
    "Ready",
    "Refused",
    "Released",
    "Report",
    "RunEnd",
    "SaveNow",
    "Saved",
    "SnapshotSource",
    "Spoken",
    "Stopped",
    "ToNode",
    "Welcome",
    "pack",
    "unpack",
]

PROTOCOL_VERSION = 4


class Message(Protocol):
    """Any report or order dataclass."""

    __dataclass_fields__: Any


_REPORTS: dict[str, type[Any]] = {
    "hello": Hello,
    "beat": Beat,
    "progress": Progress,
    "saved": Saved,
    "joined": Joined,
    "ready": Ready,
    "imported": Imported,
    "failed": Failed,
    "stopped": Stopped,
    "done": Done,
    "leaving": Leaving,
}
_ORDERS: dict[str, type[Any]] = {
    "welcome": Welcome,
    "refused": Refused,
    "pulse": Pulse,
    "form": Form,
    "drain": Drain,
    "break": Break,
    "depart": Depart,
    "released": Released,
    "save": SaveNow,
    "peer_done": PeerDone,
    "evicted": Evicted,
    "notice": Notice,
    "end": RunEnd,
}
_KINDS = {**_REPORTS, **_ORDERS, **asking.NAMES}
_NAMES = {kind: name for name, kind in _KINDS.items()}

Spoken = Report | Order | asking.Caller | asking.Request


def pack(message: Spoken) -> bytes:
    """Encode a message as one line."""
    return codec.dumps(message, type=_NAMES[type(message)]) + b"\n"


def unpack(line: bytes) -> Spoken:
    """Read one line.

    Raises:
        ProtocolError: if it is not a message that this version knows.
    """
    value = codec.loads(line)
    name = value.get("type")
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError(f"A message of the unknown type {str(name)[:50]!r} came over a link.")
    message: Spoken = codec.decode(kind, value)
    return message
