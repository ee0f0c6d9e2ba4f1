"""Detects models that are wrapped, sharded, or changed by their own forward pass, and finds the tensors in a value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from elastic_launch.errors import UsageError
from elastic_launch.training.live.waits import wait_in

# By name, since importing these classes is slow.
_FULLY_SHARD = re.compile(r"torch\.distributed\.(.*\.)?FSDPModule")
_FLAT = re.compile(r"torch\.distributed\..*FullyShardedDataParallel")
_ZERO = "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer"

MESH_HINT = (
    "Shard it by fully_shard over all ranks in one dimension, or within replicas: mesh = run.mesh(shard=S, tensor=T), "
    'then fully_shard(module, mesh=mesh["shard"]), and parallelize_module(module, mesh["tensor"], plan) before it.'
)
"""The remedy for DTensors on another mesh."""

ELEMENTWISE = {
    f"torch.optim.{name.lower()}.{name}"
    for name in ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
}
"""Optimizers that treat each element for itself, with the same result in any part of a tensor."""


def check_trainable(model: nn.Module, *, meshed: bool = False) -> None:
    """Refuse a model that would differ between ranks, or would never reach the end of a step.

    Args:
        meshed: whether its DTensors may be on the mesh that ``run.mesh()`` has made.
    """
    check_not_flat(model)
    sharding = meshed or sharding_modules(model)
    for name, parameter in model.named_parameters():
        if not sharding and is_sharded(parameter):
            raise UsageError(
                f"{name} is a DTensor, and fully_shard has not sharded the model: its gradient would not be reduced.",
                f"{MESH_HINT} Or write a loop of your own with run.resume() and run.boundary().",
            )
        check_not_inference(name, parameter)
    for name, module in model.named_modules():
        for own, buffer in module._buffers.items():
            if buffer is not None and own not in module._non_persistent_buffers_set:
                check_not_inference(f"{name}.{own}" if name else own, buffer)
        where = f"The module {name!r}" if name else "The model"
        if isinstance(module, DistributedDataParallel | DataParallel):
            raise UsageError(
                f"{where} is wrapped in {type(module).__name__}, and gradients are reduced here already.",
                "Give what it wraps: model.module. A loop of your own around DDP uses run.resume() and run.boundary().",
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise UsageError(
                f"{where} is an {type(module).__name__} with max_norm, which changes its weight in the forward pass: "
                "on each rank, the rows that its own micro-batches use.",
                "Build it without max_norm, and after step.update() do the same on all ranks: "
                f"with torch.no_grad(): weight.copy_(weight.renorm({module.norm_type:g}, 0, {module.max_norm:g})).",
            )


def check_not_inference(name: str, tensor: Tensor) -> None:
    """Refuse a tensor to which nothing is written outside inference mode, such as a saved value."""
    if tensor.is_inference():
        raise UsageError(
            f"{name} was made in torch.inference_mode(), and torch does not let a training change it.",
            "Make it in torch.no_grad() instead, or put a clone() of it in its place.",
        )


def check_not_flat(model: nn.Module) -> None:
    """Refuse a model whose shards are parts of flat tensors."""
    for name, module in model.named_modules():
        tensors = {type(parameter).__name__ for parameter in module.parameters(recurse=False)}
        if "ShardedTensor" in tensors or any(map(_FLAT.fullmatch, _classes(type(module)))):
            where = f"The module {name!r}" if name else "The model"
            raise UsageError(
                f"{where} is sharded by FullyShardedDataParallel, or has a ShardedTensor; a checkpoint here could not "
                "be resumed with another number of ranks.",
                "Shard it by torch.distributed.fsdp.fully_shard.",
            )


def check_elementwise(optimizers: Sequence[Any]) -> None:
    """Refuse optimizers whose result for a shard may differ from that for the whole parameter."""
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if _classes(type(optimizer))[0] not in ELEMENTWISE:
            raise UsageError(
                f"exact=True: it is not known whether {name} changes each element of a sharded parameter in the same "
                "way with any number of shards.",
                f"Use one of torch.optim's {', '.join(sorted(x.rpartition('.')[2] for x in ELEMENTWISE))}.",
            )
        if any(group.get("fused") for group in optimizer.param_groups):
            raise UsageError(
                f"exact=True: {name}(fused=True) rounds the last elements of a shard in another way than the others.",
                "Leave fused out.",
            )


def is_sharded(tensor: object) -> bool:
    """Whether it is a DTensor, of which each rank holds a part."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, in its memory; a plain tensor itself."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def whole(tensor: Tensor) -> Tensor:
    """Return the value of a tensor without its graph, that of a DTensor put together; called by all of its ranks."""
    found: Tensor = tensor.detach()
    return wait_in(found.full_tensor) if is_sharded(found) else found  # type: ignore[attr-defined]


def is_zero(optimizer: object) -> bool:
    """Whether it is torch's ``ZeroRedundancyOptimizer``: each rank has the state of some parameters."""
    return _ZERO in _classes(type(optimizer))


def sharding_modules(model: nn.Module) -> list[Any]:
    """Return the modules that were given to ``fully_shard``."""
    kinds = {type(module) for module in model.modules()}
    sharding = {kind for kind in kinds if any(map(_FULLY_SHARD.fullmatch, _classes(kind)))}
    return [module for module in model.modules() if type(module) in sharding] if sharding else []


def sharding_groups(model: nn.Module) -> list[Any]:
    """Return what ``fully_shard`` has made of the parameters that one call got: its ``FSDPParamGroup`` objects."""
    found: dict[int, Any] = {}
    for module in sharding_modules(model):
        state = module._get_fsdp_state()
        several = getattr(state, "_fsdp_param_groups", None)
        groups = [state._fsdp_param_group] if several is None else several
        found |= {id(group): group for group in groups if group is not None}
    return [*found.values()]


def _classes(kind: type) -> list[str]:
    return [f"{base.__module__}.{base.__name__}" for base in kind.__mro__]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in(vars(value))
