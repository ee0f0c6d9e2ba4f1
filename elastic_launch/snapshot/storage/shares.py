"""Checkpoints written by several nodes at the same time, each writing a share of the tensors. Needs no torch.

The k-th node writes the k-th share; the first node, the committer, also writes everything else. Usually each node holds
the whole replicated state:

*A checkpoint always has the committer's bytes, and never depends on another node.* The committer computes the checksum
of every share from its own memory. A share written by another node is used only if it is complete and has that
checksum; a share that is late or differs is written by the committer itself. A node that is killed, slow or wrong
therefore costs only time, and so does the removal of a waiting share.

Where each node has only some of the tensors (:class:`OwnShare`), a checkpoint needs the shares of all nodes. The
committer takes the checksums that the others report, and commits nothing if a share does not come.

*No two processes ever write to the same file.* All ranks draw a common nonce when they begin to save in a location. The
checkpoint's name derives from this nonce, the round and the step, so no other round and no other run has that name. The
committer and each node try once under this name. If that fails, the committer retries alone under another nonce. In
detail:

In a directory, a node writes its share into its own draft, which one rename turns into a ``.share-`` directory once it
is on the disk. The committer then renames the share's file into its own draft. A directory with a ``.share-`` name is
therefore complete, and the checkpoint is still committed by one rename of one directory that no other process writes
to. A share that is renamed too late stays until ``prune`` removes it.

Behind a URL, a node writes its share into the checkpoint's directory and then a small file with its checksum, unless
the manifest exists by then. A share that the committer writes in place of another node has a different name, because
that node may still be writing. If both exist in the end, the manifest names one of them, and the other is removed with
the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar

from elastic_launch.snapshot.errors import CheckpointWriteError, MalformedError
from elastic_launch.snapshot.format.files import MAX_HEADER, FileSum, safetensors_header, sum_of
from elastic_launch.snapshot.format.manifest import MAX_SHARES, file_sum, parse_json

_log = logging.getLogger(__name__)

MAX_SUM_BYTES = 1024

_THREADS = 4
"""Threads that compute checksums; a core does one to two GiB/s."""

Read = Callable[[int, int], Iterator[bytes]]


def nonce_of(drawn: int, round: int, step: int) -> str:
    """Return the nonce of a checkpoint that all nodes of a round write together.

    ``drawn`` is a random number, the same on all ranks, drawn anew whenever they begin to save in a location.
    """
    return hashlib.sha256(f"{drawn} {round} {step}".encode()).hexdigest()[:16]


def cuts(sizes: Sequence[int], count: int) -> list[int]:
    """Cut a sequence of sizes into at most ``count`` runs, minimizing the largest; return each start, then the end.

    No run is without bytes.
    """
    if sum(sizes) == 0:
        return [0, len(sizes)]
    low, high = max(max(sizes), -(-sum(sizes) // count)), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_fill(sizes, middle)) - 1 <= count:
            high = middle
        else:
            low = middle + 1
    return _fill(sizes, low)


def _fill(sizes: Sequence[int], capacity: int) -> list[int]:
    """Cut before each size that would exceed the capacity."""
    begins, filled = [0], 0
    for index, size in enumerate(sizes):
        if filled + size > capacity:
            begins.append(index)
            filled = 0
        filled += size
    return [*begins, len(sizes)]


_Run = tuple[bytes, int, int]
"""A share: its header, and the range of bytes in the undivided file that follow it."""


class Division:
    """Divides a tensor file into several, each with a run of its tensors; a tensor is never cut.

    Each node has the whole file.

    Args:
        read: yields the bytes of the undivided file from one offset to another.
        count: number of nodes; there may be fewer shares.
        waits: called about once a second while waiting for the shares of other nodes.
    """

    patience = 5.0
    """Seconds that the committer waits for other shares, in addition to the time that its own share took."""

    def __init__(self, read: Read, size: int, count: int, waits: Callable[[], None] = lambda: None) -> None:
        self.waits = waits
        self._read = read
        self._runs = _runs(read, size, min(count, MAX_SHARES))

    def __len__(self) -> int:
        return len(self._runs)

    def parts(self, index: int) -> Iterator[bytes]:
        """Yield the content of a share, a few MiB at a time."""
        header, begin, end = self._runs[index]
        yield header
        yield from self._read(begin, end)

    def sum(self, index: int) -> FileSum:
        """Return the size and checksum that a share must have."""
        return sum_of(self.parts(index))

    @contextmanager
    def sums(self) -> Iterator[Callable[[int], FileSum | None]]:
        """Compute size and checksum of all shares but the first in threads; yields a function that waits for one."""
        workers = max(1, min(_THREADS, len(self) - 1, os.cpu_count() or 1))
        pool = ThreadPoolExecutor(workers, thread_name_prefix="sum")
        try:
            found: list[Future[FileSum]] = [pool.submit(self.sum, index) for index in range(1, len(self))]
            yield lambda index: found[index - 1].result()
        finally:
            pool.shutdown(cancel_futures=True)

    def lost(self, index: int, why: str) -> None:
        """Note that the share of another node cannot be used: the first node writes it."""
        _log.warning("share %d of the checkpoint %s: the first node writes it", index + 1, why)


@dataclass(frozen=True, slots=True)
class OwnShare:
    """The tensors that this node writes of a checkpoint for which it needs the shares of all nodes."""

    index: int | None  # number of this node's share, from 0; None in a process that writes none
    count: int  # number of all shares
    nonce: str  # in the checkpoint's name, the same on all nodes
    tensors: Mapping[str, Any]  # by name, as in ``tree``; not changed any more
    rest: Any  # the rest of the state as JSON, see ``tree``; used only with the first share

    patience: ClassVar[float] = 60.0
    """Seconds as for :class:`Division`."""

    def __len__(self) -> int:
        return self.count

    def waits(self) -> None:
        """Do nothing while waiting for the shares of other nodes."""

    def parts(self, index: int) -> Iterator[bytes | memoryview]:
        """Yield the content of this node's share, a few MiB at a time."""
        from elastic_launch.snapshot.format import tensor_file  # needs torch, unlike the rest of this module

        assert index == self.index
        return tensor_file.parts(self.tensors)

    @contextmanager
    def sums(self) -> Iterator[Callable[[int], FileSum | None]]:
        """Yield a function that returns None: this node does not know what the others' shares must be."""
        yield lambda index: None

    def lost(self, index: int, why: str) -> None:
        """Raise a CheckpointWriteError: no other node has a share that cannot be used."""
        raise CheckpointWriteError(
            f"Share {index + 1} of {self.count} {why}, and only its node has it.",
            "See what that node says about it.",
        )


