"""A digest of any value that a module may keep: equal values have equal digests, in every process."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from elastic_launch import snapshot
from elastic_launch.snapshot.format import tree
from elastic_launch.snapshot.format.plain import Encoder, Path, type_name


def digest(value: Any) -> str:
    """Return a SHA-256 of a value's structure, numbers and tensors.

    An object that a checkpoint cannot hold is described by what ``pickle`` would save of it.

    Raises:
        UnsupportedStateError: if that is not possible either, naming the type and place of what cannot be described.
    """
    return hashlib.sha256(json.dumps(_Described().encode(value), sort_keys=True).encode()).hexdigest()


class _Described(Encoder):
    def other(self, value: Any, path: Path) -> Any:
        try:
            tensors, described = tree.encode(value)
        except snapshot.UnsupportedStateError:
            return self._reduced(value, path)
        return {"$": described, "tensors": snapshot.state_sha256(tensors)}

    def _reduced(self, value: Any, path: Path) -> Any:
        if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
            return {"$": f"{value.__module__}.{value.__qualname__}"}
        try:
            parts = value.__reduce_ex__(4)
        except Exception:  # noqa: BLE001 - of the script's class, as pickle would call it
            self.refuse(type_name(value), path, "It cannot be pickled either.")
        if isinstance(parts, str):
            return {"$": parts}
        function, arguments, *rest = parts
        # Its state, then the items of a list and of a dict, which are iterators.
        made = [
            function,
            arguments,
            *(each if each is None or place == 0 else [*each] for place, each in enumerate(rest)),
        ]
        return {"$": [self.encode(each, (*path, place)) for place, each in enumerate(made[:5])]}
