"""Copies one snapshot from a slot to a directory or URL: a process of its own, which storage that hangs cannot keep the
agent with. Needs no torch.

Its arguments are in one JSON object; before it commits, it says ``ready`` and waits for a line that starts with
``yes``; in the end it says how it went, as another JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from elastic_launch.snapshot.errors import CheckpointError, NotCommittedError, TakenError
from elastic_launch.snapshot.saving import prune, write_parts
from elastic_launch.snapshot.slot import Slot

__all__ = ["copy", "main"]


def copy(order: dict[str, Any]) -> dict[str, Any]:
    """Copy a snapshot and prune; return what ``elastic_launch.contract.Copied`` says of it.

    ``final`` says beside that whether it is of no use to try again.
    """
    began = time.monotonic()
    slot = Slot(order["tensors"], order["head"])
    done: dict[str, Any] = {"path": "", "digest": "", "bytes": 0, "error": "", "hint": "", "final": False}
    header = slot.header()
    if header is None or header.sequence != order["sequence"]:
        return {**done, "error": "the snapshot is not in its slot any more", "seconds": 0.0}
    try:
        info = write_parts(
            order["directory"],
            slot.tensor_parts(header),
            slot.state(header),
            json.loads(slot.meta(header)),
            step=header.step,
            round=header.round,
            may_commit=_may_commit,
            owner=order["owner"],
            take=order["take"],
        )
        done.update(path=str(info.path), digest=info.digest, bytes=info.bytes)
        prune(order["directory"], order["keep"], header.round)
    except (NotCommittedError, TakenError) as error:
        done.update(error=error.message, hint=error.hint, final=True)
    except CheckpointError as error:
        done.update(error=error.message, hint=error.hint)
    return {**done, "seconds": time.monotonic() - began}


def _may_commit() -> bool:
    print("ready", flush=True)
    return sys.stdin.readline().startswith("yes")


def main() -> None:
    """Carry out the order that is the only argument."""
    print(json.dumps(copy(json.loads(sys.argv[1]))), flush=True)
