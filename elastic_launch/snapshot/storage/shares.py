"""A checkpoint that several nodes write at the same time, each a share of its tensors. Needs no torch.

Each node holds all of a replicated state. The k-th writes the k-th share; the first one, the committer, all the rest.

*Whoever wrote it, a checkpoint has the committer's bytes, and it never depends on another node.* The committer reckons
the checksum of every share from its own memory. What another node has written is taken only if it is whole and has that
checksum; what does not come in time, or differs, the committer writes itself. So a node that is killed, slow or wrong
costs time and nothing else, and whoever removes a share that waits costs no more.

*No two processes ever write to the same file.* All ranks draw a nonce when they begin to save in a place, and the
checkpoint's name derives from it, the round and the step: no other round and no other run has that name. Under it the
committer and each node try once. What fails is done again by the committer alone, under another nonce. In detail:

In a directory, a node writes its share into a draft of its own, which becomes a ``.share-`` directory by one rename
once it is on the disk. The committer renames the file into its own draft. So what has such a name is whole, and the
checkpoint is still one rename of one directory that nobody else writes to. A share that is renamed too late waits for
``prune``.

Behind a URL, a node writes its share into the checkpoint's directory, and after that a small file with its checksum,
unless the manifest is there by then. What the committer writes in another node's place has another name, for that one
may still be writing. If both are there at last, the manifest names one, and the other goes with the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from elastic_launch.snapshot.errors import MalformedError
from elastic_launch.snapshot.format.files import MAX_HEADER, FileSum
from elastic_launch.snapshot.format.manifest import MAX_SHARES, parse_json

__all__ = ["MAX_SUM_BYTES", "Division", "Split", "cuts", "gather", "nonce_of", "pack_sum", "parse_sum"]

_log = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds for which the committer waits for other shares beside the time that its own has taken."""

MAX_SUM_BYTES = 1024

_PAUSES = (0.05, 1.0)  # Seconds between looks, at first and at last.
_THREADS = 4  # That reckon checksums; a core does one to two GiB a second.
_ALIGNMENT = 8  # Of a safetensors header.

Read = Callable[[int, int], Iterator[bytes]]


def nonce_of(drawn: int, round: int, step: int) -> str:
    """Return the nonce of a checkpoint that all nodes of a round write together.

    Args:
        drawn: random, the same on all ranks, drawn anew by all that begin to save.
    """
    return hashlib.sha256(f"{drawn} {round} {step}".encode()).hexdigest()[:16]