def pack_sum(file: FileSum) -> bytes:
    """Return the content of the small file that has a share's size and checksum."""
    return json.dumps(asdict(file)).encode() + b"\n"


def parse_sum(data: bytes) -> FileSum:
    """Return the argument that :func:`pack_sum` was given; raise a MalformedError for other data."""
    return file_sum("a share", parse_json(data))


def _runs(read: Read, size: int, count: int) -> list[_Run]:
    entries, data = _entries(read, size)
    ends = [data + entry["data_offsets"][1] for _, entry in entries]
    sizes = [end - begin for begin, end in pairwise([data, *ends])]
    if [data, *ends][-1] != size:
        raise MalformedError("its header does not describe all of it")
    begins = list(accumulate(sizes, initial=data))
    return [_run(entries[first:last], begins[first], begins[last]) for first, last in pairwise(cuts(sizes, count))]


def _run(entries: list[tuple[str, Any]], begin: int, end: int) -> _Run:
    header, offset = {}, 0
    for name, entry in entries:
        first, last = entry["data_offsets"]
        header[name] = {**entry, "data_offsets": [offset, offset + last - first]}
        offset += last - first
    try:
        return safetensors_header(header), begin, end
    except UnicodeEncodeError as error:
        raise MalformedError("the name of a tensor is not text") from error


def _entries(read: Read, size: int) -> tuple[list[tuple[str, Any]], int]:
    """Return names and descriptions of the tensors in the order of their bytes, and the offset of the first byte."""
    length = int.from_bytes(b"".join(read(0, min(8, size))), "little")
    if not 0 < length <= min(size - 8, MAX_HEADER):
        raise MalformedError("it has no header")
    header = parse_json(b"".join(read(8, 8 + length)))
    if not isinstance(header, dict) or not all(_is_tensor(entry) for entry in header.values()):
        raise MalformedError("its header describes no tensors")
    # Empty tensors have the offset of the next one; sorting is stable, so the order in the header decides.
    entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"][0])
    offset = 0
    for _, entry in entries:
        first, last = entry["data_offsets"]
        if not offset == first <= last:
            raise MalformedError("its tensors overlap or leave holes")
        offset = last
    return entries, 8 + length


def _is_tensor(entry: Any) -> bool:
    """Whether an entry of a header describes a tensor as this package's writer does."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return False
    shape, offsets = entry["shape"], entry["data_offsets"]
    return (
        isinstance(entry["dtype"], str)
        and all(isinstance(numbers, list) for numbers in (shape, offsets))
        and all(type(number) is int for number in (*shape, *offsets))
        and len(offsets) == 2
    )
