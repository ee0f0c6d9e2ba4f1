"""Copies one snapshot, or a share of it, from a slot to a directory or URL. Runs as a separate process, so that storage
that hangs cannot block the agent. Needs torch only if the state is to be saved in its format.

Its arguments are a :class:`CopyJob` and the descriptors of the slot's tensors and head. It writes ``Copying`` when it
begins, then about once a second while it makes progress. Before it commits, it writes ``MayCommit`` and waits for
``CommitAnswer``. When the checkpoint is written, and again at the end, it writes ``Copied``.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from elastic_launch import codec
from elastic_launch.contract import CommitAnswer, Copied, Copying, CopyJob, MayCommit, Message, pack, unpack
from elastic_launch.errors import UsageError
from elastic_launch.snapshot.errors import CheckpointError, MalformedError, NotCommittedError, TakenError
from elastic_launch.snapshot.format.manifest import DISTRIBUTED, parse_json
from elastic_launch.snapshot.format.plain import Decoder
from elastic_launch.snapshot.location import place
from elastic_launch.snapshot.memory.slot import PART, Header, Slot
from elastic_launch.snapshot.storage import owner as owners
from elastic_launch.snapshot.storage.lineage import epoch_of, nonce_in, order, same_run
from elastic_launch.snapshot.storage.listing import CheckpointInfo, find, order_of
from elastic_launch.snapshot.storage.saving import Files, in_format_of, prune, write_parts, write_share
from elastic_launch.snapshot.storage.shares import Division, Read
from elastic_launch.system.whole_writes import write_whole

_log = logging.getLogger(__name__)

SILENCE = 1.0
"""Seconds between two progress messages."""

_PIECE = 8 * 1024 * 1024
"""Bytes that are written between two."""


def copy(
    job: CopyJob,
    tensors: int,
    head: int,
    may_commit: Callable[[], CommitAnswer],
    progress: Callable[[], None],
    written: Callable[[Copied], None],
) -> Copied:
    """Copy a snapshot, and prune if it may; return the final result.

    The last copy has a name that follows from the state: of several nodes that save it, one adds it. ``progress`` is
    called now and then, from any thread; ``written`` once the checkpoint is written, before old ones are removed.
    """
    permit = CommitAnswer(0, allowed=False)

    def allowed() -> bool:
        nonlocal permit
        permit = may_commit()
        there = slot.header()  # it may have been dropped meanwhile
        return permit.allowed and there is not None and there.sequence == job.sequence

    began = time.monotonic()
    done = Copied(job.step, job.round, directory=job.directory)
    slot = Slot(tensors, head)
    header = slot.header()

    def read(begin: int, end: int) -> Iterator[bytes]:
        for part in slot.tensor_bytes(begin, end):
            progress()  # what was read before has been written
            yield part

    if header is None or (header.sequence, header.step, header.round) != (job.sequence, job.step, job.round):
        return replace(done, error="The snapshot is not in its slot any more.")
    numbers, position = {"step": header.step, "round": header.round}, (header.round, header.step)
    try:
        meta = parse_json(slot.meta(header))
        if isinstance(meta, dict) and PART in meta:  # snapshots are split since the one that was to be copied
            return replace(done, error="This node has only a part of the newest snapshot.", final=True)
        division = _divided(job, read, header.tensors, progress)
        newest: CheckpointInfo | None = None
        if job.last and not job.share:
            decoded = Decoder().decode(meta)
            # If another run has taken the location, what is there may be that run's.
            owners.check(place(job.directory), job.owner, epoch=epoch_of(decoded) or 0, claims=False)
            newest = next((info for info in find(job.directory) if same_run(info.meta, decoded)), None)
        if job.share:
            if division is not None and job.share < len(division):
                write_share(job.directory, division, job.share, **numbers, nonce=job.nonce)
        elif newest is not None and order_of(newest) >= order(newest.meta, header.round, header.step):
            done = replace(done, step=newest.step, round=newest.round, path=str(newest.path), digest=newest.digest)
            done = replace(done, bytes=newest.bytes)
        else:
            info = write_parts(
                job.directory,
                _in_format(slot, header, meta, progress) or division or read(0, header.tensors),
                slot.state(header),
                meta,
                **numbers,
                may_commit=allowed,
                nonce=job.nonce if division is not None else nonce_in(meta, *position) if job.last else "",
                owner=job.owner,
            )
            done = replace(done, path=str(info.path), digest=info.digest, bytes=info.bytes)
            written(replace(done, seconds=time.monotonic() - began, pruning=True))
            if isinstance(meta, dict) and meta.get("compared") is False:
                text = "the checkpoint of step %d was saved without a comparison of the ranks, and its manifest says so"
                _log.warning(text, header.step)
            if job.stands_by or permit.adds:
                return replace(done, seconds=time.monotonic() - began)
            options: dict[str, Any] = {"every": job.keep_every, "best": job.keep_best, "meta": info.meta}
            prune(job.directory, job.keep, header.round, **options)
    except (CheckpointError, UsageError) as error:
        final = isinstance(error, NotCommittedError | TakenError | UsageError)
        done = replace(done, error=error.message, hint=error.hint, final=final)
    except MalformedError as error:
        done = replace(done, error=f"What is in memory is damaged: {error}.")
    return replace(done, seconds=time.monotonic() - began)


def _in_format(slot: Slot, header: Header, meta: Any, progress: Callable[[], None]) -> Files | None:
    """Return the tensor files if the state is to be saved in torch's format, which needs torch; else None."""
    if not isinstance(meta, dict) or meta.get("format") != DISTRIBUTED:
        return None
    from elastic_launch.snapshot.format import tensor_file

    tensors = tensor_file.mapped(slot.tensors)
    files = in_format_of(Decoder().decode(meta), parse_json(slot.state(header)), tensors)

    def advancing(parts: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for part in parts:
            for start in range(0, len(part), _PIECE):
                progress()
                yield part[start : start + _PIECE]

    return {name: advancing(parts) for name, parts in (files or {}).items()}


def _divided(job: CopyJob, read: Read, size: int, progress: Callable[[], None]) -> Division | None:
    """Return the division among several nodes; None if it cannot be divided: one tensor may be most of the snapshot."""
    if job.shares == 1:
        return None
    try:
        division = Division(read, size, job.shares, progress)
    except MalformedError as error:
        raise CheckpointError(f"What is in memory cannot be divided: {error}.") from error
    return division if len(division) > 1 else None


def main() -> None:
    """Carry out the job that the arguments name."""
    logging.basicConfig(format="[elastic-launch] %(message)s")
    # The agent must not read what storage drivers print.
    agent = os.dup(1)
    os.dup2(2, 1)
    saying = threading.Lock()
    said, gone = 0.0, False

    def say(message: Message) -> None:
        nonlocal gone
        try:
            with saying:
                write_whole(agent, pack(message))
        except BrokenPipeError:
            # The agent was killed, so nothing is committed any more. The current write must finish, and its result
            # be removed: if an exception closes a file, a driver may store half of it.
            gone = True

    def progress() -> None:
        nonlocal said
        if time.monotonic() >= said + SILENCE:
            said = time.monotonic()
            say(Copying())

    def may_commit() -> CommitAnswer:
        say(MayCommit(0))
        line = b"" if gone else sys.stdin.buffer.readline()
        answer = unpack(line) if line else None
        return answer if isinstance(answer, CommitAnswer) else CommitAnswer(0, allowed=False)

    job = codec.decode(CopyJob, codec.loads(sys.argv[1].encode()))
    progress()  # it has begun: from now on, silence is the storage's fault
    say(copy(job, int(sys.argv[2]), int(sys.argv[3]), may_commit, progress, say))
    sys.exit(1 if gone else 0)
