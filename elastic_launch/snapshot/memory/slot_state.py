"""Writing a state into a slot, and reading it back."""

from __future__ import annotations

import json
import logging
import mmap
import os
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from elastic_launch import faults
from elastic_launch.snapshot.errors import TornSnapshotError
from elastic_launch.snapshot.format import tensor_file as tensorfile
from elastic_launch.snapshot.format import tree
from elastic_launch.snapshot.format.manifest import encode_meta, parse_json
from elastic_launch.snapshot.format.plain import Decoder
from elastic_launch.snapshot.memory.slot import Header, Slot
from elastic_launch.snapshot.memory.staging import Staging, mark
from elastic_launch.snapshot.memory.watch import Watched
from elastic_launch.snapshot.storage.saving import state_json

__all__ = ["SlotDraft", "SlotWriter", "read_meta", "read_state"]

_log = logging.getLogger(__name__)


class SlotDraft:
    """A state taken apart for a slot: what may change before it is copied is cloned.

    What takes time and can wait is done when it is asked for, by the thread that writes.

    Args:
        state: nested dicts, lists, tuples, tensors and plain values.
        stays: whether a tensor should keep its values until the draft is written.
        watch: whether the script may change tensors all the same before that, which is noticed then; those of the
            optimizer's state only by their versions.

    Raises:
        UnsupportedStateError: with type and place of what a checkpoint does not hold.
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
            later = {name for name in later if Watched.possible(tensors[name])}
        self.tensors = {
            name: tensor.detach() if name in later else tensor.detach().clone() for name, tensor in tensors.items()
        }
        self.watched = {
            name: Watched(tensors[name], by_sum=not name.startswith("optimizer/"))
            for name in sorted(later if watch else ())
        }
        self.marks = mark(self.tensors.values())
        self.tensor_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())
        self._rest = rest
        self._meta = encode_meta(meta)

    @cached_property
    def layout(self) -> tensorfile.Layout:
        """Where its tensors lie.

        Raises:
            UnsupportedStateError: if there are too many for a file.
        """
        return tensorfile.layout(self.tensors)

    @cached_property
    def state(self) -> bytes:
        """The rest of the state, as JSON.

        Raises:
            UnsupportedStateError: if it is too large.
        """
        return state_json(self._rest)

    @cached_property
    def meta(self) -> bytes:
        return json.dumps(self._meta, allow_nan=False).encode()

    @property
    def bytes(self) -> int:
        """Its size in a slot."""
        return self.layout.size + len(self.state) + len(self.meta)


class SlotWriter:
    """Writes drafts into one slot, whose memory stays mapped in between."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self._mapped: mmap.mmap | None = None
        self._staging: dict[torch.device, Staging | None] = {}

    def write(self, draft: SlotDraft, *, sequence: int, round: int, step: int, training: int) -> bool:
        """Write a draft; the snapshot is there when this returns, and not before.

        Most of it is copying, without the interpreter's lock: another thread may compute meanwhile.

        Returns:
            whether it is the slot's first, for which memory had to be found.

        Raises:
            OSError: if there is no memory for it.
            UnsupportedStateError: if the state is too large for the format.
            TornSnapshotError: if the script has changed what was being copied; the slot is empty then.
        """
        empty = not self.slot.allocated
        self.slot.begin()
        target = self._target(draft.layout.size)
        header = draft.layout.header
        target[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        staged: dict[torch.device, Staging] = {}
        for name, offset, size in draft.layout.places:
            tensor = draft.tensors[name]
            staging = self._stage(tensor.device) if size and tensor.is_cuda else None
            if staging is None:
                if size:
                    target[offset : offset + size].copy_(_as_bytes(tensor), non_blocking=False)
                continue
            if tensor.device not in staged:
                staging.wait_for(draft.marks)
                staged[tensor.device] = staging
            staging.copy(tensor, target[offset : offset + size])
        for staging in staged.values():
            staging.finish()
        places = {name: target[offset : offset + size] for name, offset, size in draft.layout.places}
        changed = Watched.changes(draft.watched, places.__getitem__)
        del target, places
        if changed:
            raise TornSnapshotError(
                f"The script changed {changed[0]} while it was being copied", "Change it right after step.update()."
            )
        faults.reached("snapshot", step)
        sizes = (draft.layout.size, len(draft.state), len(draft.meta))
        self.slot.commit(Header(sequence, round, step, training, *sizes), draft.state, draft.meta)
        return empty

    def close(self) -> None:
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None

    def _stage(self, device: torch.device) -> Staging | None:
        """Return what copies from a GPU beside its kernels; None if there is no pinned memory for that."""
        if device not in self._staging:
            try:
                self._staging[device] = Staging(device)
            except RuntimeError as error:
                _log.warning("snapshots wait for %s: %s", device, str(error).partition("\n")[0])
                self._staging[device] = None
        return self._staging[device]

    def _target(self, size: int) -> Tensor:
        if self._mapped is None or len(self._mapped) != size:
            self.close()
            os.ftruncate(self.slot.tensors, size)
            # Taken now, with an error if there is no room: a page that is missing later would end the process.
            os.posix_fallocate(self.slot.tensors, 0, size)
            self._mapped = mmap.mmap(self.slot.tensors, size)
        return torch.frombuffer(self._mapped, dtype=torch.uint8)


def read_state(slot: Slot, header: Header) -> Any:
    """Return the state in a slot, each tensor in memory of its own."""
    return tree.decode(parse_json(slot.state(header)), tensorfile.read(slot.tensors))


def read_meta(slot: Slot, header: Header) -> dict[str, Any]:
    """Return what the snapshot's writer wanted known of it."""
    meta: Mapping[str, Any] = Decoder().decode(parse_json(slot.meta(header)))
    return dict(meta)


def _as_bytes(tensor: Tensor) -> Tensor:
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8)
