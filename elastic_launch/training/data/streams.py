"""Shards as one dataset: the number of a sample determines its shard and its place in the shard.

Iterable datasets hand out samples one after the other, so what comes next depends on what a process has read before.
Here nothing does: an epoch is a sequence of positions, a position determines a sample, and reading goes on from any
position at any world size. Open shards are only a cache.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, takewhile
from operator import index as as_int
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from elastic_launch.errors import UsageError
from elastic_launch.training.data.permutation import Permutation
from elastic_launch.training.randomness import derive, random_state

Shard = str | os.PathLike[str]

Open = Callable[[Any], Any]
"""``(shard) -> samples``: a sequence, or an iterable that yields them from the first one on."""

OPEN = 64
"""Number of shards that a process keeps open."""

_END = object()


class ShardedStream(Dataset[Any]):
    """A dataset in shards, such as tar files, with a number for each sample; give it to an ``ElasticLoader``.

    ::

        stream = el.ShardedStream(sorted(glob("data/*.tar")), open=read_tar, lengths="data/shards.json", decode=decode)
        loader = el.ElasticLoader(stream, el.GlobalBatch(256, micro=16), seed=0)

    With ``shuffle``, the loader's default, each epoch has its own random order of the shards, and the samples are
    shuffled within each ``buffer`` successive ones of that order. Both are functions of seed, epoch and position. With
    ``shuffle=False`` the samples come in the order of the list.

    Shards that can be read at any place cost no more than a map-style dataset; up to 64 are kept open per process. Of
    others a process skips what comes before its first sample, which is read but not decoded, and so does each process
    after a change of the world and at a resume. Each rank, and each of its loader processes, reads every shard of its
    lanes: with one lane, all shards. With as many lanes as a global batch has micro-batches, a shard is read by one
    rank, or two at the end of a lane, and by one process if a rank has as many as micro-batches.

    A shard with another length than given is found when it is opened or has been read to its end, so no sample is
    shifted unnoticed. A missing shard raises the error of ``open`` with its name. A shard that was replaced by another
    one with as many samples (and of the same size, if ``lengths`` is a file) is not noticed.

    Args:
        shards: paths, or other names that ``open`` understands; the same list, in the same order, on all nodes and at
            each restart: use ``sorted``. The directory that contains all of them may differ. Another list than in the
            checkpoint is an error, unless ``Checkpoint(allow=["list of shards"])`` begins a new training with it.
        open: ``(shard) -> samples``. If the result has ``__len__`` and ``__getitem__``, a sample is read by its
            place. Otherwise it is iterated from the beginning, and the samples before the requested one are skipped.
            If it has ``close()``, that is called when the shard is no longer needed.
            It must yield the same samples in the same order each time: all of them, not the share of a rank or a
            process. Draw random numbers in ``decode``.
        lengths: number of samples in each shard, in the order of the list; or the path of a file that
            :func:`count_shards` has written for the same shards.
        decode: ``(sample) -> sample``, called only for samples that are used, with random numbers that derive from
            their place in the training. It must not change its argument, because that may be kept and used again; the
            same holds for a ``collate_fn`` if there is no ``decode``.
        buffer: number of successive samples that are shuffled. Of shards that can only be iterated, each process that
            loads keeps about this many samples of each lane in memory, four times as many at most, as ``open`` yields
            them.
        lanes: number of parts, of equal length, into which each epoch is cut; a global batch takes an equal number of
            samples from each. A rank then reads only the shards in its own lanes. It must divide the global batch; have
            several shards for each lane.

    Raises:
        UsageError: if the arguments do not fit each other, or a shard of the list was not counted, or the reverse; when
            samples are read, if a shard has another length.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        *,
        open: Open,
        lengths: Sequence[int] | Shard | None = None,
        decode: Callable[[Any], Any] | None = None,
        buffer: int = 1000,
        lanes: int = 1,
    ) -> None:
        self._shards, self.names = _named(shards, "ShardedStream")
        for name, value in (("buffer", buffer), ("lanes", lanes)):
            if type(value) is not int or value < 1:
                raise UsageError(f"ShardedStream({name}={value!r}): it is a whole number, 1 or more.")
        if not callable(open) or not (decode is None or callable(decode)):
            raise UsageError("ShardedStream: open and decode are functions of one argument.")
        self.lengths, self._bytes = _lengths(lengths, self.names)
        self.buffer, self.lanes = buffer, lanes
        self._open, self._decode = open, decode
        self._ends = list(accumulate(self.lengths))
        self._readers: OrderedDict[int, _Reader] = OrderedDict()
        self._pid = os.getpid()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if self._pid != os.getpid():  # a forked process shares its parent's places in open files
            self._readers, self._pid = OrderedDict(), os.getpid()
        # In the order of the shards, so that as little as possible is skipped or opened twice.
        read = {index: self._read(*self._locate(index)) for index in sorted(set(indices))}
        self._close_oldest()
        return [read[index] if self._decode is None else self._decode(read[index]) for index in indices]

    def firsts(self, indices: Iterable[int]) -> list[int]:
        """Return the index of the first sample of each shard that has one of these samples."""
        return sorted({self._ends[shard] - self.lengths[shard] for shard, _ in map(self._locate, indices)})

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_readers": OrderedDict()}

    def _locate(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a stream of {len(self)}")
        shard = bisect_right(self._ends, index)
        return shard, index - self._ends[shard] + self.lengths[shard]

    def _read(self, shard: int, offset: int) -> Any:
        reader = self._readers.pop(shard, None)
        try:
            if reader is not None and not reader.reaches(offset):
                reader.close()
                reader = None
            reader = reader or self._opened(shard)
            sample = reader.read(offset)
        except Exception as error:  # the reader is dropped: what it would yield next is not known
            error.add_note(f"  It was raised when sample {offset} of shard {self.names[shard]!r} was read.")
            raise
        self._readers[shard] = reader
        return sample

    def _opened(self, shard: int) -> _Reader:
        for empty in self._empty_beside(shard):
            self._reader(empty).close()
        return self._reader(shard)

    def _reader(self, shard: int) -> _Reader:
        name, length = self.names[shard], self.lengths[shard]
        found, counted = _size(self._shards[shard]), self._bytes[shard]
        if None not in (found, counted) and found != counted:
            raise _wrong(name, f"has {found} bytes, and had {counted} when its samples were counted")
        return _Reader(self._open(self._shards[shard]), name, length, self.buffer)

    def _empty_beside(self, shard: int) -> Iterator[int]:
        """Yield the shards without samples that are checked with a shard: those after it, or before the first."""
        if self._ends[shard] == self.lengths[shard]:
            yield from range(shard)
        after = shard + 1
        while after < len(self.lengths) and not self.lengths[after]:
            yield after
            after += 1

    def _close_oldest(self) -> None:
        readers = self._readers
        while len(readers) > 1 and (
            sum(reader.is_open for reader in readers.values()) > OPEN
            or sum(reader.kept for reader in readers.values()) > 4 * self.buffer * self.lanes
        ):
            readers.popitem(last=False)[1].close()


def shards_hash(stream: ShardedStream) -> int:
    """Return a hash of the names and lengths of the shards, in their order."""
    return derive("shards", json.dumps([*zip(stream.names, stream.lengths, strict=True)])) >> 16


def described(stream: ShardedStream, index: int) -> str:
    """Return the place of a sample, for errors."""
    shard, offset = stream._locate(index)
    return f"{stream.names[shard]}[{offset}]"


class StreamOrder:
    """The sampler of a :class:`ShardedStream`; takes 16 bytes per shard, and nothing per sample.

    Args:
        shuffle: whether each epoch has its own order.
    """

    def __init__(self, stream: ShardedStream, size: int, shuffle: bool) -> None:
        if size % stream.lanes:
            raise UsageError(
                f"ShardedStream(lanes={stream.lanes}): a global batch of {size} samples cannot take the same number "
                "from each lane.",
                "Give a number of lanes that divides it.",
            )
        self._length, self._buffer, self._lanes = len(stream), stream.buffer, stream.lanes
        self._size, self._shuffle = size, shuffle
        self._lengths = torch.tensor(stream.lengths, dtype=torch.int64, device="cpu")
        self._starts = self._lengths.cumsum(0) - self._lengths
        self._held: tuple[int, int] | None = None
        self._order = self._ends = self._lengths

    def __len__(self) -> int:
        return self._length

    def indices(self, seed: int, epoch: int, positions: Tensor) -> Tensor:
        places = self._in_lanes(positions)
        if not self._shuffle:
            return places
        if self._held != (seed, epoch):
            count = len(self._lengths)
            self._order = Permutation(count, "shards", seed, epoch)[torch.arange(count, device="cpu")]
            self._ends = self._lengths[self._order].cumsum(0)
            self._held = (seed, epoch)
        places = self._in_buffers(places, seed, epoch)
        # The first shard that ends behind the place; one without samples ends where the one before it does.
        which = torch.searchsorted(self._ends, places, right=True)
        shards = self._order[which]
        return self._starts[shards] + places - self._ends[which] + self._lengths[shards]

    def _in_lanes(self, positions: Tensor) -> Tensor:
        """Return the place in the epoch's order of shards at each position.

        Each full global batch takes its share of each lane in turn; samples that do not fill a global batch come last.
        """
        full, share = self._length // self._size, self._size // self._lanes
        step, within = positions // self._size, positions % self._size
        lanes = (within // share * full + step) * share + within % share
        return torch.where(step < full, lanes, positions)

    def _in_buffers(self, places: Tensor, seed: int, epoch: int) -> Tensor:
        """Shuffle the places within each ``buffer`` successive ones."""
        buffers = places.div(self._buffer, rounding_mode="floor")
        by_buffer = buffers.argsort(stable=True)
        edges = buffers[by_buffer].diff().nonzero().flatten() + 1
        shuffled = torch.empty_like(places)
        for here in torch.tensor_split(by_buffer, edges):
            number = int(buffers[here[0]])
            first = number * self._buffer
            size = min(self._buffer, self._length - first)
            shuffled[here] = Permutation(size, "buffer", seed, epoch, number)[places[here] - first] + first
        return shuffled


class _Reader:
    """An open shard.

    One that can only be iterated keeps the last samples, since those of a buffer come in any order. It reads a whole
    number of buffers, or to the end of the shard. What a buffer needs of a shard is thus read once, and a shard that is
    no longer than the buffer is closed at once.
    """

    def __init__(self, samples: Any, name: str, length: int, buffer: int) -> None:
        self._seeks = _seekable(samples)
        self._source, self._samples = samples, samples if self._seeks else iter(samples)
        self._name, self._length, self._buffer = name, length, buffer
        self._at = 0
        # The places that a buffer needs of a shard may begin in one of the buffers that are read, and end in the next.
        self._kept: deque[Any] = deque(maxlen=2 * buffer)
        self.is_open = True
        if self._seeks and len(samples) != length:
            self.close()
            raise _wrong(name, f"has {len(samples)} samples, and lengths= says {length}")
        if not self._seeks and not length:
            self._end()

    @property
    def kept(self) -> int:
        return len(self._kept)

    def reaches(self, offset: int) -> bool:
        return self._seeks or offset >= self._at - len(self._kept)

    def read(self, offset: int) -> Any:
        if self._seeks:
            return self._samples[offset]
        if offset >= self._at:
            self._advance(min(self._length, (offset // self._buffer + 1) * self._buffer))
        return self._kept[offset - self._at]

    def _advance(self, stop: int) -> None:
        before = random_state() if not self._at else None
        while self._at < stop:
            sample = next(self._samples, _END)
            if sample is _END:
                raise _wrong(self._name, f"has {self._at} samples, and lengths= says {self._length}")
            self._kept.append(sample)
            self._at += 1
        if before is not None and before != random_state():
            raise UsageError(
                f"ShardedStream: open() draws random numbers when it reads {self._name!r}. They depend on what this "
                "process has read before, so they would differ in another world and after a restart.",
                "Draw them in decode=, which is called for each sample that is used.",
            )
        if stop == self._length:
            self._end()

    def _end(self) -> None:
        more = next(self._samples, _END) is not _END
        self.close()
        if more:
            raise _wrong(self._name, f"has more samples than the {self._length} that lengths= says")

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            for opened in {id(opened): opened for opened in (self._samples, self._source)}.values():
                _close(opened)


def count_shards(shards: Sequence[Shard], open: Open, path: Shard) -> list[int]:
    """Count the samples in each shard, and write the numbers to a file for ``ShardedStream(lengths=path)``.

    Shards that the file has already, with an unchanged size, are not counted again. Call it once, before the training:
    it reads all shards that cannot be asked for their length.

    Args:
        shards: as for :class:`ShardedStream`.
        open: as for :class:`ShardedStream`.
        path: a JSON file, which is replaced as a whole.

    Returns:
        The number of samples in each shard.
    """
    given, names = _named(shards, "count_shards")
    file = Path(path)
    known: dict[str, Any] = _index(file) if file.exists() else {}
    for shard, name in zip(given, names, strict=True):
        size = _size(shard)
        if name in known and known[name]["bytes"] == size:
            continue
        try:
            samples = open(shard)
            count = len(samples) if _seekable(samples) else sum(1 for _ in samples)
        except Exception as error:
            error.add_note(f"  It was raised when the samples of shard {name!r} were counted.")
            raise
        _close(samples)
        known[name] = {"samples": count, "bytes": size}
    new = file.with_name(f".{file.name}.{os.getpid()}")
    new.write_text(json.dumps({name: known[name] for name in names}, indent=1) + "\n")
    new.replace(file)
    return [int(known[name]["samples"]) for name in names]


def _named(shards: Sequence[Shard], where: str) -> tuple[list[Shard], list[str]]:
    """Return the shards, and their names below the directory that contains all of them."""
    if isinstance(shards, str | bytes | os.PathLike) or not isinstance(shards, Iterable):
        raise UsageError(f"{where}(shards={shards!r}) is not a list.", "Give a list: sorted(glob(...)), for example.")
    given = [*shards]
    if wrong := [shard for shard in given if not isinstance(shard, str | os.PathLike)]:
        raise UsageError(f"{where}: a shard is a {type(wrong[0]).__name__}.", "Give paths, or names as strings.")
    if not given:
        raise UsageError(f"{where}: the list of shards is empty.", "Is the pattern or the directory right?")
    parts = [os.fspath(shard).split("/") for shard in given]
    common = len([*takewhile(lambda beside: len({*beside}) == 1, zip(*(path[:-1] for path in parts), strict=False))])
    return given, ["/".join(path[common:]) for path in parts]


def _lengths(lengths: Sequence[int] | Shard | None, names: list[str]) -> tuple[list[int], list[int | None]]:
    """Return number of samples and, where it is known, size in bytes of each shard."""
    count = 'Count them once, el.count_shards(shards, open, "shards.json"), and give lengths="shards.json".'
    if lengths is None:
        raise UsageError("ShardedStream: how many samples each shard has is not known without lengths=.", count)
    sizes: list[int | None] = [None] * len(names)
    if isinstance(lengths, str | os.PathLike):
        file = Path(lengths)
        if not file.exists():
            raise UsageError(f"ShardedStream(lengths={str(file)!r}): there is no such file.", count)
        known, given = _index(file), {*names}
        if gone := [name for name in known if name not in given]:
            raise UsageError(
                f"ShardedStream: shard {gone[0]!r} was counted for {file}, and is not in the list ({len(gone)} of "
                f"{len(known)}).",
                f"Is it there? To leave it out, count again: el.count_shards(shards, open, {str(file)!r}).",
            )
        if new := [name for name in names if name not in known]:
            raise UsageError(
                f"ShardedStream: shard {new[0]!r} was not counted for {file} ({len(new)} of {len(names)}).",
                f"Count again: el.count_shards(shards, open, {str(file)!r}).",
            )
        found, sizes = [known[name]["samples"] for name in names], [known[name]["bytes"] for name in names]
    else:
        found = [*lengths]
    if len(found) != len(names):
        raise UsageError(f"ShardedStream: {len(found)} lengths were given for {len(names)} shards.", count)
    for name, length in zip(names, found, strict=True):
        if not hasattr(length, "__index__") or length < 0:
            raise UsageError(f"ShardedStream: the length of {name!r} is {length!r}, not a number of samples.", count)
    return [as_int(length) for length in found], sizes


def _index(file: Path) -> dict[str, Any]:
    try:
        known = json.loads(file.read_text())
        return {name: {"samples": as_int(entry["samples"]), "bytes": entry["bytes"]} for name, entry in known.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"{file} is not a file that el.count_shards() has written ({type(error).__name__}: {error}).",
            "Remove it, and count again.",
        ) from None


def _wrong(name: str, what: str) -> UsageError:
    return UsageError(
        f"ShardedStream: shard {name!r} {what}.",
        "Is it truncated, or was it replaced, or does open() yield only a share of it? Restore it, or correct lengths= "
        "and begin a new training: every later sample would have another number.",
    )


def _seekable(samples: Any) -> bool:
    if hasattr(samples, "__len__") and hasattr(samples, "__getitem__") and not isinstance(samples, IterableDataset):
        return True
    if not isinstance(samples, Iterable):
        raise UsageError(
            f"ShardedStream: open() returned a {type(samples).__name__}.",
            "Return the samples: an object with __len__ and __getitem__, or an iterator.",
        )
    return False


def _size(shard: Shard) -> int | None:
    """Return the size of a local file; None for anything else."""
    try:
        return os.stat(shard).st_size if os.path.isfile(shard) else None
    except OSError:
        return None


def _close(samples: Any) -> None:
    if callable(close := getattr(samples, "close", None)):
        close()
