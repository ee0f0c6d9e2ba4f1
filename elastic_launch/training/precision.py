"""Number formats of a training step, and recognition of out-of-memory errors."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from elastic_launch.errors import UsageError

_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Autocast for forward pass and loss, and the gradient scaler for fp16.

    Args:
        name: ``fp32``, ``bf16`` or ``fp16``.
        scales: whether to have a gradient scaler.
    """

    def __init__(self, name: str, device: torch.device, *, scales: bool = True) -> None:
        if name not in _AUTOCAST:
            raise UsageError(f"precision={name!r} is not a known precision.", f"Give one of {', '.join(_AUTOCAST)}.")
        self._device_type = device.type
        self._dtype = _AUTOCAST[name]
        self.scaler = torch.amp.GradScaler(device.type) if name == "fp16" and scales else None

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which to run a forward pass and compute its loss."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device_type, self._dtype)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a device, or the CPU's allocator, is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # The CPU's allocator raises a plain RuntimeError.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
