"""The states of sharded parts, as they are saved: whole tensors, as if the part were not sharded.

A checkpoint therefore fits any number of ranks and any way to shard, and is read as any other. Tensors are gathered one
by one, so that a device has room for them; a rank that writes keeps all of them in host memory.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_launch.snapshot.format.plain import Path
from elastic_launch.snapshot.format.tensor_file import copied
from elastic_launch.snapshot.stall import advanced
from elastic_launch.training.checkpoints.parts import Group
from elastic_launch.training.ranks.exchange import broadcast_state
from elastic_launch.training.ranks.spreading import Box, narrowed
from elastic_launch.training.wrapped import is_sharded, is_zero, sharding_modules, whole

_WHOLE = object()
"""Stands for all of a tensor."""

_SHARD, _SHAPE = "elastic_launch: shard", "elastic_launch: shape of the whole"
"""Keys of what stands for a DTensor in a state that is sent to a rank with the same shards."""


def holds_shards(part: Any) -> bool:
    """Whether each rank has only a part of an object's state, so that all ranks are needed to save it."""
    if isinstance(part, nn.Module):
        return bool(sharding_modules(part)) or any(map(is_sharded, part.parameters()))
    if isinstance(part, Group):
        return any(map(holds_shards, part.members.values()))
    groups = getattr(part, "param_groups", [])
    return is_zero(part) or any(is_sharded(p) for group in groups for p in group["params"])


class StateGatherer:
    """Gathers states from all ranks, on those that ``keep`` them.

    With ``split``, shards that are boxes are left where they are: meta tensors of the whole shapes stand for them.
    """

    def __init__(self, *, keep: bool, split: bool = False) -> None:
        self.own: set[int] = set()  # addresses of the tensors that were made for it, which nothing else changes
        self.left: list[tuple[Tensor, Any]] = []  # what stands for each tensor that is left where it is, and the tensor
        self._keep = keep
        self._split = split

    def state(self, part: Any, chosen: Callable[[Any], Any] = lambda state: state) -> Any:
        """Return a part's state on the ranks that need it, else None; called by all ranks.

        ``chosen`` returns what is wanted of the state that each rank has, before it is gathered.
        """
        if isinstance(part, Group):
            states = {name: self.state(member) for name, member in part.members.items()}
            return states if self._keep else None
        if is_zero(part):
            return self._of_zero(part)
        return self._gathered(chosen(part.state_dict()))

    def _gathered(self, value: Any) -> Any:
        if is_sharded(value):
            if self._split and _is_plain(value):
                self.left.append((torch.empty(value.shape, dtype=value.dtype, device="meta"), value))
                return self.left[-1][0]
            tensor = whole(value)
            if not self._keep:
                return None
            kept = tensor.cpu()
            # Where this rank has all of a tensor, it is the tensor that the training changes.
            if kept.untyped_storage().data_ptr() != value.to_local().untyped_storage().data_ptr():
                self.own.add(kept.data_ptr())
            return kept
        return _each(value, (), lambda item, _: self._gathered(item))

    def _of_zero(self, part: Any) -> Any:
        """Return the state of a ``ZeroRedundancyOptimizer``, of which each rank has some parameters' state.

        Its own ``consolidate_state_dict`` sends pickles.
        """
        state = local_state(part)
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return state if self._keep else None
        rank, merged = dist.get_rank(), {}
        for source in range(dist.get_world_size()):
            sent = broadcast_state(state["state"] if rank == source else None, source, rank)
            if self._keep:
                merged.update(sent)
        return {**state, "state": dict(sorted(merged.items()))} if self._keep else None


def local_state(part: Any) -> Any:
    """Return this rank's share of a part's state, to check its types."""
    return _local(ungathered_state(part))


def ungathered_state(part: Any) -> Any:
    """Return a part's state as this rank has it: with DTensors, and of a ``ZeroRedundancyOptimizer`` its share."""
    if isinstance(part, Group):
        return {name: ungathered_state(member) for name, member in part.members.items()}
    if not is_zero(part):
        return part.state_dict()
    numbers = _numbers(part)
    groups = [{**group, "params": [numbers[p] for p in group["params"]]} for group in part.param_groups]
    own = {numbers[p]: dict(state) for p, state in part.optim.state.items() if state}
    return {"state": own, "param_groups": groups}


def _numbers(part: Any) -> dict[Any, int]:
    return {p: number for number, p in enumerate(p for group in part.param_groups for p in group["params"])}


def _each(value: Any, path: Path, function: Callable[[Any, Path], Any]) -> Any:
    """Return a dict or a list with what the function returns for each item and its path; else the value."""
    if isinstance(value, dict):
        found = copy.copy(value)
        found.update({key: function(item, (*path, key)) for key, item in value.items()})
        return found
    return [function(x, (*path, i)) for i, x in enumerate(value)] if isinstance(value, list) else value


def _local(value: Any) -> Any:
    if is_sharded(value):
        return value.to_local()
    if isinstance(value, dict):
        return {key: _local(item) for key, item in value.items()}
    return [_local(item) for item in value] if isinstance(value, list) else value


