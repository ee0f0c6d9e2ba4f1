"""Checkpoints in a directory: written and pruned."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from elastic_launch.errors import UsageError
from elastic_launch.snapshot import tensorfile, tree
from elastic_launch.snapshot.draft import bury, draft, remove_abandoned
from elastic_launch.snapshot.errors import UnsupportedStateError, writing
from elastic_launch.snapshot.files import FileSum, create, sync_directory, write_all
from elastic_launch.snapshot.manifest import (
    MANIFEST,
    MAX_STATE_BYTES,
    STATE,
    Manifest,
    check_numbers,
    directory_name,
)
from elastic_launch.snapshot.reading import CheckpointInfo, find

__all__ = ["check_keep", "prune", "write"]


def write(
    directory: str | os.PathLike[str],
    state: Any,
    *,
    step: int,
    round: int,
    meta: dict[str, Any] | None = None,
) -> CheckpointInfo:
    """Write a checkpoint; once this returns it survives the end of the process and a loss of power.

    It appears in one step, the renaming of its directory to its final name. A process that dies before leaves a hidden
    directory that nobody reads and ``prune`` removes; a write that fails removes it itself.

    Args:
        directory: where checkpoints are; made if it is not there.
        state: nested dicts, lists, tuples, tensors and plain values; see ``tree``. It must not change meanwhile.
        step: optimizer steps that the state has behind it, 0 or more.
        round: number of the round that saves it, 0 or more.
        meta: plain values that a reader wants to know before it reads the state, up to 1 MiB as JSON.

    Raises:
        UnsupportedStateError: with type and place of what the format does not hold; nothing was written.
        CheckpointWriteError: if the directory is read-only, full, or none.
        UsageError: if step or round is no such number.
    """
    check_numbers(step, round)
    tensors, rest = tree.encode(state)
    text = _state_json(rest)
    directory = Path(directory)
    with writing(directory, "write a checkpoint in"):
        _make_directory(directory)
        with draft(directory) as new:
            tensor_sum = write_all(new.tensors, tensorfile.parts(tensors))
            state_sum = _write_file(new.path / STATE, text)
            manifest = Manifest(step, round, tensor_sum, state_sum, {} if meta is None else meta)
            data, digest = manifest.dumps()
            _write_file(new.path / MANIFEST, data)
            # The rename must not reach the disk before the names that it makes visible.
            sync_directory(new.path)
            path = directory / directory_name(step, round, new.nonce)
            os.rename(new.path, path)
            sync_directory(directory)
    return CheckpointInfo(path, step, round, digest, tensor_sum.bytes + state_sum.bytes, manifest.meta)


def prune(directory: str | os.PathLike[str], keep: int, up_to_round: int) -> list[CheckpointInfo]:
    """Remove old checkpoints, and what writers that died have left; return the checkpoints removed, newest first.

    Damaged and foreign directories are neither counted nor removed; drafts of writers that live are not touched.

    Args:
        directory: need not be there.
        keep: so many of the newest by (round, step), of whatever round, stay; 1 or more.
        up_to_round: checkpoints of later rounds stay: the caller may have been left out of these.

    Raises:
        CheckpointReadError: if the directory cannot be listed.
        CheckpointWriteError: if something cannot be removed.
        UsageError: if ``keep`` is less than 1.
    """
    check_keep(keep)
    directory = Path(directory)
    old = [info for info in find(directory)[keep:] if info.round <= up_to_round]
    with writing(directory, "remove old checkpoints in"):
        # The oldest first: whoever dies in between leaves what keep says.
        for info in reversed(old):
            bury(info.path)
        if directory.is_dir():
            remove_abandoned(directory)
    return old


def check_keep(keep: int) -> None:
    """Refuse to keep nothing.

    Raises:
        UsageError: if ``keep`` is less than 1.
    """
    if keep < 1:
        raise UsageError(f"keep={keep}: at least 1 checkpoint is kept.")


def _state_json(rest: Any) -> bytes:
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
