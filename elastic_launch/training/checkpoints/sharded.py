"""The states of sharded parts, as they are saved: whole tensors, as if the part were not sharded.

A checkpoint therefore fits any number of ranks and any way to shard, and is read as any other. Tensors are gathered one
by one, so that a device has room for them; a rank that writes keeps all of them in host memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic_launch.training.checkpoints.parts import Group
from elastic_launch.training.ranks.exchange import broadcast_state
from elastic_launch.training.wrapped import is_sharded, is_zero, sharding_modules

__all__ = ["Gathering", "holds_shards", "local_state", "placed"]


def holds_shards(part: Any) -> bool:
    """Whether each rank has only a part of an object's state, so that all ranks are needed to save it."""
    if isinstance(part, nn.Module):
        return bool(sharding_modules(part)) or any(map(is_sharded, part.parameters()))
    if isinstance(part, Group):
        return any(map(holds_shards, part.members.values()))
    groups = getattr(part, "param_groups", [])
    return is_zero(part) or any(is_sharded(p) for group in groups for p in group["params"])


class Gathering:
    """Gathers states from all ranks.

    Args:
        keep: whether this rank needs the states.

    Attributes:
        own: addresses of the tensors that were made for it, which nothing else changes.
    """

    def __init__(self, *, keep: bool) -> None:
        self.own: set[int] = set()
        self._keep = keep

    def state(self, part: Any) -> Any:
        """Return a part's state on the ranks that need it, else None; called by all ranks."""
        if isinstance(part, Group):
            states = {name: self.state(member) for name, member in part.members.items()}
            return states if self._keep else None
        if is_zero(part):
            return self._of_zero(part)
        return self._gathered(part.state_dict())

    def _gathered(self, value: Any) -> Any:
        if is_sharded(value):
            whole = value.full_tensor().detach()
            if not self._keep:
                return None
            kept = whole.cpu()
            self.own.add(kept.data_ptr())
            return kept
        if isinstance(value, dict):
            found = type(value)()
            for key, item in value.items():
                found[key] = self._gathered(item)
            return found
        if isinstance(value, list):
            return [self._gathered(item) for item in value]
        return value

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
    if isinstance(part, Group):
        return {name: local_state(member) for name, member in part.members.items()}
    if not is_zero(part):
        return _local(part.state_dict())
    numbers = _numbers(part)
    groups = [{**group, "params": [numbers[p] for p in group["params"]]} for group in part.param_groups]
    own = {numbers[p]: dict(state) for p, state in part.optim.state.items() if state}
    return {"state": own, "param_groups": groups}


def _numbers(part: Any) -> dict[Any, int]:
    return {p: number for number, p in enumerate(p for group in part.param_groups for p in group["params"])}


def _local(value: Any) -> Any:
    if is_sharded(value):
        return value.to_local()
    if isinstance(value, dict):
        return {key: _local(item) for key, item in value.items()}
    return [_local(item) for item in value] if isinstance(value, list) else value


def placed(part: Any, saved: Any) -> Any:
    """Return a part's saved state with this rank's shards of what is sharded here; without communication."""
    if is_zero(part):
        return {**saved, "state": dict(saved["state"])}  # it drops what belongs to other ranks
    if isinstance(part, nn.Module) and isinstance(saved, dict):
        likes = {key: like for key, like in part.state_dict().items() if is_sharded(like)}
        return {key: _shard(value, likes[key]) if key in likes else value for key, value in saved.items()}
    if isinstance(part, torch.optim.Optimizer) and isinstance(saved, dict):
        numbers = (number for group in saved["param_groups"] for number in group["params"])
        parameters = (p for group in part.param_groups for p in group["params"])
        likes = {number: p for number, p in zip(numbers, parameters, strict=True) if is_sharded(p)}
        state = {
            number: {key: _shard(value, likes[number]) for key, value in own.items()} if number in likes else own
            for number, own in saved["state"].items()
        }
        return {**saved, "state": state}
    return saved


def _shard(value: Any, like: Any) -> Any:
    if not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor  # slow to import

    whole = value.to(like.device)
    # Cloned: the shard would keep the memory of all of it.
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).clone()
