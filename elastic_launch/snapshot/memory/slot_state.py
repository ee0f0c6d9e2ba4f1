"""Writes a state into a slot, and reads it back."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from elastic_launch import faults
from elastic_launch.snapshot.errors import TornSnapshotError
from elastic_launch.snapshot.format import tensor_file as tensorfile
from elastic_launch.snapshot.format import tree
from elastic_launch.snapshot.format.dtypes import flat_bytes
from elastic_launch.snapshot.format.manifest import encode_meta, parse_json
from elastic_launch.snapshot.format.plain import Decoder
from elastic_launch.snapshot.memory.slot import Header, Slot
from elastic_launch.snapshot.memory.staging import Staging, Stagings, mark
from elastic_launch.snapshot.storage.saving import state_json

SMALL = 64 * 1024
"""Bytes below which a tensor is copied at once, since watching it takes as long."""

_PIECE = 1 << 20
"""Bytes of a copy that are moved to aligned memory at a time, so that they stay in the cache."""


class WatchedTensor:
    """A tensor that is copied in the background, and should keep the values of the step boundary until then.

    A script may change a parameter in place at any time, for example by weight normalisation or its own weight decay;
    the copy is then neither the old state nor the new one. A tensor's version reveals changes, except those made
    through ``.data``; with ``by_sum``, a sum over the bits reveals these.
    """

    def __init__(self, tensor: Tensor, *, by_sum: bool) -> None:
        self._tensor = tensor
        self._version = tensor._version
        self._sum = _sum(tensor) if by_sum else None

    @staticmethod
    def possible(tensor: Tensor) -> bool:
        """Whether a tensor can be watched; others must be copied before the script continues."""
        size = tensor.numel() * tensor.element_size()
        plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        aligned = size % 8 == 0 and tensor.storage_offset() * tensor.element_size() % 8 == 0
        return size >= SMALL and plain and aligned and not tensor.is_inference()

    def changed(self, copy: Tensor) -> bool:
        """Whether the tensor has changed, or its copy differs from it; that is bytes in memory at any address."""
        if self._tensor._version != self._version:
            return True
        if self._sum is None:
            return False
        if copy.storage_offset() % 8 == 0:
            return int(self._sum) != int(_sum(copy))
        total = sum(int(_sum(piece.clone())) for piece in torch.split(copy, _PIECE))
        return (int(self._sum) - total) % 2**64 != 0


def _sum(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.int64).sum()


class SlotDraft:
    """A state prepared for a slot: tensors that may change before they are copied are cloned.

    Slow work that can wait is done lazily, by the thread that writes.

    Args:
        stays: whether a tensor should keep its values until the draft is written.
        watch: whether to detect that the script changes such tensors before then; changes to the optimizer's state are
            detected only by the tensors' versions.
    """

    def __init__(
        self,
        state: Any,
        meta: dict[str, Any],
        stays: Callable[[Tensor], bool],
        *,
        watch: bool = False,
    ) -> None:
        tensors, rest = tree.encode(state)
        later = {name for name, tensor in tensors.items() if stays(tensor)}
        if watch:
            later = {name for name in later if WatchedTensor.possible(tensors[name])}
        # A clone with gaps would be copied once more, on its device, by the thread that writes.
        dense = torch.contiguous_format
        self.tensors = {
            name: tensor.detach() if name in later else tensor.detach().clone(memory_format=dense)
            for name, tensor in tensors.items()
        }
        self.watched = {
            name: WatchedTensor(tensors[name], by_sum=not name.startswith("optimizer/"))
            for name in sorted(later if watch else ())
        }
        self.marks = mark(self.tensors.values())
        self.tensor_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())
        self._rest = rest
        self._meta = encode_meta(meta)

    @cached_property
    def layout(self) -> tensorfile.Layout:
        return tensorfile.layout(self.tensors)

    @cached_property
    def state(self) -> bytes:
        """The rest of the state, as JSON."""
        return state_json(self._rest)

    @cached_property
    def meta(self) -> bytes:
        return json.dumps(self._meta, allow_nan=False).encode()

    @property
    def bytes(self) -> int:
        """Its size in a slot, in bytes."""
        return self.layout.size + len(self.state) + len(self.meta)


class SlotWriter:
    """Writes drafts into one slot, whose memory stays mapped between writes.

    Args:
        stagings: those that were prepared for the tensors on GPUs; without one, a copy waits for its GPU.
    """

    def __init__(self, slot: Slot, stagings: Stagings | None = None) -> None:
        self.slot = slot
        self._mapped: mmap.mmap | None = None
        self._stagings = stagings or Stagings()

    def write(self, draft: SlotDraft, header: Header) -> bool:
        """Write a draft; the snapshot exists once this returns, and not before.

        Its header gets the sizes of the draft. Most of the work is copying without the interpreter's lock, so another
        thread can compute at the same time.

        Returns:
            Whether it is the slot's first snapshot, for which memory had to be allocated.

        Raises:
            OSError: if there is no memory for it.
            UnsupportedStateError: if the state is too large for the format.
            TornSnapshotError: if the script changed tensors while they were copied; the slot is then empty.
        """
        empty = not self.slot.allocated
        self.slot.begin()
        target = self._target(draft.layout.size)
        beginning = draft.layout.header
        target[: len(beginning)].copy_(torch.frombuffer(bytearray(beginning), dtype=torch.uint8))
        staged: dict[torch.device, Staging] = {}
        for name, offset, size in draft.layout.places:
            tensor = draft.tensors[name]
            staging = self._stagings.of(tensor.device) if size and tensor.is_cuda else None
            if staging is None:
                if size:
                    target[offset : offset + size].copy_(flat_bytes(tensor), non_blocking=False)
                continue
            if tensor.device not in staged:
                staging.wait_for(draft.marks)
                staged[tensor.device] = staging
            staging.copy(tensor, target[offset : offset + size])
        for staging in staged.values():
            staging.finish()
        places = {name: target[offset : offset + size] for name, offset, size in draft.layout.places}
        changed = [name for name, each in draft.watched.items() if each.changed(places[name])]
        del target, places
        if changed:
            raise TornSnapshotError(
                f"The script changed {changed[0]} while it was being copied", "Change it right after step.update()."
            )
        faults.reached("snapshot", header.step)
        header = replace(header, tensors=draft.layout.size, state=len(draft.state), meta=len(draft.meta))
        self.slot.commit(header, draft.state, draft.meta)
        return empty

    def close(self) -> None:
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None

    def _target(self, size: int) -> Tensor:
        if self._mapped is None or len(self._mapped) != size:
            self.close()
            self.slot.allocate(size)
            self._mapped = mmap.mmap(self.slot.tensors, size)
        return torch.frombuffer(self._mapped, dtype=torch.uint8)


def read_state(slot: Slot, header: Header, take: tree.Take | None = None) -> Any:
    """Return the state in a slot, each tensor in its own memory, or what ``take`` returns of it."""
    tensors = tensorfile.read(slot.tensors) if take is None else tensorfile.mapped(slot.tensors)
    return tree.decode(parse_json(slot.state(header)), tensors, take)


def read_meta(slot: Slot, header: Header) -> dict[str, Any]:
    """Return the meta that the snapshot's writer gave."""
    meta: Mapping[str, Any] = Decoder().decode(parse_json(slot.meta(header)))
    return dict(meta)
