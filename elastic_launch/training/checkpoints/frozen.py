"""Frozen weights that saved states leave out, such as the base of a LoRA: on a resume the script's own are used.

Their digest is that of whole tensors, also of a sharded model, so that it does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from elastic_launch.errors import UsageError
from elastic_launch.training.ranks.checksum import checksums, combined
from elastic_launch.training.wrapped import local, whole

_HINT = (
    "With Checkpoint(skip_frozen=True) frozen weights are not saved: give the model the same ones at every start, "
    "before the training, and leave them frozen and unchanged. Or leave skip_frozen out."
)


class Frozen:
    """The frozen weights of a training's parts, by part, as they were when it began in this process."""

    def __init__(self) -> None:
        self._skipped: dict[str, list[str]] = {}
        self._sums: dict[str, list[int]] = {}
        self._digests: dict[str, int] = {}

    def begin(self, parts: Mapping[str, object], *, skip: bool) -> None:
        """From now on, leave out the weights that are frozen now, or none."""
        modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)} if skip else {}
        self._skipped = {name: _frozen(module, module.state_dict()) for name, module in modules.items()}
        self._sums, self._digests = {}, {}

    def left(self, name: str, state: Any) -> Any:
        """Return a part's state without them."""
        if not self._skipped.get(name):
            return state
        state = copy(state)  # keeps the attributes that a state_dict has besides its items
        for key in self._skipped[name]:
            state.pop(key, None)
        return state

    def verify(self, parts: Mapping[str, object]) -> None:
        """Check that they are still frozen, and have the values that they had when this was first called.

        Of a sharded model each rank checks its shards.
        """
        for name, keys in self._skipped.items():
            module = parts.get(name)
            if not isinstance(module, nn.Module):
                continue  # a training of other parts goes on after this one
            state = module.state_dict()
            here = set(_frozen(module, state))
            for key in keys:
                if key not in here:
                    raise UsageError(f"{key!r} of {name} was frozen when the training began, and is not now.", _HINT)
            sums = checksums([local(state[key]) for key in keys]).tolist()
            for key, before, after in zip(keys, self._sums.setdefault(name, sums), sums, strict=True):
                if before != after:
                    raise UsageError(f"{key!r} of {name} is frozen, and its values have changed.", _HINT)

    def digests(self, parts: Mapping[str, object]) -> dict[str, int]:
        """Return a checksum of them for each part, computed only once; called by all ranks if some are sharded."""
        for name in self._skipped.keys() - self._digests.keys():
            module = parts.get(name)
            if isinstance(module, nn.Module):
                state = module.state_dict()
                self._digests[name] = _digest(state[key] for key in self._skipped[name])
        return dict(self._digests)

    def filled(self, name: str, part: object, saved: Any, origin: str, digest: int | None) -> Any:
        """Return a part's saved state with the frozen weights that it lacks, from the part itself.

        Called by all ranks if some are sharded. The digest is that of the weights that were left out; None: none were.
        """
        skips = bool(self._skipped.get(name))
        if not isinstance(part, nn.Module) or not isinstance(saved, Mapping) or (digest is None and not skips):
            return saved
        own = part.state_dict()
        here = _frozen(part, own)
        if digest is None:
            if not all(isinstance(saved.get(key), Tensor) for key in here):
                return saved  # it does not fit, which is found when it is loaded
            digest = _digest(saved[key] for key in here)
        else:
            lacking = [key for key in own if key not in saved]
            for key in sorted({*here} ^ {*lacking}):
                what = f"has {key!r}, which is" if key in here else f"has no {key!r}, which is not"
                raise UsageError(f"{origin} {what} frozen in this script's {name}.", _HINT)
        if _digest(own[key] for key in here) != digest:
            raise UsageError(f"{origin} was made with other values of the frozen weights of {name}.", _HINT)
        filled: Any = copy(saved)
        for key in here:
            filled[key] = own[key]
        return filled


def _frozen(module: nn.Module, state: Mapping[str, Any]) -> list[str]:
    named = module.named_parameters(remove_duplicate=False)
    return [name for name, parameter in named if not parameter.requires_grad and name in state]


def _digest(tensors: Iterable[Any]) -> int:
    # One whole tensor at a time; on the CPU, as sums of other devices are computed in pieces of other sizes.
    sums = [checksums([whole(tensor).cpu()]) for tensor in tensors]
    return int(combined(torch.cat(sums) if sums else checksums([])))
