"""Shards a model that ``fully_shard`` has sharded over the ranks of another round, in the same process.

Torch has no function for this. What ``fully_shard`` has made of each parameter is made again for the new ranks: hooks,
modules and parameters stay the same objects, so that optimizers, schedulers and compiled code go on with them. The
values are not moved: after :func:`reshard` a state must be loaded. What had the values before keeps its memory, see
``elastic_launch.training.checkpoints.kept_shards``.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elastic_launch.training.wrapped import is_sharded, sharding_groups, sharding_modules

_NEEDS = ("reset_iter_state", "set_custom_all_gather")
"""Methods of ``FSDPModule`` that not all versions of torch have."""

_identities = itertools.count(-1, -1)  # no thread has one of these


def obstacle(model: nn.Module, parts: Sequence[Any] = (), *, within: bool = False) -> str:
    """Return why a model cannot be sharded over other ranks in this process; empty if it can.

    Args:
        parts: what else has a state: modules, optimizers and others.
        within: whether it is sharded within replicas, whose mesh outlives rounds.
    """
    modules = sharding_modules(model)
    if lacking := [name for name in _NEEDS if not all(hasattr(module, name) for module in modules)]:
        return f"the FSDPModule of torch {torch.__version__} has no {lacking[0]}()"
    for group in sharding_groups(model):
        if group.post_forward_mesh_info is not None and group.post_forward_mesh_info is not group.mesh_info:
            return "fully_shard(reshard_after_forward=...) is a number"
        if type(group._all_gather_comm).__name__ not in ("DefaultAllGather", "_Gather"):
            return "it has exchanges of its own, see FSDPModule.set_custom_all_gather"
        if not within and any(
            each.is_dtensor or hasattr(each._sharded_local_tensor, "fsdp_pre_all_gather") for each in group.fsdp_params
        ):
            return "a parameter was a tensor of its own kind before fully_shard"
    if within:
        modules = [part for part in parts if isinstance(part, nn.Module) and part is not model]
        others = [module for module in modules if sharding_modules(module)]
        return f"fully_shard has divided another module, {type(others[0]).__name__}" if others else ""
    again = {id(each.sharded_param) for group in sharding_groups(model) for each in group.fsdp_params}
    for part in [model, *parts]:
        # Others stay on the mesh of the round in which the script made them, on which this rank may be another one.
        if any(is_sharded(tensor) and id(tensor) not in again for tensor in _tensors(part)):
            return f"{type(part).__name__} has DTensors that are not parameters of what fully_shard got"
    return ""


def let_go(model: nn.Module, *, within: bool = False) -> None:
    """Drop the process groups of the current round, which is about to be left.

    Args:
        within: see :func:`reshard`. Then each rank gets back its shards, which a pass that was broken off has gathered.
    """
    for module in sharding_modules(model) if within else []:
        if module._get_fsdp_state()._is_root:
            module.reset_iter_state()
        module.reshard()
    sharded: list[Any] = [parameter for parameter in model.parameters() if is_sharded(parameter)]
    meshes = {id(each.device_mesh): each.device_mesh for each in sharded}
    for group in sharding_groups(model):
        group.mesh_info.shard_process_group = None
        meshes[id(group.mesh_info.mesh)] = group.mesh_info.mesh
    for mesh in meshes.values():
        getattr(mesh, "_pg_registry", {}).clear()


def reshard(model: nn.Module, optimizer: Any, *, within: bool = False) -> None:
    """Shard a model over all ranks of the current round, and drop the optimizer's state, which was sharded alike.

    The parameters' values are undefined afterwards.

    Args:
        within: whether it is sharded within replicas, whose mesh has got its groups of this round: then it keeps its
            shards, with their values, and so does the optimizer.
    """
    if within:
        for group in sharding_groups(model):
            group.mesh_info.shard_process_group = group.mesh_info.mesh.get_group(group.mesh_info.shard_mesh_dim)
            for each in group.fsdp_params:  # which may have summed a part of a pass
                each.unsharded_accumulated_grad = None
                if hasattr(each, "_unsharded_param"):
                    each._unsharded_param.grad = None
        for parameter in model.parameters():
            parameter.grad = None
        return
    from torch.distributed.tensor import debug  # slow to import

    # What is there of the meshes of earlier rounds would only take memory. Not all versions of torch can drop it.
    getattr(debug, "_clear_sharding_prop_cache", bool)()
    for module in sharding_modules(model):
        if module._get_fsdp_state()._is_root:
            module.reset_iter_state()
    for each in getattr(optimizer, "optimizers", {"": optimizer}).values():
        each.state.clear()
    meshes: dict[Any, Any] = {}
    infos: dict[int, tuple[Any, Any]] = {}  # by the old one's address, which lasts as long as it
    for group in sharding_groups(model):
        old = group.mesh_info
        if old.mesh not in meshes:
            meshes[old.mesh] = _mesh_like(old.mesh)
        if id(old) not in infos:
            infos[id(old)] = old, type(old)(meshes[old.mesh], shard_mesh_dim=0)
        _, info = infos[id(old)]
        group.mesh_info = info
        if group.post_forward_mesh_info is not None:
            group.post_forward_mesh_info = info
        for each in group.fsdp_params:
            _shard_again(each, info)


def _mesh_like(old: Any) -> Any:
    """Return a mesh of all ranks of the current round that is not equal to any earlier mesh.

    Torch takes meshes of the same ranks for equal, and then what its caches have of the earlier one: its groups, which
    are gone, and this process' coordinate in it, which may be another one now. Threads tell their meshes apart by an
    identity, and so does each round here.
    """
    from torch.distributed.device_mesh import init_device_mesh  # slow to import

    mesh: Any = init_device_mesh(old.device_type, (dist.get_world_size(),), mesh_dim_names=old.mesh_dim_names)
    mesh._thread_id, mesh._hash = next(_identities), None
    return mesh


def _shard_again(each: Any, info: Any) -> None:
    """Do for one parameter what ``fully_shard`` has done, and keep the object that the optimizer has."""
    kept, placement = each.sharded_param, each.fsdp_placement
    whole = nn.Parameter(
        torch.empty(each._orig_size, dtype=kept.dtype, device=each.device), requires_grad=kept.requires_grad
    )
    whole._fsdp_orig_uid = each._orig_param_uid  # type: ignore[attr-defined] # by which torch finds tied parameters
    each.mesh_info = info
    each.all_gather_outputs = []
    each.__dict__.pop("_unsharded_param", None)
    given = {"param": whole, "device": each.device, "shard_placement_fn": lambda _: placement, "mesh_info": info}
    wanted = inspect.signature(each._init_sharded_param).parameters  # not the same in all versions of torch
    each._init_sharded_param(**{name: given[name] for name in wanted})
    if each.post_forward_mesh_info is not None:
        each.post_forward_mesh_info = info
        each._init_sharded_post_forward_param_metadata(whole)
    made = each.sharded_param
    if made.device_mesh is not info.mesh:
        raise RuntimeError(f"torch {torch.__version__} has sharded a parameter over the mesh of an earlier round")
    kept.grad = None
    kept._local_tensor, kept._spec = made._local_tensor, made._spec
    each.sharded_param = kept
    each._setattr_on_modules(kept)


def _tensors(part: Any) -> list[Any]:
    if isinstance(part, nn.Module):
        return [*part.parameters(), *part.buffers()]
    return [parameter for group in getattr(part, "param_groups", []) for parameter in group["params"]]