def cuts(sizes: Sequence[int], count: int) -> list[int]:
    """Cut a row of sizes into runs of which the largest is as small as can be; return where each begins, and the end.

    Args:
        count: of runs at most; none is empty of bytes.
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
    """Cut before whatever would exceed the capacity."""
    begins, filled = [0], 0
    for index, size in enumerate(sizes):
        if filled + size > capacity:
            begins.append(index)
            filled = 0
        filled += size
    return [*begins, len(sizes)]


@dataclass(frozen=True, slots=True)
class _Run:
    """A share: its header, and the bytes that follow in the undivided file."""

    header: bytes
    begin: int
    end: int


class Division:
    """The content of a tensor file as that of several, each with a run of its tensors; a tensor is never cut.

    Args:
        read: yields the bytes of the undivided file from one offset to another.
        size: of that file, in bytes.
        count: of nodes; there may be fewer shares.
        waits: called about once a second while the shares of other nodes are waited for.

    Raises:
        MalformedError: if it is no tensor file.
    """

    def __init__(self, read: Read, size: int, count: int, waits: Callable[[], None] = lambda: None) -> None:
        self.waits = waits
        self._read = read
        self._runs = _runs(read, size, min(count, MAX_SHARES))

    def __len__(self) -> int:
        return len(self._runs)

    def parts(self, index: int) -> Iterator[bytes]:
        """Yield the content of a share, a few MiB at a time."""
        run = self._runs[index]
        yield run.header
        yield from self._read(run.begin, run.end)

    def sum(self, index: int) -> FileSum:
        """Return what a share must be."""
        digest, size = hashlib.sha256(), 0
        for part in self.parts(index):
            digest.update(part)
            size += len(part)
        return FileSum(size, digest.hexdigest())

    @contextmanager
    def sums(self) -> Iterator[Callable[[int], FileSum]]:
        """Reckon what all shares but the first must be, in threads; yields a function that waits for one of them."""
        workers = max(1, min(_THREADS, len(self) - 1, os.cpu_count() or 1))
        pool = ThreadPoolExecutor(workers, thread_name_prefix="sum")
        try:
            found: list[Future[FileSum]] = [pool.submit(self.sum, index) for index in range(1, len(self))]
            yield lambda index: found[index - 1].result()
        finally:
            pool.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Split:
    """Tensors that are written by several nodes.

    Attributes:
        division: into two shares or more.
        nonce: of the checkpoint's name; see :func:`nonce_of`.
    """

    division: Division
    nonce: str


def gather(
    division: Division,
    expected: Callable[[int], FileSum],
    look: Callable[[Collection[int]], dict[int, FileSum | None]],
    take: Callable[[int, FileSum], bool],
    write: Callable[[int], None],
    seconds: float,
) -> None:
    """Wait for all shares but the first, and write those that do not come.

    Args:
        expected: what a share must be.
        look: of these shares returns those that are there, with what their nodes say that they are; None for nonsense.
        take: takes one into the checkpoint; False if that cannot be done.
        write: writes a share here.
        seconds: to wait at most before the first is written; each is looked for once more before its turn.
    """
    deadline, pause = time.monotonic() + seconds, _PAUSES[0]
    waiting = list(range(1, len(division)))
    while waiting:
        division.waits()
        for index, found in look(waiting).items():
            waiting.remove(index)
            if found is None or found != expected(index) or not take(index, found):
                _log.warning(
                    "share %d of the checkpoint is not what it is on the first node, which writes it", index + 1
                )
                write(index)
        if waiting and time.monotonic() >= deadline:
            index = waiting.pop(0)
            _log.warning("share %d of the checkpoint did not come: the first node writes it", index + 1)
            write(index)
        elif waiting:
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(2 * pause, _PAUSES[1])


def pack_sum(file: FileSum) -> bytes:
    """Return the content of the small file that says what a share is."""
    return json.dumps({"bytes": file.bytes, "sha256": file.sha256}).encode() + b"\n"


def parse_sum(data: bytes) -> FileSum | None:
    """Return what :func:`pack_sum` was given; None if it is something else."""
    try:
        value = parse_json(data)
    except MalformedError:
        return None
    if not isinstance(value, dict) or type(value.get("bytes")) is not int or not isinstance(value.get("sha256"), str):
        return None
    return FileSum(value["bytes"], value["sha256"])


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
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise MalformedError("the name of a tensor is not text") from error
    text += b" " * (-len(text) % _ALIGNMENT)
    return _Run(len(text).to_bytes(8, "little") + text, begin, end)


def _entries(read: Read, size: int) -> tuple[list[tuple[str, Any]], int]:
    """Return names and descriptions of the tensors in the order of their bytes, and where these begin."""
    length = int.from_bytes(b"".join(read(0, min(8, size))), "little")
    if not 0 < length <= min(size - 8, MAX_HEADER):
        raise MalformedError("it has no header")
    header = parse_json(b"".join(read(8, 8 + length)))
    if not isinstance(header, dict) or not all(_is_tensor(entry) for entry in header.values()):
        raise MalformedError("its header describes no tensors")
    # Tensors without bytes lie where the next one does: the order in the header tells them apart.
    entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"][0])
    offset = 0
    for _, entry in entries:
        first, last = entry["data_offsets"]
        if not offset == first <= last:
            raise MalformedError("its tensors overlap or leave holes")
        offset = last
    return entries, 8 + length


def _is_tensor(entry: Any) -> bool:
    """Whether part of a header describes a tensor as our writer does."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return False
    shape, offsets = entry["shape"], entry["data_offsets"]
    return (
        isinstance(entry["dtype"], str)
        and all(isinstance(numbers, list) for numbers in (shape, offsets))
        and all(type(number) is int for number in (*shape, *offsets))
        and len(offsets) == 2
    )
