"""Which training saved a checkpoint, by the ``branch`` in its meta. Does no I/O, and needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def same_run(meta: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two states are of one run: under its id, and numbered from the same start.

    Another run under the same id that did not know of the first one's states may number its own alike, so this holds
    only for a location that no other run has taken.
    """
    return _run(meta) == _run(other)


def _run(meta: Mapping[str, Any]) -> tuple[Any, Any]:
    branch = meta.get("branch")
    return (branch.get("run"), branch.get("since")) if isinstance(branch, dict) else (None, None)
