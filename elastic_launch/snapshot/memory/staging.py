"""Copies from a GPU into memory that is not pinned, while the GPU computes.

A copy that must not delay the device's kernels has to go to pinned memory and on its own stream
(https://docs.pytorch.org/docs/stable/notes/cuda.html#use-pinned-memory-buffers). A slot's memory is not pinned, and
pinning all of it would take as long as copying. There are therefore two small buffers of pinned memory: while the
device fills one, the CPU empties the other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor

from elastic_launch.snapshot.format.dtypes import flat_bytes

_log = logging.getLogger(__name__)

PIECE = 32 * 1024 * 1024
"""Bytes of each of the two buffers."""


def mark(tensors: Iterable[Tensor]) -> list[torch.cuda.Event]:
    """Return the events, one for each GPU, that a copy must wait for to see the tensors as they are now."""
    events = []
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return events


class Staging:
    """Copies tensors of one GPU, in one thread at a time; raises a RuntimeError if there is no pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pieces = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._full: list[tuple[torch.cuda.Event, Tensor, Tensor] | None] = [None, None]
        self._turn = 0

    def wait_for(self, events: Iterable[torch.cuda.Event]) -> None:
        """Make later copies wait for the events that :func:`mark` returned."""
        for event in events:
            self._stream.wait_event(event)

    def copy(self, tensor: Tensor, target: Tensor) -> None:
        """Start a copy of a GPU tensor to bytes in host memory, which have the values after :meth:`finish`."""
        with torch.cuda.stream(self._stream):
            source = flat_bytes(tensor)
            for start in range(0, source.numel(), PIECE):
                part = source[start : start + PIECE]
                self._empty(self._turn)
                piece = self._pieces[self._turn][: part.numel()]
                piece.copy_(part, non_blocking=True)
                filled = torch.cuda.Event()  # type: ignore[no-untyped-call]
                filled.record(self._stream)
                self._full[self._turn] = filled, piece, target[start : start + PIECE]
                self._turn ^= 1

    def finish(self) -> None:
        """Wait until all copies are done."""
        for turn in (self._turn, self._turn ^ 1):
            self._empty(turn)

    def _empty(self, turn: int) -> None:
        if (full := self._full[turn]) is not None:
            filled, piece, target = full
            filled.synchronize()
            target.copy_(piece)
            self._full[turn] = None


class Stagings:
    """A :class:`Staging` for each GPU, for all that one thread writes."""

    def __init__(self) -> None:
        self._by_device: dict[torch.device, Staging | None] = {}

    def prepare(self, tensors: Iterable[Tensor]) -> None:
        """Allocate what copies of these tensors need; called by the thread that computes.

        CUDA lets no thread allocate pinned memory while another one captures a graph, and ends the capture.
        """
        for device in {tensor.device for tensor in tensors if tensor.is_cuda} - self._by_device.keys():
            try:
                self._by_device[device] = Staging(device)
            except RuntimeError as error:
                _log.warning("snapshots wait for %s: %s", device, str(error).partition("\n")[0])
                self._by_device[device] = None

    def of(self, device: torch.device) -> Staging | None:
        """Return what copies from a GPU while it computes; None if there is no pinned memory for it."""
        return self._by_device.get(device)
