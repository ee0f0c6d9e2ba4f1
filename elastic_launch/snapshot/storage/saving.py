"""Writes and prunes checkpoints in a directory or behind a URL."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from elastic_launch.contract import Best
from elastic_launch.errors import UsageError
from elastic_launch.snapshot.errors import (
    CheckpointReadError,
    MalformedError,
    NotCommittedError,
    UnsupportedStateError,
    writing,
)
from elastic_launch.snapshot.format.files import FileSum, create, open_regular, read_small, sync_directory, write_all
from elastic_launch.snapshot.format.manifest import (
    MANIFEST,
    MAX_STATE_BYTES,
    REMOVING,
    STATE,
    TENSORS,
    assemble,
    check_numbers,
    directory_name,
    encode_meta,
    new_nonce,
    share_directory,
    share_file,
)
from elastic_launch.snapshot.format.plain import Decoder
from elastic_launch.snapshot.location import Url, place
from elastic_launch.snapshot.storage import owner as owners
from elastic_launch.snapshot.storage import urls as remote
from elastic_launch.snapshot.storage.draft import Draft, bury, draft, remove_abandoned, remove_shares
from elastic_launch.snapshot.storage.lineage import epoch_of, leads_to
from elastic_launch.snapshot.storage.listing import CheckpointInfo, find, inspect, order_of
from elastic_launch.snapshot.storage.shares import (
    MAX_SUM_BYTES,
    Division,
    OwnShare,
    OwnTensors,
    Split,
    gather,
    pack_sum,
    parse_sum,
)

_SUM = "sum.json"
"""Name of the file with the size and checksum of a share that waits to be committed."""


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
    from elastic_launch.snapshot.format import tensor_file as tensorfile
    from elastic_launch.snapshot.format import tree  # needs torch, unlike the code that follows

    tensors, rest = tree.encode(state)
    meta_json = encode_meta({} if meta is None else meta)
    parts = tensorfile.parts(tensors)
    state_data = state_json(rest)
    return write_parts(
        directory, parts, state_data, meta_json, step=step, round=round, may_commit=may_commit, owner=owner
    )


def write_own(
    directory: str | os.PathLike[str],
    own: OwnTensors,
    *,
    step: int,
    round: int,
    meta: dict[str, Any] | None = None,
    owner: str = "",
    may_commit: Callable[[], bool] = lambda: True,
) -> CheckpointInfo | None:
    """Write a checkpoint together with other nodes, each of which calls this with its own tensors.

    The first node commits it, when all shares are there.

    Returns:
        None on nodes other than the first.

    Raises:
        CheckpointWriteError: as for ``write``, and on the first node if the share of another one does not come.
        NotCommittedError, UnsupportedStateError: as for ``write``.
    """
    from elastic_launch.snapshot.format import tensor_file as tensorfile  # needs torch

    share = OwnShare(own.index, own.count, partial(tensorfile.parts, own.tensors))
    if own.index:
        write_share(directory, share, own.index, step=step, round=round, nonce=own.nonce)
        return None
    tensors, meta_json = Split(share, own.nonce), encode_meta({} if meta is None else meta)
    return write_parts(
        directory, tensors, state_json(own.rest), meta_json, step=step, round=round, may_commit=may_commit, owner=owner
    )


def write_parts(
    directory: str | os.PathLike[str],
    tensors: Iterable[bytes | memoryview] | Split,
    state: bytes,
    meta: Any,
    *,
    step: int,
    round: int,
    may_commit: Callable[[], bool] = lambda: True,
    owner: str = "",
    take: bool = False,
    nonce: str = "",
) -> CheckpointInfo:
    """Write a checkpoint as ``write`` does, given the content of its files.

    Args:
        tensors: content of the tensor file, in parts; or of several files, most of which other nodes write.
        meta: as ``encode_meta`` returns it.
        may_commit: as for ``write``.
        owner: as for ``write``; checked after ``may_commit``.
        take: as for ``owner.check``.
        nonce: of its name in a directory, if it is not split; empty for a random one. If another process has written
            that checkpoint, its description is returned, and this one's is dropped.
    """
    check_numbers(step, round)
    where = place(directory)
    decoded = Decoder().decode(meta)

    def allowed() -> bool:
        if not may_commit():
            return False
        owners.check(where, owner, take=take, epoch=epoch_of(decoded))
        return True

    if isinstance(where, Url):
        path, digest, size = remote.write(where, tensors, state, meta, step=step, round=round, may_commit=allowed)
        return CheckpointInfo(path, step, round, digest, size, decoded)
    with writing(where, "write a checkpoint in"):
        _make_directory(where)
        with draft(where) as new:
            if isinstance(tensors, Split):
                name = directory_name(step, round, tensors.nonce)
                state_sum = _write_file(new.path / STATE, state)
                tensor_sums = _write_split(where, name, new, tensors.division)
            else:
                name = directory_name(step, round, nonce or new.nonce)
                tensor_sums = {TENSORS: write_all(new.tensors, tensors)}
                state_sum = _write_file(new.path / STATE, state)
            data, digest = assemble(step, round, tensor_sums, state_sum, meta)
            _write_file(new.path / MANIFEST, data)
            # The rename must not reach the disk before the file names in the directory.
            sync_directory(new.path)
            if not allowed():
                raise NotCommittedError(step)
            final = where / name
            if nonce and final.exists():
                try:
                    found = inspect(final)
                    bury(new.path)
                    return found
                except CheckpointReadError:
                    final = where / directory_name(step, round, new.nonce)
            os.rename(new.path, final)
            sync_directory(where)
    size = sum(file.bytes for file in tensor_sums.values()) + state_sum.bytes
    return CheckpointInfo(final, step, round, digest, size, decoded)


def write_share(
    directory: str | os.PathLike[str], division: Division | OwnShare, index: int, *, step: int, round: int, nonce: str
) -> None:
    """Write a share of a checkpoint that another node commits; see ``shares``.

    Args:
        index: index of the share, from 1, as the first share is the committer's.
        nonce: nonce in the checkpoint's name.
    """
    check_numbers(step, round)
    where = place(directory)
    if isinstance(where, Url):
        remote.write_share(where, division, index, step=step, round=round, nonce=nonce)
        return
    name = directory_name(step, round, nonce)
    with writing(where, "write a share of a checkpoint in"):
        _make_directory(where)
        with draft(where) as new:
            _write_file(new.path / _SUM, pack_sum(write_all(new.tensors, division.parts(index))))
            sync_directory(new.path)
            if (where / name).exists():
                bury(new.path)  # the committer has not waited
            else:
                os.rename(new.path, where / share_directory(name, index, len(division)))


def _write_split(where: Path, name: str, new: Draft, division: Division | OwnShare) -> dict[str, FileSum]:
    """Fill a draft with shares: write the first, take those of other nodes, and write those that are missing."""
    count, began = len(division), time.monotonic()
    files = [new.path / share_file(index, count) for index in range(count)]
    with division.sums() as expected:
        sums = {0: write_all(new.tensors, division.parts(0))}
        os.rename(new.path / TENSORS, files[0])

        def place_of(index: int) -> Path:
            return where / share_directory(name, index, count)

        def look(indices: Collection[int]) -> dict[int, FileSum | None]:
            # A network file system's client may cache for long that a name was absent, unless it has changed the
            # directory itself in the meantime.
            mark = where / f"{REMOVING}{new_nonce()}"  # prune removes it if this process dies here
            with suppress(OSError):
                mark.mkdir()
                mark.rmdir()
            return {x: _said(place_of(x)) for x in indices if place_of(x).exists()}

        def take(index: int, found: FileSum) -> bool:
            sums[index] = found
            return _take(place_of(index), files[index], found.bytes)

        def write(index: int) -> None:
            descriptor = create(files[index])
            try:
                sums[index] = write_all(descriptor, division.parts(index))
            finally:
                os.close(descriptor)

        gather(division, expected, look, take, write, division.patience + time.monotonic() - began)
    return {files[index].name: sums[index] for index in range(count)}


def _take(share: Path, file: Path, size: int) -> bool:
    """Move a share into a draft, if it exists with its size."""
    try:
        os.rename(share / TENSORS, file)
    except OSError:
        return False  # it was removed, or belongs to another user
    try:
        with open_regular(file) as descriptor:
            whole = os.fstat(descriptor).st_size == size
    except MalformedError:
        whole = False
    if not whole:
        os.unlink(file)
    bury(share)
    return whole


def _said(share: Path) -> FileSum | None:
    try:
        return parse_sum(read_small(share / _SUM, MAX_SUM_BYTES))
    except (OSError, MalformedError):
        return None


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
            left is removed once it is older than those; None: all are counted.

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
    if isinstance(where, Url):
        remote.remove(path for path in paths if isinstance(path, Url))
        remote.remove_abandoned(where, newest)
        return old
    with writing(where, "remove old checkpoints in"):
        for path in paths:
            bury(Path(path))
        if where.is_dir():
            remove_abandoned(where)
            remove_shares(where, newest)
    return old


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
        raise UsageError(f"keep={keep}: at least 1 checkpoint is kept.")


def state_json(rest: Any) -> bytes:
    """Return the content of a state's file; refuse a state that is too large."""
    text = json.dumps(rest, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > MAX_STATE_BYTES:
        raise UnsupportedStateError(
            f"A checkpoint cannot hold {len(text)} bytes of JSON; the limit is {MAX_STATE_BYTES}.",
            "Put long lists of numbers into tensors.",
        )
    return text


def _make_directory(directory: Path) -> None:
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    if missing:
        os.makedirs(directory, exist_ok=True)
    for path in missing:
        sync_directory(path.parent)


def _write_file(path: Path, data: bytes) -> FileSum:
    descriptor = create(path)
    try:
        return write_all(descriptor, [data])
    finally:
        os.close(descriptor)
