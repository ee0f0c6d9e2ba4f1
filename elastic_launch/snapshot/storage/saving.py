"""Writes and prunes checkpoints in a directory or behind a URL."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from elastic_launch.contract import Best
from elastic_launch.errors import UsageError
from elastic_launch.snapshot.errors import CheckpointReadError, NotCommittedError, UnsupportedStateError, writing
from elastic_launch.snapshot.format.files import FileSum
from elastic_launch.snapshot.format.manifest import (
    DISTRIBUTED,
    MAX_STATE_BYTES,
    STATE,
    TENSORS,
    assemble,
    check_numbers,
    directory_name,
    encode_meta,
    new_nonce,
    share_file,
)
from elastic_launch.snapshot.format.plain import Decoder
from elastic_launch.snapshot.location import Url, place
from elastic_launch.snapshot.storage import owner as owners
from elastic_launch.snapshot.storage.directory import DirectoryDraft
from elastic_launch.snapshot.storage.lineage import epoch_of, leads_to, same_run
from elastic_launch.snapshot.storage.listing import CheckpointInfo, find, inspect, order_of, storage_at
from elastic_launch.snapshot.storage.shares import Division, OwnShare
from elastic_launch.snapshot.storage.url_storage import UrlDraft

_PAUSES = (0.05, 1.0)
"""Seconds between polls for the shares of other nodes: first and longest."""

Files = Mapping[str, Iterable[bytes | memoryview]]
"""The content of files by name, in the order in which they are written."""


def write(
    directory: str | os.PathLike[str],
    state: Any,
    *,
    step: int,
    round: int,
    meta: dict[str, Any] | None = None,
    owner: str = "",
    may_commit: Callable[[], bool] = lambda: True,
) -> CheckpointInfo:
    """Write a checkpoint. Once this returns, it survives the end of the process and a loss of power.

    The checkpoint appears atomically, when its directory is renamed to its final name. A process that dies before that
    leaves a hidden directory, which is never read and which ``prune`` removes; a write that fails removes it itself.

    Args:
        directory: directory or URL of the checkpoints; made if it does not exist.
        state: nested dicts, lists, tuples, tensors and plain values; see ``tree``. It must not change during the call.
        step: optimizer steps done when the state was taken, 0 or more.
        round: number of the round that saves it, 0 or more.
        meta: plain values that can be read without the state, up to 1 MiB as JSON.
        owner: mark of the run that must have taken the directory last, see ``owner``; empty: any run.
        may_commit: called once all files are on the disk; if it returns False, the checkpoint is not committed.

    Raises:
        NotCommittedError: if ``may_commit`` returned False; nothing is left behind.
        UnsupportedStateError: if the format cannot hold a value, naming its type and place; nothing was written.
        CheckpointWriteError: if the directory is read-only, full, or not a directory; TakenError if another run has
            taken it.
        UsageError: if ``step`` or ``round`` is invalid.
    """
    from elastic_launch.snapshot.format import tensor_file, tree  # need torch, unlike the code that follows

    tensors, rest = tree.encode(state)
    meta_json = encode_meta({} if meta is None else meta)
    files = in_format_of(meta or {}, rest, tensors) or tensor_file.parts(tensors)
    return write_parts(
        directory, files, state_json(rest), meta_json, step=step, round=round, may_commit=may_commit, owner=owner
    )


def in_format_of(meta: Mapping[str, Any], rest: Any, tensors: Mapping[str, Any]) -> Files | None:
    """Return the tensor files if a state's meta asks for torch's format, see ``distributed``; else None."""
    if meta.get("format") != DISTRIBUTED:
        return None
    from elastic_launch.snapshot.format import distributed  # needs torch

    return distributed.files(rest, tensors, meta.get("orders", {}))


def write_own(
    directory: str | os.PathLike[str],
    own: OwnShare,
    *,
    step: int,
    round: int,
    meta: dict[str, Any] | None = None,
    owner: str = "",
    may_commit: Callable[[], bool] = lambda: True,
) -> CheckpointInfo | None:
    """Write a checkpoint together with other nodes, each of which calls this with its own tensors.

    The first node commits it, when all shares are there; others return None.

    Raises:
        CheckpointWriteError: as for ``write``, and on the first node if the share of another one does not come.
        NotCommittedError, UnsupportedStateError: as for ``write``.
    """
    numbers: dict[str, Any] = {"step": step, "round": round, "nonce": own.nonce}
    if own.index:
        write_share(directory, own, own.index, **numbers)
        return None
    meta_json = encode_meta({} if meta is None else meta)
    return write_parts(directory, own, state_json(own.rest), meta_json, **numbers, may_commit=may_commit, owner=owner)


def write_parts(
    directory: str | os.PathLike[str],
    tensors: Files | Iterable[bytes | memoryview] | Division | OwnShare,
    state: bytes,
    meta: Any,
    *,
    step: int,
    round: int,
    may_commit: Callable[[], bool] = lambda: True,
    owner: str = "",
    nonce: str = "",
) -> CheckpointInfo:
    """Write a checkpoint as ``write`` does, given the content of its files.

    Args:
        tensors: content of the tensor file, in parts; of several files by name; or of several, most of which other
            nodes write.
        meta: as ``encode_meta`` returns it.
        may_commit: as for ``write``.
        owner: as for ``write``; checked after ``may_commit``.
        nonce: of its name; empty for a random one. If it is one file in a directory, and another process has written
            that checkpoint, its description is returned, and this one's is dropped. Behind a URL such a file gets a
            random one.
    """
    check_numbers(step, round)
    where, decoded = place(directory), Decoder().decode(meta)
    with writing(where, "write a checkpoint in"):
        storage = storage_at(where)
        alone = not isinstance(tensors, Division | OwnShare)
        with storage.draft(step, round, "" if alone and isinstance(where, Url) else nonce) as draft:
            if isinstance(tensors, Division | OwnShare):
                sums = _write_shares(draft, tensors)
            else:
                each = tensors if isinstance(tensors, Mapping) else {TENSORS: tensors}
                sums = {name: draft.write(name, parts) for name, parts in each.items()}
            state_sum = draft.write(STATE, [state])
            data, digest = assemble(step, round, sums, state_sum, meta)
            draft.finish(data)
            if not may_commit():
                raise NotCommittedError(step)
            owners.check(where, owner, epoch=epoch_of(decoded) or 0)
            if nonce and alone and isinstance(draft, DirectoryDraft) and (same := draft.final).exists():
                try:
                    return inspect(same)
                except CheckpointReadError:
                    draft.name = directory_name(step, round, new_nonce())
            path = draft.publish()
    size = sum(file.bytes for file in sums.values()) + state_sum.bytes
    return CheckpointInfo(path, step, round, digest, size, decoded)


def write_share(
    directory: str | os.PathLike[str], division: Division | OwnShare, index: int, *, step: int, round: int, nonce: str
) -> None:
    """Write a share, from the second on, of a checkpoint that another node commits under that nonce; see ``shares``."""
    check_numbers(step, round)
    where = place(directory)
    with writing(where, "write a share of a checkpoint in"):
        storage_at(where).write_share(step, round, nonce, (index, len(division)), division.parts(index))


def _write_shares(draft: DirectoryDraft | UrlDraft, division: Division | OwnShare) -> dict[str, FileSum]:
    """Fill a draft with shares: write the first, take those of other nodes, and write those that are missing."""
    count, began = len(division), time.monotonic()
    names = [share_file(index, count) for index in range(count)]
    sums: dict[int, FileSum] = {}

    def replace(index: int, why: str) -> None:
        division.lost(index, why)
        names[index] = draft.replacement(index, count)
        sums[index] = draft.write(names[index], division.parts(index))

    with division.sums() as expected:
        sums[0] = draft.write(names[0], division.parts(0))
        now = time.monotonic()
        # Others may take as long as this node did. Each share is looked for once more before it is written here.
        deadline, pause = now + division.patience + now - began, _PAUSES[0]
        waiting = list(range(1, count))
        while waiting:
            division.waits()
            for index, found in draft.look(waiting, count).items():
                waiting.remove(index)
                must = expected(index)
                if found is None or must not in (None, found) or not draft.take(index, count, found.bytes):
                    replace(index, "is not what it must be")
                else:
                    sums[index] = found
            if waiting and time.monotonic() >= deadline:
                replace(waiting.pop(0), "did not come")
            elif waiting:
                time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
                pause = min(2 * pause, _PAUSES[1])
    return {names[index]: sums[index] for index in range(count)}


def prune(
    directory: str | os.PathLike[str],
    keep: int,
    up_to_round: int,
    *,
    every: int = 0,
    best: Best | None = None,
    meta: dict[str, Any] | None = None,
) -> list[CheckpointInfo]:
    """Remove old checkpoints and remains of dead writers; return the checkpoints removed, newest first.

    Damaged and foreign directories are neither counted nor removed; drafts of running writers are not touched.

    Args:
        directory: a directory, which need not exist, or a URL.
        keep: number of newest checkpoints by (round, step) to keep, 1 or more.
        up_to_round: the caller's own round. Checkpoints of later rounds are kept and not counted: the caller may not be
            part of those rounds, and the checkpoint that it has just written is the only state of its branch.
        every: keep the first checkpoint at or after each multiple of this number of steps, too; 0: none.
        best: keep these, too, by the ``metrics`` in their meta.
        meta: the caller's, see ``lineage``: only states that it went through are counted, and what other branches have
            left is removed once it is older than those; None: all are counted. If it has ``agreed``, the last step in
            which ranks that verify steps have agreed, the newest state from before it is kept, too.

    Raises:
        CheckpointReadError: if the directory cannot be listed.
        CheckpointWriteError: if something cannot be removed.
        UsageError: if ``keep`` is less than 1.
    """
    check_keep(keep)
    where = place(directory)
    found = find(where)
    old = left_over(found, keep, up_to_round, every, best, meta)
    # The oldest first, so that a process that dies in between leaves the newest ones.
    paths = [info.path for info in reversed(old)]
    newest = min((found[0].round, found[0].step), (up_to_round + 1, 0)) if found else (0, 0)
    with writing(where, "remove old checkpoints in"):
        storage = storage_at(where)
        for path in paths:
            storage.remove(path.name)
        storage.remove_remains(newest)
    return old


def withdraw(directory: str | os.PathLike[str], after: int, meta: dict[str, Any]) -> list[CheckpointInfo]:
    """Remove a run's checkpoints of steps after ``after``, and return them, newest first: they may be wrong.

    Args:
        directory: a directory, which need not exist, or a URL.
        meta: the run's, see ``lineage``.

    Raises:
        CheckpointReadError: if the directory cannot be listed.
        CheckpointWriteError: if something cannot be removed.
    """
    where = place(directory)
    later = [info for info in find(where) if info.step > after and same_run(info.meta, meta)]
    with writing(where, "remove checkpoints in"):
        for info in later:
            storage_at(where).remove(info.path.name)
    return later


def left_over(
    found: list[CheckpointInfo],
    keep: int,
    up_to_round: int,
    every: int,
    best: Best | None,
    meta: dict[str, Any] | None = None,
) -> list[CheckpointInfo]:
    """Return the checkpoints, of those found, that ``prune`` removes; both newest first."""
    mine = [info for info in found if info.round <= up_to_round]
    if meta is not None:
        mine = [info for info in found if order_of(info) <= (epoch_of(meta) or 0, up_to_round, math.inf)]
    spared = {info.path for info in [*_milestones(mine, every), *_best_of(mine, best)]}
    line = [info for info in mine if meta is None or leads_to(info.round, info.step, meta, up_to_round)]
    if isinstance(agreed := (meta or {}).get("agreed"), int):  # a verified step finds what its state has that is wrong
        spared |= {info.path for info in [x for x in line if x.step < agreed][:1]}
    oldest = mine.index(line[keep - 1]) if len(line) >= keep else len(mine)
    return [info for info in mine[oldest + 1 :] if info.path not in spared]


def _milestones(infos: list[CheckpointInfo], every: int) -> list[CheckpointInfo]:
    found: dict[int, CheckpointInfo] = {}
    for info in sorted(infos, key=lambda info: (info.step, -info.round)):
        if every and info.step >= every:
            found.setdefault(info.step // every, info)
    return list(found.values())


def _best_of(infos: list[CheckpointInfo], best: Best | None) -> list[CheckpointInfo]:
    """Return the best of the infos, which are the newest first; of equal ones, the newer ones."""
    if best is None:
        return []
    found: list[tuple[float, CheckpointInfo]] = []
    for info in infos:
        metrics = info.meta.get("metrics")
        value = metrics.get(best.metric) if isinstance(metrics, dict) else None
        if isinstance(value, float) and not math.isnan(value):
            found.append((value if best.mode == "min" else -value, info))
    return [info for _, info in sorted(found, key=lambda pair: pair[0])][: best.count]


def check_keep(keep: int) -> None:
    """Check that at least one checkpoint is kept."""
    if keep < 1:
        raise UsageError(f"keep={keep}: it must be 1 or more.")


def state_json(rest: Any) -> bytes:
    """Return the content of a state's file; refuse a state that is too large."""
    text = json.dumps(rest, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > MAX_STATE_BYTES:
        raise UnsupportedStateError(
            f"A checkpoint cannot hold {len(text)} bytes of JSON; the limit is {MAX_STATE_BYTES}.",
            "Put long lists of numbers into tensors.",
        )
    return text