class Cutting:
    """Cuts this rank's shards out of whole tensors, one by one as they are read or sent; without communication.

    ``here`` and ``there`` are the names of each optimizer's parameters by group, now and when the state was saved.
    """

    def __init__(
        self, parts: Mapping[str, Any], here: Mapping[str, list[list[str]]], there: Mapping[str, list[list[str]]]
    ) -> None:
        self._likes: dict[Path, Any] = {}
        self._here, self._there = here, there
        for name, part in parts.items():
            self._add((name,), part)

    def _add(self, path: Path, part: Any) -> None:
        """Note what this rank has of a part, by the places in its state."""
        if isinstance(part, Group):
            for key, member in part.members.items():
                self._add((*path, key), member)
        elif is_zero(part):
            mine = {p for group in part.optim.param_groups for p in group["params"]}
            others = [number for p, number in _numbers(part).items() if p not in mine]
            self._likes |= {(*path, "state", number): None for number in others}
        elif isinstance(part, torch.optim.Optimizer):
            # Before the first step it has no state: its parameters are sharded alike.
            now, saved = ([*chain(*orders.get("/".join(map(str, path)), []))] for orders in (self._here, self._there))
            known = dict(zip(now, _numbers(part), strict=False))
            order = [known[x] for x in saved] if now and set(saved) == set(now) else _numbers(part)
            self._likes |= {(*path, "state", number): p for number, p in enumerate(order) if is_sharded(p)}
        else:
            self._likes |= dict(_sharded_in(part.state_dict(), path))

    def __call__(self, path: Path, tensor: Tensor, /) -> Tensor:
        advanced()
        box = self.box(path, tensor.shape)
        if box is None:
            return tensor.to("meta")
        return self.kept(path, tensor.shape, copied(narrowed(tensor, box)))

    def box(self, path: Path, shape: Sequence[int]) -> Box | None:
        """Return the part of a tensor that this rank needs; None: it is of a parameter that belongs to another rank."""
        like = self._like(path, shape)
        if like is None:
            return None
        if like is _WHOLE or not _is_plain(like):
            return [(0, length) for length in shape]
        return box_of(like)

    def kept(self, path: Path, shape: Sequence[int], part: Tensor) -> Tensor:
        """Return what this rank keeps of a tensor, made of the part that it needs."""
        like = self._like(path, shape)
        if like is None or like is _WHOLE:
            return part
        if _is_plain(like):
            return _dtensor(part, like, shape)  # distribute_tensor would need the whole tensor
        from torch.distributed.tensor import distribute_tensor  # slow to import

        # Cloned: the shard would keep the memory of all of it.
        return distribute_tensor(part.to(like.device), like.device_mesh, like.placements, src_data_rank=None).clone()

    def as_sent(self, value: Any, path: Path = ()) -> Any:
        """Return a state of this rank for one that has the same shards: plain tensors stand for its DTensors.

        Raises:
            LookupError: if the other rank would not know how the whole of a DTensor is divided.
        """
        if is_sharded(value):
            if getattr(self._like(path, value.shape), "placements", None) != value.placements:
                raise LookupError(path)
            return {_SHARD: value.detach().to_local(), _SHAPE: list(value.shape)}
        return _each(value, path, self.as_sent)

    def as_received(self, value: Any, path: Path = ()) -> Any:
        """Return the state that another rank's :meth:`as_sent` has returned."""
        if not isinstance(value, dict) or _SHARD not in value:
            return _each(value, path, self.as_received)
        return _dtensor(value[_SHARD], self._like(path, value[_SHAPE]), value[_SHAPE])

    def _like(self, path: Path, shape: Sequence[int]) -> Any:
        """Return the tensor as whose shard one is cut; None: it is not needed here."""
        # An optimizer's state of a parameter may have its tensors in lists and dicts.
        places = (path[:end] for end in range(len(path), 0, -1))
        like: Any = next((self._likes[place] for place in places if place in self._likes), _WHOLE)
        return like if like is None or (is_sharded(like) and list(like.shape) == list(shape)) else _WHOLE


def bytes_in(value: Any, without: Collection[int] = ()) -> int:
    """Return the bytes of a state's tensors, but for those at some addresses; of a DTensor those of the whole."""
    if isinstance(value, Tensor):
        return 0 if without and value.data_ptr() in without else value.numel() * value.element_size()
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | deque) else ()
    return sum(bytes_in(item, without) for item in items)


def box_of(sharded: Any) -> Box:
    """Return the part of a DTensor that this rank has, which is a box."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # slow to import

    lengths, begins = compute_local_shape_and_global_offset(
        tuple(sharded.shape), sharded.device_mesh, sharded.placements
    )
    return [(begin if length else 0, length) for length, begin in zip(lengths, begins, strict=True)]


def _dtensor(shard: Tensor, like: Any, shape: Sequence[int]) -> Tensor:
    """Return a DTensor of this shape with a shard, which is one as this rank has of another DTensor."""
    from torch.distributed.tensor import DTensor  # slow to import

    how: dict[str, Any] = {"run_check": False, "shape": torch.Size(shape), "stride": like.stride()}
    return DTensor.from_local(shard.to(like.device), like.device_mesh, like.placements, **how)


def _is_plain(like: Any) -> bool:
    """Whether this rank's shard is a box."""
    from torch.distributed.tensor import Replicate, Shard  # slow to import

    return all(type(placement) in (Shard, Replicate) for placement in like.placements)


def _sharded_in(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if is_sharded(value):
        yield path, value
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _sharded_in(item, (*path, key))
