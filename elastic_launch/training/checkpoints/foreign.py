"""A checkpoint of torch.distributed.checkpoint from another program, in the form of this library's states."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from hashlib import sha256
from itertools import chain
from typing import Any, BinaryIO

import torch
from torch import nn

from elastic_launch.errors import UsageError
from elastic_launch.snapshot import CheckpointInfo, LoadedCheckpoint
from elastic_launch.snapshot.format import distributed
from elastic_launch.snapshot.format.distributed import Blob, StoredTensor
from elastic_launch.snapshot.format.files import read_at
from elastic_launch.snapshot.format.manifest import MANIFEST, MAX_MANIFEST_BYTES, METADATA
from elastic_launch.snapshot.location import Place
from elastic_launch.snapshot.stall import advanced
from elastic_launch.snapshot.storage.directory import Directory
from elastic_launch.snapshot.storage.listing import faults
from elastic_launch.snapshot.storage.reading import Taking
from elastic_launch.snapshot.storage.url_storage import UrlStorage
from elastic_launch.training.checkpoints.sharded import ungathered_state
from elastic_launch.training.checkpoints.state import TrainingState

_AVERAGE = re.compile("ema|avg|average|swa")
"""What names of averages of a model have."""

_SHOWN = 4
"""Names in a message."""


def read_foreign(
    where: Place, state: TrainingState, without: Collection[str], taking: Taking
) -> LoadedCheckpoint | None:
    """Return the weights and the optimizer's state in a checkpoint, for the parts of a state that are to load them.

    It has step 0, and its meta has no ``identity``: neither is known. Tensors are read one after the other, and put
    together if they were sharded.

    Args:
        where: the checkpoint's own directory or URL.
        without: names of the parts that are not wanted.
        taking: as for ``snapshot.load``.

    Returns:
        None if there is no such checkpoint, or it is one of this library, which has a manifest.

    Raises:
        UsageError: if it has no weights under the model's names, or an optimizer's state without names.
        CheckpointReadError: if it cannot be read; DamagedCheckpointError if it is not what it says.
    """
    with faults(where) as storage:
        about = _content(storage, METADATA, distributed.MAX_METADATA_BYTES)
        if about is None or _content(storage, MANIFEST, MAX_MANIFEST_BYTES) is not None:
            return None
        meta = {"orders": state.orders()}
        with _Files(storage) as files:
            parts = _Parts(where, *distributed.parse(about), files.read)
            own = set(state.names)  # others are of a group, such as that of several optimizers
            places = {name: (name,) if name in own else tuple(name.split("/", 1)) for name, _ in state.members()}
            wanted = {name: part for name, part in state.members() if places[name][0] not in without}
            found = dict(parts.all_of(wanted, meta["orders"]))
            take = taking(meta)
            loaded: dict[str, Any] = {}
            for name, part in found.items():
                root, *member = places[name]
                read = _read(part, places[name], files.read, take)
                loaded[root] = {**loaded.get(root, {}), member[0]: read} if member else read
    size = sum(blob.length for blob in parts.used)
    return LoadedCheckpoint(CheckpointInfo(where, 0, 0, sha256(about).hexdigest(), size, meta), loaded)


def _content(storage: Directory | UrlStorage, name: str, limit: int) -> bytes | None:
    try:
        return storage.read(name, limit)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _read(value: Any, path: tuple[str | int, ...], read: distributed.Read, take: Any) -> Any:
    """Return a part, with the tensors that it names, or what is kept of them."""
    if isinstance(value, dict):
        return {key: _read(item, (*path, key), read, take) for key, item in value.items()}
    if isinstance(value, Blob):
        return distributed.loaded(value, read)
    if not isinstance(value, StoredTensor):
        return value
    advanced()
    tensor = value.read(read)
    return tensor if take is None else take(path, tensor)


class _Parts:
    """Finds what belongs to a part among the names of a checkpoint."""

    def __init__(
        self, where: Place, tensors: Mapping[str, StoredTensor], values: Mapping[str, Blob], read: distributed.Read
    ) -> None:
        self._where, self._tensors, self._load = where, tensors, read
        self._all: dict[str, StoredTensor | Blob] = {**values, **tensors}
        self.used: set[Blob] = set()
        self._taken: set[str] = set()  # prefixes of the models' weights

    def all_of(
        self, parts: Mapping[str, Any], orders: Mapping[str, list[list[str]]]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        models = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
        trained_first = sorted(models, key=lambda name: name.partition(".")[0] != "model")
        found = {
            name: self._weights(name, list(models[name].state_dict()), {*models} - {name}) for name in trained_first
        }
        if not any(found.values()):
            has = ", ".join(map(repr, list(self._tensors)[:_SHOWN])) or "no tensors"
            raise UsageError(
                f"The checkpoint {self._where} has no weights under the names of {', '.join(models) or 'a model'}: it "
                f"has {has}.",
                "Save model.state_dict() with torch.distributed.checkpoint, under the names that the model has here.",
            )
        yield from ((name, weights) for name, weights in found.items() if weights)
        for name, part in parts.items():
            if isinstance(part, torch.optim.Optimizer) and (state := self._optimizer(name, part, orders[name])):
                yield name, state

    def _weights(self, part: str, names: list[str], others: Collection[str]) -> dict[str, StoredTensor | Blob]:
        """Return what a model with these names loads: what has them, after a common prefix, and what it lacks.

        Several models may have the same names, such as one and its average: ``others`` are the other parts.
        """
        known, theirs = set(names), {*map(_last, others)}
        every = Counter(prefix for key in self._all for prefix, rest in _cuts(key) if rest in known)
        if not every:
            return {}
        # What another model has begun with is for this one if there is nothing else, such as for a teacher.
        left = {x: n for x, n in every.items() if x not in self._taken and _last(x) not in theirs}
        prefixes = left or every
        best = [prefix for prefix, count in prefixes.items() if count == max(prefixes.values())]
        own = [prefix for prefix in best if _last(prefix) == _last(part)]
        trained = [prefix for prefix in best if not _AVERAGE.search(_last(prefix))]
        if len(among := own or trained or best) > 1 and left and "" not in among:
            raise UsageError(
                f"The checkpoint {self._where} has the weights of {part} several times: under "
                f"{', '.join(sorted(among))}.",
                "Register the model by one of these names, or load it in the script with torch.distributed.checkpoint.",
            )
        prefix = min(among, key=len)
        self._taken.add(prefix)
        found = {name: self._all[prefix + name] for name in names if prefix + name in self._all}
        self._use(found.values())
        # A model that has more, such as further layers, is another one.
        first = {name.partition(".")[0] for name in names}
        for key, value in self._tensors.items():
            name = key.removeprefix(prefix)
            if key.startswith(prefix) and name not in known and name.partition(".")[0] in first:
                found |= {} if {blob for _, _, blob in value.chunks} <= self.used else {name: value}
        return found

    def _optimizer(self, name: str, part: torch.optim.Optimizer, order: list[list[str]]) -> dict[str, Any]:
        """Return the state of an optimizer in the script's order of parameters; empty if there is none."""
        names = [each.removeprefix("model.") for each in chain(*order)]
        known, states, unnamed = set(names), dict[str, dict[str, dict[str, Any]]](), False
        for key, value in self._all.items():
            for prefix, rest in _cuts(key):
                of, _, entry = rest.removeprefix("state.").rpartition(".")
                if rest.startswith("state.") and of in known:
                    states.setdefault(prefix, {}).setdefault(of, {})[entry] = value
                unnamed |= rest.startswith("state.") and of.isdecimal() and of not in known
        if not states:
            if unnamed:
                raise UsageError(
                    f"The checkpoint {self._where} has the state of an optimizer by numbers, without the names of "
                    "parameters.",
                    "Save what get_optimizer_state_dict of torch.distributed.checkpoint.state_dict returns; or begin "
                    f"without it: Checkpoint(allow=[{name!r}]), or weights_only=True.",
                )
            return {}
        prefix = min(states, key=lambda prefix: (-len(states[prefix]), len(prefix), prefix))
        groups = ungathered_state(part)["param_groups"]
        numbers = dict(zip(names, (number for group in groups for number in group["params"]), strict=True))
        found = {numbers[of]: entries for of, entries in states[prefix].items()}
        self._use(chain(*(entries.values() for entries in found.values())))
        options = [
            {option: self._option(prefix, each, option, value) for option, value in group.items() if option != "params"}
            for group, each in zip(groups, [[x.removeprefix("model.") for x in each] for each in order], strict=True)
        ]
        made = [{**own, "params": group["params"]} for own, group in zip(options, groups, strict=True)]
        return {"state": found, "param_groups": made}

    def _option(self, prefix: str, names: list[str], option: str, given: Any) -> Any:
        """Return an option of a group of parameters; the given one if the checkpoint has none."""
        found = self._all.get(f"{prefix}param_groups.{names[0]}.{option}") if names else None
        number = 0
        while found is None and (listed := self._all.get(f"{prefix}param_groups.{number}.params")) is not None:
            if isinstance(listed, Blob) and names and names[0] in distributed.loaded(listed, self._load):
                found = self._all.get(f"{prefix}param_groups.{number}.{option}")
                break
            number += 1
        if found is None:
            return given
        return found.read(self._load) if isinstance(found, StoredTensor) else distributed.loaded(found, self._load)

    def _use(self, found: Iterable[StoredTensor | Blob]) -> None:
        for value in found:
            self.used |= {value} if isinstance(value, Blob) else {blob for _, _, blob in value.chunks}


def _cuts(key: str) -> Iterator[tuple[str, str]]:
    """Yield a name cut before each of its parts: ("", "a.b"), ("a.", "b")."""
    at = 0
    while True:
        yield key[:at], key[at:]
        at = key.find(".", at) + 1
        if not at:
            return


def _last(prefix: str) -> str:
    """Return the last part of a prefix, or of a part's name."""
    return prefix.rstrip(".").rpartition(".")[2]


class _Files(ExitStack):
    """Reads parts of a checkpoint's files, which stay open."""

    def __init__(self, storage: Directory | UrlStorage) -> None:
        super().__init__()
        self._storage = storage
        self._open: dict[str, BinaryIO] = {}

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Return so many bytes of a file, from an offset on; raise a MalformedError if it has not so many."""
        if name not in self._open:
            self._open[name] = self.enter_context(self._storage.opened(name))
        return read_at(self._open[name], name, offset, length)
