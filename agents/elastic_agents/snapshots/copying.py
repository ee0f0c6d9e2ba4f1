"""Copies one snapshot, or a share of it, from a slot to a directory or URL. Runs as a separate process, so that storage
that hangs cannot block the agent. Needs no torch.

Its arguments are one JSON object. It writes ``progress`` when it begins, then about once a second while it makes
progress. Before it commits, it writes ``ready`` and waits for a line that starts with ``yes``. When the checkpoint is
written, and again at the end, it writes the result: a JSON object, see ``copier.Answer``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from elastic_launch.snapshot.errors import CheckpointError, MalformedError, NotCommittedError, TakenError
from elastic_launch.snapshot.format.manifest import parse_json
from elastic_launch.snapshot.memory.slot import Header, Slot
from elastic_launch.snapshot.storage.listing import find
from elastic_launch.snapshot.storage.saving import prune, write_parts, write_share
from elastic_launch.snapshot.storage.shares import Division, Split

__all__ = ["copy", "main"]

_log = logging.getLogger(__name__)

SILENCE = 1.0
"""Seconds between two progress messages."""


class _Followed(Slot):
    """A slot that reports progress as it is read: by then, what was read before has been written."""

    def __init__(self, tensors: int, head: int, progress: Callable[[], None]) -> None:
        super().__init__(tensors, head)
        self._progress = progress

    def tensor_bytes(self, begin: int, end: int) -> Iterator[bytes]:
        for part in super().tensor_bytes(begin, end):
            self._progress()
            yield part


def copy(
    order: dict[str, Any],
    may_commit: Callable[[], bool],
    progress: Callable[[], None],
    there: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Copy a snapshot, and prune if it may; return the final result.

    Args:
        progress: called now and then, from any thread.
        there: called with the result once the checkpoint is written, before old ones are removed.
    """
    began = time.monotonic()
    slot = _Followed(order["tensors"], order["head"], progress)
    done: dict[str, Any] = {"path": "", "digest": "", "bytes": 0, "error": "", "hint": "", "final": False}
    header = slot.header()
    if header is None or header.sequence != order["sequence"]:
        return {**done, "error": "the snapshot is not in its slot any more", "seconds": 0.0}
    numbers = {"step": header.step, "round": header.round}
    try:
        split = _split(order, slot, header, progress)
        if order["share"]:
            if split is not None and order["share"] < len(split.division):
                write_share(order["directory"], split.division, order["share"], **numbers, nonce=split.nonce)
            return {**done, "seconds": time.monotonic() - began}
        newest = next(iter(find(order["directory"])), None) if order["last"] else None
        if newest is not None and (newest.round, newest.step) >= (header.round, header.step):
            done.update(path=str(newest.path), digest=newest.digest, bytes=newest.bytes)
            return {**done, "seconds": time.monotonic() - began}
        meta = parse_json(slot.meta(header))
        info = write_parts(
            order["directory"],
            split or slot.tensor_parts(header),
            slot.state(header),
            meta,
            **numbers,
            may_commit=may_commit,
            owner=order["owner"],
            take=order["take"],
        )
        done.update(path=str(info.path), digest=info.digest, bytes=info.bytes)
        there({**done, "seconds": time.monotonic() - began, "pruning": True})
        if isinstance(meta, dict) and meta.get("compared") is False:
            text = "the checkpoint of step %d was saved without a comparison of the ranks, and its manifest says so"
            _log.warning(text, header.step)
        prune(order["directory"], order["keep"], header.round)
    except (NotCommittedError, TakenError) as error:
        done.update(error=error.message, hint=error.hint, final=True)
    except CheckpointError as error:
        done.update(error=error.message, hint=error.hint)
    except MalformedError as error:
        done.update(error=f"What is in memory is damaged: {error}.")
    return {**done, "seconds": time.monotonic() - began}


def _split(order: dict[str, Any], slot: Slot, header: Header, progress: Callable[[], None]) -> Split | None:
    """Return the split among several nodes; None if it cannot be divided: one tensor may be most of the snapshot."""
    if order["shares"] == 1:
        return None
    try:
        division = Division(slot.tensor_bytes, header.tensors, order["shares"], progress)
    except MalformedError as error:
        raise CheckpointError(f"What is in memory cannot be divided: {error}.") from error
    return Split(division, order["nonce"]) if len(division) > 1 else None


def main() -> None:
    """Carry out the order that is the only argument."""
    logging.basicConfig(format="[elastic-launch] %(message)s")
    # The agent must not read what storage drivers print.
    agent = os.dup(1)
    os.dup2(2, 1)
    saying = threading.Lock()
    said, gone = 0.0, False

    def say(text: str) -> None:
        nonlocal gone
        try:
            with saying:
                os.write(agent, f"{text}\n".encode())
        except BrokenPipeError:
            # The agent was killed, so nothing is committed any more. The current write must finish, and its result
            # be removed: if an exception closes a file, a driver may store half of it.
            gone = True

    def progress() -> None:
        nonlocal said
        if time.monotonic() >= said + SILENCE:
            said = time.monotonic()
            say("progress")

    def may_commit() -> bool:
        say("ready")
        return not gone and sys.stdin.readline().startswith("yes")

    order = json.loads(sys.argv[1])
    progress()  # it has begun: from now on, silence is the storage's fault
    say(json.dumps(copy(order, may_commit, progress, lambda done: say(json.dumps(done)))))
    sys.exit(1 if gone else 0)
