"""Prunes a model as the state that it is to load, which the script had pruned in its loop (``torch.nn.utils.prune``).

Pruning renames a parameter and adds a buffer. A process that runs the script from its start has the model as it was
before, and would have no place for the state. The parameter itself stays the same object, so optimizers keep it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import prune

_log = logging.getLogger(__name__)

_MASK, _ORIGINAL = "_mask", "_orig"


def prune_alike(model: nn.Module, saved: Any, origin: str) -> None:
    """Prune those parameters of a model that are pruned in its saved state, and end the pruning of others.

    The log names the state by ``origin``.
    """
    if not isinstance(saved, Mapping):
        return
    there, here = _pruned(saved), _pruned(model.state_dict(keep_vars=True))
    parameters = {name for name, _ in model.named_parameters()}
    begun = [name for name in there if name not in here and name in parameters]
    ended = [name for name in here if name not in there and name in saved]
    for name in begun:
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        mask = saved[name + _MASK].to(getattr(module, own).device)
        prune.custom_from_mask(module, own, mask)  # type: ignore[no-untyped-call]
    for name in ended:
        path, _, own = name.rpartition(".")
        prune.remove(model.get_submodule(path), own)  # type: ignore[no-untyped-call]
    if begun or ended:
        _log.warning(
            "%s was made after the script had pruned its model, or ended that: the same was done here to %s",
            origin,
            ", ".join([*begun, *ended]),
        )


def _pruned(state: Mapping[str, Any]) -> list[str]:
    """Return the names of the parameters that are pruned in a model's state."""
    names = [name.removesuffix(_MASK) for name, value in state.items() if isinstance(value, Tensor)]
    return [name for name in names if name + _MASK in state and name + _ORIGINAL in state and name not in state]
