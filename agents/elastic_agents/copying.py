"""Copies one snapshot from a slot to a directory or URL, or a share of it: a process of its own, which storage that
hangs cannot keep the agent with. Needs no torch.

Its arguments are in one JSON object; before it commits, it says ``ready`` and waits for a line that starts with
``yes``; in the end it says how it went, as another JSON object.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from elastic_launch.snapshot.errors import CheckpointError, MalformedError, NotCommittedError, TakenError
from elastic_launch.snapshot.saving import prune, write_parts, write_share
from elastic_launch.snapshot.shares import Division, Split
from elastic_launch.snapshot.slot import Header, Slot

__all__ = ["copy", "main"]


def copy(order: dict[str, Any], may_commit: Callable[[], bool]) -> dict[str, Any]:
    """Copy a snapshot and prune, if it may; return what ``elastic_launch.contract.Copied`` says of it.

    ``final`` says beside that whether it is of no use to try again.
    """
    began = time.monotonic()
    slot = Slot(order["tensors"], order["head"])
    done: dict[str, Any] = {"path": "", "digest": "", "bytes": 0, "error": "", "hint": "", "final": False}
    header = slot.header()
    if header is None or header.sequence != order["sequence"]:
        return {**done, "error": "the snapshot is not in its slot any more", "seconds": 0.0}
    numbers = {"step": header.step, "round": header.round}
    try:
        split = _split(order, slot, header)
        if order["share"]:
            if split is not None and order["share"] < len(split.division):
                write_share(order["directory"], split.division, order["share"], **numbers, nonce=split.nonce)
            return {**done, "seconds": time.monotonic() - began}
        info = write_parts(
            order["directory"],
            split or slot.tensor_parts(header),
            slot.state(header),
            json.loads(slot.meta(header)),
            **numbers,
            may_commit=may_commit,
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


def _split(order: dict[str, Any], slot: Slot, header: Header) -> Split | None:
    """Return what is to be written by several nodes; None if it cannot be divided: one tensor may be most of it."""
    if order["shares"] == 1:
        return None
    try:
        division = Division(slot.tensor_bytes, header.tensors, order["shares"])
    except MalformedError as error:
        raise CheckpointError(f"What is in memory cannot be divided: {error}.") from error
    return Split(division, order["nonce"]) if len(division) > 1 else None


def main() -> None:
    """Carry out the order that is the only argument."""
    logging.basicConfig(format="[elastic-launch] %(message)s")
    # What drivers of storage print is not for the agent.
    with os.fdopen(os.dup(1), "w") as agent:
        os.dup2(2, 1)

        def may_commit() -> bool:
            print("ready", file=agent, flush=True)
            return sys.stdin.readline().startswith("yes")

        print(json.dumps(copy(json.loads(sys.argv[1]), may_commit)), file=agent, flush=True)
