"""Flips bits of a training's tensors, as a plan of faults says: hardware that computes wrong without an error."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from elastic_launch import faults
from elastic_launch.snapshot.format.dtypes import flat_bytes
from elastic_launch.training.gradients.accumulation import Gradients


class Flips:
    """The flips of one process, in the rounds that it takes part in."""

    def __init__(self) -> None:
        self._lasting: list[tuple[faults.Fault, int, int]] = []  # with the place of the bit, and the round
        self._now: list[tuple[faults.Fault, int, int]] = []

    def begin(self, step: int, round_number: int, gradients: Gradients, optimizer: Any) -> None:
        """Begin the step after ``step``; flip what a step begins with."""
        new = [(each, zlib.crc32(f"{each.rank} {step}".encode()), round_number) for each in faults.flips(step)]
        self._lasting = [each for each in self._lasting if each[2] == round_number]
        self._now = [*self._lasting, *new]
        self._lasting += [each for each in new if each[0].every]
        gradients.spoiler = self if self._now else None
        if not self._now:
            return
        found = getattr(optimizer, "state", {}).values()
        states = [state for each in found for state in (each.values() if isinstance(each, dict) else [each])]
        self._flip("parameter", [*gradients.parameters.trained.values()])
        self._flip("optimizer", [each for each in states if isinstance(each, Tensor) and each.dim()])

    def spoil_sums(self, gradients: Sequence[Tensor]) -> None:
        """Flip what all ranks have summed."""
        self._flip("sums", gradients)

    def spoil_gradient(self, which: int, gradient: Tensor, count: int) -> None:
        """Flip the gradient of a micro-batch, that of one of ``count`` parameters."""
        for entry in [*self._now]:
            fault, place, _ = entry
            if fault.of == "gradient" and which == place % count:
                _flip(gradient, place)
                if not fault.every:
                    self._now.remove(entry)

    def _flip(self, of: str, tensors: Sequence[Tensor]) -> None:
        for fault, place, _ in self._now:
            if fault.of == of and tensors:
                _flip(tensors[place % len(tensors)], place)


def _flip(tensor: Tensor, place: int) -> None:
    """Flip a high bit of an element's mantissa, so that the value changes and remains finite."""
    with torch.no_grad():
        size = tensor.element_size()
        lanes = tensor.detach().clone(memory_format=torch.contiguous_format)
        flat_bytes(lanes)[place % tensor.numel() * size + max(0, size - 2)] ^= 0x20
        tensor.copy_(lanes)
