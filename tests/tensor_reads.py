"""Counts the values of tensors that are read, for which a GPU would be waited for."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Reads(TorchDispatchMode):
    """Within this context, notes the addresses of the tensors of which a value is read.

    Attributes:
        addresses: those of the tensors, once for each reading.
    """

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.addresses.append(args[0].data_ptr())
        return func(*args, **(kwargs or {}))
