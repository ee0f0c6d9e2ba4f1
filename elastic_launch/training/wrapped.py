"""Detects models that cannot be trained as they are: wrapped, sharded, or changed by their own forward pass."""

from __future__ import annotations

import re

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from elastic_launch.errors import UsageError

__all__ = ["check_not_sharded", "check_trainable"]

_SHARDED = re.compile(r"torch\.distributed\..*(FSDPModule|FullyShardedDataParallel)")


def check_trainable(model: nn.Module) -> None:
    """Refuse a model that would differ between ranks, or would never reach the end of a step.

    Raises:
        UsageError: naming the module, and what to do instead.
    """
    check_not_sharded(model)
    for name, module in model.named_modules():
        where = f"The module {name!r}" if name else "The model"
        if isinstance(module, DistributedDataParallel | DataParallel):
            raise UsageError(
                f"{where} is wrapped in {type(module).__name__}, and gradients are reduced here already.",
                "Give what it wraps: model.module. A loop of your own around DDP uses run.resume() and run.boundary().",
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise UsageError(
                f"{where} is an {type(module).__name__} with max_norm, which changes its weight in the forward pass: "
                "each rank those rows that its own micro-batches use.",
                "Build it without max_norm, and after step.update() do the same on all ranks: "
                f"with torch.no_grad(): weight.copy_(weight.renorm({module.norm_type:g}, 0, {module.max_norm:g})).",
            )


def check_not_sharded(model: nn.Module) -> None:
    """Refuse a model of which each rank holds only a part.

    Raises:
        UsageError: naming the module.
    """
    for name, module in model.named_modules():
        # By name, since importing these classes is slow.
        kinds = [f"{kind.__module__}.{kind.__name__}" for kind in type(module).__mro__]
        tensors = {type(parameter).__name__ for parameter in module.parameters(recurse=False)}
        if tensors & {"DTensor", "ShardedTensor"} or any(map(_SHARDED.fullmatch, kinds)):
            where = f"The module {name!r}" if name else "The model"
            raise UsageError(
                f"{where} is sharded (FSDP, fully_shard or tensor parallel): each rank has a part of it, and "
                "checkpoints here hold replicated models only.",
                "Leave sharding out, or save with torch.distributed.checkpoint in a loop of your own.",
            )
