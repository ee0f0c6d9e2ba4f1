"""Loads the state of a module that may have expanded tensors, to which torch does not write."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from elastic_launch.snapshot.format.dtypes import flat_bytes, unexpanded


def load_module(module: nn.Module, saved: Any) -> None:
    """Load a state as ``load_state_dict`` does; a tensor keeps its memory as far as that can have the values.

    Raises:
        RuntimeError: or another error of ``load_state_dict``, if the state does not fit.
    """
    expanded = [x for x in chain(module.parameters(), module.buffers()) if _is_expanded(x)]
    before = [tensor.data for tensor in expanded]
    for tensor in expanded:
        tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
    try:
        module.load_state_dict(saved)
    finally:
        for tensor, then in zip(expanded, before, strict=True):
            now, own = unexpanded(tensor.data, then.stride()), unexpanded(then, then.stride())
            if torch.equal(flat_bytes(now.expand_as(then)), flat_bytes(tensor.data)):
                own.copy_(now)
                tensor.data = then


def _is_expanded(tensor: Tensor) -> bool:
    if is_lazy(tensor) or type(tensor.data) is not Tensor or tensor.layout is not torch.strided:
        return False
    return unexpanded(tensor, tensor.stride()).shape != tensor.shape
